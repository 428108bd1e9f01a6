"""What is recorded where a worker is free begins at once: one write for the execution and its attempt (DESIGN §8)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from workbench import AGENT, FAST, WORKFLOW, Gate, Workbench

from statelayer.drivers.database import Collection
from statelayer.errors import TransientDatabaseError
from statelayer.executors import Recorder, Staff
from statelayer.subscriptions.decisions import Decision, Wakeup
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from statelayer.executors import Worker

pytestmark = pytest.mark.anyio


class Desk:
    """A workbench whose recorder hands what it records to the workers of a staff."""

    def __init__(self, bench: Workbench, gate: Gate) -> None:
        self.bench = bench
        self.gate = gate
        self.staff = Staff()
        self.recorder = Recorder(bench.database, FAST, bench.clock, bench.registry, self.staff)

    async def join(self, worker: Worker) -> None:
        """Wait until the worker has seen that nothing waits, and put it on the staff."""
        await wait_until(lambda: not worker._more)
        self.staff.workers.append(worker)

    async def decisions(
        self, count: int = 1, action: dict[str, Any] = WORKFLOW, *, name: str = "intake"
    ) -> list[Decision]:
        subscription = await self.bench.subscription(action, name=name)
        events = [await self.bench.event(f"/tasks/T1/{name}/R{n}") for n in range(count)]
        return [Decision(event, wakeups=(Wakeup(subscription, {}),)) for event in events]

    async def jobs(self, state: str) -> list[str]:
        return [execution.id for execution in await self.bench.executions.find(state=state)]


@pytest.fixture
async def desk(bench: Workbench) -> AsyncIterator[Desk]:
    gate = Gate()
    bench.registry.workflow("review")(gate)
    bench.registry.agent("facade")(gate)
    yield Desk(bench, gate)
    gate.open.set()


async def test_what_a_worker_is_free_for_is_running_when_it_is_recorded(desk: Desk) -> None:
    async with desk.bench.working() as worker:
        await desk.join(worker)
        await desk.recorder.record(await desk.decisions())
        [execution] = await desk.bench.executions.find()
        assert (execution.state, execution.attempts) == ("running", 1)
        assert execution.lease is not None
        assert execution.lease.owner == worker.id
        desk.gate.open.set()
        done = await desk.bench.ended(execution.id)
    assert (done.state, done.attempts, desk.gate.runs) == ("succeeded", 1, [1])
    result = (await desk.bench.result_of(done))["value"]
    assert result["startedAt"] == done.started_at == execution.started_at


async def test_its_lease_is_kept_and_fences_it(desk: Desk) -> None:
    async with desk.bench.working() as worker:
        await desk.join(worker)
        await desk.recorder.record(await desk.decisions())
        [execution] = await desk.bench.executions.find()
        assert execution.lease is not None
        first = execution.lease.until

        async def renewed() -> bool:
            lease = (await desk.bench.executions.get(execution.id)).lease
            return lease is not None and lease.until > first

        await wait_until(renewed)
        await desk.bench.executions.cancel(execution.id)
        await wait_until(lambda: desk.gate.cancelled == 1)
    assert await desk.jobs("cancelled") == [execution.id]


async def test_recording_it_again_begins_nothing_again(desk: Desk) -> None:
    async with desk.bench.working() as worker:
        await desk.join(worker)
        decisions = await desk.decisions()
        for _ in range(3):
            await desk.recorder.record(decisions)
        desk.gate.open.set()
        done = await desk.bench.ended((await desk.bench.executions.find())[0].id)
        await desk.recorder.record(decisions)
        assert (await desk.bench.executions.get(done.id)) == done
    assert desk.gate.runs == [1]
    assert not worker._reserved.total()


async def test_two_that_record_at_once_begin_it_once(desk: Desk) -> None:
    async with desk.bench.working() as worker:
        await desk.join(worker)
        other = Desk(desk.bench, desk.gate)
        decisions = await desk.decisions()
        async with desk.bench.working(instance=desk.bench.instance("other")) as theirs:
            await other.join(theirs)
            await asyncio.gather(*(each.recorder.record(decisions) for each in (desk, other) * 4))
            await desk.gate.started.wait()
            desk.gate.open.set()
            [execution] = await desk.bench.executions.find()
            await desk.bench.ended(execution.id)
    assert desk.gate.runs == [1]


async def test_what_there_is_no_room_for_is_queued(desk: Desk) -> None:
    desk.bench.registry.workflow("narrow", concurrency=2)(desk.gate)
    async with desk.bench.working() as worker:
        await desk.join(worker)
        await desk.recorder.record(await desk.decisions(5, {"type": "execute_workflow", "workflowId": "narrow"}))
        assert (len(await desk.jobs("running")), len(await desk.jobs("queued"))) == (2, 3)
        desk.gate.open.set()

        async def all_done() -> bool:
            return len(await desk.jobs("succeeded")) == 5

        await wait_until(all_done)
    assert desk.gate.runs == [1] * 5


async def test_nothing_overtakes_what_waits(desk: Desk) -> None:
    """A worker that has not yet looked, or has seen more than it could take, is handed nothing."""
    settings = FAST.model_copy(update={"concurrency": 1})
    await desk.bench.dispatch("paused")
    async with desk.bench.working(settings=settings) as worker:
        desk.staff.workers.append(worker)
        await desk.recorder.record(await desk.decisions(2))
        assert len(await desk.jobs("queued")) == 2
        await desk.bench.dispatch("on")
        worker.wake()
        await desk.gate.started.wait()
        await desk.recorder.record(await desk.decisions(name="later"))
        assert len(await desk.jobs("queued")) == 2


async def test_what_is_caught_up_is_queued(desk: Desk) -> None:
    async with desk.bench.working() as worker:
        await desk.join(worker)
        await desk.recorder.record(await desk.decisions(), live=False)
        assert await desk.jobs("running") == []
        await desk.gate.started.wait()  # whoever is free takes it from the queue


@pytest.mark.parametrize("action", [WORKFLOW, AGENT])
async def test_when_nobody_heard_that_it_was_recorded_it_begins_with_the_next_try(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, action: dict[str, Any]
) -> None:
    """An agent would otherwise be lost with a lease that nobody knows he holds."""
    write = Collection.bulk_write
    lost = ["the answer"]

    async def answer_lost(self: Collection, *arguments: Any, **options: Any) -> Any:
        answer = await write(self, *arguments, **options)
        if self.name == "executions" and lost:
            raise TransientDatabaseError(f"{lost.pop()} was lost")
        return answer

    monkeypatch.setattr(Collection, "bulk_write", answer_lost)
    async with desk.bench.working() as worker:
        await desk.join(worker)
        decisions = await desk.decisions(action=action)
        with pytest.raises(TransientDatabaseError):
            await desk.recorder.record(decisions)
        assert (worker.running, desk.gate.runs, worker._reserved.total()) == ([], [], 0)
        await desk.recorder.record(decisions)
        await desk.gate.started.wait()
        await desk.recorder.record(decisions)
        desk.gate.open.set()
        done = await desk.bench.ended((await desk.bench.executions.find())[0].id)
    assert (done.state, done.attempts, desk.gate.runs) == ("succeeded", 1, [1])


async def test_a_worker_that_stops_is_handed_nothing_and_ends_what_it_was_handed(desk: Desk) -> None:
    async with desk.bench.working() as worker:
        await desk.join(worker)
        first, second = await desk.decisions(2)
        await desk.recorder.record([first])
        worker.stop()
        await desk.recorder.record([second])
        assert (len(await desk.jobs("running")), len(await desk.jobs("queued"))) == (1, 1)
        desk.gate.open.set()
    assert len(await desk.jobs("succeeded")) == 1


async def test_stopping_waits_for_a_slot_that_is_reserved(desk: Desk) -> None:
    async with desk.bench.working() as worker:
        await desk.join(worker)
        reservation = worker.reserve("execute_workflow", "review")
        assert reservation is not None
        worker.stop()
        stopped = asyncio.create_task(worker._drain(5))
        await asyncio.sleep(0)
        assert not stopped.done()
        reservation.release()
        await stopped


async def test_input_that_breaks_the_contract_never_reaches_the_code(desk: Desk) -> None:
    """What is checked of an execution from the queue is checked of this one."""
    schema = {"type": "object", "required": ["amount"]}
    subscription = await desk.bench.subscription(WORKFLOW, input_schema=schema)
    event = await desk.bench.event()
    async with desk.bench.working() as worker:
        await desk.join(worker)
        await desk.recorder.record([Decision(event, wakeups=(Wakeup(subscription, {}),))])
        done = await desk.bench.ended((await desk.bench.executions.find())[0].id)
    assert (done.state, done.reason, desk.gate.runs) == ("failed", "invalid_input", [])
