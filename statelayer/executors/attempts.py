"""One attempt: from a claim to the fact that says how it went."""

from __future__ import annotations

import asyncio
import contextvars
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from statelayer import mongo_indexes as names
from statelayer.errors import (
    InvalidPathError,
    InvalidSubscriptionError,
    InvalidValueError,
    LeaseLostError,
    NotFoundError,
)
from statelayer.events import Event
from statelayer.executors import envelopes
from statelayer.executors.inputs import check_input
from statelayer.executors.results import Tenure
from statelayer.executors.run import Failure, Run, Success
from statelayer.executors.runtime import AgentResponse
from statelayer.journal import bound_origin
from statelayer.subscriptions import StoredSubscription
from statelayer.values import Limits, canonical

if TYPE_CHECKING:
    from collections.abc import Callable

    from statelayer.drivers import Database
    from statelayer.executors.envelopes import ResultPlace
    from statelayer.executors.held import Held
    from statelayer.executors.leases import Leases
    from statelayer.executors.models import Execution
    from statelayer.executors.registry import Executor
    from statelayer.executors.results import Results
    from statelayer.executors.run import Conclusion
    from statelayer.journal import Origin
    from statelayer.layer import StateLayer

log = structlog.get_logger("statelayer.executors")


CANCEL_AGAIN = 5.0
"""Seconds that cancelled code gets to clean up, before it is cancelled again."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What an attempt needs beside its execution."""

    event: Event
    subscription: StoredSubscription
    place: ResultPlace


class Attempts:
    """Takes held executions through their attempts. ``bind`` makes the layer handle that a run is given."""

    def __init__(
        self,
        database: Database,
        leases: Leases,
        results: Results,
        bind: Callable[[Origin], StateLayer],
        *,
        max_value_bytes: int,
    ) -> None:
        self._log = database.log_name
        self._events = database.collection(names.EVENTS)
        self._subscriptions = database.collection(names.SUBSCRIPTIONS)
        self._leases = leases
        self._results = results
        self._bind = bind
        self._limits = Limits(bytes=max_value_bytes)

    async def run(self, held: Held) -> None:
        """Run a claimed or started execution to its end, or to where it is no longer ours."""
        try:
            prepared = await self._prepare(held)
            if held.execution.state == "claimed":
                # The attempt counts from here on: code that kills the process has been tried.
                held.execution = await self._started(held)
            await self._conclude(held, prepared)
        except LeaseLostError:
            _log_lost(held)

    async def _started(self, held: Held) -> Execution:
        started = await self._leases.start(held.fence)
        if started is None:
            raise LeaseLostError(held.execution.id)
        return started

    async def _prepare(self, held: Held) -> Prepared | Failure:
        """Find what the attempt needs, and check what can be checked before the code runs, and is paid for."""
        execution = held.execution
        if held.material is not None:
            return _prepared(execution, held.material.event, held.material.subscription)
        event = await self._events.find_one({"_id": execution.event_id})
        subscription = await self._subscriptions.find_one({"_id": execution.subscription.id})
        if event is None:
            return Failure("invalid_input", NotFoundError("event", execution.event_id))
        if subscription is None:
            return Failure("quarantined", NotFoundError("subscription", execution.subscription.id))
        try:
            stored = StoredSubscription.from_document(subscription)
        except InvalidSubscriptionError as error:
            return Failure("quarantined", error)
        return _prepared(execution, Event.from_document(event), stored)

    async def _call(self, held: Held, prepared: Prepared) -> Conclusion:
        origin = envelopes.origin_of(held.execution)
        run = Run.of(prepared.event, held.execution, prepared.subscription, self._bind(origin))
        # A context of its own, so that nothing of the service or of another run colours this one.
        held.code = asyncio.create_task(
            self._execute(held.registration.executor, run, origin),
            name=f"statelayer-{held.execution.id}",
            context=contextvars.Context(),
        )
        if held.stopped is not None:
            held.code.cancel()
        timed_out = not await _ends_within(held.code, held.registration.timeout)
        return _conclusion(held, held.code, timed_out=timed_out)

    async def _execute(self, executor: Executor, run: Run, origin: Origin) -> Conclusion:
        with bound_origin(origin, self._log):
            try:
                result = await executor.execute(run)
            except SystemExit as error:  # would stop the whole process, which is not an executor's to stop
                return Failure("handler_error", error, may_pass=True)
        return _success(result, self._limits)

    async def _conclude(self, held: Held, prepared: Prepared | Failure) -> None:
        tenure = Tenure(held.execution, held.fence, is_lasting=lambda: held.stopped is None)
        if isinstance(prepared, Failure):
            await self._results.fail(tenure, prepared)
            return
        conclusion = await self._call(held, prepared)
        if held.stopped == "lost":
            raise LeaseLostError(held.execution.id)
        if isinstance(conclusion, Failure):
            await self._results.fail(tenure, conclusion)
        else:
            await self._results.succeed(tenure, conclusion, prepared.place, seq=prepared.event.seq)


def _prepared(execution: Execution, event: Event, subscription: StoredSubscription) -> Prepared | Failure:
    try:
        place = envelopes.result_place(execution, subscription.output)
        check_input(event.value, subscription.input_schema)
    except InvalidPathError as error:
        return Failure("rendering_failed", error)
    except InvalidValueError as error:
        return Failure("invalid_input", error)
    return Prepared(event, subscription, place)


def _success(result: Any, limits: Limits) -> Conclusion:
    response = result if isinstance(result, AgentResponse) else AgentResponse(output=result)
    try:
        usage = canonical(response.usage, limits=limits, where="usage")
        return Success(canonical(response.output, limits=limits, where="output"), usage)
    except InvalidValueError as error:
        return Failure("invalid_output", error)


async def _ends_within(code: asyncio.Task[Any], timeout: float | None) -> bool:
    """Wait for the code to end by itself; after ``timeout`` seconds, or when we are cancelled, it is made to.

    Code that swallows its cancellation is cancelled again and again: it still runs, so that it keeps its slot.
    """
    try:
        await asyncio.wait({code}, timeout=timeout)
    finally:
        ended = code.done()
        while not code.done():
            code.cancel()
            await asyncio.wait({code}, timeout=CANCEL_AGAIN)
            if not code.done():
                log.error("executor_ignores_cancellation", task=code.get_name())
    return ended


def _conclusion(held: Held, code: asyncio.Task[Conclusion], *, timed_out: bool) -> Conclusion:
    if code.cancelled():
        return _interrupted(held, timed_out=timed_out)
    error = code.exception()
    if error is not None:
        return Failure("handler_error", error, may_pass=True)
    return code.result()


def _interrupted(held: Held, *, timed_out: bool) -> Failure:
    if held.stopped is not None:
        error = LeaseLostError(held.execution.id)
        return Failure("lease_lost", error, may_pass=True, at_once=True)
    if timed_out:
        late = TimeoutError(f"The executor did not end within {held.registration.timeout:g} s.")
        return Failure("timeout", late, may_pass=True)
    return Failure("handler_error", asyncio.CancelledError("The executor cancelled itself."), may_pass=True)


def _log_lost(held: Held) -> None:
    log.warning("execution_lease_lost", job=held.execution.id, attempt=held.execution.attempts)
