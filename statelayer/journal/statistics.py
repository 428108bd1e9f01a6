"""What the journal did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JournalStatistics:
    """Numbers of one layer in one process, since it was made. Times are in seconds.

    ``queued`` appends are accepted and not settled, ``waiting`` callers stand outside the full queue, ``contended``
    namespaces have transactions of their own at the moment. ``batches`` were committed, with ``appends`` and
    ``events`` in them; ``conflicts`` are transactions that lost against another writer. ``commit_seconds`` is the sum
    over all batches of the time from the first read to the commit, ``slowest_commit`` the longest of them.
    """

    queued: int = 0
    waiting: int = 0
    contended: int = 0
    batches: int = 0
    appends: int = 0
    events: int = 0
    largest_batch: int = 0
    conflicts: int = 0
    retries: int = 0
    commit_seconds: float = 0.0
    slowest_commit: float = 0.0

    @property
    def mean_batch(self) -> float:
        """Appends in a batch, on average; 0 before the first."""
        return self.appends / self.batches if self.batches else 0.0

    @property
    def mean_commit(self) -> float:
        """Seconds that a batch took, on average; 0 before the first."""
        return self.commit_seconds / self.batches if self.batches else 0.0


class Counts:
    """What is counted as it happens."""

    def __init__(self) -> None:
        self.conflicts = self.retries = 0
        self._batches = self._appends = self._events = self._largest_batch = 0
        self._commit_seconds = self._slowest_commit = 0.0

    def committed(self, appends: int, events: int, seconds: float) -> None:
        """Count a batch that was committed."""
        self._batches += 1
        self._appends += appends
        self._events += events
        self._largest_batch = max(self._largest_batch, appends)
        self._commit_seconds += seconds
        self._slowest_commit = max(self._slowest_commit, seconds)

    def statistics(self, *, queued: int, waiting: int, contended: int) -> JournalStatistics:
        """Return the numbers as they are now."""
        return JournalStatistics(
            queued=queued,
            waiting=waiting,
            contended=contended,
            batches=self._batches,
            appends=self._appends,
            events=self._events,
            largest_batch=self._largest_batch,
            conflicts=self.conflicts,
            retries=self.retries,
            commit_seconds=self._commit_seconds,
            slowest_commit=self._slowest_commit,
        )
