"""The listener: every committed event is evaluated, in the order of its namespace, and what it leads to is recorded.

The log is the truth and the change stream only wakes us. An event is evaluated when its seq follows the namespace's
cursor; a lower one is a repeat; a higher one means that the log is read first. So the stream may repeat, skip or break,
and two listeners may do the same work: recording is idempotent, and cursors only move after it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pymongo
import structlog
from pydantic import ValidationError

from statelayer import mongo_indexes as names
from statelayer.errors import (
    HistoryLostError,
    LogLostError,
    SetupRequiredError,
    StateLayerError,
    TransientDatabaseError,
)
from statelayer.events import Event
from statelayer.instances import Instance, Instances
from statelayer.loops import first_of, insisted, signalled
from statelayer.streams import GONE, open_stream
from statelayer.subscriptions.cursors import Checkpoints, Cursors
from statelayer.subscriptions.dispatch import Dispatch
from statelayer.subscriptions.evaluation import evaluate
from statelayer.subscriptions.shares import Share
from statelayer.subscriptions.state import StateReader
from statelayer.transactions import finished

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Sequence

    from bson.timestamp import Timestamp

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Document
    from statelayer.settings import Settings
    from statelayer.streams import Batch, ChangeStream
    from statelayer.subscriptions.catalogue import Catalogue
    from statelayer.subscriptions.decisions import Recorder
    from statelayer.subscriptions.repository import Subscriptions

log = structlog.get_logger("statelayer.listener")

ListenerState = Literal["stopped", "starting", "catching_up", "following", "paused", "log_lost"]

REVISION_POLL = 0.25
"""Seconds between two looks for a revision that events bear and the database does not have."""

FLUSH_INTERVAL = 1.0
"""Seconds between two writes of the cursors while events keep coming."""

CHECKPOINT_INTERVAL = 5.0
"""Seconds between two writes of the stream's position. An older position costs repeats, never events."""

PROGRESS_INTERVAL = 5.0
"""Seconds between two lines that say how far a catch-up is."""

LONGEST_BACKOFF = 5.0

LAST_MOMENTS = 5.0
"""Seconds that a stopping listener gets to give its partitions back."""


@dataclass(slots=True)
class ListenerStatistics:
    """What a listener has done since it started."""

    state: ListenerState = "stopped"
    evaluated: int = 0
    wakeups: int = 0
    skips: int = 0
    gaps: int = 0
    holes: int = 0
    unreadable: int = 0
    partitions: tuple[int, ...] = ()
    """Those that this instance holds."""
    restarts: Counter[str] = field(default_factory=Counter)
    quarantined: tuple[str, ...] = ()
    awaits_revision: int | None = None
    """A revision of the subscriptions that an event bears and ``meta`` has not reached; nothing is evaluated before."""


