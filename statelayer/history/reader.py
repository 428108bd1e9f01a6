"""The reader stream: one change stream per process, fanned out in memory to whoever watches.

It is opened with the first watcher and closed after the last. Nobody can hold it up: a watcher that does not keep up
is told that it missed something, and reads again what it relies on; so is everyone when the stream lost its place.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from statelayer.errors import ClosedError, HistoryLostError, StateLayerError, TransientDatabaseError
from statelayer.history.changes import Backoff, Position, Sieve, change_of, cluster_time, match
from statelayer.streams import open_stream
from statelayer.transactions import finished

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from bson.timestamp import Timestamp

    from statelayer.clock import Clock
    from statelayer.drivers import Database
    from statelayer.history.changes import Change
    from statelayer.settings import Settings
    from statelayer.streams import Batch

log = structlog.get_logger("statelayer.reader")

CAPACITY = 256
"""How many changes a watcher may leave unread before it is told that it missed some."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What arrived since the last read. ``missed`` says that there was more than is kept, or that the stream broke."""

    changes: Sequence[Change]
    missed: bool


@dataclass(slots=True)
class ReaderStatistics:
    """What the reader is doing, and how often it had to open its stream anew or let a watcher miss something."""

    watchers: int = 0
    is_open: bool = False
    reopened: int = 0
    overflows: int = 0


class Watcher:
    """The changes that one watcher wanted and has not read yet."""

    def __init__(self, wanted: Callable[[Change], bool], capacity: int) -> None:
        self._wanted = wanted
        self._capacity = capacity
        self._unread: deque[Change] = deque()
        self._missed = False
        self._joined: asyncio.Future[Timestamp] = asyncio.get_running_loop().create_future()
        self._passed: Timestamp | None = None
        self._failure: StateLayerError | None = None
        self._news = asyncio.Event()

    @property
    def joined(self) -> Timestamp:
        """The place of the stream when the watcher joined: it is told of whatever is later, and perhaps of this."""
        return self._joined.result()

    @property
    def passed(self) -> Timestamp | None:
        """Everything before this time was read, or was not wanted; ``None`` while something is unread."""
        return None if self._unread or self._missed else self._passed

    async def read(self) -> Delivery:
        """Wait for news. Cancelling the wait loses nothing.

        Raises ``LogLostError``, ``ClosedError`` or what else ended the stream.
        """
        await self._news.wait()
        if self._failure is not None and not self._unread and not self._missed:
            raise self._failure
        delivery = Delivery(tuple(self._unread), self._missed)
        self._unread.clear()
        self._missed = False
        if self._failure is None:
            self._news.clear()
        return delivery

    async def opened(self) -> None:
        """Wait until the stream's cursor exists."""
        await self._joined

    # --- the reader's side

    def join(self, time: Timestamp) -> None:
        if not self._joined.done():
            self._joined.set_result(time)
            self._passed = time

    def take(self, change: Change) -> bool:
        """Keep the change if it is wanted; return False when it no longer fits."""
        if self._missed or not self._wanted(change):
            return True
        if len(self._unread) == self._capacity:
            self.miss()
            return False
        self._unread.append(change)
        self._news.set()
        return True

    def miss(self) -> None:
        self._unread.clear()
        self._missed = True
        self._news.set()

    def pass_by(self, time: Timestamp) -> None:
        self._passed = time

    def fail(self, error: StateLayerError) -> None:
        if not self._joined.done():
            self._joined.set_exception(error)
            self._joined.exception()  # looked at, in case that nobody waits for it any more
        self._failure = error
        self._news.set()


class Reader:
    """Owns the reader stream and the task that reads it."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:  # noqa: ARG002 - as every part
        self._database = database
        self._match = match(database)
        self._watchers: set[Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._position: Timestamp | None = None  # of the open stream
        self._sieve: Sieve | None = None  # what was read before the stream broke
        self._closed = False
        self._reopened = self._overflows = 0

    @property
    def statistics(self) -> ReaderStatistics:
        return ReaderStatistics(len(self._watchers), self._position is not None, self._reopened, self._overflows)

    @asynccontextmanager
    async def watching(
        self, wanted: Callable[[Change], bool] = lambda _: True, *, capacity: int = CAPACITY
    ) -> AsyncIterator[Watcher]:
        """Watch the changes that are wanted; the cursor exists when the block is entered.

        With a ``capacity`` of 1 a watcher is only woken: it reads what it relies on after every delivery. Raises
        ``ClosedError`` after ``aclose``, and whatever keeps the stream from opening, failovers excepted.
        """
        watcher = Watcher(wanted, capacity)
        self._join(watcher)
        try:
            await watcher.opened()
            yield watcher
        finally:
            self._watchers.discard(watcher)

    async def aclose(self) -> None:
        """Close the stream. Whoever still watches gets ``ClosedError``."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _join(self, watcher: Watcher) -> None:
        if self._closed:
            raise ClosedError("The layer is closed; nothing can be watched.")
        self._watchers.add(watcher)
        if self._position is not None:
            watcher.join(self._position)
        elif self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(
                self._run(), name="statelayer-reader", context=contextvars.Context()
            )

    # --- the task

    async def _run(self) -> None:
        try:
            await self._keep_open()
        except asyncio.CancelledError:
            self._fail(ClosedError("The layer was closed while somebody watched."))
            raise
        except StateLayerError as error:
            log.warning("reader_failed", code=error.code, error=str(error))
            self._fail(error)
        except Exception as fault:
            log.exception("reader_fault")
            stopped = ClosedError("The reader stream stopped on a fault of its own; see the log.")
            stopped.__cause__ = fault
            self._fail(stopped)

    async def _keep_open(self) -> None:
        """Read while somebody watches, through whatever heals."""
        backoff = Backoff()
        missed = False
        self._sieve = None
        while self._watchers:
            try:
                await self._follow(backoff, missed=missed)
                missed = False
            except HistoryLostError as error:
                self._sieve = None
                missed = True
                await self._pause(error, backoff)
            except TransientDatabaseError as error:
                await self._pause(error, backoff)

    async def _pause(self, error: StateLayerError, backoff: Backoff) -> None:
        self._reopened += 1
        log.info("reader_reopens", code=error.code, error=str(error))
        await backoff.pause()

    async def _follow(self, backoff: Backoff, *, missed: bool) -> None:
        """Open the stream, where it broke if it did, and read until nobody watches."""
        if self._sieve is None:
            self._sieve = Sieve(Position(await finished(cluster_time(self._database))))
        async with open_stream(self._database, self._match, start_at=self._sieve.position.at) as stream:
            try:
                self._opened(self._sieve, missed=missed)
                while self._watchers:
                    self._deliver(await stream.read(), self._sieve)
                    backoff.reset()
                self._sieve = None
            finally:
                self._position = None

    def _opened(self, sieve: Sieve, *, missed: bool) -> None:
        self._position = sieve.position.at
        for watcher in self._watchers:
            watcher.join(self._position)
            if missed:
                watcher.miss()

    def _deliver(self, batch: Batch, sieve: Sieve) -> None:
        for change in (change_of(document, self._database) for document in batch.changes):
            if change.collection == "executions" or sieve.admits(change):
                self._overflows += sum(not watcher.take(change) for watcher in self._watchers)
        if batch.position is not None:
            sieve.advance(batch.position)
        self._position = sieve.position.at
        for watcher in self._watchers:
            watcher.pass_by(self._position)

    def _fail(self, error: StateLayerError) -> None:
        for watcher in self._watchers:
            watcher.fail(error)
        self._watchers.clear()
