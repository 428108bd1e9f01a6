"""Which processes are alive, what each of them does, and what it can run."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING, Literal, TypeAlias

import structlog
from pymongo import DeleteOne

from statelayer import mongo_indexes as names
from statelayer.errors import StateLayerError
from statelayer.servertime import NOW, literal

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Document

log = structlog.get_logger("statelayer.instances")

Offer: TypeAlias = tuple[str, str | None]
"""An action type, and the one target that is taken or ``None`` for all."""

Role = Literal["listens", "works"]

REMEMBER = 1.0
"""Seconds that the offers of others are remembered."""

BURY_AFTER = 20
"""Leases after which a silent instance is forgotten."""

BURY_AT_ONCE = 100


class Instances:
    """The ``instances`` collection. One that was silent for ``lease`` seconds (the server's clock) counts as dead."""

    def __init__(self, database: Database, clock: Clock, *, lease: float) -> None:
        self._database = database
        self._instances = database.collection(names.INSTANCES)
        self._clock = clock
        self._lease = lease
        self._offers: set[Offer] = set()
        self._known_until = float("-inf")

    async def report(self, id: str, facts: Document) -> None:
        """Say that a process is alive, and what it does."""
        alive = {
            "host": literal(socket.gethostname()),
            "pid": os.getpid(),
            "startedAt": {"$ifNull": ["$startedAt", NOW]},
            "heartbeatAt": NOW,
            "sessions": literal(self._database.recent_sessions),
            **{key: literal(value) for key, value in facts.items()},
        }
        await self._instances.update_one({"_id": id}, [{"$set": alive}], upsert=True)
        self.forget()

    async def leave(self, id: str) -> None:
        """Take a process off the list."""
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

    async def listening(self) -> list[str]:
        """Return the ids of the live instances that evaluate events, in order."""
        wanted = {"listens": True, "$nor": [_silent_for(self._lease)]}
        return sorted(document["_id"] for document in await self._instances.find(wanted, projection={"_id": 1}))

    def forget(self) -> None:
        """Ask again next time."""
        self._known_until = float("-inf")

    async def bury(self) -> None:
        """Free what the dead still hold in the server, and drop the documents of those that have been dead for long."""
        await self._end_sessions()
        silent = _silent_for(BURY_AFTER * self._lease)
        dead = await self._instances.find(silent, limit=BURY_AT_ONCE, projection={"_id": 1})
        await self._instances.bulk_write([DeleteOne({"_id": document["_id"], **silent}) for document in dead])

    async def _end_sessions(self) -> None:
        """A transaction outlives its process by a minute, and its namespaces are locked for everybody until then."""
        silent = {"sessions.0": {"$exists": True}, **_silent_for(self._lease)}
        for document in await self._instances.find(silent, limit=BURY_AT_ONCE, projection={"sessions": 1}):
            try:
                await self._database.kill_sessions(document["sessions"])
            except StateLayerError as error:  # only its own user's sessions can be ended; the server ends the others
                log.warning("sessions_of_the_dead_left", instance=document["_id"], error=error.code)
            await self._instances.update_one({"_id": document["_id"], **silent}, {"$set": {"sessions": []}})
            log.warning("instance_died", instance=document["_id"], sessions=len(document["sessions"]))


class Instance:
    """One process in that list. Each part of it reports what it does; the last to leave takes the process off."""

    def __init__(self, instances: Instances, id: str) -> None:
        self.id = id
        self._instances = instances
        self._roles: set[Role] = set()
        self._executors: list[Document] = []
        self._partitions: list[int] = []
        self._reporting = asyncio.Lock()

    async def listens(self, partitions: Collection[int]) -> None:
        """Report that this process evaluates these partitions."""
        self._partitions = sorted(partitions)
        await self._report("listens")

    async def works(self, offers: Iterable[Offer]) -> None:
        """Report that this process runs executions of these kinds."""
        self._executors = [{"type": kind, "target": target} for kind, target in sorted(offers, key=str)]
        await self._report("works")

    async def leave(self, role: Role) -> None:
        """Report that this process no longer does that."""
        async with self._reporting:
            self._roles.discard(role)
            if self._roles:
                await self._instances.report(self.id, self._facts())
            else:
                await self._instances.leave(self.id)

    async def _report(self, role: Role) -> None:
        async with self._reporting:  # the later report must not be overtaken by the earlier one
            self._roles.add(role)
            await self._instances.report(self.id, self._facts())

    def _facts(self) -> Document:
        listens, works = "listens" in self._roles, "works" in self._roles
        return {
            "listens": listens,
            "works": works,
            "partitions": self._partitions if listens else [],
            "executors": self._executors if works else [],
        }


def _silent_for(seconds: float) -> Document:
    return {"$expr": {"$lt": ["$heartbeatAt", {"$subtract": [NOW, round(seconds * 1000)]}]}}
