"""Owning executions: claimed by one conditional update, kept by renewing, judged by the server's clock."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from statelayer import mongo_indexes as names
from statelayer.executors import moves
from statelayer.executors.models import Execution
from statelayer.executors.registry import ANY

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Document
    from statelayer.executors.models import State
    from statelayer.executors.moves import Fence, Move
    from statelayer.instances import Offer

LEASED: tuple[State, ...] = ("claimed", "running")


class Leases:
    """The leases of one owner. ``lease`` is how many seconds one lasts without being renewed."""

    def __init__(self, database: Database, clock: Clock, *, owner: str, lease: float) -> None:
        self._executions = database.collection(names.EXECUTIONS)
        self._clock = clock
        self._owner = owner
        self._lease = lease

    async def candidates(self, offers: Collection[Offer], limit: int) -> list[Document]:
        """Return what could be claimed for these offers, the longest available first: ``_id`` and ``availableAt``."""
        if not offers or limit < 1:
            return []
        filters = [{**queued, **moves.AVAILABLE} for queued in queued_for(await self._with_targets(offers))]
        if not filters:
            return []
        wanted = filters[0] if len(filters) == 1 else {"$or": filters}
        fields = {"availableAt": 1, "target": 1, "action.type": 1}
        return await self._executions.find(wanted, sort=[("availableAt", 1)], limit=limit, projection=fields)

    async def _with_targets(self, offers: Collection[Offer]) -> list[Offer]:
        """Name the targets that wait where any is taken, so that each is a range of the index that is in order."""
        named = [offer for offer in offers if offer[1] is not ANY]
        for action_type in sorted(action_type for action_type, target in offers if target is ANY):
            waiting = {"state": "queued", "action.type": action_type}
            found = await self._executions.aggregate([{"$match": waiting}, {"$group": {"_id": "$target"}}])
            named += [(action_type, document["_id"]) for document in found]
        return named

    async def claim(self, job_ids: Sequence[str]) -> list[Execution]:
        """Claim what is still to be had of these. The update alone decides who gets what; the token tells it."""
        if not job_ids:
            return []
        token = self._clock.new_id()
        move = moves.claimed(owner=self._owner, token=token, lease=self._lease)
        wanted = {"_id": {"$in": list(job_ids)}, **moves.AVAILABLE}
        counts = await self._executions.update_many(move.filter(**wanted), move.update)
        if not counts.matched:
            return []
        mine = {"_id": {"$in": list(job_ids)}, "lease.token": token}
        return [Execution.from_document(document) for document in await self._executions.find(mine)]

    async def start(self, fence: Fence) -> Execution | None:
        """Record the attempt before its code runs. ``None`` when the claim is lost."""
        move = moves.started(lease=self._lease)
        document = await self._executions.find_one_and_update(move.under(fence), move.update)
        return None if document is None else Execution.from_document(document)

    async def make(self, move: Move, fence: Fence) -> bool:
        """Make a move under the fence; ``False`` when the lease is lost."""
        return bool((await self._executions.update_one(move.under(fence), move.update)).matched)

    async def renew(self, fences: Collection[Fence]) -> set[Fence]:
        """Renew these in one update; return the lost ones."""
        if not fences:
            return set()
        held = {
            "_id": {"$in": sorted({fence.job_id for fence in fences})},
            "lease.token": {"$in": sorted({fence.token for fence in fences})},
            "state": {"$in": list(LEASED)},
        }
        counts = await self._executions.update_many(held, moves.renewal(self._lease))
        if counts.matched == len(fences):
            return set()
        kept = {
            (document["_id"], document["lease"]["token"])
            for document in await self._executions.find(held, projection={"lease.token": 1})
        }
        return {fence for fence in fences if (fence.job_id, fence.token) not in kept}

    async def expired(self, limit: int) -> list[Execution]:
        """Return leased executions whose lease has run out."""
        leased = {"state": {"$in": list(LEASED)}, **moves.EXPIRED}
        return [Execution.from_document(document) for document in await self._executions.find(leased, limit=limit)]

    async def take_back(self, job_ids: Sequence[str]) -> int:
        """Queue expired claims again; their code never ran. Return how many it were."""
        if not job_ids:
            return 0
        move = moves.given_back()
        expired = move.filter(_id={"$in": list(job_ids)}, **moves.EXPIRED)
        return (await self._executions.update_many(expired, move.update)).matched


def queued_for(offers: Iterable[Offer]) -> list[Document]:
    """Return one filter for each action type; each is a range, or a few, of the claim index."""
    return [
        {"state": "queued", "action.type": action_type}
        | ({} if ANY in targets else {"target": {"$in": sorted(filter(None, targets))}})
        for action_type, targets in sorted(by_type(offers).items())
    ]


def queued_for_nobody(offers: Iterable[Offer]) -> list[Document]:
    """Return filters that together meet what none of these offers takes; ranges of the claim index, too."""
    grouped = by_type(offers)
    return [
        {"state": "queued", "action.type": {"$nin": sorted(grouped)}},
        *(
            {"state": "queued", "action.type": action_type, "target": {"$nin": sorted(filter(None, targets))}}
            for action_type, targets in sorted(grouped.items())
            if ANY not in targets
        ),
    ]


def by_type(offers: Iterable[Offer]) -> dict[str, set[str | None]]:
    """Return the targets that are offered of each action type."""
    grouped: defaultdict[str, set[str | None]] = defaultdict(set)
    for action_type, target in offers:
        grouped[action_type].add(target)
    return dict(grouped)
