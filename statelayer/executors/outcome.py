"""What an event has led to, once everything that it woke has ended or waits for somebody."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statelayer import mongo_indexes as names
from statelayer.errors import NotFoundError
from statelayer.events import Event, check_id

if TYPE_CHECKING:
    from statelayer.clock import Clock
    from statelayer.drivers import Database
    from statelayer.executors.executions import Executions
    from statelayer.executors.models import Execution
    from statelayer.history import Change, Reader, Watcher

FIRST_PAUSE = 0.02
LONGEST_PAUSE = 0.5

LONGEST_WAIT = 5.0
"""Seconds after which executions are looked at although none announced itself."""

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Outcome:
    """An event that was evaluated, and what it woke: each has ended or waits for somebody outside."""

    event: Event
    executions: tuple[Execution, ...]


class Outcomes:
    """Waits for outcomes, woken by the reader stream."""

    def __init__(self, database: Database, clock: Clock, executions: Executions, reader: Reader) -> None:
        self._events = database.collection(names.EVENTS)
        self._cursors = database.collection(names.CURSORS)
        self._clock = clock
        self._executions = executions
        self._reader = reader

    async def outcome(self, event_id: str, *, timeout: float | None = None) -> Outcome:
        """Return when the event has been evaluated and nothing that it woke is still going on.

        After ``timeout`` seconds it raises ``TimeoutError``, which says what is missing; ``NotFoundError`` when there
        is no such event.
        """
        document = await self._events.find_one({"_id": check_id("event", event_id)})
        if document is None:
            raise NotFoundError("event", event_id)
        waiting = _Waiting(Event.from_document(document))
        try:
            async with asyncio.timeout(timeout), self._reader.watching(waiting.concerns, capacity=1) as watcher:
                return await self._settled(waiting, watcher)
        except TimeoutError:
            if timeout is None:
                raise
            raise TimeoutError(waiting.missing(timeout)) from None

    async def _settled(self, waiting: _Waiting, watcher: Watcher) -> Outcome:
        # Cursors are not in the stream, so they are asked for, less and less often; executions announce themselves.
        pause = FIRST_PAUSE
        while True:
            await self._look(waiting)
            if waiting.is_over:
                return Outcome(waiting.event, tuple(waiting.executions))
            try:
                async with asyncio.timeout(LONGEST_WAIT if waiting.evaluated else pause):
                    await watcher.read()
            except TimeoutError:
                pause = min(LONGEST_PAUSE, 2 * pause)

    async def _look(self, waiting: _Waiting) -> None:
        # In this order: what an event wakes is recorded before its cursor moves on.
        cursor = await self._cursors.find_one({"_id": waiting.event.namespace})
        waiting.executions = await self._executions.find(event_id=waiting.event.id)
        waiting.evaluated = cursor is not None and cursor["at"]["seq"] >= waiting.event.seq


@dataclass(slots=True)
class _Waiting:
    """How far an event has come, as of the last look."""

    event: Event
    evaluated: bool = False
    executions: list[Execution] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return self.evaluated and all(execution.is_settled for execution in self.executions)

    def concerns(self, change: Change) -> bool:
        """Say whether a change is one of the event's executions; their ids name it."""
        return change.collection == "executions" and f":{self.event.id}:" in change.id

    def missing(self, timeout: float) -> str:
        """Say what is not there after ``timeout`` seconds."""
        begin = f"No outcome of event {self.event.id} within {timeout:g} s: "
        if not self.evaluated:
            return begin + "it has not been evaluated. Is a listener running (`layer.running()`), and dispatch on?"
        still_open = [execution for execution in self.executions if not execution.is_settled]
        told = [f"{execution.id} is {execution.state}{_because(execution)}" for execution in still_open[:_SHOWN]]
        more = f" and {len(still_open) - _SHOWN} more" if len(still_open) > _SHOWN else ""
        return begin + "; ".join(told) + more + "."


def _because(execution: Execution) -> str:
    if execution.reason == "no_executor":
        return " (no_executor: no running instance has its executor registered)"
    return f" ({execution.reason})" if execution.reason else ""