class Listener:
    """Evaluates the events of its share of the partitions, and hands what it decided to the recorder."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        clock: Clock,
        *,
        subscriptions: Subscriptions,
        recorder: Recorder,
        instance: Instance | None = None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._subscriptions = subscriptions
        self._recorder = recorder
        instances = Instances(database, clock, lease=settings.lease)
        self._instance = instance or Instance(instances, clock.new_id())
        self._share = Share(database, settings, clock, instances, self._instance)
        self._behind: set[int] = set()
        self._events = database.collection(names.EVENTS)
        self._heads = database.collection(names.NAMESPACES)
        self._state = StateReader(database)
        self._cursors = Cursors(database)
        self._checkpoints = Checkpoints(database)
        self._dispatch = Dispatch(database)
        self._catalogue: Catalogue | None = None
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._flushed = self._saved = self._told = 0.0
        self._position: Timestamp | None = None
        self._log_lost = self._history_lost = False
        self.statistics = ListenerStatistics()

    def stop(self) -> None:
        """Let ``run`` end after what it is evaluating."""
        self._stopping.set()

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Evaluate until stopped. ``started`` is called when the stream's cursor exists: nothing is missed from then.

        Goes on by itself after what heals: a lost position, a failover, a pause. Raises what cannot heal.
        """
        try:
            await insisted("join", self._share.settle, self._stopping)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_share(), context=contextvars.Context())
                try:
                    await self._evaluate_until_stopped(started)
                finally:
                    self._ended.set()
        except BaseExceptionGroup as faults:
            fault = first_of(faults)
            raise fault from fault.__cause__
        finally:
            await finished(self._leave())

    async def _evaluate_until_stopped(self, started: Callable[[], None]) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                await self._mark_if_lost()
                await self._wait_until_on(started)
                async with self._opened() as stream:
                    started()
                    failures = await self._evaluate_through(stream, failures)
            except HistoryLostError as error:
                self._history_lost = True
                failures = await self._back_off("history_lost", error, failures)
            except (LogLostError, SetupRequiredError) as error:
                self._report_lost_log(error)
            except TransientDatabaseError as error:
                failures = await self._back_off("database", error, failures)

    async def _evaluate_through(self, stream: ChangeStream, failures: int) -> int:
        """Catch up and follow until there is a reason to open another stream; return what is left of the failures."""
        try:
            await self._catch_up()
            failures = 0
            await self._follow(stream)
        except _InterruptedError:
            pass
        await self._store(self._position)
        return failures

    async def _keep_share(self) -> None:
        while not self._ended.is_set():
            await insisted("keep_share", self._share.keep, self._ended)
            self.statistics.partitions = tuple(sorted(self._share.held))
            await signalled(self._ended, self._settings.poll)

    async def _leave(self) -> None:
        self._ended.set()
        self.statistics.state, self.statistics.partitions = "stopped", ()
        try:
            with pymongo.timeout(LAST_MOMENTS):
                await self._share.leave()
        except StateLayerError as error:
            log.warning("partitions_left_to_their_lease", instance=self._instance.id, error=error.code)

    # --- opening and catching up

    async def _wait_until_on(self, started: Callable[[], None]) -> None:
        """Wait while dispatch is off, which is no reason for a service not to come up."""
        while not self._stopping.is_set():
            state = await self._dispatch.state()
            if state == "on":
                return
            started()
            self.statistics.state = "log_lost" if state == "log_lost" else "paused"
            await signalled(self._stopping, self._settings.poll)

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[ChangeStream]:
        """Open the stream at the oldest checkpoint; partitions without a usable one must be caught up from the log."""
        self.statistics.state = "starting"
        await self._settle()
        self._cursors.forget()
        if self._history_lost:
            await self._checkpoints.discard(self._instance.id, self._share.held)
            self._history_lost = False
        position, self._behind = await self._checkpoints.oldest(self._share.held)
        async with open_stream(self._database, self._match(), start_at=position) as stream:
            await self._reload()
            yield stream

    async def _settle(self) -> bool:
        self._position = None  # what is taken over here has not been evaluated up to it
        changed = await self._share.settle()
        self.statistics.partitions = tuple(sorted(self._share.held))
        return changed

    def _match(self) -> list[dict[str, Any]]:
        ours = [self._database.prefix + name for name in (names.SUBSCRIPTIONS, names.META)]
        return [
            {
                "operationType": "insert",
                "ns.coll": self._events.name,
                "fullDocument.partition": {"$in": sorted(self._share.held)},
            },
            {"ns.coll": {"$in": ours}},
            {"operationType": {"$in": list(GONE)}},
        ]

    async def _catch_up(self) -> None:
        """Evaluate from the log whatever the cursors of the partitions that are behind have not seen."""
        if not self._behind:
            return
        self.statistics.state = "catching_up"
        log.info("catch_up_started", partitions=len(self._behind))
        self._told = self._clock.monotonic()
        async for page in self._pages_of_heads(self._behind):
            await self._cursors.load(head["_id"] for head in page)
            for head in page:
                await self._read_log(head["_id"], head["seq"])
            await self._flush()
        self._behind = set()
        log.info("catch_up_finished", evaluated=self.statistics.evaluated)

    async def _pages_of_heads(self, partitions: Collection[int]) -> AsyncIterator[list[Document]]:
        after = ""
        while True:
            wanted = {"_id": {"$gt": after}, "partition": {"$in": sorted(partitions)}}
            page = await self._heads.find(wanted, sort=[("_id", 1)], limit=self._settings.page_size)
            if not page:
                return
            yield page
            after = page[-1]["_id"]

    # --- following the stream

    async def _follow(self, stream: ChangeStream) -> None:
        """Read on while the last batch is evaluated, until stopped or paused, or until the share has changed."""
        self.statistics.state = "following"
        reading = asyncio.ensure_future(stream.read())
        try:
            while not self._stopping.is_set():
                batch = await reading
                reading = asyncio.ensure_future(stream.read())
                if not await self._take(batch):
                    break
                await self._keep(batch, idle=not reading.done())
                if self._share.is_due and await self._hand_over():
                    break
        finally:
            await finished(_settled(reading))

    async def _hand_over(self) -> bool:
        """Store how far we are, so that others go on from there, and let partitions change hands."""
        await self._store(self._position)
        return await self._settle()

    async def _take(self, batch: Batch) -> bool:
        """Evaluate a batch; say whether to go on."""
        touched = {change["ns"].get("coll") for change in batch.changes if "ns" in change}
        self._refuse_loss(batch.changes)
        if self._database.prefix + names.META in touched and await self._dispatch.state() != "on":
            return False
        await self._evaluate_in_turn([c["fullDocument"] for c in batch.changes if self._is_event(c)])
        if self._database.prefix + names.SUBSCRIPTIONS in touched:
            await self._reload()
        return True

    def _is_event(self, change: Document) -> bool:
        if change["operationType"] != "insert" or change["ns"]["coll"] != self._events.name:
            return False
        if type(change["fullDocument"].get("seq")) is int and isinstance(change["fullDocument"].get("namespace"), str):
            return True
        self._report_unreadable(change["documentKey"]["_id"])
        return False

    def _refuse_loss(self, changes: Sequence[Document]) -> None:
        for change in changes:
            hit = change.get("ns", {}).get("coll", self._events.name) == self._events.name
            if hit and change["operationType"] in GONE:
                raise LogLostError(f"The event log was lost: {change['operationType']} of {self._database.name}.")

    async def _keep(self, batch: Batch, *, idle: bool) -> None:
        """Store how far we are: at once when nothing else waits, else about once a second."""
        now = self._clock.monotonic()
        self._position = batch.position
        if self._cursors.moved and (idle or now - self._flushed >= FLUSH_INTERVAL):
            await self._flush()
        if not self._cursors.moved and now - self._saved >= CHECKPOINT_INTERVAL:
            await self._store(batch.position)

    async def _store(self, position: Timestamp | None) -> None:
        """Store the cursors, and then the position before which everything has been evaluated."""
        await self._flush()
        if position is not None:
            await self._checkpoints.save(self._instance.id, self._share.held - self._behind, position)
            self._saved = self._clock.monotonic()

    # --- evaluating

    async def _evaluate_in_turn(self, documents: Sequence[Document]) -> None:
        """Evaluate what is next in each namespace; leave out repeats, and read the log first where one is missing."""
        await self._cursors.load(document["namespace"] for document in documents)
        due: list[Document] = []
        reached: dict[str, int] = {}
        for document in documents:
            namespace, seq = document["namespace"], document["seq"]
            at = reached.get(namespace, self._cursors.at(namespace).seq)
            if seq <= at:
                continue
            if seq > at + 1:
                await self._evaluate(due)
                due = []
                await self._close_gap(namespace, seq)
            else:
                due.append(document)
            reached[namespace] = seq
        await self._evaluate(due)

    async def _close_gap(self, namespace: str, seq: int) -> None:
        self.statistics.gaps += 1
        await self._read_log(namespace, seq)
        if self._cursors.at(namespace).seq < seq:
            raise TransientDatabaseError(f"The stream showed seq {seq} of {namespace}, the log does not have it yet.")

    async def _read_log(self, namespace: str, up_to: int) -> None:
        """Evaluate from the log, page by page, from the namespace's cursor up to a seq."""
        while (at := self._cursors.at(namespace).seq) < up_to:
            if self._stopping.is_set() or self._share.has_surplus:
                raise _InterruptedError
            wanted = {"namespace": namespace, "seq": {"$gt": at, "$lte": up_to}}
            page = await self._events.find_page(wanted, sort=[("seq", 1)], size=self._settings.page_size)
            if not page:
                return
            self._report_holes(at, page)
            await self._evaluate(page)
            await self._keep_progress()

    def _report_holes(self, at: int, page: Sequence[Document]) -> None:
        """Seqs are given in commit order, so a seq that is missing now never comes; ``verify`` names it too."""
        for document in page:
            if document["seq"] != at + 1:
                self.statistics.holes += 1
                log.error("seq_missing", namespace=document["namespace"], after=at, before=document["seq"])
            at = document["seq"]

    async def _evaluate(self, documents: Sequence[Document]) -> None:
        """Decide, record, and only then move the cursors."""
        if not documents:
            return
        events = [event for event in map(self._readable, documents) if event is not None]
        catalogue = await self._catalogue_of(max((event.subscriptions_rev for event in events), default=0))
        decisions = [d for d in await evaluate(events, catalogue, self._state) if d.wakeups or d.skips]
        if decisions:
            await self._recorder.record(decisions, live=self.statistics.state == "following")
        for document in documents:
            self._cursors.advance(document["namespace"], document["seq"], document["_id"])
        self.statistics.evaluated += len(documents)
        self.statistics.wakeups += sum(len(decision.wakeups) for decision in decisions)
        self.statistics.skips += sum(len(decision.skips) for decision in decisions)

    def _readable(self, document: Document) -> Event | None:
        """An event that was broken by hand wakes nobody, is named here and by ``verify``, and stops no other."""
        try:
            return Event.from_document(document)
        except ValidationError:
            self._report_unreadable(document["_id"])
            return None

    def _report_unreadable(self, event_id: object) -> None:
        self.statistics.unreadable += 1
        log.error("event_unreadable", event_id=event_id)

    async def _catalogue_of(self, revision: int) -> Catalogue:
        """Return the subscriptions as of this revision or a later one."""
        while self._catalogue is None or self._catalogue.revision < revision:
            await self._reload()
            if self._catalogue is not None and self._catalogue.revision < revision:
                self._report_missing_revision(revision, self._catalogue.revision)
                await signalled(self._stopping, REVISION_POLL)
            if self._stopping.is_set():
                raise _InterruptedError
        self.statistics.awaits_revision = None
        return self._catalogue

    def _report_missing_revision(self, wanted: int, found: int) -> None:
        if self.statistics.awaits_revision != wanted:
            log.error("subscriptions_behind_log", event_revision=wanted, revision=found)
        self.statistics.awaits_revision = wanted

    async def _reload(self) -> None:
        catalogue = await self._subscriptions.refresh()
        if await self._subscriptions.settle_toggles(catalogue):
            catalogue = await self._subscriptions.refresh()
        known = set(self.statistics.quarantined)
        for broken in catalogue.quarantined:
            if broken.id not in known:
                log.error("subscription_quarantined", id=broken.id, problems=list(broken.problems))
        self.statistics.quarantined = tuple(broken.id for broken in catalogue.quarantined)
        self._catalogue = catalogue

    # --- keeping going

    async def _flush(self) -> None:
        await self._cursors.flush()
        self._flushed = self._clock.monotonic()

    async def _keep_progress(self) -> None:
        """Store the cursors while a long stretch of the log is read, and say how far we are."""
        now = self._clock.monotonic()
        if now - self._flushed >= FLUSH_INTERVAL:
            await self._flush()
        if now - self._told >= PROGRESS_INTERVAL:
            log.info("catch_up_progress", evaluated=self.statistics.evaluated)
            self._told = now

    async def _back_off(self, cause: str, error: StateLayerError, failures: int) -> int:
        self.statistics.restarts[cause] += 1
        pause = min(LONGEST_BACKOFF, 0.1 * 2 ** min(failures, 10))
        log.warning("stream_restarted", cause=cause, error=error.code, pause=pause, detail=str(error))
        await signalled(self._stopping, pause)
        return failures + 1

    def _report_lost_log(self, error: StateLayerError) -> None:
        self.statistics.restarts["log_lost"] += 1
        self.statistics.state = "log_lost"
        self._log_lost = True
        log.critical("log_lost", detail=str(error))

    async def _mark_if_lost(self) -> None:
        """Stop every instance, until an operator has decided what to do."""
        if self._log_lost:
            await self._dispatch.mark_log_lost()
            await self._checkpoints.discard_all()
            self._log_lost = False


class _InterruptedError(Exception):
    """The listener is stopped, or its share has changed, in the middle of the log; what is left comes next."""


async def _settled(reading: asyncio.Future[Any]) -> None:
    """Let a read end by itself, whoever is cancelled; what it brings is read again from the same position."""
    await asyncio.wait([reading])
    if not reading.cancelled():
        reading.exception()
