"""One transaction's reads and writes for a batch of appends."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from bson.int64 import Int64
from pymongo import InsertOne, ReplaceOne, UpdateOne

from statelayer import mongo_indexes as names
from statelayer.errors import DatabaseError, SetupRequiredError, StateLayerError
from statelayer.events import Entry, Event
from statelayer.journal.judge import Ledger, PathState, causes_of, head_of, judge, partition_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statelayer.clock import Clock
    from statelayer.drivers import Collection, Database, Document, Session
    from statelayer.drivers.database import Operation
    from statelayer.journal.append import Append
    from statelayer.journal.judge import Head
    from statelayer.journal.memory import Memory
    from statelayer.settings import Settings

Outcome = list[Event] | StateLayerError


class GuardFailedError(DatabaseError):
    """A conditional write met fewer documents than the snapshot had; the batch must be read and judged again."""


class Batches:
    """Takes a batch of appends through one transaction."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._events = database.collection(names.EVENTS)
        self._entries = database.collection(names.ENTRIES)
        self._namespaces = database.collection(names.NAMESPACES)
        self._meta = database.collection(names.META)

    async def append(self, batch: Sequence[Append], session: Session) -> list[Outcome]:
        """Read, judge and write; return what became of each append, in order, should the transaction commit."""
        ledger = await self.read(batch, session)
        outcomes = self.judge(batch, ledger)
        await self.write(ledger, session)
        return outcomes

    def judge(self, batch: Sequence[Append], ledger: Ledger) -> list[Outcome]:
        """Decide each append in order, over what the ones before it changed. No I/O."""
        return [self._judged(append, ledger) for append in batch]

    def _judged(self, append: Append, ledger: Ledger) -> Outcome:
        try:
            return judge(append, ledger, self._settings)
        except StateLayerError as refusal:
            return refusal

    # --- reading what the decisions rest on

    async def read(self, batch: Sequence[Append], session: Session, memory: Memory | None = None) -> Ledger:
        """Read what the decisions rest on, in the transaction's snapshot; what ``memory`` has is not read again."""
        namespaces = {namespace for append in batch for namespace in append.namespaces}
        written = {write.path.text: write.path.namespace for append in batch for write in append.writes}
        heads, states, unwritten = _remembered(batch, memory) if memory is not None else ({}, {}, set())
        remembers = bool(heads)
        heads |= {d["_id"]: head_of(d) for d in await self._by_id(self._namespaces, namespaces - heads.keys(), session)}
        paths = {path for path, namespace in written.items() if namespace in heads} - states.keys() - unwritten
        states |= {d["_id"]: PathState.of(d) for d in await self._by_id(self._entries, paths, session)}
        return Ledger(
            heads=heads,
            states=states,
            keyed=await self._keyed(batch, session),
            causes=await self._causes(batch, session),
            committed=await self._committed(batch, session),
            companions=await self._companions(batch, session),
            revision=await self._revision(session),
            now=self._clock.now(),
            remembers=remembers,
        )

    async def _by_id(self, collection: Collection, ids: set[str], session: Session) -> list[Document]:
        return await collection.find({"_id": {"$in": sorted(ids)}}, session=session) if ids else []

    async def _revision(self, session: Session) -> int:
        document = await self._meta.find_one({"_id": "subscriptions"}, session=session)
        if document is None:
            raise SetupRequiredError(self._database.name)
        return int(document["revision"])

    async def _keyed(self, batch: Sequence[Append], session: Session) -> dict[tuple[str, str], list[Event]]:
        wanted = [
            {"namespace": namespace, "idempotencyKey": append.key}
            for append in batch
            if append.key is not None
            for namespace in append.namespaces
        ]
        if not wanted:
            return {}
        firsts = await self._events.find({"$or": wanted}, session=session)
        return {
            (first["namespace"], first["idempotencyKey"]): await self._whole_batch(first, session) for first in firsts
        }

    async def _whole_batch(self, first: Document, session: Session) -> list[Event]:
        """The events of one append stand side by side in their namespace's log."""
        seqs = {"$gte": first["seq"], "$lt": first["seq"] + (first.get("batchSize") or 1)}
        documents = await self._events.find(
            {"namespace": first["namespace"], "seq": seqs}, sort=[("seq", 1)], session=session
        )
        return [Event.from_document(d) for d in documents if d["batchId"] == first["batchId"]]

    async def _causes(self, batch: Sequence[Append], session: Session) -> Any:
        ids = {write.caused_by for append in batch for write in append.writes if write.caused_by is not None}
        if not ids:
            return {}
        projection = {"triggerDepth": 1, "rootEventId": 1}
        return causes_of(await self._events.find({"_id": {"$in": sorted(ids)}}, projection=projection, session=session))

    async def _committed(self, batch: Sequence[Append], session: Session) -> dict[str, Event]:
        ids = [event_id for append in batch if append.in_doubt for event_id in append.event_ids]
        if not ids:
            return {}
        documents = await self._events.find({"_id": {"$in": ids}}, session=session)
        return {document["_id"]: Event.from_document(document) for document in documents}

    async def _companions(self, batch: Sequence[Append], session: Session) -> dict[tuple[str, Any], Document]:
        ids: defaultdict[str, list[Any]] = defaultdict(list)
        for append in batch:
            for companion in append.companions:
                ids[companion.collection].append(companion.id)
        return {
            (name, document["_id"]): document
            for name, wanted in ids.items()
            for document in await self._database.collection(name).find({"_id": {"$in": wanted}}, session=session)
        }

    # --- writing what was judged good

    async def write(self, ledger: Ledger, session: Session) -> None:
        """Write what was judged good, each document under the condition that it is as it was read."""
        if not ledger.events:
            return
        await _exactly(self._namespaces, self._head_operations(ledger), session)
        await _exactly(self._entries, self._entry_operations(ledger), session)
        await self._events.insert_many(ledger.documents, session=session)
        grouped: defaultdict[str, list[Operation]] = defaultdict(list)
        for companion, events in ledger.operations:
            grouped[companion.collection].append(companion.operation(events))
        for name, operations in grouped.items():
            await _exactly(self._database.collection(name), operations, session)

    def _head_operations(self, ledger: Ledger) -> list[Operation]:
        operations: list[Operation] = []
        for namespace in sorted({event.namespace for event in ledger.events}):
            head, read = ledger.heads[namespace], ledger.head_read(namespace)
            if read is None:
                partition = partition_of(namespace, self._settings.partitions)
                new = {"_id": namespace, "seq": Int64(head.seq), "repairs": Int64(0), "partition": partition}
                operations.append(InsertOne(new))
            else:
                guard = {"_id": namespace, "seq": Int64(read.seq), "repairs": Int64(read.repairs)}
                operations.append(UpdateOne(guard, {"$set": {"seq": Int64(head.seq)}}))
        return operations

    def _entry_operations(self, ledger: Ledger) -> list[Operation]:
        operations: list[Operation] = []
        newest = {event.path: event for event in ledger.events}
        for path in sorted(newest):
            document, version = Entry.document_of(newest[path]), ledger.version_read(path)
            if version is None:
                operations.append(InsertOne(document))
            else:
                operations.append(ReplaceOne({"_id": path, "version": version}, document))
        return operations


