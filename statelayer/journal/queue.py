"""What callers wait for, and how much of it may wait."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statelayer.errors import ClosedError, ContentionError, OutcomeUnknownError, StateLayerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from statelayer.events import Event
    from statelayer.journal.append import Append
    from statelayer.journal.batch import Outcome
    from statelayer.settings import Settings
    from statelayer.transactions import Deadline


@dataclass(eq=False, slots=True)
class Pending:
    """An append that was accepted, and the caller who waits for it."""

    append: Append
    deadline: Deadline
    outcome: asyncio.Future[list[Event]]

    @property
    def namespaces(self) -> tuple[str, ...]:
        return self.append.namespaces

    @property
    def is_live(self) -> bool:
        """Whether it has no outcome yet and its caller still waits."""
        return not self.outcome.done()

    def settle(self, outcome: Outcome) -> None:
        """Tell the caller, if he still listens."""
        if self.outcome.done():
            return
        if isinstance(outcome, StateLayerError):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)

    def settle_if_late(self, cause: BaseException) -> None:
        """Tell the caller what is known when his time is up. Deadlines are the callers' own."""
        if self.deadline.remaining > 0:
            return
        error: StateLayerError
        if self.append.in_doubt:
            error = OutcomeUnknownError(
                "The commit was sent and its outcome could not be learned in time. Look the events up by their ids, or "
                "send the append again with an idempotency key.",
                event_ids=self.append.event_ids,
            )
        else:
            error = ContentionError(
                f"The append kept losing until its deadline ({self.deadline.attempts} attempts). Nothing was written.",
                attempts=self.deadline.attempts,
            )
        error.__cause__ = cause
        self.settle(error)

    def fail(self, fault: BaseException) -> None:
        """Tell the caller of a fault of the committer itself, so that he does not wait for ever."""
        error = ClosedError("The committer stopped in the middle; look the events up by their idempotency key.")
        error.__cause__ = fault
        self.settle(error)


def live(batch: Iterable[Pending]) -> list[Pending]:
    """Return those that still want an outcome."""
    return [pending for pending in batch if pending.is_live]


def namespaces_of(batch: Iterable[Pending]) -> set[str]:
    """Return all namespaces that these write to."""
    return {namespace for pending in batch for namespace in pending.namespaces}


class Admission:
    """Bounds how much is accepted and not settled; callers beyond that wait at the door, in the order of arrival."""

    def __init__(self, settings: Settings) -> None:
        self._most_writes = settings.max_queued_writes
        self._most_bytes = settings.max_queued_bytes
        self._writes = self._bytes = self._inside = 0
        self._door: deque[tuple[Append, asyncio.Future[None]]] = deque()
        self._closed = False

    @property
    def inside(self) -> int:
        """How many appends are accepted and not settled."""
        return self._inside

    @property
    def waiting(self) -> int:
        """How many callers wait until there is room."""
        return len(self._door)

    @asynccontextmanager
    async def entered(self, append: Append, deadline: Deadline) -> AsyncIterator[None]:
        """Be inside for the block, after waiting for room.

        Raises ``ContentionError`` at the deadline, ``ClosedError`` when the layer closes meanwhile.
        """
        await self._enter(append, deadline)
        try:
            yield
        finally:
            self._leave(append)

    async def _enter(self, append: Append, deadline: Deadline) -> None:
        if self._closed:
            raise _closed()
        if not self._door and self._fits(append):
            self._add(append, +1)
            return
        place = (append, asyncio.get_running_loop().create_future())
        self._door.append(place)
        try:
            async with asyncio.timeout(deadline.remaining):
                await place[1]
        except TimeoutError:
            self._withdraw(place)
            raise ContentionError(
                f"The queue stayed full ({self._writes} writes, {self._bytes} bytes) until the append's deadline. "
                "Nothing was written.",
                attempts=0,
            ) from None
        except asyncio.CancelledError:
            self._withdraw(place)
            raise
        if self._closed:  # since its turn came
            self._leave(append)
            raise _closed()

    def close(self) -> None:
        """Turn away whoever waits, and whoever comes."""
        self._closed = True
        while self._door:
            _, turn = self._door.popleft()
            if not turn.done():
                turn.set_exception(_closed())

    def _leave(self, append: Append) -> None:
        self._add(append, -1)
        self._let_in()

    def _withdraw(self, place: tuple[Append, asyncio.Future[None]]) -> None:
        if place in self._door:
            self._door.remove(place)
            self._let_in()
        elif place[1].done() and not place[1].cancelled() and place[1].exception() is None:
            self._leave(place[0])  # it was let in at the same moment

    def _let_in(self) -> None:
        while self._door and self._fits(self._door[0][0]):
            append, turn = self._door.popleft()
            if not turn.done():
                self._add(append, +1)
                turn.set_result(None)

    def _fits(self, append: Append) -> bool:
        if not self._inside:
            return True
        return self._writes + len(append.writes) <= self._most_writes and self._bytes + append.bytes <= self._most_bytes

    def _add(self, append: Append, sign: int) -> None:
        self._inside += sign
        self._writes += sign * len(append.writes)
        self._bytes += sign * append.bytes


def _closed() -> ClosedError:
    return ClosedError("The layer is closed; nothing was written.")


class Capacity:
    """How much one transaction may still take, so that it stays well inside the server's limits.

    A companion's document changes once in a transaction: what was read of it holds for the first only.
    """

    def __init__(self, settings: Settings) -> None:
        self._writes = settings.max_append_writes
        self._bytes = settings.max_append_bytes
        self._companions: set[tuple[str, Any]] = set()
        self._is_empty = True

    def takes(self, append: Append) -> bool:
        """Take the append if it fits; the first always does. Once one did not, smaller ones behind it do not either."""
        self._writes -= len(append.writes)
        self._bytes -= append.bytes
        companions = {(companion.collection, companion.id) for companion in append.companions}
        fits = self._is_empty or (self._writes >= 0 and self._bytes >= 0 and self._companions.isdisjoint(companions))
        self._companions |= companions
        self._is_empty = False
        return fits
