"""What a team would write without the library: the same documents, with the driver alone."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from zlib import crc32

from bson import Int64, ObjectId
from pymongo import WriteConcern
from pymongo.read_concern import ReadConcern

if TYPE_CHECKING:
    from collections.abc import Sequence

ACTOR = "user:U7"
DURABLE = WriteConcern(w="majority", j=True)
PARTITIONS = 64


def event_document(path: str, seq: int, version: int, value: Any) -> dict[str, Any]:
    namespace = "/".join(path.split("/")[:3])
    event_id = str(ObjectId())
    return {
        "_id": event_id,
        "namespace": namespace,
        "seq": Int64(seq),
        "path": path,
        "version": Int64(version),
        "op": "set",
        "actor": ACTOR,
        "source": "api",
        "triggerDepth": 0,
        "batchId": event_id,
        "subscriptionsRev": Int64(0),
        "partition": crc32(namespace.encode()) % PARTITIONS,
        "committedAt": datetime.now(UTC),
        "schemaVersion": 1,
        "value": value,
    }


def entry_document(event: dict[str, Any]) -> dict[str, Any]:
    return {
        "_id": event["path"],
        "namespace": event["namespace"],
        "value": event["value"],
        "version": event["version"],
        "seq": event["seq"],
        "eventId": event["_id"],
        "actor": event["actor"],
        "deleted": False,
        "updatedAt": event["committedAt"],
    }


class TransactionPerWrite:
    """Head, entry and event in one transaction, retried by the driver's own ``with_transaction``."""

    def __init__(self, database: Any) -> None:
        self._client = database.client
        durable = database.with_options(write_concern=DURABLE, read_concern=ReadConcern("majority"))
        self._heads, self._entries, self._events = durable["namespaces"], durable["entries"], durable["events"]

    async def set(self, path: str, value: Any) -> None:
        namespace = "/".join(path.split("/")[:3])

        async def body(session: Any) -> None:
            head = await self._heads.find_one_and_update(
                {"_id": namespace},
                {
                    "$inc": {"seq": Int64(1)},
                    "$setOnInsert": {"repairs": Int64(0), "partition": crc32(namespace.encode()) % PARTITIONS},
                },
                upsert=True,
                return_document=True,
                session=session,
            )
            entry = await self._entries.find_one({"_id": path}, {"version": 1}, session=session)
            event = event_document(path, head["seq"], (entry["version"] if entry else 0) + 1, value)
            await self._entries.replace_one({"_id": path}, entry_document(event), upsert=True, session=session)
            await self._events.insert_one(event, session=session)

        async with self._client.start_session() as session:
            await session.with_transaction(body, read_concern=ReadConcern("snapshot"), write_concern=DURABLE)


class BareInserts:
    """Events and entries inserted in batches, with no transaction, no head and no check of any kind."""

    def __init__(self, database: Any) -> None:
        durable = database.with_options(write_concern=DURABLE)
        self._entries, self._events = durable["entries"], durable["events"]

    async def append(self, paths: Sequence[str], first_seq: int, value: Any) -> None:
        events = [event_document(path, first_seq + n, 1, value) for n, path in enumerate(paths)]
        await self._entries.insert_many([entry_document(event) for event in events])
        await self._events.insert_many(events)
