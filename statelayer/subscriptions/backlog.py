"""What is written and not yet evaluated, as the database tells it, whoever holds the partitions or nobody does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from statelayer import mongo_indexes as names
from statelayer.servertime import NOW

if TYPE_CHECKING:
    from statelayer.drivers import Database, Document


class Lag(NamedTuple):
    """A partition with events that were not evaluated: how many, and the age in seconds of the oldest of them."""

    partition: int
    events: int
    oldest: float | None
    """``None`` when the log does not have the event that comes next."""


class Backlog:
    """Compares the heads of the namespaces with their cursors."""

    def __init__(self, database: Database) -> None:
        self._heads = database.collection(names.NAMESPACES)
        self._cursors = database.collection(names.CURSORS).name
        self._events = database.collection(names.EVENTS).name

    async def lags(self) -> list[Lag]:
        """Return the partitions that are behind, in order. Reads a head and a cursor of each namespace."""
        found = await self._heads.aggregate(
            [
                {"$match": {"partition": {"$gte": 0}}},
                *self._behind(),
                *self._next_event(),
                {
                    "$group": {
                        "_id": "$partition",
                        "events": {"$sum": {"$subtract": ["$seq", "$at"]}},
                        "oldest": {"$min": "$next"},
                    }
                },
                {"$set": {"age": {"$subtract": [NOW, "$oldest"]}}},
                {"$sort": {"_id": 1}},
            ]
        )
        return [Lag(lag["_id"], lag["events"], None if lag["age"] is None else lag["age"] / 1000) for lag in found]

    def _behind(self) -> list[Document]:
        """Keep the heads that their cursor has not reached; ``at`` is where that is."""
        return [
            {"$lookup": {"from": self._cursors, "localField": "_id", "foreignField": "_id", "as": "cursor"}},
            {"$set": {"at": {"$ifNull": [{"$first": "$cursor.at.seq"}, 0]}}},
            {"$match": {"$expr": {"$lt": ["$at", "$seq"]}}},
        ]

    def _next_event(self) -> list[Document]:
        """Find when the event after the cursor was committed."""
        after: list[dict[str, Any]] = [{"$eq": ["$namespace", "$$namespace"]}, {"$gt": ["$seq", "$$at"]}]
        first = [
            {"$match": {"$expr": {"$and": after}}},
            {"$sort": {"seq": 1}},
            {"$limit": 1},
            {"$project": {"committedAt": 1}},
        ]
        join = {"from": self._events, "let": {"namespace": "$_id", "at": "$at"}, "pipeline": first, "as": "following"}
        return [{"$lookup": join}, {"$set": {"next": {"$first": "$following.committedAt"}}}]
