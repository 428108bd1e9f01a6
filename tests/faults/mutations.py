"""Ways in which systems like this one lose or repeat work. A run of a mutated process must find violations."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from pymongo import UpdateOne

from statelayer.executors import moves
from statelayer.executors.leases import Leases
from statelayer.journal.batch import Batches
from statelayer.subscriptions.cursors import Checkpoints
from statelayer.subscriptions.listener import Listener
from statelayer.subscriptions.shares import ours

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE = 0.3
"""Seconds for which a mutated process stands where it must not be killed."""

STALE = 0.7
"""Seconds for which a revision that was read outside is used."""


def cursor_before_recording() -> None:
    """The cursor is stored before what follows from the event is."""
    evaluate = Listener._evaluate

    async def mutated(self: Any, documents: Any) -> None:
        for document in documents:
            self._cursors.advance(document["namespace"], document["seq"], document["_id"])
        await self._flush()
        await asyncio.sleep(PAUSE)
        await evaluate(self, documents)

    Listener._evaluate = mutated  # type: ignore[method-assign]


def position_before_evaluating() -> None:
    """The stream's position is stored when a batch arrives, not when it has been evaluated."""
    take = Listener._take

    async def mutated(self: Any, batch: Any) -> bool:
        await self._checkpoints.save(self._instance.id, self._share.held, batch.position)
        await asyncio.sleep(PAUSE)
        return await take(self, batch)

    Listener._take = mutated  # type: ignore[method-assign]


def now_when_history_is_lost() -> None:
    """A position that the server no longer has is replaced by "now", and nothing is caught up."""

    async def mutated(self: Any, owner: str, partitions: Any) -> None:
        await self._checkpoints.update_many(ours(owner, partitions), [{"$set": {"clusterTime": "$$CLUSTER_TIME"}}])

    Checkpoints.discard = mutated  # type: ignore[method-assign]


def fence_ignored() -> None:
    """Whoever has a result writes it, whether the execution is still his or not."""

    async def renew(self: Any, fences: Any) -> set[Any]:
        leased = {"_id": {"$in": [fence.job_id for fence in fences]}, "lease": {"$exists": True}}
        await self._executions.update_many(leased, moves.renewal(self._lease))
        return set()

    moves.Fence.holds = lambda _, document: document is not None  # type: ignore[method-assign]
    moves.operation = lambda fence, move: UpdateOne({"_id": fence.job_id}, move.update)
    Leases.renew = renew  # type: ignore[method-assign]


def revision_outside_the_transaction() -> None:
    """The revision of the subscriptions is not read in the append's own transaction."""
    known: dict[str, Any] = {"until": 0.0}

    async def mutated(self: Any, session: Any) -> int:
        if time.monotonic() >= known["until"]:
            document = await self._meta.find_one({"_id": "subscriptions"})
            known.update(until=time.monotonic() + STALE, revision=document["revision"])
        return int(known["revision"])

    Batches._revision = mutated  # type: ignore[method-assign]


BY_NAME: dict[str, Callable[[], None]] = {
    mutation.__name__: mutation
    for mutation in (
        cursor_before_recording,
        position_before_evaluating,
        now_when_history_is_lost,
        fence_ignored,
        revision_outside_the_transaction,
    )
}
