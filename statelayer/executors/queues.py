"""What waits for a worker, as the database tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from statelayer import mongo_indexes as names
from statelayer.executors.registry import ANY
from statelayer.servertime import NOW

if TYPE_CHECKING:
    from collections.abc import Collection

    from statelayer.drivers import Database
    from statelayer.instances import Offer


class Queue(NamedTuple):
    """The queued executions of one action type and target."""

    action_type: str
    target: str
    executions: int
    oldest: float
    """Seconds since the first of them could have been claimed; negative while it waits for its next attempt."""

    def is_served_by(self, offers: Collection[Offer]) -> bool:
        """Say whether one of these offers takes what waits here."""
        return (self.action_type, self.target) in offers or (self.action_type, ANY) in offers


class Queues:
    """Counts what is queued, from the claim index alone."""

    def __init__(self, database: Database) -> None:
        self._executions = database.collection(names.EXECUTIONS)

    async def waiting(self) -> list[Queue]:
        """Return the queues in which something waits, by action type and target."""
        found = await self._executions.aggregate(
            [
                {"$match": {"state": "queued"}},
                {
                    "$group": {
                        "_id": {"type": "$action.type", "target": "$target"},
                        "executions": {"$sum": 1},
                        "available": {"$min": "$availableAt"},
                    }
                },
                {"$set": {"age": {"$subtract": [NOW, "$available"]}}},
                {"$sort": {"_id.type": 1, "_id.target": 1}},
            ]
        )
        return [Queue(q["_id"]["type"], q["_id"]["target"], q["executions"], q["age"] / 1000) for q in found]
