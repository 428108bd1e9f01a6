"""Decisions become durable work here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelayer import mongo_indexes as names
from statelayer.errors import DuplicateKeyError
from statelayer.instances import Instances
from statelayer.executors.direct import DirectStarts
from statelayer.executors.models import job_id, skip_id
from statelayer.executors.registry import ANY
from statelayer.servertime import ServerTime

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from datetime import datetime

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Document
    from statelayer.events import Event
    from statelayer.executors.registry import Registry
    from statelayer.executors.staff import Staff
    from statelayer.instances import Offer
    from statelayer.settings import Settings
    from statelayer.subscriptions.decisions import Decision, Skip, Wakeup


class Recorder:
    """Stores what is to be run and what was skipped; the ``Recorder`` of the subscriptions room.

    What somebody of the ``staff`` is free for is recorded as already running and started at once: a write and a few
    looks less before its code runs. Everything else is queued.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        clock: Clock,
        registry: Registry,
        staff: Staff,
    ) -> None:
        self._executions = database.collection(names.EXECUTIONS)
        self._clock = clock
        self._registry = registry
        self._instances = Instances(database, clock, lease=settings.lease)
        self._server_time = ServerTime(database, clock)
        self._staff = staff
        self._direct = DirectStarts(database, clock, staff)

    async def record(self, decisions: Sequence[Decision], *, live: bool = True) -> None:
        """Insert by job id. What is there already stays as it is, so that recording twice changes nothing.

        What is not ``live`` is queued, behind what has waited for longer and for those who may be free elsewhere.
        """
        if not any(decision.wakeups or decision.skips for decision in decisions):
            return
        here = self._registry.offers() if self._staff.works else set()
        offered = here | await self._instances.offers()
        now = await self._server_time.now()
        documents = {
            document["_id"]: document for decision in decisions for document in self._documents(decision, offered, now)
        }
        if live:
            await self._direct.take(decisions, documents, now)
        await self._insert(documents)
        if any(document["state"] == "queued" for document in documents.values()):
            self._staff.wake()

    async def _insert(self, documents: dict[str, Document]) -> None:
        if not documents:
            return
        try:
            await self._executions.insert_many(list(documents.values()), ordered=False)
        except DuplicateKeyError:
            # One error stands for all of an unordered insert; another one may hide behind it.
            if await self._executions.count({"_id": {"$in": list(documents)}}) < len(documents):
                raise

    def _documents(self, decision: Decision, offered: Collection[Offer], now: datetime) -> Iterator[Document]:
        for wakeup in decision.wakeups:
            yield self._queued(decision.event, wakeup, offered, now)
        for skip in decision.skips:
            yield self._skipped(decision.event, skip, now)

    def _queued(self, event: Event, wakeup: Wakeup, offered: Collection[Offer], now: datetime) -> Document:
        subscription = wakeup.subscription
        kind, target = subscription.action.type, subscription.target
        is_offered = (kind, target) in offered or (kind, ANY) in offered
        return {
            "_id": job_id(kind, event.id, target),
            **_origin(event, subscription.name, subscription.version),
            "alsoMatched": list(wakeup.also_matched),
            "params": dict(wakeup.params),
            "action": subscription.action.model_dump(by_alias=True),
            "target": target,
            "state": "queued",
            **({} if is_offered else {"reason": "no_executor"}),
            "attempts": 0,
            "maxAttempts": self._registry.max_attempts(kind, target),
            "availableAt": now,
            "reads": [],
            "warnings": [],
            "createdAt": self._clock.now(),
        }

    def _skipped(self, event: Event, skip: Skip, now: datetime) -> Document:
        return {
            "_id": skip_id(event.id, skip.name),
            **_origin(event, skip.name, skip.version),
            "state": "skipped",
            "reason": skip.reason,
            "createdAt": now,
            "finishedAt": now,
        }


def _origin(event: Event, name: str, version: int) -> Document:
    return {
        "namespace": event.namespace,
        "eventId": event.id,
        "rootEventId": event.root_event_id,
        "triggerDepth": event.trigger_depth,
        "subscription": {"name": name, "version": version},
    }
