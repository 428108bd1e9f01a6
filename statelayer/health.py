"""How a layer is: what an operator or a probe asks."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import pymongo

from statelayer.drivers import is_timeout
from statelayer.errors import StateLayerError
from statelayer.executors.queues import Queue, Queues
from statelayer.instances import Instances
from statelayer.subscriptions.backlog import Backlog, Lag
from statelayer.subscriptions.dispatch import Dispatch, DispatchState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence

    from statelayer.clock import Clock
    from statelayer.drivers import Database
    from statelayer.executors import Worker
    from statelayer.instances import Offer
    from statelayer.settings import Settings
    from statelayer.subscriptions.listener import Listener, ListenerStatistics

T = TypeVar("T")

PATIENCE = 3.0
"""Seconds that counting what waits may take, each; a probe must not become a burden."""


@dataclass(frozen=True, slots=True)
class Health:
    """``ok`` when nothing needs a person; otherwise ``problems`` says what does, in sentences.

    ``dispatch``, ``lags``, ``queues`` and ``listening`` (the ids of the instances that evaluate) are those of the
    database, whichever instance is asked; ``None`` where it did not answer, or not within a few seconds. ``listeners``
    and ``running`` (the job ids that are held) are those of this layer.
    """

    dispatch: DispatchState | None = None
    lags: tuple[Lag, ...] | None = None
    queues: tuple[Queue, ...] | None = None
    listening: tuple[str, ...] | None = None
    listeners: tuple[ListenerStatistics, ...] = ()
    running: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    @property
    def unevaluated(self) -> int | None:
        """How many events wait to be evaluated."""
        return None if self.lags is None else sum(lag.events for lag in self.lags)

    @property
    def oldest_unevaluated(self) -> float | None:
        """The age in seconds of the oldest event that waits to be evaluated."""
        return max((lag.oldest for lag in self.lags or () if lag.oldest is not None), default=None)

    @property
    def queued(self) -> int | None:
        """How many executions wait for a worker."""
        return None if self.queues is None else sum(queue.executions for queue in self.queues)

    @property
    def oldest_queued(self) -> float | None:
        """The seconds for which the first of them could have been claimed."""
        return max((queue.oldest for queue in self.queues or ()), default=None)


class Examination:
    """Looks at the database and at what runs here, and never raises for what it finds."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._dispatch = Dispatch(database)
        self._backlog = Backlog(database)
        self._queues = Queues(database)
        self._instances = Instances(database, clock, lease=settings.lease)

    async def of(self, listeners: Sequence[Listener], workers: Sequence[Worker]) -> Health:
        """Say how the database and these are."""
        here = Health(
            listeners=tuple(copy.deepcopy(listener.statistics) for listener in listeners),
            running=tuple(job for worker in workers for job in worker.running),
            problems=tuple(problem for listener in listeners for problem in _of_a_listener(listener.statistics)),
        )
        try:
            return await self._of_the_database(here)
        except StateLayerError as error:
            return replace(here, problems=(f"The database cannot be asked: {error}", *here.problems))

    async def _of_the_database(self, here: Health) -> Health:
        with pymongo.timeout(PATIENCE):
            dispatch, offers = await self._dispatch.state(), await self._instances.offers()
            listening = tuple(await self._instances.listening())
        lags, queues = await _counted(self._backlog.lags), await _counted(self._queues.waiting)
        problems = [*_of_dispatch(dispatch, listening), *_of_queues(queues or (), offers), *here.problems]
        return replace(here, dispatch=dispatch, listening=listening, lags=lags, queues=queues, problems=tuple(problems))


async def _counted(count: Callable[[], Awaitable[list[T]]]) -> tuple[T, ...] | None:
    try:
        with pymongo.timeout(PATIENCE):
            return tuple(await count())
    except StateLayerError as error:
        if error.__cause__ is None or not is_timeout(error.__cause__):
            raise
    return None


def _of_dispatch(state: DispatchState, listening: Collection[str]) -> Iterator[str]:
    if state == "log_lost":
        yield "The event log was lost; nothing is evaluated until an operator sets `meta.dispatch` to 'on'."
    if state == "on" and not listening:
        yield "No instance listens: what is written wakes nobody until one does."


def _of_queues(queues: Iterable[Queue], offers: Collection[Offer]) -> Iterator[str]:
    for queue in queues:
        if not queue.is_served_by(offers):
            yield (
                f"Queued executions of {queue.action_type} {queue.target!r} ({queue.executions}) wait for an instance "
                "that offers it."
            )


def _of_a_listener(statistics: ListenerStatistics) -> Iterator[str]:
    if (revision := statistics.awaits_revision) is not None:
        yield (
            f"Events bear revision {revision} of the subscriptions, which `meta` has not reached; nothing is "
            "evaluated before it does. Was it restored from an older copy than `events`?"
        )
    for document_id in statistics.quarantined:
        yield f"Subscription document {document_id} is broken and cannot fire."
