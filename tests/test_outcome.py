"""Waiting for what an event leads to (DESIGN §7, §13)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from bson import Int64
from workbench import WORKFLOW, Gate, Workbench

from statelayer.errors import NotFoundError
from statelayer.executors import Outcomes
from statelayer.history import Reader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from statelayer.events import Event

pytestmark = pytest.mark.anyio


@pytest.fixture
async def outcomes(bench: Workbench) -> AsyncIterator[Outcomes]:
    reader = Reader(bench.database, bench.settings, bench.clock)
    yield Outcomes(bench.database, bench.clock, bench.executions, reader)
    await reader.aclose()


async def evaluated(bench: Workbench, event: Event) -> None:
    """Say that a listener has been there."""
    at = {"seq": Int64(event.seq), "eventId": event.id}
    await bench.handle["cursors"].replace_one({"_id": event.namespace}, {"at": at}, upsert=True)


async def test_it_waits_for_evaluation_and_for_every_execution(bench: Workbench, outcomes: Outcomes) -> None:
    gate = Gate()
    bench.registry.workflow("review")(gate)
    event, subscription = await bench.event(), await bench.subscription(WORKFLOW)
    async with bench.working():
        waiting = asyncio.create_task(outcomes.outcome(event.id, timeout=10))
        job = await bench.wake(event, subscription)
        await evaluated(bench, event)
        await gate.started.wait()
        assert not waiting.done()
        gate.open.set()
        outcome = await waiting
    assert outcome.event == event
    assert [(execution.id, execution.state) for execution in outcome.executions] == [(job, "succeeded")]


async def test_an_event_that_woke_nobody_has_an_outcome_too(bench: Workbench, outcomes: Outcomes) -> None:
    event = await bench.event()
    await evaluated(bench, event)
    assert (await outcomes.outcome(event.id, timeout=10)).executions == ()


@pytest.mark.parametrize("state", ["interrupted", "waiting_external", "failed", "cancelled"])
async def test_what_waits_for_somebody_is_an_outcome(bench: Workbench, outcomes: Outcomes, state: str) -> None:
    event, subscription = await bench.event(), await bench.subscription(WORKFLOW)
    job = await bench.wake(event, subscription)
    await bench.skip(event, "loop", "max_depth")
    await evaluated(bench, event)
    await bench.handle["executions"].update_one({"_id": job}, {"$set": {"state": state}})
    outcome = await outcomes.outcome(event.id, timeout=10)
    assert {execution.state for execution in outcome.executions} == {state, "skipped"}


async def test_a_timeout_says_that_nobody_listens(bench: Workbench, outcomes: Outcomes) -> None:
    event = await bench.event()
    with pytest.raises(TimeoutError, match=r"within 0\.1 s: it has not been evaluated\. Is a listener running"):
        await outcomes.outcome(event.id, timeout=0.1)


async def test_a_timeout_says_what_is_still_open_and_why(bench: Workbench, outcomes: Outcomes) -> None:
    event, subscription = await bench.event(), await bench.subscription(WORKFLOW)
    job = await bench.wake(event, subscription)
    await evaluated(bench, event)
    with pytest.raises(TimeoutError, match=rf"{job} is queued \(no_executor: no running instance has"):
        await outcomes.outcome(event.id, timeout=0.3)


async def test_an_unknown_event_is_not_found(outcomes: Outcomes) -> None:
    with pytest.raises(NotFoundError):
        await outcomes.outcome("0" * 24, timeout=1)
