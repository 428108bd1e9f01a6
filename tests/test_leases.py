"""Leases and fences, faults, stopping and dying (DESIGN §8; P6)."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pymongo.errors import AutoReconnect
from workbench import AGENT, FAST, SOON, WORKFLOW, Gate, Workbench

from statelayer.errors import ContentionError, DatabaseError, OutcomeUnknownError, TransientDatabaseError
from statelayer.executors import Registry, Run
from statelayer.executors.leases import Leases
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from datetime import datetime

    from statelayer.testing.plugin import ExternalServer

pytestmark = pytest.mark.anyio


async def expire(bench: Workbench, job: str) -> None:
    """Let a lease run out, as if its worker had been away for long."""
    expired = {"lease.until": bench.clock.now().replace(year=2020)}
    await bench.handle["executions"].update_one({"_id": job}, {"$set": expired})


# --- leases and fences


async def test_long_work_keeps_its_lease(bench: Workbench) -> None:
    """D2: it runs for several leases while another worker watches."""
    gate = Gate()
    bench.registry.agent("facade")(gate)
    subscription = await bench.subscription(AGENT)
    settings = FAST.model_copy(update={"lease": 0.6})
    async with bench.working(settings=settings), bench.working(settings=settings, journal=bench.other_journal()):
        job = await bench.wake(await bench.event(), subscription)
        await gate.started.wait()
        first = (await bench.executions.get(job)).lease
        assert first is not None
        await wait_until(lambda: renewed_for(bench, job, first.until, 1.8))
        gate.open.set()
        done = await bench.ended(job)
    assert (done.state, done.attempts, gate.runs) == ("succeeded", 1, [1])


async def renewed_for(bench: Workbench, job: str, since: datetime, seconds: float) -> bool:
    lease = (await bench.executions.get(job)).lease
    return lease is not None and (lease.until - since).total_seconds() > seconds


async def test_a_zombie_cannot_write_its_result(bench: Workbench) -> None:
    """D2: its lease was taken over, the other one is done, and then the first one returns."""
    first, second = Gate("zombie"), Gate("heir", is_open=True)
    old, new = Registry(), Registry()
    old.workflow("review", retry=SOON)(first)
    new.workflow("review", retry=SOON)(second)
    subscription = await bench.subscription(WORKFLOW)
    deaf = FAST.model_copy(update={"heartbeat": 300.0, "lease": 0.5, "poll": 300.0})
    async with bench.working(settings=deaf, registry=old, journal=bench.other_journal()):
        job = await bench.wake(await bench.event(), subscription)
        await first.started.wait()
        async with bench.working(registry=new):
            done = await bench.ended(job)
            first.open.set()
            await wait_until(lambda: not bench.staff.workers[0].running)
    assert (done.state, done.attempts) == ("succeeded", 2)
    [fact] = await bench.events_at(f"/tasks/T1/workflows/review/results/{done.event_id}")
    assert fact["value"]["output"] == "heir"
    assert await bench.executions.get(job) == done
    assert await bench.events_at(f"/tasks/T1/workflows/review/errors/{done.event_id}") == []


async def test_a_heartbeat_finds_what_is_lost_and_stops_it(bench: Workbench) -> None:
    gate = Gate()
    bench.registry.agent("facade")(gate)
    subscription = await bench.subscription(AGENT)
    async with bench.working() as worker:
        job = await bench.wake(await bench.event(), subscription)
        await gate.started.wait()
        await bench.handle["executions"].update_one({"_id": job}, {"$set": {"lease.token": "$other"}})
        await wait_until(lambda: gate.cancelled)
        await wait_until(lambda: not worker.running)
        assert await bench.state_of(job) == "running"
        assert await bench.events_at(f"/tasks/T1/agents/facade/errors/{job.split(':')[1]}") == []
        await bench.executions.cancel(job)


async def test_a_cancelled_execution_is_stopped_and_stays_cancelled(bench: Workbench) -> None:
    gate = Gate()
    bench.registry.workflow("review")(gate)
    subscription = await bench.subscription(WORKFLOW)
    async with bench.working(settings=FAST.model_copy(update={"heartbeat": 300.0, "lease": 600.0})) as worker:
        job = await bench.wake(await bench.event(), subscription)
        await gate.started.wait()
        await bench.executions.cancel(job)
        await wait_until(lambda: gate.cancelled and not worker.running)
    cancelled = await bench.executions.get(job)
    assert (cancelled.state, cancelled.result_event_id) == ("cancelled", None)
    assert len(await bench.events_at("/tasks/T1/requests/R1")) == await bench.handle["events"].count_documents({})


async def test_a_dead_agent_becomes_an_error_fact(bench: Workbench) -> None:
    gate = Gate()
    bench.registry.agent("facade")(gate)
    subscription = await bench.subscription(AGENT)
    deaf = FAST.model_copy(update={"heartbeat": 300.0, "lease": 0.5, "poll": 300.0, "drain_timeout": 0.01})
    async with bench.working(settings=deaf, journal=bench.other_journal()):
        job = await bench.wake(await bench.event(), subscription)
        await gate.started.wait()
        async with bench.working(registry=Registry()):  # by an instance that does not even have the executor
            done = await bench.ended(job)
    assert (done.state, done.reason, done.attempts, gate.runs) == ("failed", "lease_lost", 1, [1])
    fact = await bench.result_of(done)
    assert (fact["path"], fact["actor"]) == (f"/tasks/T1/agents/facade/errors/{done.event_id}", "agent:facade")
    assert (fact["causedByEventId"], fact["triggerDepth"]) == (done.event_id, 1)
    assert (fact["value"]["reason"], fact["value"]["error"]["code"]) == ("lease_lost", "lease_lost")


async def test_a_lease_that_was_renewed_is_not_taken(bench: Workbench) -> None:
    """The reaper saw it expired; before it acts the worker is back."""
    gate = Gate()
    bench.registry.agent("facade")(gate)
    subscription = await bench.subscription(AGENT)
    async with bench.working(settings=FAST.model_copy(update={"heartbeat": 300.0, "lease": 600.0})) as worker:
        job = await bench.wake(await bench.event(), subscription)
        await gate.started.wait()
        await expire(bench, job)
        reaper = bench.worker(registry=Registry(), journal=bench.other_journal())
        seen = await reaper._leases.expired(10)
        await worker._beat()
        assert [execution.id for execution in seen] == [job]
        assert not await reaper._reaper._bury(seen[0])
        assert await reaper._reaper.reap(mine=()) == 0
        gate.open.set()
        assert (await bench.ended(job)).state == "succeeded"


async def test_a_worker_does_not_bury_what_it_still_runs(bench: Workbench) -> None:
    """Its heartbeat was late, and nobody else took over."""
    gate = Gate()
    bench.registry.agent("facade")(gate)
    subscription = await bench.subscription(AGENT)
    async with bench.working(settings=FAST.model_copy(update={"heartbeat": 300.0, "lease": 600.0})) as worker:
        job = await bench.wake(await bench.event(), subscription)
        await gate.started.wait()
        await expire(bench, job)
        await worker._keep_up()
        assert await bench.state_of(job) == "running"
        gate.open.set()
        assert (await bench.ended(job)).state == "succeeded"


async def test_an_expired_claim_does_not_count_as_an_attempt(bench: Workbench) -> None:
    gate = Gate(is_open=True)
    subscription = await bench.subscription(AGENT)
    job = await bench.wake(await bench.event(), subscription)
    dead = Leases(bench.database, bench.clock, owner="dead", lease=30)
    assert len(await dead.claim([job])) == 1
    await expire(bench, job)
    bench.registry.agent("facade")(gate)
    async with bench.working():
        done = await bench.ended(job)
    assert (done.state, done.attempts) == ("succeeded", 1)


async def test_contention_on_a_result_is_no_error(bench: Workbench) -> None:
    gate = Gate(is_open=True)
    bench.registry.agent("facade")(gate)
    subscription = await bench.subscription(AGENT)
    journal = bench.other_journal()
    faults: Iterator[Exception] = iter(
        [
            ContentionError("planted", attempts=1),
            TransientDatabaseError("planted"),
            OutcomeUnknownError("planted", event_ids=["0" * 24]),
        ]
    )
    plant(journal, lambda: next(faults, None))
    async with bench.working(journal=journal):
        done = await bench.ended(await bench.wake(await bench.event(), subscription))
    assert (done.state, done.attempts, gate.runs) == ("succeeded", 1, [1])


async def test_a_commit_whose_answer_was_lost_is_not_repeated(bench: Workbench) -> None:
    """D1: the result and the end are one append, so the fence refuses the repeat."""
    gate = Gate(is_open=True)
    bench.registry.agent("facade")(gate)
    subscription = await bench.subscription(AGENT)
    journal, lost = bench.other_journal(), []
    append = journal.append

    async def forgetful(*args: Any, **options: Any) -> Any:
        events = await append(*args, **options)
        if not lost:
            lost.append(events[0].id)
            raise OutcomeUnknownError("planted", event_ids=[events[0].id])
        return events

    journal.append = forgetful  # type: ignore[method-assign]
    async with bench.working(journal=journal):
        done = await bench.ended(await bench.wake(await bench.event(), subscription))
    assert (done.state, [done.result_event_id]) == ("succeeded", lost)
    assert len(await bench.events_at(f"/tasks/T1/agents/facade/results/{done.event_id}")) == 1


def plant(journal: Any, fault: Callable[[], Exception | None]) -> None:
    """Let the journal's appends fail as long as there are faults."""
    append = journal.append

    async def failing(*args: Any, **options: Any) -> Any:
        if (error := fault()) is not None:
            raise error
        return await append(*args, **options)

    journal.append = failing