def _remembered(batch: Sequence[Append], memory: Memory) -> tuple[dict[str, Head], dict[str, PathState], set[str]]:
    """Take what a batch needs out of the memory: heads, paths that were written, and paths that never were.

    A merge rests on the value, which is not remembered.
    """
    heads: dict[str, Head] = {}
    states: dict[str, PathState] = {}
    unwritten: set[str] = set()
    merged = {write.path.text for append in batch for write in append.writes if write.op == "merge"}
    for append in batch:
        for namespace in append.namespaces:
            if (head := memory.head(namespace)) is not None:
                heads[namespace] = head
        for write in append.writes:
            path, namespace = write.path.text, write.path.namespace
            state = memory.state(namespace, path)
            if state is not None and path not in merged:
                states[path] = state
            elif state is None and memory.is_complete(namespace):
                unwritten.add(path)
    return heads, states, unwritten


async def _exactly(collection: Collection, operations: list[Operation], session: Session) -> None:
    """Send the writes; each must meet exactly one document, as it did in the snapshot."""
    counts = await collection.bulk_write(operations, session=session)
    met = counts.matched + counts.inserted + counts.deleted
    if met != len(operations):
        raise GuardFailedError(f"{len(operations) - met} of {len(operations)} guards on {collection.name} failed.")
