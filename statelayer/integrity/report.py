"""What ``verify`` and ``replay`` report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal

MAX_PROBLEMS: Final = 1000
"""How many problems one report names."""

ProblemKind = Literal[
    "head",  # namespaces.seq is not the newest seq
    "seq",  # a seq that is missing or no int64
    "seq_gap",
    "path",  # an event whose path lies outside its namespace
    "version",  # a version that is missing or no int64
    "version_gap",
    "version_order",  # the newest event of a path is not its highest version: both are given as seqs
    "actor",
    "depth",
    "root",
    "dangling_cause",
    "event",  # an event that cannot be read, for another reason than the above
    "missing_entry",
    "entry_without_events",
    "entry_namespace",
    "entry_value",
    "entry_version",
    "entry_seq",
    "entry_event_id",
    "entry_actor",
    "entry_deleted",
    "entry_updated_at",
]


@dataclass(frozen=True, slots=True)
class Problem:
    """One contradiction: what is stored (``actual``) and what the log demands (``expected``).

    A field that is not there is reported as ``MISSING``, since ``None`` is a value.
    """

    kind: ProblemKind
    path: str | None
    seq: int | None
    expected: Any
    actual: Any


MISSING: Final = "(missing)"


@dataclass(slots=True)
class VerifyReport:
    """What ``verify`` looked at and found. ``truncated`` says that there are more problems than are listed."""

    namespace: str
    events: int = 0
    entries: int = 0
    problems: list[Problem] = field(default_factory=list)
    truncated: bool = False

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(
        self, kind: ProblemKind, *, expected: Any, actual: Any, path: str | None = None, seq: int | None = None
    ) -> None:
        """Report a problem, or that there are too many to list."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(Problem(kind, path, seq, expected, actual))
        else:
            self.truncated = True


@dataclass(slots=True)
class ReplayReport:
    """What ``replay`` did: from how many events it rebuilt, and how many entries it had to write or remove."""

    namespace: str
    events: int = 0
    entries_written: int = 0
    entries_removed: int = 0
