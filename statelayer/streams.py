"""A change stream of the database, read batch by batch.

Both streams of the layer stand on this: the evaluation stream and the reader stream. The cursor is opened and advanced
with plain commands instead of the drivers' change-stream objects: one reply is one batch on either driver (Motor hops
to a thread once for each, not for every change), nothing resumes behind our back, and the position is ours to keep.

A position is a cluster time, not a resume token, which is bound to the filter that it was taken under.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pymongo
from bson.timestamp import Timestamp

from statelayer.errors import DatabaseError, HistoryLostError, LogLostError, StateLayerError, TransientDatabaseError
from statelayer.transactions import finished

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

    from statelayer.drivers import Database, Document, Session

AWAIT = 0.25
"""Seconds that the server holds an idle read open. A closing stream waits no longer than this."""

CLOSE_TIMEOUT = 1.0

GONE = ("drop", "rename", "dropDatabase", "invalidate")
"""What happens to a collection or database as a whole; a filter that leaves these out goes deaf without a sign."""

_TIMESTAMP_TAG = "82"


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes in the order of their commits. Everything before ``position`` has been delivered."""

    changes: list[Document]
    position: Timestamp | None


class ChangeStream:
    """An open stream. Its ``read`` calls are never cancelled half-way, since that would lose the batch."""

    def __init__(self, database: Database, session: Session, reply: Mapping[str, Any]) -> None:
        self._database = database
        self._session = session
        self._cursor = reply["cursor"]
        self._first: list[Document] = list(self._cursor["firstBatch"])
        self.position = position_of(self._cursor)

    async def read(self) -> Batch:
        """Return the next batch, which is empty when nothing happened for a moment.

        Raises ``HistoryLostError`` or ``TransientDatabaseError`` when the stream cannot go on; open another one then.
        """
        if self._first:
            changes, self._first = self._first, []
            return Batch(changes, self.position)
        if not self._cursor["id"]:
            raise LogLostError("The change stream ended: the database that it watched is gone.")
        with _refusals_told():
            reply = await finished(self._more())
        self._cursor = reply["cursor"]
        self.position = position_of(self._cursor) or self.position
        return Batch(list(self._cursor["nextBatch"]), self.position)

    async def close(self) -> None:
        """Give the server its cursor back."""
        if self._cursor["id"]:
            kill = {"killCursors": self._collection, "cursors": [self._cursor["id"]]}
            await self._database.command(kill, session=self._session)

    @property
    def _collection(self) -> str:
        return str(self._cursor["ns"]).partition(".")[2]

    async def _more(self) -> Document:
        more = {"getMore": self._cursor["id"], "collection": self._collection, "maxTimeMS": int(AWAIT * 1000)}
        return await self._database.command(more, session=self._session)


@asynccontextmanager
async def open_stream(
    database: Database, match: Sequence[Mapping[str, Any]], *, start_at: Timestamp | None = None
) -> AsyncIterator[ChangeStream]:
    """Open a stream of the changes that meet one of ``match``; the cursor exists when the block is entered.

    ``start_at`` delivers changes of that cluster time and later; without it the stream starts now. Raises
    ``HistoryLostError`` when the server no longer has that time.
    """
    options: dict[str, Any] = {} if start_at is None else {"startAtOperationTime": start_at}
    command = {
        "aggregate": 1,
        "pipeline": [{"$changeStream": options}, {"$match": {"$or": list(match)}}],
        "cursor": {},
        "readConcern": {"level": "majority"},
    }
    async with database.session() as session:
        with _refusals_told():
            reply = await finished(database.command(command, session=session))
        stream = ChangeStream(database, session, reply)
        try:
            _refuse_future(start_at, reply)
            yield stream
        finally:
            await _close(stream)


@contextmanager
def _refusals_told() -> Iterator[None]:
    """Take a refusal that is in no table for a lost position: the log is read, which is never wrong."""
    try:
        yield
    except TransientDatabaseError:
        raise
    except DatabaseError as error:
        raise HistoryLostError(f"The server refuses the stream ({error.server_code}): {error}") from error


def _refuse_future(start_at: Timestamp | None, reply: Mapping[str, Any]) -> None:
    if start_at is not None and start_at > reply.get("operationTime", start_at):
        raise HistoryLostError("The position lies in the server's future: it was taken on another server.")


async def _close(stream: ChangeStream) -> None:
    # A cursor that cannot be given back in time is reaped by the server.
    with suppress(StateLayerError), pymongo.timeout(CLOSE_TIMEOUT):
        await finished(stream.close())


def position_of(cursor: Mapping[str, Any]) -> Timestamp | None:
    """Return the cluster time up to which this cursor has looked, matching changes or not.

    It is the head of the post-batch resume token: a KeyString that begins with a timestamp. It moves on idle streams
    too, so that a quiet partition's position does not age out of the oplog. ``None`` when the token reads otherwise.
    """
    data = cursor.get("postBatchResumeToken", {}).get("_data")
    if not isinstance(data, str) or not data.startswith(_TIMESTAMP_TAG) or len(data) < 18:
        return None
    return Timestamp(int(data[2:10], 16), int(data[10:18], 16))
