"""How a layer is: what an operator or a probe asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statelayer.errors import StateLayerError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statelayer.executors import Worker
    from statelayer.subscriptions.dispatch import Dispatch, DispatchState
    from statelayer.subscriptions.listener import Listener, ListenerStatistics


@dataclass(frozen=True, slots=True)
class Health:
    """``ok`` when nothing needs a person; otherwise ``problems`` says what does, in sentences.

    ``dispatch`` is the switch of the database, ``None`` when it cannot be read. ``listeners`` and ``running`` (the job
    ids that are held) are those of this layer.
    """

    dispatch: DispatchState | None
    listeners: tuple[ListenerStatistics, ...] = ()
    running: tuple[str, ...] = ()
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        return not self.problems


async def examine(dispatch: Dispatch, listeners: Sequence[Listener], workers: Sequence[Worker]) -> Health:
    """Look at the database's switch and at what runs here."""
    problems: list[str] = []
    state: DispatchState | None = None
    try:
        state = await dispatch.state()
    except StateLayerError as error:
        problems.append(f"The database cannot be asked: {error}")
    if state == "log_lost":
        problems.append("The event log was lost; nothing is evaluated until an operator sets `meta.dispatch` to 'on'.")
    for listener in listeners:
        if (revision := listener.statistics.awaits_revision) is not None:
            problems.append(
                f"Events bear revision {revision} of the subscriptions, which `meta` has not reached; nothing is "
                "evaluated before it does. Was it restored from an older copy than `events`?"
            )
        broken = listener.statistics.quarantined
        problems += [f"Subscription document {document_id} is broken and cannot fire." for document_id in broken]
    return Health(
        dispatch=state,
        listeners=tuple(listener.statistics for listener in listeners),
        running=tuple(job for worker in workers for job in worker.running),
        problems=tuple(problems),
    )
