"""Which partitions an instance evaluates: as many as its fellows have, leased by the server's clock.

Leases are for efficiency, not for safety: two instances that evaluate one partition for a moment record the same.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import structlog
from pymongo import UpdateOne

from statelayer import mongo_indexes as names
from statelayer.servertime import NOW, in_seconds, literal

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from statelayer.clock import Clock
    from statelayer.drivers import Database
    from statelayer.instances import Instance, Instances
    from statelayer.settings import Settings

log = structlog.get_logger("statelayer.listener")

NO_POSITION = {"clusterTime": {"$exists": True, "$not": {"$type": ["timestamp", "null"]}}}

FREE = {"$or": [{"lease": None}, {"$expr": {"$lt": ["$lease.until", NOW]}}]}


class Share:
    """The partitions that one instance holds.

    ``keep`` is called every now and then, whatever the holder is doing; it renews the leases and finds out whether the
    share is still fair. Partitions change hands in ``settle`` only, which the holder calls when it has stored how far
    it is.
    """

    def __init__(
        self, database: Database, settings: Settings, clock: Clock, instances: Instances, instance: Instance
    ) -> None:
        self._checkpoints = database.collection(names.CHECKPOINTS)
        self._settings = settings
        self._clock = clock
        self._instances = instances
        self._instance = instance
        self._held: frozenset[int] = frozenset()
        self._quota = settings.partitions
        self._next_beat = float("-inf")
        self._changing = asyncio.Lock()
        self.is_due = False
        """Whether there is something to take over or to give away."""

    @property
    def held(self) -> frozenset[int]:
        return self._held

    @property
    def has_surplus(self) -> bool:
        """Whether others wait for partitions that this instance holds."""
        return len(self._held) > self._quota

    async def keep(self) -> None:
        """Renew the leases at the pace of the heartbeat, and look whether partitions are to change hands."""
        async with self._changing:
            if self._clock.monotonic() >= self._next_beat:
                await self._beat()
            await self._count()
            self.is_due |= self.has_surplus or (len(self._held) < self._quota and bool(await self._free()))

    async def settle(self) -> bool:
        """Give away what is too much and take what is free; say whether anything changed hands."""
        async with self._changing:
            before = self._held
            await self._count()
            await self._release(sorted(self._held)[self._quota :])
            await self._claim(self._quota - len(self._held))
            await self._instance.listens(self._held)
            self.is_due = False
            if self._held != before:
                log.info("partitions_changed", held=len(self._held), before=len(before))
        return self._held != before

    async def leave(self) -> None:
        """Give everything back, so that others need not wait for a lease to end."""
        async with self._changing:
            await self._release(self._held)
            await self._instance.leave("listens")

    async def _beat(self) -> None:
        await self._renew()
        await self._instance.listens(self._held)
        await self._instances.bury()
        self._next_beat = self._clock.monotonic() + self._settings.heartbeat

    async def _renew(self) -> None:
        if not self._held:
            return
        counts = await self._checkpoints.update_many(
            self._ours(self._held), [{"$set": {"lease.until": in_seconds(self._settings.lease)}}]
        )
        if counts.matched < len(self._held):
            found = await self._checkpoints.find(self._ours(self._held), projection={"_id": 1})
            kept = frozenset(document["_id"] for document in found)
            log.warning("partitions_lost", lost=sorted(self._held - kept))
            self._held, self.is_due = kept, True

    async def _count(self) -> None:
        """Find out how many partitions are ours to hold: the instances with the lowest ids take what is left over."""
        fellows = sorted({*await self._instances.listening(), self._instance.id})
        share, left = divmod(self._settings.partitions, len(fellows))
        self._quota = share + (fellows.index(self._instance.id) < left)

    async def _free(self) -> list[int]:
        known = await self._checkpoints.find({"$nor": [FREE]}, projection={"_id": 1})
        return sorted(set(range(self._settings.partitions)) - {document["_id"] for document in known})

    async def _claim(self, count: int) -> None:
        wanted = (await self._free())[:count] if count > 0 else []
        if not wanted:
            return
        await self._create(wanted)
        taken = {"owner": literal(self._instance.id), "until": in_seconds(self._settings.lease)}
        await self._checkpoints.update_many({"_id": {"$in": wanted}, **FREE}, [{"$set": {"lease": taken}}])
        found = await self._checkpoints.find(self._ours(wanted), projection={"_id": 1})
        self._held |= {document["_id"] for document in found}

    async def _create(self, partitions: Sequence[int]) -> None:
        """Make sure that there is a document to lease; a position that is none, edited by hand, is forgotten."""
        nothing = {"$setOnInsert": {"lease": None}}
        await self._checkpoints.bulk_write(
            [
                *(UpdateOne({"_id": partition, **NO_POSITION}, {"$unset": {"clusterTime": ""}}) for partition in partitions),
                *(UpdateOne({"_id": partition}, nothing, upsert=True) for partition in partitions),
            ]
        )

    async def _release(self, partitions: Collection[int]) -> None:
        if partitions:
            await self._checkpoints.update_many(self._ours(partitions), {"$set": {"lease": None}})
            self._held -= frozenset(partitions)

    def _ours(self, partitions: Collection[int]) -> dict[str, Any]:
        return ours(self._instance.id, partitions)


def ours(owner: str, partitions: Collection[int] | Sequence[int]) -> dict[str, Any]:
    """Return a filter of those of these partitions that this instance holds."""
    return {"_id": {"$in": sorted(partitions)}, "lease.owner": owner}
