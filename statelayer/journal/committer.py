"""Leading appends from the queue through transactions.

What arrives while a commit is in flight forms the next batch. There is no standing background task: the first caller
to find nobody leading starts the lead, which ends when the queue is empty. It runs in an empty context, so that no
caller's trace, origin or timeout colours another's write, and a cancelled caller takes nobody's commit with it.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from statelayer import mongo_indexes as names
from statelayer.drivers import is_transient
from statelayer.errors import (
    ClosedError,
    ContentionError,
    DuplicateKeyError,
    IntegrityError,
    OutcomeUnknownError,
    StateLayerError,
)
from statelayer.journal.batch import Batches, GuardFailedError
from statelayer.journal.claims import Claims
from statelayer.transactions import CommitUnknown, Deadline, transaction

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statelayer.clock import Clock
    from statelayer.drivers import Database
    from statelayer.events import Event
    from statelayer.journal.append import Append
    from statelayer.journal.batch import Outcome
    from statelayer.settings import Settings


log = structlog.get_logger("statelayer.journal")


@dataclass(eq=False, slots=True)
class Pending:
    """An append in the queue, and the caller who waits for it."""

    append: Append
    deadline: Deadline
    outcome: asyncio.Future[list[Event]]

    def settle(self, outcome: Outcome) -> None:
        """Tell the caller, if he still listens."""
        if self.outcome.done():
            return
        if isinstance(outcome, StateLayerError):
            self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)

    def fail(self, fault: BaseException) -> None:
        """Tell the caller of a fault of the committer itself, so that he does not wait for ever."""
        error = ClosedError("The committer stopped in the middle; look the events up by their idempotency key.")
        error.__cause__ = fault
        self.settle(error)


class Committer:
    """The one way by which plain appends reach the log."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._batches = Batches(database, settings, clock)
        self._events = database.collection(names.EVENTS)
        self._queue: deque[Pending] = deque()
        self._lead: asyncio.Task[None] | None = None
        self._closed = False
        self.claims = Claims(on_release=self._ensure_lead)

    async def append(self, append: Append) -> list[Event]:
        """Return the committed events. A caller that is cancelled before its batch starts withdraws its append."""
        if self._closed:
            raise ClosedError("The layer is closed; nothing was written.")
        outcome: asyncio.Future[list[Event]] = asyncio.get_running_loop().create_future()
        deadline = Deadline(self._clock, self._settings.append_timeout)
        self._queue.append(Pending(append, deadline, outcome))
        self._ensure_lead()
        return await outcome

    async def aclose(self) -> None:
        """Refuse new appends and commit those that were accepted."""
        self._closed = True
        while self._lead is not None:
            await asyncio.wait([self._lead])

    # --- the lead

    def _ensure_lead(self) -> None:
        if self._lead is None and self._queue:
            self._lead = asyncio.get_running_loop().create_task(
                self._commit_queue(), name="statelayer-committer", context=contextvars.Context()
            )

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
        room = _Room(self._settings)
        for pending in self._queue:
            if pending.outcome.done():
                continue
            namespaces = pending.append.namespaces
            if held_back.isdisjoint(namespaces) and self.claims.free(namespaces) and room.takes(pending.append):
                batch.append(pending)
            else:
                held_back.update(namespaces)
                left.append(pending)
        self._queue = left
        return batch

    async def _commit_claimed(self, batch: list[Pending]) -> None:
        namespaces = {namespace for pending in batch for namespace in pending.append.namespaces}
        self.claims.take(namespaces)
        try:
            await self._commit(batch)
        except BaseException as fault:
            log.exception("append_fault", appends=len(batch))
            for pending in batch:
                pending.fail(fault)
            if not isinstance(fault, Exception):
                raise
        finally:
            self.claims.release(namespaces)

    async def _commit(self, batch: list[Pending]) -> None:
        """Try until every append of the batch has its outcome."""
        while batch := [pending for pending in batch if not pending.outcome.done()]:
            try:
                await self._attempt(batch)
            except StateLayerError as error:
                batch = await self._after(error, batch)
            except CommitUnknown as error:
                for pending in batch:
                    pending.append.in_doubt = True
                await self._pause(batch, error)

    async def _attempt(self, batch: Sequence[Pending]) -> None:
        latest = max((pending.deadline for pending in batch), key=lambda deadline: deadline.remaining)
        async with transaction(self._database, latest) as session:
            outcomes = await self._batches.append([pending.append for pending in batch], session)
        for pending, outcome in zip(batch, outcomes, strict=True):
            pending.settle(outcome)

    async def _after(self, error: StateLayerError, batch: list[Pending]) -> list[Pending]:
        """Decide what an aborted transaction means, and return what is still to be tried."""
        if isinstance(error, DuplicateKeyError):
            await self._report_contradiction(error, batch)
            await self._pause(batch, error)
        elif isinstance(error, GuardFailedError) or is_transient(error):
            await self._pause(batch, error)
        elif len(batch) > 1:
            for pending in batch:
                await self._commit([pending])
        else:
            batch[0].settle(error)
        return batch

    async def _pause(self, batch: Sequence[Pending], cause: BaseException) -> None:
        """Wait before the next try. Deadlines are the callers' own: whose time is up is told so."""
        pause = max(pending.deadline.next_pause() for pending in batch)
        await asyncio.sleep(pause)
        for pending in batch:
            if pending.deadline.remaining <= 0:
                pending.settle(_too_late(pending, cause))

    async def _report_contradiction(self, error: DuplicateKeyError, batch: Sequence[Pending]) -> None:
        """Tell a duplicate that a race explains, and the next try mends, from a log that contradicts itself."""
        if error.keys == ("_id",) and error.values.get("_id") in _ids(batch):
            for pending in batch:
                pending.append.in_doubt = True
        for pending in batch:
            contradiction = await self._contradiction(error, pending.append)
            if contradiction is not None:
                pending.settle(contradiction)

    async def _contradiction(self, error: DuplicateKeyError, append: Append) -> IntegrityError | None:
        namespace = error.values.get("namespace")
        if namespace not in append.namespaces:
            return None
        if error.keys == ("namespace", "seq"):
            return await self._head_behind_log(namespace)
        if error.keys == ("namespace", "path", "version"):
            return await self._entry_behind_log(namespace, error.values["path"], append)
        return None

    async def _head_behind_log(self, namespace: str) -> IntegrityError | None:
        newest = await self._events.find_one({"namespace": namespace}, sort=[("seq", -1)])
        head = await self._database.collection(names.NAMESPACES).find_one({"_id": namespace})
        if newest is None or head is None or newest["seq"] <= head["seq"]:
            return None
        return IntegrityError(
            f"The head of {namespace} says {head['seq']}, its log goes on to {newest['seq']}. Set `namespaces.seq` to "
            f"{newest['seq']} (as a long) and run `verify`.",
            namespace=namespace,
        )

    async def _entry_behind_log(self, namespace: str, path: str, append: Append) -> IntegrityError | None:
        if path not in {write.path.text for write in append.writes}:
            return None
        newest = await self._events.find_one({"namespace": namespace, "path": path}, sort=[("version", -1)])
        entry = await self._database.collection(names.ENTRIES).find_one({"_id": path})
        if newest is None or (entry is not None and newest["version"] <= entry["version"]):
            return None
        return IntegrityError(
            f"The entry {path} is behind its log, which has version {newest['version']}. Run `replay` on {namespace}.",
            namespace=namespace,
            path=path,
        )


