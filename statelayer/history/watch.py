"""Events as they come, after those that are there already: no gap, nothing twice.

A task of each watch reads ahead into a short queue, so that a consumer may give up waiting at any moment and lose
nothing: what it cancels is a wait in memory, never a read of the driver.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
from abc import ABC, abstractmethod
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self

from statelayer.errors import (
    HistoryLostError,
    IntegrityError,
    InvalidInputError,
    StateLayerError,
    TransientDatabaseError,
)
from statelayer.history.changes import Backoff, Position, Sieve, change_of, cluster_time, following, match
from statelayer.history.log import event_of
from statelayer.streams import open_stream
from statelayer.transactions import finished

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from bson.timestamp import Timestamp

    from statelayer.drivers import Database, Document
    from statelayer.events import Event
    from statelayer.history.changes import Change
    from statelayer.history.log import Log
    from statelayer.history.reader import Reader, Watcher

    Matches = Callable[[Sequence[str]], bool]

AHEAD = 64
"""How many events a watch reads ahead of its consumer."""


class Watch(ABC):
    """An endless iterator of events.

    It raises ``LogLostError``, ``HistoryLostError`` or ``ClosedError`` when it cannot go on, and ``IntegrityError`` for
    an event that was broken by hand, behind which it goes on.
    """

    def __init__(self) -> None:
        self._ahead: asyncio.Queue[tuple[Event | IntegrityError, Any]] = asyncio.Queue(AHEAD)
        self._started = asyncio.Event()
        self._failure: StateLayerError | None = None
        self._news = asyncio.Event()

    @property
    @abstractmethod
    def position(self) -> int | str:
        """What to pass as ``after`` to go on behind what was read: a seq when the pattern fixes the namespace."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while self._ahead.empty():
            if self._failure is not None:
                raise self._failure
            self._news.clear()
            await self._news.wait()
        event, position = self._ahead.get_nowait()
        self._moved(position)
        if isinstance(event, IntegrityError):
            raise event
        return event

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Self]:
        """Read ahead until the block ends. Whatever is committed from its beginning on will be seen."""
        task = asyncio.get_running_loop().create_task(
            self._run(), name="statelayer-watch", context=contextvars.Context()
        )
        try:
            await self._started.wait()
            if self._failure is not None:
                raise self._failure
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        try:
            await self._read()
        except StateLayerError as error:
            self._failure = error
        finally:
            self._started.set()
            self._news.set()

    @abstractmethod
    async def _read(self) -> None:
        """Read until cancelled, or until nothing can be read any more."""

    @abstractmethod
    def _moved(self, position: Any) -> None:
        """Note that the consumer has everything up to here."""

    async def _hand_on(self, document: Document, position: Any) -> None:
        event: Event | IntegrityError
        try:
            event = event_of(document)
        except IntegrityError as error:
            event = error
        await self._ahead.put((event, position))
        self._news.set()


class NamespaceWatch(Watch):
    """The events of one namespace in seq order. The stream only wakes it; what it hands on is read from the log."""

    def __init__(self, reader: Reader, log: Log, namespace: str, matches: Matches, after: int | None) -> None:
        super().__init__()
        self._reader = reader
        self._log = log
        self._namespace = namespace
        self._matches = matches
        self._after = after
        self._last = after or 0

    @property
    def position(self) -> int:
        return self._last

    def _moved(self, position: int) -> None:
        self._last = position

    async def _read(self) -> None:
        async with self._reader.watching(self._concerns, capacity=1) as watcher:
            if self._after is None:
                self._after = self._last = await finished(self._log.head(self._namespace))
            self._started.set()
            backoff = Backoff()
            while True:
                try:
                    await self._read_log(self._after)
                except TransientDatabaseError:
                    await backoff.pause()
                    continue
                backoff.reset()
                await watcher.read()

    async def _read_log(self, after: int) -> None:
        while page := await finished(self._log.page(self._namespace, after)):
            for document in page:
                self._after = after = document["seq"]
                if _matches(self._matches, document):
                    await self._hand_on(document, after)

    def _concerns(self, change: Change) -> bool:
        return change.collection == "events" and change.fields.get("namespace") == self._namespace


class EverywhereWatch(Watch):
    """The events of all namespaces, in the order of each, from the stream.

    It reads the shared stream as long as it keeps up. From an earlier position, and when it missed something, it reads
    a stream of its own up to where it joined the shared one.
    """

    def __init__(self, reader: Reader, database: Database, matches: Matches, after: Position | None) -> None:
        super().__init__()
        self._reader = reader
        self._database = database
        self._matches = matches
        self._after = after
        self._read_to: Position | None = None  # by the consumer
        self._sieve: Sieve | None = None  # what this task has read
        self._watcher: Watcher | None = None
        self._busy = False

    @property
    def position(self) -> str:
        if self._sieve is not None and not self._busy and self._ahead.empty():
            if self._watcher is not None and (passed := self._watcher.passed) is not None:
                self._sieve.advance(passed)
            return str(self._sieve.position)
        return str(self._read_to or self._after)

    def _moved(self, position: Position) -> None:
        self._read_to = position

    async def _read(self) -> None:
        backoff = Backoff()
        while True:
            try:
                async with self._reader.watching(self._concerns) as watcher:
                    sieve = self._sieve = self._sieve or Sieve(await self._beginning())
                    await self._catch_up(watcher.joined, sieve)
                    self._started.set()
                    backoff.reset()
                    await self._follow(watcher, sieve)
            except TransientDatabaseError:
                await backoff.pause()

    async def _beginning(self) -> Position:
        now = following(await finished(cluster_time(self._database)))
        if self._after is None:
            self._read_to = Position(now)
            return self._read_to
        if self._after.at > now:
            raise InvalidInputError(f"Position {str(self._after)!r} lies in the future; it is another server's.")
        return self._after

    async def _catch_up(self, joined: Timestamp, sieve: Sieve) -> None:
        """Read a stream of our own until the shared one has everything that is left."""
        if sieve.position.at > joined:
            return
        try:
            async with open_stream(self._database, match(self._database), start_at=sieve.position.at) as stream:
                self._started.set()
                while sieve.position.at <= joined:
                    batch = await stream.read()
                    await self._take([change_of(document, self._database) for document in batch.changes], sieve)
                    if batch.position is not None:
                        sieve.advance(batch.position)
        except HistoryLostError as error:
            raise HistoryLostError(
                f"The server can no longer stream from {str(sieve.position)!r}. Read each namespace on from its last "
                "seq with events(namespace, after=seq), then watch from now on."
            ) from error

    async def _follow(self, watcher: Watcher, sieve: Sieve) -> None:
        """Take what the shared stream delivers, until it was too much or the stream broke."""
        self._watcher = watcher
        try:
            while not (delivery := await watcher.read()).missed:
                await self._take(delivery.changes, sieve)
        finally:
            self._watcher = None

    async def _take(self, changes: Sequence[Change], sieve: Sieve) -> None:
        self._busy = True
        for change in changes:
            if change.collection == "events" and sieve.admits(change) and self._concerns(change):
                await self._hand_on(copy.deepcopy(change.fields), sieve.position)
        self._busy = False

    def _concerns(self, change: Change) -> bool:
        return change.collection == "events" and _matches(self._matches, change.fields)


def _matches(matches: Matches, event: Document) -> bool:
    path = event.get("path")
    return isinstance(path, str) and matches(path.split("/")[1:])
