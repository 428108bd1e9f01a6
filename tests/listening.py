"""A listener by itself: what it decides is kept here, instead of becoming executions."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from statelayer import Settings, StateLayer
from statelayer.clock import Clock
from statelayer.drivers import Database
from statelayer.errors import TransientDatabaseError
from statelayer.subscriptions.listener import Listener
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from statelayer.events import Event
    from statelayer.subscriptions.decisions import Decision

USER = "user:U7"
REQUESTS = {
    "name": "requests",
    "pattern": "/tasks/*/requests/*",
    "condition": {"path": "$event.value.status", "op": "eq", "value": "confirmed"},
    "action": {"type": "execute_workflow", "workflowId": "intake"},
}


class Recorded:
    """Keeps what the listener decided, as the executors' recorder stores it: by job, once."""

    def __init__(self) -> None:
        self.decisions: list[Decision] = []
        self.evaluations: list[tuple[str, str]] = []
        self.fail_next = 0

    async def record(self, decisions: Sequence[Decision], *, live: bool = True) -> None:
        if self.fail_next:
            self.fail_next -= 1
            raise TransientDatabaseError("planted")
        self.decisions += decisions

    def woken(self) -> list[tuple[str, int, str]]:
        return [
            (decision.event.namespace, decision.event.seq, wakeup.subscription.name)
            for decision in self.decisions
            for wakeup in decision.wakeups
        ]

    def skipped(self) -> list[tuple[str, int, str]]:
        return [(skip.name, d.event.seq, skip.reason) for d in self.decisions for skip in d.skips]


@asynccontextmanager
async def listening(database: Any, layer: StateLayer, recorded: Recorded, **settings: Any) -> AsyncIterator[Listener]:
    listener = Listener(
        Database(database),
        Settings(poll=0.05, **settings),
        Clock(),
        subscriptions=layer.subscriptions,
        recorder=recorded,
    )
    started = asyncio.Event()
    task = asyncio.create_task(listener.run(started.set))
    waiting = asyncio.create_task(started.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED, timeout=10)
    try:
        yield listener
    finally:
        waiting.cancel()
        listener.stop()
        await task


async def evaluated(database: Any, event: Event) -> None:
    async def reached() -> bool:
        cursor = await database["cursors"].find_one({"_id": event.namespace})
        return cursor is not None and cursor["at"]["seq"] >= event.seq

    await wait_until(reached, message=f"evaluation of {event.path}")


async def confirm(layer: StateLayer, task: str, request: str, status: str = "confirmed") -> Event:
    return await layer.set(f"/tasks/{task}/requests/{request}", {"status": status}, actor=USER)
