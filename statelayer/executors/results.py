"""Storing how an attempt ended: the fact and the execution's end are one append, under the fence."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from statelayer import mongo_indexes as names
from statelayer.errors import (
    ContentionError,
    DatabaseError,
    IntegrityError,
    InvalidInputError,
    InvalidPathError,
    InvalidValueError,
    LeaseLostError,
    OutcomeUnknownError,
    TransientDatabaseError,
    VersionConflictError,
)
from statelayer.events import Write
from statelayer.executors import envelopes, moves
from statelayer.executors.run import Failure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from datetime import datetime

    from statelayer.drivers import Database, Document
    from statelayer.drivers.database import Operation
    from statelayer.errors import StateLayerError
    from statelayer.events import Event
    from statelayer.executors.envelopes import ResultPlace
    from statelayer.executors.leases import Leases
    from statelayer.executors.models import Execution, Reason, State
    from statelayer.executors.moves import Fence
    from statelayer.executors.registry import Registry
    from statelayer.executors.run import Success
    from statelayer.servertime import ServerTime
    from statelayer.journal import Journal

log = structlog.get_logger("statelayer.executors")

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0

PASSING = (ContentionError, OutcomeUnknownError, TransientDatabaseError)
"""These say nothing about the result; storing it is tried again while the lease lives."""

REFUSED = (InvalidInputError, IntegrityError, DatabaseError)
"""These will be said again, however often it is tried."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The companion of a result: the execution ends in the same transaction, if it is still ours."""

    fence: Fence
    state: State
    reason: Reason | None = None

    @property
    def collection(self) -> str:
        return names.EXECUTIONS

    @property
    def id(self) -> str:
        return self.fence.job_id

    def judge(self, document: Document | None) -> StateLayerError | None:
        """Refuse whoever lost the lease."""
        return None if self.fence.holds(document) else LeaseLostError(self.fence.job_id)

    def operation(self, events: Sequence[Event]) -> Operation:
        """End the execution; its first event is the result."""
        return moves.operation(self.fence, moves.ended(self.state, reason=self.reason, result_event_id=events[0].id))


@dataclass(frozen=True, slots=True)
class Tenure:
    """A started attempt and the right to say how it ended. ``is_lasting`` says whether it is worth trying again."""

    execution: Execution
    fence: Fence
    is_lasting: Callable[[], bool]


