"""P4 and P6 when the one process that listens and works is killed in the middle, again and again."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import MongoClient

from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from statelayer import StateLayer
    from statelayer.events import Event
    from statelayer.executors import Execution
    from statelayer.testing.plugin import Driver, ExternalServer

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

USER = "user:U7"
EVENTS = 200
TASKS = 7
KILLS = 3
SEED = 20261201
LIFETIME = "transactionLifetimeLimitSeconds"
SERVICE = Path(__file__).with_name("kill_service.py")


class Service:
    """The process under test. There is one at a time."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, str(SERVICE), *self._arguments, stdout=asyncio.subprocess.PIPE, stderr=sys.stderr
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(20):
            while (line := await self._process.stdout.readline()) != b"running\n":
                assert line, f"the service ended with {await self._process.wait()}"

    async def kill(self) -> None:
        if self._process is None or self._process.returncode is not None:
            return
        self._process.kill()
        await self._process.communicate()


@pytest.fixture(scope="module", autouse=True)
def dead_transactions_end_soon(statelayer_server: ExternalServer) -> Generator[None]:
    """What a killed process had open holds its namespaces, and the drop of its database, for a minute by default."""
    with MongoClient[dict[str, "Any"]](statelayer_server.uri) as client:
        limit = client.admin.command({"getParameter": 1, LIFETIME: 1})[LIFETIME]
        client.admin.command({"setParameter": 1, LIFETIME: 3})
        yield
        client.admin.command({"setParameter": 1, LIFETIME: limit})


@pytest.fixture
async def service(
    database: Any, layer: StateLayer, statelayer_server: ExternalServer, driver: Driver
) -> AsyncGenerator[Service]:
    service = Service(statelayer_server.uri, database.name, driver)
    yield service
    await service.kill()


async def something_runs(database: Any) -> list[Any]:
    """Return jobs of each kind that are in the middle of their code, as soon as there are some."""

    async def found() -> list[Any] | None:
        running = await database["executions"].find({"state": "running"}).to_list(length=100)
        kinds = {document["action"]["type"] for document in running}
        return running if kinds == {"execute_agent", "execute_workflow"} else None

    return await wait_until(found, timeout=20, message="nothing runs") or []


async def write(layer: StateLayer, numbers: range, events: list[Event]) -> None:
    for n in numbers:
        path = f"/tasks/T{n % TASKS}/requests/R{n}"
        events.append(await layer.set(path, {"n": n}, actor=USER))


async def test_p4_p6_a_service_that_is_killed_skips_nothing_and_says_nothing_twice(
    database: Any, layer: StateLayer, service: Service
) -> None:
    for name, action in (
        ("settle", {"type": "execute_workflow", "workflowId": "settle"}),
        ("classify", {"type": "execute_agent", "agentId": "classify"}),
    ):
        await layer.subscriptions.publish({"name": name, "pattern": "/tasks/*/requests/*", "action": action})
    moments = sorted(random.Random(SEED).sample(range(20, EVENTS - 20), KILLS))
    events: list[Event] = []
    hit: set[str] = set()
    await service.start()
    for begin, end in zip([0, *moments], [*moments, EVENTS], strict=True):
        writing = asyncio.create_task(write(layer, range(begin, end), events))
        if end < EVENTS:
            # Killed while the last of these are written, and others are in the middle of their code.
            await wait_until(lambda end=end: len(events) >= end - 5, timeout=30)
            hit |= {document["_id"] for document in await something_runs(database)}
            await service.kill()
            await writing
            await service.start()
        else:
            await writing
    assert len(events) == EVENTS
    jobs: dict[str, Execution] = {}
    for event in events:
        found = (await layer.outcome(event.id, timeout=40)).executions
        assert {job.id for job in found} == {f"workflow:{event.id}:settle", f"agent:{event.id}:classify"}
        jobs |= {job.id: job for job in found}
    for event in await heads(database, layer):
        await layer.outcome(event.id, timeout=20)
    await service.kill()

    await check_jobs(database, jobs)
    for event in events:
        await check_facts(layer, jobs, event)
    for n in range(TASKS):
        log = [event async for event in layer.events(f"/tasks/T{n}")]
        assert [event.seq for event in log] == list(range(1, len(log) + 1))
        assert max(Counter(event.path for event in log).values()) == 1
        report = await layer.verify(f"/tasks/T{n}")
        assert report.problems == []
    lost = {job.id for job in jobs.values() if job.reason == "lease_lost"}
    again = {job.id for job in jobs.values() if job.attempts > 1}
    assert lost & hit, "no kill hit an agent"
    assert again & hit, "no kill hit a workflow"


async def heads(database: Any, layer: StateLayer) -> list[Event]:
    """Return the last event of each namespace: with these everything has been evaluated."""
    return [[event async for event in layer.events(f"/tasks/T{n}")][-1] for n in range(TASKS)]


async def check_jobs(database: Any, jobs: dict[str, Execution]) -> None:
    """The executions are these and no others, and their code was started as often as they say."""
    stored = await database["executions"].find({}).to_list(length=10 * EVENTS)
    assert sorted(document["_id"] for document in stored) == sorted(jobs)
    starts = Counter(note["job"] for note in await database["effects"].find({}).to_list(length=10 * EVENTS))
    for job in jobs.values():
        is_agent = job.action_type == "execute_agent"
        assert job.state == ("failed" if is_agent and job.reason else "succeeded"), job
        assert job.attempts == 1 if is_agent else 1 <= job.attempts <= job.max_attempts, job
        assert starts[job.id] <= job.attempts, job
        assert job.state == "failed" or starts[job.id] >= 1, job


async def check_facts(layer: StateLayer, jobs: dict[str, Execution], event: Event) -> None:
    """A workflow left one result; an agent one result or the error that tells its death."""
    place = f"{event.namespace}/workflows/settle"
    result = await layer.get(f"{place}/results/{event.id}")
    assert result is not None
    assert (result.version, result.value["output"]["n"]) == (1, event.value["n"])
    assert await layer.get(f"{place}/errors/{event.id}") is None
    place = f"{event.namespace}/agents/classify"
    result = await layer.get(f"{place}/results/{event.id}")
    error = await layer.get(f"{place}/errors/{event.id}")
    assert (result is None) != (error is None), event
    told = result or error
    assert told is not None
    assert told.version == 1
    assert told.event_id == jobs[f"agent:{event.id}:classify"].result_event_id
    if error is not None:
        assert error.value["reason"] == "lease_lost"
