"""Appends inside a transaction of the service, beside the service's own documents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from bson.int64 import Int64

from statelayer import mongo_indexes as names
from statelayer.drivers import is_timeout, is_transient
from statelayer.errors import (
    ContentionError,
    DatabaseError,
    InvalidWriteError,
    OutcomeUnknownError,
    StateLayerError,
)
from statelayer.journal.judge import partition_of
from statelayer.journal.writer import Writer
from statelayer.transactions import LONGEST_PAUSE, CommitUnknown, Deadline, transaction

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Session
    from statelayer.events import Event, Write
    from statelayer.journal.append import Append
    from statelayer.journal.batch import Batches
    from statelayer.journal.claims import Claims
    from statelayer.journal.memory import Memory
    from statelayer.settings import Settings

T = TypeVar("T")


class JournalTransaction(Writer):
    """An open transaction. ``session`` is the driver's own, for the service's collections in the same database."""

    def __init__(
        self, session: Session, batches: Batches, namespaces: frozenset[str], prepare: Prepare, owner: Transactions
    ) -> None:
        self.session = session
        self.owner = owner
        self.event_ids: list[str] = []
        self._namespaces = namespaces
        self._batches = batches
        self._prepare = prepare
        self._one_at_a_time = asyncio.Lock()
        self._open = True

    @property
    def namespaces(self) -> frozenset[str]:
        return self._namespaces

    @property
    def is_open(self) -> bool:
        return self._open

    def close(self) -> None:
        self._open = False

    async def append(self, writes: Sequence[Write], *, idempotency_key: str | None = None) -> list[Event]:
        """Append within the transaction; the events become visible with its commit."""
        return await self.join(self._prepare(writes, idempotency_key))

    async def join(self, append: Append) -> list[Event]:
        """Write now. A refusal leaves the transaction usable."""
        self._refuse_foreign(append)
        async with self._one_at_a_time:
            [outcome] = await self._batches.append([append], self.session)
        if isinstance(outcome, StateLayerError):
            raise outcome
        # Events of an earlier append under the same key prove nothing about this transaction.
        self.event_ids += [event.id for event in outcome if event.id in append.event_ids]
        return outcome

    def _refuse_foreign(self, append: Append) -> None:
        if not self._open:
            raise InvalidWriteError("The transaction has ended; open another one.")
        foreign = sorted(set(append.namespaces) - self._namespaces)
        if foreign:
            raise InvalidWriteError(
                f"The transaction did not name {', '.join(foreign)}; name all that it writes when it starts."
            )


Prepare = Callable[["Sequence[Write]", "str | None"], "Append"]
_CURRENT: ContextVar[JournalTransaction | None] = ContextVar("statelayer_transaction", default=None)


class Transactions:
    """Opens transactions for the service, after claiming their namespaces from the committer."""

    def __init__(
        self,
        database: Database,
        batches: Batches,
        claims: Claims,
        memory: Memory,
        settings: Settings,
        clock: Clock,
    ) -> None:
        self._database = database
        self._batches = batches
        self._claims = claims
        self._memory = memory
        self._settings = settings
        self._clock = clock
        self._events = database.collection(names.EVENTS)
        self._heads = database.collection(names.NAMESPACES)

    def current(self) -> JournalTransaction | None:
        """Return the open transaction of this journal whose block runs here."""
        current = _CURRENT.get()
        return current if current is not None and current.is_open and current.owner is self else None

    @asynccontextmanager
    async def once(self, namespaces: frozenset[str], prepare: Prepare) -> AsyncIterator[JournalTransaction]:
        """One try. A conflict with another process raises ``ContentionError``: run the block again."""
        deadline = Deadline(self._clock, self._settings.append_timeout)
        self._refuse_nesting()
        async with self._claimed(namespaces):
            opened: list[JournalTransaction] = []
            try:
                async with self._opened(namespaces, prepare, deadline, opened) as tx:
                    yield tx
            except CommitUnknown as doubt:
                if not await self._was_committed(opened[-1], doubt):
                    raise _lost() from doubt
            except Exception as error:
                if is_transient(error) or _ran_out(error, deadline):
                    raise _lost() from error
                raise

    async def retried(
        self, body: Callable[[JournalTransaction], Awaitable[T]], namespaces: frozenset[str], prepare: Prepare
    ) -> T:
        """Run the body in a transaction, again after each transient failure, until the deadline."""
        deadline = Deadline(self._clock, self._settings.append_timeout)
        self._refuse_nesting()
        async with self._claimed(namespaces):
            while True:
                opened: list[JournalTransaction] = []
                try:
                    async with self._opened(namespaces, prepare, deadline, opened) as tx:
                        result = await body(tx)
                except CommitUnknown as doubt:
                    if await self._was_committed(opened[-1], doubt):
                        return result
                    await deadline.pause("The transaction", doubt)
                except Exception as error:
                    if not (is_transient(error) or _ran_out(error, deadline)):
                        raise
                    await deadline.pause("The transaction", error)
                else:
                    return result

    @asynccontextmanager
    async def _claimed(self, namespaces: frozenset[str]) -> AsyncIterator[None]:
        """Keep the committer off these; what it remembers of them is not true afterwards."""
        async with self._claims.claimed(namespaces):
            try:
                yield
            finally:
                self._memory.forget(namespaces)

    @asynccontextmanager
    async def _opened(
        self, namespaces: frozenset[str], prepare: Prepare, deadline: Deadline, opened: list[JournalTransaction]
    ) -> AsyncIterator[JournalTransaction]:
        async with transaction(self._database, deadline) as session:
            tx = JournalTransaction(session, self._batches, namespaces, prepare, self)
            opened.append(tx)
            token = _CURRENT.set(tx)
            try:
                yield tx
            finally:
                tx.close()
                _CURRENT.reset(token)

    async def _was_committed(self, tx: JournalTransaction, doubt: CommitUnknown) -> bool:
        """Decide in a new transaction that takes the same heads.

        While the old one lives it holds them, so taking them conflicts; once they are taken it has either committed,
        and its events are there, or it never will. A plain lookup proves nothing.
        """
        if not tx.event_ids:
            raise OutcomeUnknownError("The commit's outcome is unknown, and it held no event to tell.", event_ids=())
        deadline = Deadline(self._clock, self._settings.append_timeout)
        while True:
            try:
                return await self._holds_heads_and_events(tx)
            except (DatabaseError, CommitUnknown) as error:
                try:
                    await deadline.pause("The outcome", error)
                except ContentionError:
                    raise OutcomeUnknownError(
                        "The commit was sent and its outcome could not be learned. Look the events up by their ids.",
                        event_ids=tx.event_ids,
                    ) from doubt

    async def _holds_heads_and_events(self, tx: JournalTransaction) -> bool:
        async with self._database.session() as session:
            await self._database.start_transaction(session)
            for namespace in sorted(tx.namespaces):
                await self._take_head(namespace, session)
            found = await self._events.find_one({"_id": tx.event_ids[0]}, session=session)
            await session.abort_transaction()
        return found is not None

    async def _take_head(self, namespace: str, session: Session) -> None:
        new = {"seq": Int64(0), "partition": partition_of(namespace, self._settings.partitions)}
        take = {"$inc": {"repairs": Int64(1)}, "$setOnInsert": new}
        await self._heads.update_one({"_id": namespace}, take, upsert=True, session=session)

    def _refuse_nesting(self) -> None:
        if self.current() is not None:
            raise InvalidWriteError("A transaction is open here already; write through it instead of opening another.")


def _ran_out(error: Exception, deadline: Deadline) -> bool:
    """Say whether our deadline cut a statement of the service short, which the driver tells as a timeout of its own."""
    return is_timeout(error) and deadline.remaining < LONGEST_PAUSE


def _lost() -> ContentionError:
    return ContentionError("The transaction lost against another writer; run the block again.", attempts=1)
