"""How far each namespace has been evaluated, and from where the stream can be read again."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from bson.int64 import Int64
from bson.timestamp import Timestamp
from pymongo import UpdateOne

from statelayer import mongo_indexes as names
from statelayer.errors import LogLostError
from statelayer.subscriptions.shares import ours

if TYPE_CHECKING:
    from collections.abc import Collection as Many
    from collections.abc import Iterable

    from statelayer.drivers import Database

REMEMBERED = 50_000
"""How many namespaces' cursors are kept in memory; the others are read again when they are needed."""


class Cursor(NamedTuple):
    """Everything up to ``seq`` has been evaluated; ``event_id`` is the event there."""

    seq: int = 0
    event_id: str | None = None


class Cursors:
    """The cursors of the namespaces that this process evaluates. They only ever move forward."""

    def __init__(self, database: Database) -> None:
        self._cursors = database.collection(names.CURSORS)
        self._events = database.collection(names.EVENTS)
        self._known: dict[str, Cursor] = {}
        self._moved: set[str] = set()

    async def load(self, namespaces: Iterable[str]) -> None:
        """Make the cursors of these namespaces known, reading those that are not.

        Raises ``LogLostError`` when the log no longer has the event at a cursor: it was replaced.
        """
        unknown = sorted({namespace for namespace in namespaces if namespace not in self._known})
        if not unknown:
            return
        documents = await self._cursors.find({"_id": {"$in": unknown}})
        stored = {d["_id"]: Cursor(d["at"]["seq"], d["at"]["eventId"]) for d in documents}
        await self._check(stored)
        for namespace in unknown:
            self._known[namespace] = stored.get(namespace, Cursor())

    def at(self, namespace: str) -> Cursor:
        """Return a cursor that was loaded."""
        return self._known[namespace]

    def advance(self, namespace: str, seq: int, event_id: str) -> None:
        """Note that everything up to here has been evaluated and recorded."""
        self._known[namespace] = Cursor(seq, event_id)
        self._moved.add(namespace)

    @property
    def moved(self) -> int:
        """How many cursors are ahead of what is stored."""
        return len(self._moved)

    async def flush(self) -> None:
        """Store what moved."""
        moved = {namespace: self._known[namespace] for namespace in self._moved}
        await self._cursors.bulk_write(
            [
                UpdateOne({"_id": namespace}, {"$max": {"at": _document(cursor)}}, upsert=True)
                for namespace, cursor in moved.items()
            ],
            ordered=False,
        )
        self._moved.difference_update(n for n, cursor in moved.items() if self._known[n] == cursor)
        self._forget_some()

    def forget(self) -> None:
        """Drop what is remembered, because somebody else may have moved it."""
        self._known.clear()
        self._moved.clear()

    async def _check(self, stored: dict[str, Cursor]) -> None:
        if not stored:
            return
        expected = {(namespace, cursor.seq): cursor.event_id for namespace, cursor in stored.items()}
        places = [{"namespace": namespace, "seq": seq} for namespace, seq in expected]
        found = await self._events.find({"$or": places}, projection={"namespace": 1, "seq": 1})
        for event in found:
            if expected.pop((event["namespace"], event["seq"])) != event["_id"]:
                raise _replaced(event["namespace"], event["seq"])
        for namespace, seq in expected:
            raise _replaced(namespace, seq)

    def _forget_some(self) -> None:
        surplus = len(self._known) - REMEMBERED
        for namespace in [n for n in self._known if n not in self._moved][: max(surplus, 0)]:
            del self._known[namespace]


def _document(cursor: Cursor) -> dict[str, object]:
    return {"seq": Int64(cursor.seq), "eventId": cursor.event_id}


def _replaced(namespace: str, seq: int) -> LogLostError:
    return LogLostError(
        f"The log of {namespace} no longer holds the event that was evaluated at seq {seq}: it was dropped or replaced."
    )


class Checkpoints:
    """From which cluster time each partition's stream can be read again without a gap."""

    def __init__(self, database: Database) -> None:
        self._checkpoints = database.collection(names.CHECKPOINTS)

    async def oldest(self, partitions: Many[int]) -> tuple[Timestamp | None, set[int]]:
        """Return the oldest position of these partitions, and the partitions that have none."""
        documents = await self._checkpoints.find({"_id": {"$in": sorted(partitions)}})
        positions = {document["_id"]: document.get("clusterTime") for document in documents}
        known = {partition: position for partition, position in positions.items() if isinstance(position, Timestamp)}
        return min(known.values(), default=None), set(partitions) - set(known)

    async def save(self, owner: str, partitions: Many[int], position: Timestamp) -> None:
        """Store that everything before this position has been evaluated, where the owner still holds the partition.

        Positions only move forward.
        """
        await self._checkpoints.update_many(ours(owner, partitions), {"$max": {"clusterTime": position}})

    async def discard_all(self) -> None:
        """Forget every position: read on from one before the log was lost, a stream would tell of the loss again."""
        await self._checkpoints.update_many({}, {"$unset": {"clusterTime": ""}})

    async def discard(self, owner: str, partitions: Many[int]) -> None:
        """Forget positions that the server does not have, so that whoever holds these partitions reads the log."""
        await self._checkpoints.update_many(ours(owner, partitions), {"$unset": {"clusterTime": ""}})
