"""What evaluating an event said, and who is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statelayer.events import Event
    from statelayer.subscriptions.models import StoredSubscription

VerdictKind = Literal[
    "quarantined", "not_in_force", "pattern_mismatch", "condition_false", "max_depth", "covered", "dispatched"
]
"""In the order of deciding."""

SkipReason = Literal["max_depth", "quarantined"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What evaluating one event against one subscription said."""

    name: str
    version: int
    kind: VerdictKind


@dataclass(frozen=True, slots=True)
class Wakeup:
    """One execution that an event asks for. ``also_matched`` are the subscriptions that ask for the same target."""

    subscription: StoredSubscription
    params: Mapping[str, str]
    also_matched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Skip:
    """A subscription that matched and must not fire, which has to be visible."""

    name: str
    version: int
    reason: SkipReason


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything that one event leads to."""

    event: Event
    wakeups: tuple[Wakeup, ...] = ()
    skips: tuple[Skip, ...] = ()


class Recorder(Protocol):
    """Whoever turns decisions into durable work. Recording one twice must change nothing."""

    async def record(self, decisions: Sequence[Decision], *, live: bool = True) -> None:
        """Store what is to be run and what was skipped; when this returns, it survives a crash.

        ``live`` says that the events have just been committed, and not been read from the log long after.
        """