# --- faults of the database


async def test_loops_go_on_through_transient_faults(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(is_open=True)
    bench.registry.workflow("review")(gate)
    subscription = await bench.subscription(WORKFLOW)
    worker = bench.worker()
    faults = {"claim": 2, "renew": 2, "expired": 2}
    for name in faults:
        monkeypatch.setattr(worker._leases, name, failing_at_first(getattr(worker._leases, name), faults, name))
    async with bench.working(worker):
        done = await bench.ended(await bench.wake(await bench.event(), subscription))
        await wait_until(lambda: not any(faults.values()))
    assert done.state == "succeeded"


def failing_at_first(method: Any, faults: dict[str, int], name: str) -> Any:
    async def call(*args: Any) -> Any:
        if faults[name]:
            faults[name] -= 1
            raise TransientDatabaseError("planted") from AutoReconnect("planted")
        return await method(*args)

    return call


async def test_what_cannot_heal_ends_the_worker(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = bench.worker()

    async def broken(*args: Any) -> Any:
        raise DatabaseError("not authorized")

    monkeypatch.setattr(worker._leases, "expired", broken)
    with pytest.raises(DatabaseError, match="not authorized"):
        async with asyncio.timeout(10):
            await worker.run()
    assert await bench.handle["instances"].count_documents({}) == 0


async def test_what_cannot_heal_in_an_execution_ends_the_worker(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.registry.workflow("review")(Gate())
    worker = bench.worker()

    async def broken(*args: Any) -> Any:
        raise DatabaseError("not authorized")

    monkeypatch.setattr(worker._leases, "start", broken)
    await bench.wake(await bench.event(), await bench.subscription(WORKFLOW))
    with pytest.raises(DatabaseError, match="not authorized"):
        async with asyncio.timeout(10):
            await worker.run()


# --- stopping


async def test_stopping_waits_for_what_runs(bench: Workbench) -> None:
    gate = Gate()
    bench.registry.agent("facade")(gate)
    subscription = await bench.subscription(AGENT)
    async with bench.working() as worker:
        job = await bench.wake(await bench.event(), subscription)
        await gate.started.wait()
        worker.stop()
        later = await bench.wake(await bench.event(), subscription)
        gate.open.set()
    assert await bench.state_of(job) == "succeeded"
    assert (await bench.state_of(later), gate.runs) == ("queued", [1])


@pytest.mark.parametrize(
    ("action", "state", "reason"), [(WORKFLOW, "queued", "lease_lost"), (AGENT, "failed", "lease_lost")]
)
@pytest.mark.parametrize("way", ["stopped", "cancelled"])
async def test_what_does_not_end_in_time_is_cancelled(
    bench: Workbench, action: dict[str, Any], state: str, reason: str, way: str
) -> None:
    gate = Gate()
    bench.registry.agent("facade")(gate)
    bench.registry.workflow("review")(gate)
    subscription = await bench.subscription(action)
    worker = bench.worker(settings=FAST.model_copy(update={"drain_timeout": 0.1}))
    task = asyncio.create_task(worker.run())
    job = await bench.wake(await bench.event(), subscription)
    await gate.started.wait()
    if way == "stopped":
        worker.stop()
    else:
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() == (way == "cancelled")
    execution = await bench.executions.get(job)
    assert (execution.state, execution.reason, execution.attempts, gate.cancelled) == (state, reason, 1, 1)
    assert execution.lease is None
    assert await bench.handle["instances"].count_documents({}) == 0


async def test_what_was_claimed_and_not_started_is_given_back(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    bench.registry.agent("facade")(gate)
    worker = bench.worker()
    claim = worker._leases.claim

    async def stopped_meanwhile(job_ids: Sequence[str]) -> Any:
        claimed = await claim(job_ids)
        worker.stop()
        return claimed

    monkeypatch.setattr(worker._leases, "claim", stopped_meanwhile)
    job = await bench.wake(await bench.event(), await bench.subscription(AGENT))
    async with asyncio.timeout(10):
        await worker.run()
    execution = await bench.executions.get(job)
    assert (execution.state, execution.attempts, execution.lease, gate.runs) == ("queued", 0, None, [])


# --- processes that die


WORKER = """
import asyncio, sys
from pymongo import AsyncMongoClient
from statelayer.settings import Settings
sys.path.insert(0, sys.argv[3])
from workbench import AGENT, FAST, Gate, SOON, WORKFLOW, Workbench

async def main():
    bench = Workbench(AsyncMongoClient(sys.argv[1])[sys.argv[2]])

    @bench.registry.agent("facade")
    async def classify(run):
        print("started", flush=True)
        if run.input == "poison":
            import os
            os._exit(1)
        await asyncio.sleep(600)

    bench.registry.workflow("review")(classify)
    async with bench.working():
        await asyncio.sleep(600)

asyncio.run(main())
"""


def spawn(server: ExternalServer, bench: Workbench) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WORKER, server.uri, bench.handle.name, str(Path(__file__).parent)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


@pytest.mark.fault
async def test_a_killed_worker_loses_nothing(bench: Workbench, statelayer_server: ExternalServer) -> None:
    """D6: five jobs of a process that gets SIGKILL are all taken over within a lease and a sweep."""
    jobs = await bench.many(AGENT, 3)
    jobs += await bench.many(WORKFLOW, 2, name="other")
    process = spawn(statelayer_server, bench)
    try:
        await wait_until(lambda: all_running(bench, jobs), timeout=20)
    finally:
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.communicate)
    gate = Gate(is_open=True)
    bench.registry.workflow("review", retry=SOON)(gate)
    async with bench.working():
        await wait_until(lambda: bench.all_ended(jobs), timeout=10)
    ended = await bench.executions.find()
    assert {(e.target, e.state, e.reason, e.attempts) for e in ended} == {
        ("facade", "failed", "lease_lost", 1),
        ("review", "succeeded", None, 2),
    }
    assert len(ended) == 5
    for execution in ended:
        assert (await bench.result_of(execution))["causedByEventId"] == execution.event_id


async def all_running(bench: Workbench, jobs: Sequence[str]) -> bool:
    return await bench.states(jobs) == {"running"}


@pytest.mark.fault
async def test_poison_is_parked_and_the_rest_goes_on(bench: Workbench, statelayer_server: ExternalServer) -> None:
    """D10: the code kills its process; the agent has been attempted once and is not tried again."""
    poison = await bench.event(value="poison")
    job = await bench.wake(poison, await bench.subscription(AGENT))
    process = spawn(statelayer_server, bench)
    await asyncio.to_thread(process.communicate)
    assert process.returncode == 1
    ran: list[str] = []

    @bench.registry.agent("facade")
    async def classify(run: Run) -> None:
        ran.append(run.input)

    other = await bench.subscription(AGENT, name="other")
    async with bench.working():
        await bench.ended(await bench.wake(await bench.event("/tasks/T2/requests/R1"), other))
        done = await bench.ended(job)
    assert (done.state, done.reason, done.attempts, ran) == ("failed", "lease_lost", 1, ["v"])
