"""The journal: every event of the layer is written here."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, TypeVar

from statelayer import paths
from statelayer.errors import InvalidWriteError
from statelayer.events import Write, check_key, check_write
from statelayer.journal.append import Append, current_origin
from statelayer.journal.batch import Batches
from statelayer.journal.committer import Committer
from statelayer.journal.transact import Transactions
from statelayer.values import Limits

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from statelayer.clock import Clock
    from statelayer.drivers import Database
    from statelayer.events import CheckedWrite, Event
    from statelayer.journal.append import Companion, Origin
    from statelayer.journal.statistics import JournalStatistics
    from statelayer.journal.transact import JournalTransaction, Prepare
    from statelayer.settings import Settings

T = TypeVar("T")


class Journal:
    """Appends events, atomically and in order."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._log = database.log_name
        self._limits = Limits(bytes=settings.max_value_bytes)
        self._committer = Committer(database, settings, clock)
        self._transactions = Transactions(
            database,
            Batches(database, settings, clock),
            self._committer.claims,
            self._committer.memory,
            settings,
            clock,
        )

    @property
    def statistics(self) -> JournalStatistics:
        return self._committer.statistics

    async def append(
        self,
        writes: Sequence[Write],
        *,
        idempotency_key: str | None = None,
        origin: Origin | None = None,
        companions: Sequence[Companion] = (),
        owner: bool = False,
    ) -> list[Event]:
        """Append the writes as one atomic batch and return their events, in the order of the writes.

        Everything about them is settled here, before anything waits: values are copied, cause and depth are bound.
        ``origin`` is the execution that writes; without it, the one whose code runs in this context. ``owner`` allows
        paths that executors and the layer keep for themselves.

        Raises an ``Invalid…Error``, ``VersionConflictError``, ``IdempotencyConflictError``,
        ``CausationNotFoundError``, ``NotFoundError`` (deleting what is not there), ``ContentionError``,
        ``OutcomeUnknownError`` or ``ClosedError``.
        """
        append = self.prepare(
            writes, idempotency_key, origin=origin or current_origin(self._log), companions=companions, owner=owner
        )
        transaction = self._transactions.current()
        if transaction is not None:
            return await transaction.join(append)
        return await self._committer.append(append)

    def prepare(
        self,
        writes: Sequence[Write],
        idempotency_key: str | None = None,
        *,
        origin: Origin | None = None,
        companions: Sequence[Companion] = (),
        owner: bool = False,
    ) -> Append:
        """Check the writes and bind them to their origin, without any I/O."""
        return Append.of(
            [self._check(write, origin, owner) for write in writes],
            settings=self._settings,
            clock=self._clock,
            key=check_key(idempotency_key),
            origin=origin,
            companions=companions,
        )

    def transaction(
        self, *namespaces: str, origin: Origin | None = None
    ) -> AbstractAsyncContextManager[JournalTransaction]:
        """Open a transaction over these namespaces; one try, ``ContentionError`` says "run the block again"."""
        return self._transactions.once(self._named(namespaces), self._bound(origin))

    async def transact(
        self, body: Callable[[JournalTransaction], Awaitable[T]], *namespaces: str, origin: Origin | None = None
    ) -> T:
        """Run the body in a transaction over these namespaces, again after each transient failure."""
        return await self._transactions.retried(body, self._named(namespaces), self._bound(origin))

    async def aclose(self) -> None:
        """Refuse new appends and finish those that were accepted."""
        await self._committer.aclose()

    def _bound(self, origin: Origin | None) -> Prepare:
        return partial(self.prepare, origin=origin or current_origin(self._log))

    def _check(self, write: Write, origin: Origin | None, owner: bool) -> CheckedWrite:
        if not isinstance(write, Write):
            raise InvalidWriteError(f"An append takes Write(...) objects, not {type(write).__name__}.")
        return check_write(
            write,
            roots=self._settings.roots,
            limits=self._limits,
            actor=origin.actor if origin else None,
            source=origin.source if origin else "api",
            owner=owner,
        )

    def _named(self, namespaces: Sequence[str]) -> frozenset[str]:
        if not namespaces:
            raise InvalidWriteError("A transaction names the namespaces that it writes, for example '/tasks/T1'.")
        return frozenset(paths.parse_namespace(namespace, self._settings.roots) for namespace in namespaces)
