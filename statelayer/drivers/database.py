"""Our own handles on the service's database.

Whatever options the client was built with, these read from the primary with read concern majority, write with
majority and journal, and decode aware UTC datetimes and standard UUIDs. A read of several documents uses read concern
snapshot: under majority, prefix reads beside writers were seen torn in 185 of 1,094 tries.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from uuid import UUID

import bson
import pymongo
from bson.binary import Binary
from bson.raw_bson import DEFAULT_RAW_BSON_OPTIONS
from pymongo import IndexModel, ReadPreference, WriteConcern
from pymongo.read_concern import ReadConcern

from statelayer.drivers.dialects import dialect_of
from statelayer.drivers.failures import translated
from statelayer.errors import StateLayerError
from statelayer.values import CODEC_OPTIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from pymongo.operations import DeleteOne, InsertOne, ReplaceOne, UpdateMany, UpdateOne

    Operation = InsertOne[dict[str, Any]] | UpdateOne | UpdateMany | ReplaceOne[dict[str, Any]] | DeleteOne

Document = dict[str, Any]
Session = Any
"""The driver's own session, so that a service can pass it to its own collections."""

DURABLE = WriteConcern(w="majority", j=True)
MAJORITY = ReadConcern("majority")
SNAPSHOT = ReadConcern("snapshot")

KILL_TIMEOUT = 2.0

RECENT_SESSIONS = 64

TRANSACTION_OPTIONS = {
    "read_concern": SNAPSHOT,
    "write_concern": DURABLE,
    "read_preference": ReadPreference.PRIMARY,
}


@dataclass(frozen=True, slots=True)
class UpdateCounts:
    """What a write changed."""

    matched: int = 0
    modified: int = 0
    inserted: int = 0
    deleted: int = 0
    upserted: int = 0


class Database:
    """The service's database, seen through our options. ``prefix`` is put before every collection's name."""

    def __init__(self, handle: Any, prefix: str = "") -> None:
        self._dialect = dialect_of(handle)
        self._handle = handle
        self._abandoned: list[Any] = []
        self._recent: dict[str, None] = {}
        self.prefix = prefix

    @property
    def name(self) -> str:
        return str(self._handle.name)

    @property
    def log_name(self) -> str:
        """The full name of the collection that holds the events: what tells one log from another."""
        return f"{self.name}.{self.prefix}events"

    @property
    def handle(self) -> Any:
        """The handle that the service handed in."""
        return self._handle

    def collection(self, name: str) -> Collection:
        """Open a collection of ours by the name it has without the prefix."""
        return Collection(self._handle[self.prefix + name], self._dialect)

    async def command(self, command: Mapping[str, Any], *, session: Session = None) -> Document:
        """Run a database command on the primary."""
        # The driver decodes the reply of a command without the type registry; so it is taken as it came.
        with translated():
            reply = await self._handle.command(command, codec_options=DEFAULT_RAW_BSON_OPTIONS, session=session)
            document: Document = bson.decode(reply.raw, CODEC_OPTIONS)
        return document

    async def admin_command(self, command: Mapping[str, Any]) -> Document:
        """Run a command on the admin database."""
        with translated():
            return dict(await self._handle.client["admin"].command(command, codec_options=CODEC_OPTIONS))

    async def collection_names(self) -> list[str]:
        """Return the names of all collections of the database, with their prefixes."""
        with translated():
            return list(await self._handle.list_collection_names())

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Session]:
        """Open a session of the driver, and end it."""
        with translated():
            session = await self._dialect.start_session(self._handle.client)
        self._remember(session.session_id)
        try:
            yield session
        finally:
            await self._end(session)

    async def start_transaction(self, session: Session) -> None:
        """Start a transaction with our options."""
        with translated():
            await self._dialect.start_transaction(session, **TRANSACTION_OPTIONS)

    @property
    def recent_sessions(self) -> list[str]:
        """The ids of the server's sessions that this process has used lately; the driver uses a few over and over."""
        return list(self._recent)

    async def kill_sessions(self, ids: Sequence[str]) -> None:
        """Have the server end sessions of this user, with what they still have open."""
        await self.admin_command({"killSessions": [{"id": Binary.from_uuid(UUID(session))} for session in ids]})

    async def kill_session(self, session: Session) -> None:
        """Have the server abort what a session of ours still has open; a user may always kill his own sessions.

        Raises nothing: a server that does not answer is told when it does (``kill_abandoned``).
        """
        self._abandoned.append(session.session_id)
        await self.kill_abandoned()

    async def kill_abandoned(self) -> None:
        """Tell the server of sessions that it could not be told of when they ended; their locks would outlive them."""
        if not self._abandoned:
            return
        ids, self._abandoned = self._abandoned, []
        try:
            with translated(), pymongo.timeout(KILL_TIMEOUT):
                await self._handle.client["admin"].command({"killSessions": ids})
        except StateLayerError:
            self._abandoned += ids

    async def close_client(self) -> None:
        """Close the client that the handle belongs to."""
        await self._dialect.close(self._handle.client)

    def _remember(self, session_id: Mapping[str, Any]) -> None:
        key = str(UUID(bytes=bytes(session_id["id"])))
        self._recent.pop(key, None)
        self._recent[key] = None
        if len(self._recent) > RECENT_SESSIONS:
            del self._recent[next(iter(self._recent))]

    async def _end(self, session: Session) -> None:
        with translated():
            await session.end_session()