class Results:
    """Writes results and error facts."""

    def __init__(
        self, database: Database, journal: Journal, leases: Leases, registry: Registry, server_time: ServerTime
    ) -> None:
        self._events = database.collection(names.EVENTS)
        self._entries = database.collection(names.ENTRIES)
        self._journal = journal
        self._leases = leases
        self._registry = registry
        self._server_time = server_time

    async def succeed(self, tenure: Tenure, success: Success, place: ResultPlace, *, seq: int) -> None:
        """Store a result; what cannot be stored becomes an error fact. ``LeaseLostError`` when it is refused.

        ``seq`` is the waking event's: on a shared path an older event's result gives way to a newer one's.
        """
        try:
            await self._insist(tenure, lambda: self._write_result(tenure, success, place, seq))
        except PASSING:
            raise
        except REFUSED as refusal:
            await self.fail(tenure, Failure(_reason(refusal), refusal))

    async def fail(self, tenure: Tenure, failure: Failure) -> None:
        """Queue the execution again if another attempt may help and is left, else end it with an error fact.

        Raises ``LeaseLostError`` when the lease is lost.
        """
        step = self._retry if failure.may_pass and tenure.execution.may_retry else self._write_error
        await self._insist(tenure, lambda: step(tenure, failure))

    async def _insist(self, tenure: Tenure, step: Callable[[], Awaitable[None]]) -> None:
        """Take a step again while its failing is only a matter of time and the lease lives.

        After a commit of ours whose answer was lost the fence refuses the repeat, because the execution has ended.
        """
        pause = FIRST_PAUSE
        while True:
            try:
                return await step()
            except PASSING as error:
                if not tenure.is_lasting():
                    raise
                log.warning("execution_end_delayed", job=tenure.execution.id, error=error.code)
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    async def _write_result(self, tenure: Tenure, success: Success, place: ResultPlace, seq: int) -> None:
        now = await self._now(tenure)
        value = envelopes.success(tenure.execution, success.output, usage=success.usage, finished_at=now)
        while True:
            standing = await self._entries.find_one({"_id": place.path}) if place.shared else None
            if standing is not None and await self._is_newer(standing, tenure.execution, seq):
                await self._supersede(tenure)
                return
            version = (standing["version"] if standing else 0) if place.shared else None
            write = Write(path=place.path, value=value, expected_version=version)
            try:
                await self._append(tenure, write, Ending(tenure.fence, "succeeded"))
            except VersionConflictError:
                continue
            log.info("execution_succeeded", job=tenure.execution.id, attempt=tenure.execution.attempts)
            return

    async def _is_newer(self, standing: Document, execution: Execution, seq: int) -> bool:
        value = standing.get("value")
        event_id = value.get("eventId") if isinstance(value, dict) else None
        if not isinstance(event_id, str):
            return False
        newer = {"_id": event_id, "namespace": execution.namespace, "seq": {"$gt": seq}}
        return await self._events.find_one(newer, projection={"_id": 1}) is not None

    async def _supersede(self, tenure: Tenure) -> None:
        if not await self._leases.make(moves.ended("succeeded", reason="superseded"), tenure.fence):
            raise LeaseLostError(tenure.execution.id)
        log.info("execution_superseded", job=tenure.execution.id)

    async def _retry(self, tenure: Tenure, failure: Failure) -> None:
        execution = tenure.execution
        policy = self._registry.policy(execution.action_type, execution.target)
        wait = 0.0 if failure.at_once else policy.wait_after(execution.attempts)
        move = moves.retried(wait=wait, reason=failure.reason, warning=_warning(execution, failure))
        if not await self._leases.make(move, tenure.fence):
            raise LeaseLostError(execution.id)
        log.warning(
            "execution_retried",
            job=execution.id,
            attempt=execution.attempts,
            reason=failure.reason,
            wait=round(wait, 3),
        )

    async def _write_error(self, tenure: Tenure, failure: Failure) -> None:
        execution = tenure.execution
        value = envelopes.failure(execution, failure.reason, failure.error, finished_at=await self._now(tenure))
        write = Write(path=envelopes.error_path(execution), value=value)
        try:
            await self._append(tenure, write, Ending(tenure.fence, "failed", failure.reason))
        except PASSING:
            raise
        except REFUSED as refusal:
            await self._end_without_fact(tenure, failure, refusal)
        log.warning(
            "execution_failed",
            job=execution.id,
            attempt=execution.attempts,
            reason=failure.reason,
            error=type(failure.error).__name__,
        )

    async def _end_without_fact(self, tenure: Tenure, failure: Failure, refusal: StateLayerError) -> None:
        """The log takes neither result nor error. The execution ends all the same, or it would repeat for ever."""
        told = _warning(tenure.execution, Failure(failure.reason, refusal))
        if not await self._leases.make(moves.ended("failed", reason=failure.reason, warning=told), tenure.fence):
            raise LeaseLostError(tenure.execution.id)
        log.error("execution_error_refused", job=tenure.execution.id, error=type(refusal).__name__, code=refusal.code)

    async def _append(self, tenure: Tenure, write: Write, ending: Ending) -> None:
        origin = envelopes.origin_of(tenure.execution)
        await self._journal.append([write], origin=origin, companions=[ending], owner=True)

    async def _now(self, tenure: Tenure) -> datetime:
        """Return the server's time, not before the attempt's start."""
        now = await self._server_time.now()
        started = tenure.execution.started_at
        return now if started is None else max(now, started)


def _reason(refusal: StateLayerError) -> Reason:
    if isinstance(refusal, InvalidPathError):
        return "rendering_failed"
    return "invalid_output" if isinstance(refusal, InvalidValueError) else "handler_error"


def _warning(execution: Execution, failure: Failure) -> Document:
    return {"attempt": execution.attempts, "reason": failure.reason, **envelopes.describe(failure.error)}
