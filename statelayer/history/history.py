"""Asking for what was written."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from statelayer import mongo_indexes as names
from statelayer import paths
from statelayer.errors import InvalidInputError, InvalidValueError, TransientDatabaseError
from statelayer.events import check_id
from statelayer.history.changes import Backoff, Change, Position
from statelayer.history.log import Log, entry_of, event_of
from statelayer.history.reader import Reader
from statelayer.history.watch import EverywhereWatch, NamespaceWatch, Watch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from pydantic import BaseModel

    from statelayer.clock import Clock
    from statelayer.drivers import Database
    from statelayer.events import Entry, Event
    from statelayer.settings import Settings

MAX_INT64 = 2**63 - 1


class History:
    """Reads entries and events. What it returns belongs to the caller alone.

    Every method refuses a path, namespace or number that breaks a rule, with an ``InvalidInputError``, before it reads
    anything, and raises ``IntegrityError`` for a document that was broken by hand.
    """

    def __init__(self, database: Database, settings: Settings, clock: Clock, reader: Reader | None = None) -> None:
        self.reader = reader or Reader(database, settings, clock)
        self._database = database
        self._roots = settings.roots
        self._page_size = settings.page_size
        self._entries = database.collection(names.ENTRIES)
        self._events = database.collection(names.EVENTS)
        self._log = Log(database, settings)

    async def aclose(self) -> None:
        """Close the reader stream. Whoever still watches gets ``ClosedError``."""
        await self.reader.aclose()

    # --- entries

    async def get(self, path: str, model: type[BaseModel] | None = None) -> Entry | None:
        """Return the entry at the path, or ``None`` when it was never written or is deleted.

        With a pydantic ``model`` the entry's ``value`` is an instance of it; a value that does not fit raises
        ``InvalidValueError``, which names the path and the field.
        """
        address = paths.parse(path, self._roots).text
        document = await self._entries.find_one({"_id": address})
        if document is None or document.get("deleted"):
            return None
        entry = entry_of(document)
        return entry if model is None else entry.model_copy(update={"value": _fitted(entry, model)})

    async def entries(self, namespace_or_prefix: str) -> list[Entry]:
        """Return the entries of a namespace, or those at a path and below it, sorted by path, as of one instant."""
        prefix, namespace = self._prefix(namespace_or_prefix)
        below = {"$gt": prefix + "/", "$lt": prefix + "0"}  # "0" follows "/"
        wanted = {"namespace": namespace, "$or": [{"_id": prefix}, {"_id": below}]}
        documents = await self._entries.find(wanted, sort=[("_id", 1)])
        return [entry_of(document) for document in documents if not document.get("deleted")]

    async def wait_for(self, path: str, timeout: float | None = None) -> Entry:
        """Return the entry at the path as soon as it has a value.

        ``timeout`` is in seconds; ``None`` waits for ever. Raises the builtin ``TimeoutError``.
        """
        entry = await self.get(path)
        if entry is not None:
            return entry
        try:
            async with asyncio.timeout(timeout):
                return await self._appearance(path)
        except TimeoutError:
            raise TimeoutError(f"{path} had no value within {timeout:g} seconds.") from None

    async def _appearance(self, path: str) -> Entry:
        backoff = Backoff()
        async with self.reader.watching(_writes_of(path), capacity=1) as watcher:
            while True:
                try:
                    entry = await self.get(path)
                except TransientDatabaseError:
                    await backoff.pause()
                    continue
                if entry is not None:
                    return entry
                await watcher.read()

    # --- events

    async def event(self, event_id: str) -> Event | None:
        """Return the event, or ``None`` when there is none of this id."""
        document = await self._events.find_one({"_id": check_id("event", event_id)})
        return event_of(document) if document else None

    def events(self, namespace: str, after: int = 0) -> AsyncIterator[Event]:
        """Iterate over the events behind the seq ``after``, in seq order, until the log ends.

        They are read page by page, so that the consumer may take its time.
        """
        checked = paths.parse_namespace(namespace, self._roots)
        return self._events_behind(checked, _whole("after", after))

    async def _events_behind(self, namespace: str, after: int) -> AsyncIterator[Event]:
        while page := await self._log.page(namespace, after):
            for document in page:
                yield event_of(document)
            after = page[-1]["seq"]

    async def read_version(self, path: str, n: int) -> Event | None:
        """Return the event that was the n-th write of the path, or ``None`` when it has not come to that."""
        address = paths.parse(path, self._roots)
        wanted = {"namespace": address.namespace, "path": address.text, "version": _whole("version", n)}
        document = await self._events.find_one(wanted)
        return event_of(document) if document else None

    async def state_at(self, namespace: str, seq: int) -> dict[str, Any]:
        """Return the values of all paths as they were just after this seq; beyond the head, as they are now."""
        checked = paths.parse_namespace(namespace, self._roots)
        newest: list[dict[str, Any]] = [
            {"$match": {"namespace": checked, "seq": {"$gte": 1, "$lte": _whole("seq", seq)}}},
            {"$group": {"_id": "$path", "seq": {"$max": "$seq"}}},
            {"$sort": {"_id": 1}},
        ]
        rows = await self._events.aggregate(newest)
        state: dict[str, Any] = {}
        for n in range(0, len(rows), self._page_size):
            state |= await self._values_at(checked, [row["seq"] for row in rows[n : n + self._page_size]])
        return state

    async def _values_at(self, namespace: str, seqs: Sequence[int]) -> dict[str, Any]:
        """Return the values that these events left, by path."""
        wanted = {"namespace": namespace, "seq": {"$in": list(seqs)}, "op": {"$ne": "delete"}}
        events = await self._events.find(wanted, projection={"path": 1, "value": 1})
        return {event["path"]: event.get("value") for event in sorted(events, key=lambda event: event["path"])}

    def watch(
        self,
        namespace: str | None,
        matches: Callable[[Sequence[str]], bool],
        *,
        after: int | str | None = None,
    ) -> AbstractAsyncContextManager[Watch]:
        """Watch the events whose path's segments match: first those behind ``after``, then live, without a gap.

        With a ``namespace``, ``after`` is a seq and events come in seq order; without one it is an earlier
        ``events.position``, and order holds inside each namespace. ``None`` means from now on. Raises
        ``HistoryLostError`` for a position that the server can no longer stream from.
        """
        if namespace is None:
            position = None if after is None else Position.parse(after)
            return EverywhereWatch(self.reader, self._database, matches, position).reading()
        checked = paths.parse_namespace(namespace, self._roots)
        seq = None if after is None else _whole("after", after)
        return NamespaceWatch(self.reader, self._log, checked, matches, seq).reading()

    def _prefix(self, text: str) -> tuple[str, str]:
        if isinstance(text, str) and text.count("/") > 2:
            path = paths.parse(text, self._roots)
            return path.text, path.namespace
        namespace = paths.parse_namespace(text, self._roots)
        return namespace, namespace


def _writes_of(path: str) -> Callable[[Change], bool]:
    return lambda change: change.collection == "events" and change.fields.get("path") == path


def _fitted(entry: Entry, model: type[BaseModel]) -> BaseModel:
    try:
        return model.model_validate(entry.value)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_input=False)
        field = ".".join(["value", *map(str, first["loc"])])
        more = f" (and {len(others)} more)" if others else ""
        raise InvalidValueError(
            f"{entry.path} (version {entry.version}), {field}",
            f"it does not fit {model.__name__}: {first['msg']}{more}",
            "Read it without a model, or write a value that fits.",
        ) from error


def _whole(name: str, number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_INT64:
        raise InvalidInputError(f"{name} is a whole number from 0 on, not {number!r:.80}.")
    return number