class Collection:
    """One collection of ours. Reads return plain dicts that nobody else holds."""

    def __init__(self, handle: Any, dialect: Any) -> None:
        options = {"codec_options": CODEC_OPTIONS, "read_preference": ReadPreference.PRIMARY, "write_concern": DURABLE}
        self._dialect = dialect
        self._one = handle.with_options(read_concern=MAJORITY, **options)
        self._many = handle.with_options(read_concern=SNAPSHOT, **options)
        self.name = str(handle.name)

    async def find_one(
        self,
        filter: Mapping[str, Any],
        *,
        sort: Sequence[tuple[str, int]] | None = None,
        projection: Mapping[str, Any] | None = None,
        session: Session = None,
    ) -> Document | None:
        """Return the first document that matches, as a majority of the nodes has it."""
        with translated():
            found: Document | None = await self._one.find_one(filter, projection, sort=sort, session=session)
        return found

    async def find(
        self,
        filter: Mapping[str, Any],
        *,
        sort: Sequence[tuple[str, int]] | None = None,
        limit: int = 0,
        projection: Mapping[str, Any] | None = None,
        session: Session = None,
    ) -> list[Document]:
        """Return every document that matches, of one instant."""
        batch = {"batch_size": limit} if limit else {}
        with translated():
            cursor = self._many.find(filter, projection, sort=sort, limit=limit, session=session, **batch)
            return list(await cursor.to_list(None))

    async def find_page(
        self, filter: Mapping[str, Any], *, sort: Sequence[tuple[str, int]], size: int
    ) -> list[Document]:
        """Return the first documents that match, at most ``size`` and at most what one reply holds (16 MiB).

        No cursor is left in the server.
        """
        with translated():  # a negative limit asks for a single batch, which holds 101 documents unless told
            return list(await self._many.find(filter, sort=sort, limit=-size, batch_size=size).to_list(None))

    async def aggregate(
        self, pipeline: Sequence[Mapping[str, Any]], *, session: Session = None, **options: Any
    ) -> list[Document]:
        """Run a pipeline that reads, on one instant."""
        with translated():
            cursor = await self._dialect.aggregate(self._many, pipeline, session=session, **options)
            return list(await cursor.to_list(None))

    async def aggregate_into(self, pipeline: Sequence[Mapping[str, Any]], **options: Any) -> None:
        """Run a pipeline that ends in ``$merge`` or ``$out``, which snapshot reads do not allow."""
        with translated():
            cursor = await self._dialect.aggregate(self._one, pipeline, **options)
            await cursor.to_list(None)

    async def insert_one(self, document: Mapping[str, Any], *, session: Session = None) -> None:
        with translated():
            await self._one.insert_one(dict(document), session=session)

    async def insert_many(
        self, documents: Sequence[Document], *, ordered: bool = True, session: Session = None
    ) -> None:
        """Insert the documents. One without an ``_id`` is given one, in place."""
        with translated():
            await self._one.insert_many(documents, ordered=ordered, session=session)

    async def update_one(
        self, filter: Mapping[str, Any], update: Any, *, upsert: bool = False, session: Session = None
    ) -> UpdateCounts:
        with translated():
            result = await self._one.update_one(filter, update, upsert=upsert, session=session)
        return UpdateCounts(result.matched_count, result.modified_count, upserted=int(result.upserted_id is not None))

    async def update_many(self, filter: Mapping[str, Any], update: Any, *, session: Session = None) -> UpdateCounts:
        with translated():
            result = await self._one.update_many(filter, update, session=session)
        return UpdateCounts(result.matched_count, result.modified_count)

    async def replace_one(
        self, filter: Mapping[str, Any], document: Mapping[str, Any], *, upsert: bool = False, session: Session = None
    ) -> UpdateCounts:
        with translated():
            result = await self._one.replace_one(filter, document, upsert=upsert, session=session)
        return UpdateCounts(result.matched_count, result.modified_count, upserted=int(result.upserted_id is not None))

    async def find_one_and_update(
        self, filter: Mapping[str, Any], update: Any, *, upsert: bool = False, session: Session = None
    ) -> Document | None:
        """Update one document and return it as it is afterwards."""
        with translated():
            found: Document | None = await self._one.find_one_and_update(
                filter, update, upsert=upsert, return_document=True, session=session
            )
        return found

    async def bulk_write(
        self, operations: Sequence[Operation], *, ordered: bool = True, session: Session = None
    ) -> UpdateCounts:
        """Send several writes at once. Nothing to send is nothing done."""
        if not operations:
            return UpdateCounts()
        with translated():
            result = await self._one.bulk_write(operations, ordered=ordered, session=session)
        return UpdateCounts(
            result.matched_count,
            result.modified_count,
            result.inserted_count,
            result.deleted_count,
            result.upserted_count,
        )

    async def delete_one(self, filter: Mapping[str, Any], *, session: Session = None) -> UpdateCounts:
        with translated():
            result = await self._one.delete_one(filter, session=session)
        return UpdateCounts(deleted=result.deleted_count)

    async def count(self, filter: Mapping[str, Any]) -> int:
        with translated():
            return int(await self._one.count_documents(filter))

    async def create_index(self, keys: Sequence[tuple[str, int]], **options: Any) -> None:
        with translated():
            await self._one.create_indexes([IndexModel(list(keys), **options)])

    async def drop_index(self, name: str) -> None:
        with translated():
            await self._one.drop_index(name)

    async def list_indexes(self) -> list[Document]:
        with translated():
            indexes: list[Document] = await self._dialect.list_indexes(self._one)
        return indexes
