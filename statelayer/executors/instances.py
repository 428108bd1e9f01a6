"""Which processes are alive, and what each can run."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from pymongo import DeleteOne

from statelayer import mongo_indexes as names
from statelayer.executors.moves import NOW, literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Document
    from statelayer.executors.registry import Offer

REMEMBER = 1.0
"""Seconds that the offers of others are remembered."""

BURY_AFTER = 20
"""Leases after which a silent instance is forgotten."""


class Instances:
    """The ``instances`` collection. One that was silent for ``lease`` seconds (the server's clock) counts as dead."""

    def __init__(self, database: Database, clock: Clock, *, lease: float) -> None:
        self._instances = database.collection(names.INSTANCES)
        self._clock = clock
        self._lease = lease
        self._offers: set[Offer] = set()
        self._known_until = float("-inf")

    async def report(self, id: str, offers: Iterable[Offer]) -> None:
        """Say that this process is alive, and what it can run."""
        executors = [{"type": kind, "target": target} for kind, target in sorted(offers, key=str)]
        alive = {
            "host": literal(socket.gethostname()),
            "pid": os.getpid(),
            "startedAt": {"$ifNull": ["$startedAt", NOW]},
            "heartbeatAt": NOW,
            "executors": literal(executors),
        }
        await self._instances.update_one({"_id": id}, [{"$set": alive}], upsert=True)
        self.forget()

    async def leave(self, id: str) -> None:
        """Take this process off the list."""
        await self._instances.delete_one({"_id": id})
        self.forget()

    async def offers(self) -> set[Offer]:
        """Return what live instances can run, as of a second ago at most."""
        if self._clock.monotonic() >= self._known_until:
            living = await self._instances.find({"$nor": [_silent_for(self._lease)]}, projection={"executors": 1})
            self._offers = {
                (executor["type"], executor.get("target")) for document in living for executor in document["executors"]
            }
            self._known_until = self._clock.monotonic() + REMEMBER
        return self._offers

    def forget(self) -> None:
        """Ask again next time."""
        self._known_until = float("-inf")

    async def bury(self) -> None:
        """Drop the documents of instances that have been silent for long."""
        silent = _silent_for(BURY_AFTER * self._lease)
        dead = await self._instances.find(silent, limit=100, projection={"_id": 1})
        await self._instances.bulk_write([DeleteOne({"_id": document["_id"], **silent}) for document in dead])


def _silent_for(seconds: float) -> Document:
    return {"$expr": {"$lt": ["$heartbeatAt", {"$subtract": [NOW, round(seconds * 1000)]}]}}
