"""Leading appends from the queue through transactions.

What arrives while a commit is in flight forms the next batch, across namespaces. There is no standing background task:
the first caller to find nobody leading starts the lead, which ends when nothing waits. It runs in an empty context, so
that no caller's trace, origin or timeout colours another's write, and a cancelled caller takes nobody's commit with it.

Most appends go through the calm lane, one batch after the other. A namespace that others fight for, or hold in an open
transaction, is set aside: for a while it has a lane and transactions of its own, and the calm lane goes on without it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import structlog

from statelayer import mongo_indexes as names
from statelayer.drivers import is_conflict, is_transient
from statelayer.errors import DatabaseError, DuplicateKeyError, StateLayerError
from statelayer.journal.batch import Batches, GuardFailedError
from statelayer.journal.claims import Claims
from statelayer.journal.contention import Contention, halves
from statelayer.journal.contradictions import Contradictions
from statelayer.journal.memory import Memory
from statelayer.journal.queue import Admission, Capacity, Pending, live, namespaces_of
from statelayer.journal.statistics import Counts, JournalStatistics
from statelayer.transactions import CommitUnknown, Deadline, transaction

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Mapping, Sequence

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Document
    from statelayer.events import Event
    from statelayer.journal.append import Append
    from statelayer.journal.judge import Head, Ledger
    from statelayer.settings import Settings


log = structlog.get_logger("statelayer.journal")

LANES_AT_ONCE = 8
"""How many contended namespaces are in a transaction at the same time."""

ANOTHER_LOOK = 0.005
"""Seconds after which a head that did not move is looked at again, before a batch is taken apart."""


class ConflictError(Exception):
    """A transaction was aborted because of what somebody else wrote, or writes. ``heads`` is what it rested on."""

    def __init__(self, heads: Mapping[str, Head | None], *, remembered: bool) -> None:
        super().__init__()
        self.heads = heads
        self.remembered = remembered


class Committer:
    """The one way by which plain appends reach the log."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._batches = Batches(database, settings, clock)
        self._heads = database.collection(names.NAMESPACES)
        self._contradictions = Contradictions(database)
        self._contention = Contention(clock)
        self._admission = Admission(settings)
        self._accepted: set[Pending] = set()
        self._queue: deque[Pending] = deque()
        self._lanes: dict[frozenset[str], deque[Pending]] = {}
        self._slots = asyncio.Semaphore(LANES_AT_ONCE)
        self._lead: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._counts = Counts()
        self.memory = Memory(clock)
        self.claims = Claims(on_release=self._ensure_lead)

    @property
    def statistics(self) -> JournalStatistics:
        return self._counts.statistics(
            queued=self._admission.inside,
            waiting=self._admission.waiting,
            contended=len(frozenset().union(*self._lanes)),
        )

    async def append(self, append: Append) -> list[Event]:
        """Return the committed events. A caller that is cancelled before its batch starts withdraws its append."""
        deadline = Deadline(self._clock, self._settings.append_timeout)
        async with self._admission.entered(append, deadline):
            pending = Pending(append, deadline, asyncio.get_running_loop().create_future())
            self._accepted.add(pending)
            try:
                self._accept(pending)
                return await pending.outcome
            finally:
                self._accepted.discard(pending)

    async def aclose(self) -> None:
        """Refuse new appends and commit those that were accepted."""
        self._admission.close()
        while waited_for := {pending.outcome for pending in self._accepted if pending.is_live} | self._tasks:
            await asyncio.wait(waited_for, return_when=asyncio.FIRST_COMPLETED)

    def _accept(self, pending: Pending) -> None:
        if self._is_contended(pending):
            self._set_aside(pending)
        else:
            self._queue.append(pending)
            self._ensure_lead()

    def _is_contended(self, pending: Pending) -> bool:
        return frozenset(pending.namespaces) in self._lanes or self._contention.holds(pending.namespaces)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=name, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- the calm lane

    def _ensure_lead(self) -> None:
        if self._lead is None and self._queue:
            self._lead = self._start(self._commit_queue(), "statelayer-committer")

    async def _commit_queue(self) -> None:
        try:
            while batch := self._next_batch():
                await self._commit_claimed(batch)
        finally:
            self._lead = None

    def _next_batch(self) -> list[Pending]:
        """Take what may go now, in the order of arrival; what waits for a namespace holds back only that namespace."""
        batch: list[Pending] = []
        left: deque[Pending] = deque()
        held_back: set[str] = set()
        capacity = Capacity(self._settings)
        for pending in live(self._queue):
            if self._is_contended(pending):
                self._set_aside(pending)
            elif (
                held_back.isdisjoint(pending.namespaces)
                and self.claims.free(pending.namespaces)
                and capacity.takes(pending.append)
            ):
                batch.append(pending)
            else:
                held_back.update(pending.namespaces)
                left.append(pending)
        self._queue = left
        return batch

    async def _commit_claimed(self, batch: list[Pending]) -> None:
        """Try until each append of the batch has its outcome or was set aside."""
        claimed = namespaces_of(batch)
        self.claims.take(claimed)
        parts = [batch]
        try:
            while parts:
                if part := live(parts.pop()):
                    parts += reversed(await self._commit_part(part))
                still = namespaces_of(pending for part in parts for pending in part)
                self.claims.release(claimed - still)
                claimed &= still
        except BaseException as fault:
            _fail(batch, fault)
            if not isinstance(fault, Exception):
                raise
        finally:
            self.claims.release(claimed)

    async def _commit_part(self, batch: list[Pending]) -> list[list[Pending]]:
        """Try once, and return the parts that are still to be tried."""
        try:
            try:
                await self._commit(batch, self.memory)
            except ConflictError as conflict:
                return await self._untangled(batch, conflict)
        except (StateLayerError, CommitUnknown) as error:
            return await self._after(error, batch)
        return []

    async def _untangled(self, batch: list[Pending], conflict: ConflictError) -> list[list[Pending]]:
        """Set aside what others fight for. What they hold without having committed is found by taking apart."""
        moved = await self._moved(conflict.heads)
        if conflict.remembered:
            self.memory.share(moved)
            return [batch]
        if not moved:
            parts = halves(batch)
            if len(parts) > 1:
                return parts
            moved = namespaces_of(batch)
        self._contention.note(moved)
        calm: list[Pending] = []
        for pending in batch:
            if self._is_contended(pending):
                self._set_aside(pending)
            else:
                calm.append(pending)
        return [calm]

    async def _moved(self, heads: Mapping[str, Head | None]) -> set[str]:
        """Return the namespaces whose heads are no longer what they were; a commit may take a moment to show."""
        for pause in (0.0, ANOTHER_LOOK):
            await asyncio.sleep(pause)
            found = {head["_id"]: head for head in await self._heads.find({"_id": {"$in": sorted(heads)}})}
            moved = {namespace for namespace, head in heads.items() if not _is_head(found.get(namespace), head)}
            if moved:
                return moved
        return set()

    # --- lanes of contended namespaces

    def _set_aside(self, pending: Pending) -> None:
        namespaces = frozenset(pending.namespaces)
        if namespaces not in self._lanes:
            self._lanes[namespaces] = deque()
            self._start(self._commit_lane(namespaces), "statelayer-committer-lane")
        self._lanes[namespaces].append(pending)

    async def _commit_lane(self, namespaces: frozenset[str]) -> None:
        """Commit what goes to exactly these namespaces, so that nothing waits for what another one needs as well."""
        try:
            while waiting := live(self._lanes[namespaces]):
                self._lanes[namespaces] = deque(waiting)
                await self._commit_apart(namespaces, _fitting(waiting, self._settings))
        except BaseException as fault:
            _fail(self._lanes[namespaces], fault)
            if not isinstance(fault, Exception):
                raise
        finally:
            del self._lanes[namespaces]

    async def _commit_apart(self, namespaces: frozenset[str], batch: list[Pending]) -> None:
        """Try once. What has no outcome afterwards is tried again with whatever else waits by then."""
        try:
            async with self.claims.claimed(namespaces), self._slots:
                if batch := live(batch):
                    await self._commit(batch, memory=None)
        except ConflictError as conflict:
            self._contention.note(namespaces)
            await self._pause(batch, conflict)
        except (StateLayerError, CommitUnknown) as error:
            parts = await self._after(error, batch)
            if len(parts) > 1:
                for part in parts:
                    await self._commit_apart(namespaces, part)

    # --- one transaction

    async def _commit(self, batch: Sequence[Pending], memory: Memory | None) -> None:
        """Take the batch through one transaction and tell its callers; raise why it was aborted."""
        latest = max((pending.deadline for pending in batch), key=lambda deadline: deadline.remaining)
        appends = [pending.append for pending in batch]
        started = self._clock.monotonic()
        ledger: Ledger | None = None
        try:
            async with transaction(self._database, latest) as session:
                ledger = await self._batches.read(appends, session, memory)
                outcomes = self._batches.judge(appends, ledger)
                await self._batches.write(ledger, session)
        except BaseException as error:
            if memory is not None:
                memory.forget(namespaces_of(batch))
            if isinstance(error, DatabaseError):
                await self._raise_conflict(error, batch, ledger)
            raise
        if memory is not None:
            memory.learn(ledger)
        self._counts.committed(len(batch), len(ledger.events), self._clock.monotonic() - started)
        for pending, outcome in zip(batch, outcomes, strict=True):
            pending.settle(outcome)

    async def _raise_conflict(self, error: DatabaseError, batch: Sequence[Pending], ledger: Ledger | None) -> None:
        if isinstance(error, DuplicateKeyError):
            await self._explain(error, batch)
        elif not isinstance(error, GuardFailedError) and not is_conflict(error):
            return
        self._counts.conflicts += 1
        if ledger is None:
            raise ConflictError({}, remembered=False) from error
        raise ConflictError(ledger.heads_read, remembered=ledger.remembers) from error

    async def _explain(self, error: DuplicateKeyError, batch: Sequence[Pending]) -> None:
        """Tell a duplicate that a race explains, and the next try mends, from a log that contradicts itself."""
        if error.keys == ("_id",) and error.values.get("_id") in _event_ids(batch):
            _doubt(batch)
        for pending in batch:
            contradiction = await self._contradictions.of(error, pending.append)
            if contradiction is not None:
                pending.settle(contradiction)

    async def _after(self, error: StateLayerError | CommitUnknown, batch: list[Pending]) -> list[list[Pending]]:
        """Decide what any other aborted transaction means, and return the parts that are still to be tried."""
        if isinstance(error, CommitUnknown):
            _doubt(batch)
        elif not is_transient(error):
            return _divided(error, batch)
        await self._pause(batch, error)
        return [batch]

    async def _pause(self, batch: Sequence[Pending], cause: BaseException) -> None:
        self._counts.retries += 1
        await asyncio.sleep(max((pending.deadline.next_pause() for pending in batch), default=0))
        for pending in batch:
            pending.settle_if_late(cause)


def _divided(error: StateLayerError, batch: list[Pending]) -> list[list[Pending]]:
    """Take apart a batch that holds somebody whose append cannot be written; alone he is told why."""
    if len(batch) == 1:
        batch[0].settle(error)
        return []
    middle = len(batch) // 2
    return [batch[:middle], batch[middle:]]


def _fitting(waiting: Iterable[Pending], settings: Settings) -> list[Pending]:
    capacity = Capacity(settings)
    return list(takewhile(lambda pending: capacity.takes(pending.append), waiting))


def _is_head(document: Document | None, head: Head | None) -> bool:
    if document is None or head is None:
        return document is None and head is None
    return (document.get("seq"), document.get("repairs", 0)) == (head.seq, head.repairs)


def _fail(batch: Iterable[Pending], fault: BaseException) -> None:
    log.error("append_fault", appends=len(live(batch)), exc_info=fault)
    for pending in batch:
        pending.fail(fault)


def _doubt(batch: Iterable[Pending]) -> None:
    for pending in batch:
        pending.append.in_doubt = True


def _event_ids(batch: Iterable[Pending]) -> set[str]:
    return {event_id for pending in batch for event_id in pending.append.event_ids}