class _Room:
    """How much one transaction may still take, so that it stays well inside the server's limits.

    A companion's document changes once in a transaction: what was read of it holds for the first only.
    """

    def __init__(self, settings: Settings) -> None:
        self._writes = settings.max_append_writes
        self._bytes = settings.max_append_bytes
        self._companions: set[tuple[str, Any]] = set()
        self._empty = True

    def takes(self, append: Append) -> bool:
        self._writes -= len(append.writes)
        self._bytes -= append.bytes
        companions = {(companion.collection, companion.id) for companion in append.companions}
        fits = self._empty or (self._writes >= 0 and self._bytes >= 0 and self._companions.isdisjoint(companions))
        self._companions |= companions
        self._empty = False
        return fits


def _ids(batch: Sequence[Pending]) -> set[str]:
    return {event_id for pending in batch for event_id in pending.append.event_ids}


def _too_late(pending: Pending, cause: BaseException) -> StateLayerError:
    error: StateLayerError
    if pending.append.in_doubt:
        error = OutcomeUnknownError(
            "The commit was sent and its outcome could not be learned in time. Look the events up by their ids, or "
            "send the append again with an idempotency key.",
            event_ids=pending.append.event_ids,
        )
    else:
        error = ContentionError(
            f"The append kept losing until its deadline ({pending.deadline.attempts} attempts). Nothing was written.",
            attempts=pending.deadline.attempts,
        )
    error.__cause__ = cause
    return error
