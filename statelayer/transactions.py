"""One transaction, and the one retry rule.

``TransientTransactionError``, and whatever passes before the commit, means that nothing was committed: the body runs
again, jittered, until the deadline.
``UnknownTransactionCommitResult`` means that the commit may have happened: the commit is sent again, and when that
does not tell either, ``CommitUnknown`` leaves the decision to whoever knows what the transaction wrote. The drivers'
``with_transaction`` is not used: it has no deadline of ours, and Motor's gives up on a commit that fails transiently.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import pymongo

from statelayer.drivers.failures import UNKNOWN_COMMIT, is_silence, is_transient, translated
from statelayer.errors import ContentionError, DatabaseError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Session

T = TypeVar("T")

FIRST_PAUSE = 0.002
LONGEST_PAUSE = 0.25

COMMIT_ATTEMPTS = 5
SHORTEST_COMMIT = 1.0
"""Seconds that a commit gets even when the deadline is nearer: cutting it short only makes its outcome unknown."""


class CommitUnknown(Exception):  # noqa: N818 - control flow between two rooms, never shown to a user
    """The commit was sent, and every attempt to learn its outcome failed until the deadline."""


class Deadline:
    """A moment until which one piece of work may be retried."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._until = clock.monotonic() + seconds
        self.attempts = 0

    @property
    def remaining(self) -> float:
        return self._until - self._clock.monotonic()

    def next_pause(self) -> float:
        """Count a failed attempt and return how long to wait before the next one: longer each time, with jitter."""
        self.attempts += 1
        return random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self.attempts, 10)))

    async def pause(self, what: str, cause: BaseException) -> None:
        """Wait before the next attempt, or raise ``ContentionError`` when the time is up."""
        pause = self.next_pause()
        if pause >= self.remaining:
            raise ContentionError(
                f"{what} kept losing until its deadline ({self.attempts} attempts). Nothing was written; try again.",
                attempts=self.attempts,
            ) from cause
        await asyncio.sleep(pause)


@asynccontextmanager
async def transaction(database: Database, deadline: Deadline) -> AsyncIterator[Session]:
    """Run the block in one transaction: committed when it ends, aborted when it raises or is cancelled."""
    await finished(database.kill_abandoned())
    async with database.session() as session:
        await database.start_transaction(session)
        try:
            with pymongo.timeout(max(deadline.remaining, 0.001)):
                yield session
        except BaseException as error:
            await finished(_abort(database, session, error))
            raise
        await finished(_commit(database, session, deadline))


async def retried(
    database: Database,
    body: Callable[[Session], Awaitable[T]],
    *,
    deadline: Deadline,
    what: str,
    repeatable: bool = False,
) -> T:
    """Run the body in a transaction, again for as long as it fails transiently and the deadline allows.

    A ``repeatable`` body finds out by itself whether it was committed before, so that a lost outcome is no more than a
    transient failure. Raises ``ContentionError`` when the deadline passes, ``CommitUnknown`` when the outcome cannot
    be learned, and whatever the body raises that is not transient.
    """
    while True:
        try:
            async with transaction(database, deadline) as session:
                return await body(session)
        except CommitUnknown as doubt:
            if not repeatable:
                raise
            await deadline.pause(what, doubt)
        except DatabaseError as error:
            if not is_transient(error):
                raise
            await deadline.pause(what, error)


async def finished(work: Coroutine[Any, Any, T]) -> T:
    """Await the work to its end even when the caller is cancelled meanwhile; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()
        raise cancelled
    return task.result()


async def _abort(database: Database, session: Session, error: BaseException) -> None:
    """Abort, and when the server may not have heard of it, see to it that it does: the locks are held until then."""
    if session.in_transaction:
        with translated():
            await session.abort_transaction()
    if is_silence(error):
        await database.kill_session(session)


async def _commit(database: Database, session: Session, deadline: Deadline) -> None:
    """Send the commit, again while its outcome is unknown. After one such answer, no failure is proof of an abort."""
    doubts = 0
    while True:
        try:
            with translated(), pymongo.timeout(max(deadline.remaining, SHORTEST_COMMIT)):
                await session.commit_transaction()
        except DatabaseError as error:
            if UNKNOWN_COMMIT not in error.labels and not doubts:
                raise
            doubts += 1
            if doubts == COMMIT_ATTEMPTS or UNKNOWN_COMMIT not in error.labels:
                await database.kill_session(session)  # what has committed stays committed
                raise CommitUnknown from error
            await asyncio.sleep(deadline.next_pause())
        else:
            return
