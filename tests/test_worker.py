"""The worker: claiming, offering, retrying (DESIGN §8)."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs
from workbench import AGENT, FAST, SOON, WORKFLOW, Gate, Workbench

from statelayer.executors import Registry, RetryPolicy, Run
from statelayer.executors import attempts as attempts_module
from statelayer.executors.leases import Leases
from statelayer.executors.worker import shares
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from statelayer.executors import Worker

pytestmark = pytest.mark.anyio


# --- claiming


async def test_d3_each_execution_is_claimed_once(bench: Workbench) -> None:
    """D3: eight claimers, 500 jobs, everybody looks before anybody claims."""
    now = bench.clock.now()
    jobs = [f"workflow:{number:024x}:review" for number in range(500)]
    common = {
        "namespace": "/tasks/T1",
        "rootEventId": "0" * 24,
        "triggerDepth": 0,
        "action": WORKFLOW,
        "target": "review",
    }
    common |= {"subscription": {"name": "s", "version": 1}, "state": "queued", "attempts": 0, "maxAttempts": 3}
    await bench.handle["executions"].insert_many(
        {"_id": job, "eventId": job.split(":")[1], "availableAt": now, "createdAt": now, **common} for job in jobs
    )
    claimed: list[str] = []
    everybody_looked = asyncio.Barrier(8)

    async def claim(owner: str) -> None:
        leases = Leases(bench.database, bench.clock, owner=owner, lease=30)
        found = await leases.candidates({("execute_workflow", "review")}, 40)
        await everybody_looked.wait()
        while found:
            claimed.extend(execution.id for execution in await leases.claim([document["_id"] for document in found]))
            found = await leases.candidates({("execute_workflow", "review")}, 40)

    await asyncio.gather(*(claim(f"$owner{number}") for number in range(8)))
    assert sorted(claimed) == jobs
    owners = await bench.handle["executions"].distinct("lease.owner")
    assert all(owner.startswith("$owner") for owner in owners)


async def test_workers_share_what_there_is(bench: Workbench) -> None:
    ran: list[str] = []

    @bench.registry.workflow("review")
    async def review(run: Run) -> None:
        ran.append(run.execution.id)

    jobs = await bench.many(WORKFLOW, 60)
    async with bench.working(journal=bench.other_journal()), bench.working(journal=bench.other_journal()):
        await wait_until(lambda: bench.all_ended(jobs))
    assert sorted(ran) == sorted(jobs)
    assert await bench.states(jobs) == {"succeeded"}


async def test_what_this_process_records_runs_at_once(bench: Workbench) -> None:
    bench.registry.workflow("review")(Gate())
    subscription = await bench.subscription(WORKFLOW)
    async with bench.working(settings=FAST.model_copy(update={"poll": 600.0})):
        job = await bench.wake(await bench.event(), subscription)
        await bench.in_state(job, "running", timeout=5)
        bench.registry.find("execute_workflow", "review").executor.function.open.set()  # type: ignore[union-attr, attr-defined]
        await bench.ended(job)


async def test_what_another_process_records_is_found_by_polling(bench: Workbench) -> None:
    gate = Gate()
    bench.registry.workflow("review")(gate)
    gate.open.set()
    subscription = await bench.subscription(WORKFLOW)
    async with bench.working():
        await bench.ended(await Workbench(bench.handle).wake(await bench.event(), subscription))


async def test_an_attempt_is_recorded_before_the_code_runs(bench: Workbench) -> None:
    gate = Gate()
    bench.registry.agent("facade")(gate)
    subscription = await bench.subscription(AGENT)
    async with bench.working() as worker:
        job = await bench.wake(await bench.event(), subscription)
        await gate.started.wait()
        execution = await bench.executions.get(job)
        assert (execution.state, execution.attempts) == ("running", 1)
        assert execution.lease is not None
        assert execution.lease.owner == worker.id
        assert worker.running == [job]
        gate.open.set()


@pytest.mark.parametrize(("bound", "expected"), [({}, 4), ({"concurrency": 2}, 2)])
async def test_concurrency_is_bounded(bench: Workbench, bound: dict[str, int], expected: int) -> None:
    active = most = 0

    @bench.registry.workflow("review", **bound)
    async def review(run: Run) -> None:
        nonlocal active, most
        active += 1
        most = max(most, active)
        await asyncio.sleep(0.02)
        active -= 1

    jobs = await bench.many(WORKFLOW, 24)
    async with bench.working(settings=FAST.model_copy(update={"concurrency": 4})):
        await wait_until(lambda: bench.all_ended(jobs))
    assert most == expected


async def test_a_full_executor_holds_up_nobody_else(bench: Workbench) -> None:
    slow, quick = Gate(), Gate(is_open=True)
    bench.registry.workflow("review", concurrency=1)(slow)
    bench.registry.agent("facade")(quick)
    await bench.many(WORKFLOW, 40)
    subscription = await bench.subscription(AGENT, name="other")
    async with bench.working(settings=FAST.model_copy(update={"concurrency": 2, "drain_timeout": 0.1})):
        await slow.started.wait()
        await bench.ended(await bench.wake(await bench.event(), subscription))
        assert len(slow.runs) == 1


def test_executors_with_a_bound_are_looked_for_by_themselves() -> None:
    registry = Registry()
    registry.workflow("a", concurrency=3)(Gate())
    registry.workflow("b")(Gate())
    registry.workflow("c")(Gate())
    a, b, c = (("execute_workflow", name) for name in "abc")
    assert shares(registry.registrations(), {a: 1, b: 9}, 5) == [([b, c], 5), ([a], 2)]
    assert shares(registry.registrations(), {a: 3}, 5) == [([b, c], 5)]
    assert shares(registry.registrations(), {}, 0) == []


@pytest.mark.parametrize("state", ["paused", "log_lost"])
async def test_nothing_is_claimed_while_dispatch_is_off(bench: Workbench, state: str) -> None:
    running, waiting = Gate(), Gate(is_open=True)
    bench.registry.workflow("review")(running)
    bench.registry.agent("facade")(waiting)
    first, second = await bench.subscription(WORKFLOW), await bench.subscription(AGENT, name="other")
    async with bench.working() as worker:
        before = await bench.wake(await bench.event(), first)
        await running.started.wait()
        await bench.dispatch(state)
        after = await bench.wake(await bench.event(), second)
        running.open.set()
        await bench.ended(before)
        await looked_again(worker)
        assert await bench.state_of(after) == "queued"
        await bench.dispatch("on")
        await bench.ended(after)


async def looked_again(worker: Worker) -> None:
    """Wait until the worker has looked for work twice: once it may have been at it already."""
    looks = 0
    is_dispatching = worker._is_dispatching

    async def counted() -> bool:
        nonlocal looks
        looks += 1
        return await is_dispatching()

    worker._is_dispatching = counted  # type: ignore[method-assign]
    await wait_until(lambda: looks == 2)


# --- who offers what


async def test_registering_at_run_time_cures_no_executor(bench: Workbench) -> None:
    subscription = await bench.subscription(WORKFLOW)
    async with bench.working(settings=FAST.model_copy(update={"heartbeat": 300.0, "lease": 600.0})) as worker:
        job = await bench.wake(await bench.event(), subscription)
        assert (await bench.executions.get(job)).reason == "no_executor"
        gate = Gate()
        bench.registry.workflow("review")(gate)
        await gate.started.wait()
        assert (await bench.executions.get(job)).reason is None
        await wait_until(lambda: offered(bench, worker, {"type": "execute_workflow", "target": "review"}))
        gate.open.set()
        done = await bench.ended(job)
        assert (done.state, done.reason) == ("succeeded", None)


async def offered(bench: Workbench, worker: Worker, executor: dict[str, Any]) -> bool:
    document = await bench.handle["instances"].find_one({"_id": worker.id})
    return executor in document["executors"]


async def test_no_executor_appears_when_the_last_that_offered_it_is_gone(bench: Workbench) -> None:
    other = Workbench(bench.handle)
    other.registry.workflow("review")(Gate())
    subscription = await bench.subscription(WORKFLOW)
    await bench.dispatch("paused")
    async with bench.working():
        async with other.working():
            job = await bench.wake(await bench.event(), subscription)
            assert (await bench.executions.get(job)).reason is None
        await wait_until(lambda: reason_is(bench, job, "no_executor"))
        async with other.working():
            await wait_until(lambda: reason_is(bench, job, None))


async def reason_is(bench: Workbench, job: str, reason: str | None) -> bool:
    return (await bench.executions.get(job)).reason == reason


async def test_an_instance_reports_itself_and_leaves(bench: Workbench) -> None:
    bench.registry.workflow("review")(Gate())
    async with bench.working(instance=bench.instance("$instance")) as worker:
        document = await bench.handle["instances"].find_one({"_id": worker.id})
        assert document["executors"] == [{"type": "execute_workflow", "target": "review"}]
        assert (document["pid"], bool(document["host"])) == (os.getpid(), True)
        first = document["heartbeatAt"]
        await wait_until(lambda: later(bench, first))
        assert (await bench.handle["instances"].find_one())["startedAt"] == document["startedAt"]
    assert await bench.handle["instances"].count_documents({}) == 0


async def later(bench: Workbench, than: Any) -> bool:
    return bool((await bench.handle["instances"].find_one())["heartbeatAt"] > than)


# --- retries


async def test_a_workflow_is_tried_again_until_it_succeeds(bench: Workbench) -> None:
    attempts: list[int] = []

    @bench.registry.workflow("review", retry=SOON)
    async def review(run: Run) -> str:
        attempts.append(run.attempt)
        if run.attempt < 3:
            raise OSError(f"down {run.attempt}")
        return "up"

    subscription = await bench.subscription(WORKFLOW)
    async with bench.working():
        done = await bench.ended(await bench.wake(await bench.event(), subscription))
    assert (done.state, done.reason, attempts) == ("succeeded", None, [1, 2, 3])
    assert [(w["attempt"], w["reason"], w["message"]) for w in done.warnings] == [
        (1, "handler_error", "down 1"),
        (2, "handler_error", "down 2"),
    ]
    assert await bench.events_at(f"/tasks/T1/workflows/review/errors/{done.event_id}") == []


async def test_a_retry_waits_as_the_policy_says(bench: Workbench) -> None:
    @bench.registry.workflow("review", retry=RetryPolicy(wait=3600, cap=3600, jitter=lambda wait: wait))
    async def review(run: Run) -> None:
        raise OSError

    subscription = await bench.subscription(WORKFLOW)
    async with bench.working():
        job = await bench.wake(await bench.event(), subscription)
        waiting = await wait_until(lambda: retried(bench, job))
    assert waiting.available_at is not None
    assert waiting.started_at is not None
    assert 3590 < (waiting.available_at - waiting.started_at).total_seconds() < 3660
    assert (waiting.reason, waiting.lease) == ("handler_error", None)


async def retried(bench: Workbench, job: str) -> Any:
    execution = await bench.executions.get(job)
    return execution if execution.state == "queued" and execution.attempts else None


@pytest.mark.parametrize(("action", "attempts"), [(AGENT, 1), (WORKFLOW, 2)])
async def test_what_takes_too_long_is_stopped(bench: Workbench, action: dict[str, Any], attempts: int) -> None:
    gate = Gate()
    bench.registry.agent("facade", timeout=0.05)(gate)
    bench.registry.workflow("review", timeout=0.05, retry=RetryPolicy(max_attempts=2, wait=0))(gate)
    subscription = await bench.subscription(action)
    async with bench.working():
        done = await bench.ended(await bench.wake(await bench.event(), subscription))
    told = (await bench.result_of(done))["value"]["error"]
    assert (done.state, done.reason, done.attempts, gate.cancelled) == ("failed", "timeout", attempts, attempts)
    assert told == {"type": "TimeoutError", "message": "The executor did not end within 0.05 s.", "code": None}


async def test_code_that_swallows_its_cancellation_is_cancelled_again(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its slot and its lease for as long as it runs, and is told of each time."""
    monkeypatch.setattr(attempts_module, "CANCEL_AGAIN", 0.05)
    swallowed: list[int] = []

    async def deaf(run: Run) -> None:
        while len(swallowed) < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed.append(run.attempt)
        await asyncio.Event().wait()

    bench.registry.agent("facade", timeout=0.05)(deaf)
    job = await bench.wake(await bench.event(), await bench.subscription(AGENT))
    with capture_logs() as logs:
        async with bench.working():
            done = await bench.ended(job)
    assert (done.state, done.reason) == ("failed", "timeout")
    assert swallowed == [1, 1, 1]
    assert [line["event"] for line in logs].count("executor_ignores_cancellation") == 3
