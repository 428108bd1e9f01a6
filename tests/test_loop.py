"""The whole loop through the public surface alone: fact → event → subscription → execution → next fact, and its end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
from bson import Decimal128

import statelayer
from statelayer import Settings, StateLayer, Write
from statelayer.errors import (
    ClosedError,
    InvalidExecutorError,
    InvalidInputError,
    InvalidPathError,
    InvalidSubscriptionError,
    NotFoundError,
    StateLayerError,
)
from statelayer.executors import RetryPolicy
from statelayer.instances import Instances
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from statelayer.events import Event
    from statelayer.executors import Outcome, Run

    Way = Callable[[StateLayer, Run, str], Awaitable[Any]]
    MakeLayer = Callable[..., StateLayer]

pytestmark = pytest.mark.anyio

USER = "user:U7"
BRISK = Settings(poll=0.1)
AT_ONCE = RetryPolicy(max_attempts=3, wait=0)
LIBRARY = str(Path(statelayer.__file__).parent)
CONFIRMED = {"path": "$event.value.status", "op": "eq", "value": "confirmed"}

TOO_MANY = 100
"""Events that no chain of these tests comes near, unless it does not stop."""


def agent(id: str) -> dict[str, Any]:
    return {"type": "execute_agent", "agentId": id}


def workflow(id: str) -> dict[str, Any]:
    return {"type": "execute_workflow", "workflowId": id}


async def subscribe(layer: StateLayer, name: str, pattern: str, action: dict[str, Any], **more: Any) -> None:
    await layer.subscriptions.publish({"name": name, "pattern": pattern, "action": action, **more})


async def written(layer: StateLayer, namespace: str = "/tasks/T1") -> list[Event]:
    return [event async for event in layer.events(namespace)]


async def stopped(layer: StateLayer, namespace: str = "/tasks/T1") -> list[Event]:
    """Follow a namespace until every event of it has its outcome and nothing new came of that; return its events."""
    done = 0
    while len(events := await written(layer, namespace)) > done:
        assert len(events) < TOO_MANY, "the loop does not stop"
        for event in events[done:]:
            await layer.outcome(event.id, timeout=20)
        done = len(events)
    return events


async def executions_of(layer: StateLayer, event: Event) -> dict[str, tuple[str, str | None]]:
    found = (await layer.outcome(event.id, timeout=20)).executions
    return {execution.id: (execution.state, execution.reason) for execution in found}


def owned_tasks() -> list[asyncio.Task[Any]]:
    """Return the running tasks whose code is the library's."""
    coroutines = [(task, task.get_coro()) for task in asyncio.all_tasks()]
    return [task for task, coro in coroutines if coro is not None and LIBRARY in str(_file_of(coro))]


def _file_of(coro: Any) -> str | None:
    code = getattr(coro, "cr_code", None)
    return code.co_filename if code else None


@pytest.fixture(autouse=True)
async def nothing_left_over() -> AsyncGenerator[None]:
    yield
    await wait_until(lambda: not owned_tasks(), timeout=2, message=f"left over: {owned_tasks()}")


@pytest.fixture
async def make_layer(database: Any, layer: StateLayer) -> AsyncGenerator[MakeLayer]:
    """Makes further layers on the test's database, as other processes have them."""
    made: list[StateLayer] = []

    def make(settings: Settings = BRISK) -> StateLayer:
        made.append(StateLayer(database, settings=settings))
        return made[-1]

    yield make
    for other in made:
        await other.aclose()


class Gate:
    """Code that says when it runs, and goes on when it is let."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self.open = asyncio.Event()

    async def pass_through(self) -> None:
        self.reached.set()
        await self.open.wait()

    async def __call__(self, run: Run) -> str:
        await self.pass_through()
        return "done"


async def within(seconds: float, awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await awaitable


@asynccontextmanager
async def in_background(work: Awaitable[Any]) -> AsyncIterator[asyncio.Task[Any]]:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


# --- the single delivery


async def test_a_confirmed_request_becomes_the_agents_result(layer: StateLayer) -> None:
    @layer.agent("facade-hs-code")
    async def classify(run: Run) -> Any:
        return {"code": "8471", "of": run.input["goods"], "by": run.params["requestId"]}

    await subscribe(layer, "intake", "/tasks/*/requests/*", agent("facade-hs-code"), condition=CONFIRMED)
    async with layer.running():
        draft = await layer.set("/tasks/T1/requests/S0", {"status": "draft"}, actor=USER)
        request = await layer.set("/tasks/T1/requests/S", {"status": "confirmed", "goods": "laptop"}, actor=USER)
        assert (await layer.outcome(draft.id, timeout=10)).executions == ()
        [execution] = (await layer.outcome(request.id, timeout=10)).executions
        events = await stopped(layer)

    assert (request.source, request.actor, request.trigger_depth, request.caused_by_event_id) == (
        "api",
        USER,
        0,
        None,
    )
    [result] = events[2:]
    assert result.path == f"/tasks/T1/agents/facade-hs-code/results/{request.id}"
    assert (result.source, result.actor) == ("agent_callback", "agent:facade-hs-code")
    assert (result.trigger_depth, result.caused_by_event_id, result.root_event_id) == (1, request.id, request.id)
    assert execution.id == f"agent:{request.id}:facade-hs-code"
    assert (execution.state, execution.attempts, execution.result_event_id) == ("succeeded", 1, result.id)
    assert result.value == {
        "status": "succeeded",
        "output": {"code": "8471", "of": "laptop", "by": "S"},
        "target": "facade-hs-code",
        "eventId": request.id,
        "subscription": {"name": "intake", "version": 1},
        "startedAt": execution.started_at,
        "finishedAt": result.value["finishedAt"],
    }
    assert execution.started_at <= result.value["finishedAt"]
    entry = await layer.get(result.path)
    assert (entry.value, entry.version, entry.event_id) == (result.value, 1, result.id)
    tree = await layer.trace_causation(event_id=result.id)
    assert [(node.event.id, [child.event.id for child in node.children]) for node in tree.roots] == [
        (request.id, [result.id])
    ]
    assert tree.links_resolved
    assert (await layer.verify("/tasks/T1")).ok


async def test_an_agent_that_raises_leaves_an_error_and_no_result(layer: StateLayer) -> None:
    calls: list[str] = []

    @layer.agent("a")
    async def fail(run: Run) -> None:
        calls.append(run.event.id)
        raise LookupError("$nothing like 'x'")

    await subscribe(layer, "intake", "/tasks/*/requests/*", agent("a"))
    async with layer.running():
        request = await layer.set("/tasks/T1/requests/S", 1, actor=USER)
        [execution] = (await layer.outcome(request.id, timeout=10)).executions
    assert (execution.state, execution.reason, execution.attempts) == ("failed", "handler_error", 1)
    assert calls == [request.id]
    assert await layer.get(f"/tasks/T1/agents/a/results/{request.id}") is None
    error = await layer.event(execution.result_event_id)
    assert error.path == f"/tasks/T1/agents/a/errors/{request.id}"
    assert (error.source, error.actor, error.trigger_depth) == ("agent_callback", "agent:a", 1)
    assert error.caused_by_event_id == request.id
    told = {key: error.value[key] for key in ("status", "reason", "error", "target", "eventId", "subscription")}
    assert told == {
        "status": "failed",
        "reason": "handler_error",
        "error": {"type": "LookupError", "message": "$nothing like 'x'", "code": None},
        "target": "a",
        "eventId": request.id,
        "subscription": {"name": "intake", "version": 1},
    }


async def test_d5_what_begins_with_a_dollar_goes_through_the_loop_unchanged(layer: StateLayer) -> None:
    odd = {"$x": "$secret", "a.b": 1, "": "$$NOW", "k": ["$lease.token", {"$set": {"state": "failed"}}]}

    @layer.workflow("w", retry=AT_ONCE)
    async def echo(run: Run) -> Any:
        if run.attempt == 1:
            raise ValueError("$action.type")
        return run.input

    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    async with layer.running():
        request = await layer.set("/tasks/T1/requests/R", odd, actor="user:$owner")
        [execution] = (await layer.outcome(request.id, timeout=10)).executions
    assert (execution.state, execution.attempts) == ("succeeded", 2)
    assert [warning["message"] for warning in execution.warnings] == ["$action.type"]
    assert (await layer.get(f"/tasks/T1/workflows/w/results/{request.id}")).value["output"] == odd


async def test_a_registered_type_gets_params_and_writes_at_its_place(layer: StateLayer) -> None:
    seen: list[Run] = []

    class Notify:
        def target(self, action: Any) -> str:
            return f"to-{action.params['channel']}"

        async def execute(self, run: Run) -> Any:
            seen.append(run)
            return None

    layer.executors.register("notify", Notify())
    await subscribe(
        layer, "tell", "/tasks/*/deliveries/{parcel}/legs/*", {"type": "notify", "channel": "mail", "to": {"$a": 1}}
    )
    async with layer.running():
        event = await layer.set("/tasks/T1/deliveries/P1/legs/2", "arrived", actor=USER)
        [execution] = (await layer.outcome(event.id, timeout=10)).executions
    [run] = seen
    assert dict(run.params) == {"taskId": "T1", "parcel": "P1"}
    assert run.execution.action == {"type": "notify", "channel": "mail", "to": {"$a": 1}}
    assert (run.event.id, run.input) == (event.id, "arrived")
    assert execution.id == f"notify:{event.id}:to-mail"
    result = await layer.event(execution.result_event_id)
    assert result.path == f"/tasks/T1/executors/notify/to-mail/results/{event.id}"
    assert (result.source, result.actor, result.trigger_depth) == ("subscription", "system:notify", 1)
    assert result.value["output"] is None


async def test_the_input_is_the_events_value_and_reads_are_of_now(layer: StateLayer) -> None:
    gate = Gate()
    seen: dict[str, Any] = {}

    @layer.workflow("w")
    async def look(run: Run) -> None:
        await gate.pass_through()
        current = await run.layer.get(run.event.path)
        seen.update(input=run.input, event=run.event.value, now=current.value, version=current.version)
        run.input["mutated"] = True

    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"), condition=CONFIRMED)
    async with layer.running():
        first = await layer.set("/tasks/T1/requests/R", {"status": "confirmed", "n": 1}, actor=USER)
        await within(10, gate.reached.wait())
        await layer.set("/tasks/T1/requests/R", {"status": "cancelled"}, actor=USER)
        gate.open.set()
        await layer.outcome(first.id, timeout=10)
    assert seen == {
        "input": {"status": "confirmed", "n": 1, "mutated": True},
        "event": {"status": "confirmed", "n": 1},
        "now": {"status": "cancelled"},
        "version": 2,
    }
    assert (await layer.event(first.id)).value == {"status": "confirmed", "n": 1}


async def test_f10_nobody_holds_what_another_sees(layer: StateLayer) -> None:
    inputs: dict[str, Any] = {}
    turn = asyncio.Event()

    @layer.workflow("vandal")
    async def vandal(run: Run) -> Any:
        run.input["list"].append("mine")
        run.event.value["list"].clear()
        turn.set()
        return run.input

    @layer.workflow("witness")
    async def witness(run: Run) -> None:
        await within(10, turn.wait())
        inputs["witness"] = run.input

    await subscribe(layer, "a", "/tasks/*/requests/*", workflow("vandal"))
    await subscribe(layer, "b", "/tasks/*/requests/*", workflow("witness"))
    mine = {"list": [1, 2]}
    async with layer.running():
        first = await layer.set("/tasks/T1/requests/R1", mine, actor=USER)
        mine["list"].append(3)
        first.value["list"].append("returned")
        second = await layer.set("/tasks/T1/notes/N1", mine, actor=USER)
        await layer.outcome(first.id, timeout=10)
    assert mine == {"list": [1, 2, 3]}
    assert inputs == {"witness": {"list": [1, 2]}}
    assert (await layer.get("/tasks/T1/requests/R1")).value == {"list": [1, 2]}
    assert (await layer.event(second.id)).value == {"list": [1, 2, 3]}
    assert (await layer.verify("/tasks/T1")).ok


async def test_f6_f7_whoever_looks_sees_the_same_value(layer: StateLayer) -> None:
    at = datetime(2026, 5, 1, 9, 30, 15, 987654, tzinfo=timezone(timedelta(hours=8)))
    given = {
        "at": at,
        "last": datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        "id": UUID("12345678-1234-5678-1234-567812345678"),
        "price": Decimal128("1.10"),
        "big": 2**63 - 1,
        "small": -(2**63),
        "float": 1.0,
        "list": [at, {"at": at}],
        "bytes": b"\x00\xff",
    }
    kept = given | {
        "at": datetime(2026, 5, 1, 1, 30, 15, 987000, tzinfo=UTC),
        "last": datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC),
        "list": [
            datetime(2026, 5, 1, 1, 30, 15, 987000, tzinfo=UTC),
            {"at": datetime(2026, 5, 1, 1, 30, 15, 987000, tzinfo=UTC)},
        ],
    }
    inputs: list[Any] = []

    @layer.workflow("w")
    async def echo(run: Run) -> Any:
        inputs.append(run.input)
        return {"echo": run.input, "late": at}

    same_moment = {"path": "$event.value.at", "op": "eq", "value": at}
    same_id = {"path": "$event.value.id", "op": "eq", "value": given["id"]}
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"), condition={"all": [same_moment, same_id]})
    path = "/tasks/T1/requests/R"
    async with layer.running(), layer.watch("/tasks/T1/requests/*", after=0) as watched:
        event = await layer.set(path, given, actor=USER)
        [execution] = (await layer.outcome(event.id, timeout=10)).executions
        seen = await within(10, anext(aiter(watched)))
    result = await layer.event(execution.result_event_id)
    assert result.value["output"] == {"echo": kept, "late": kept["at"]}
    before = await layer.state_at("/tasks/T1", event.seq)
    assert (await layer.replay("/tasks/T1")).entries_written == 0
    answers = {
        "returned": event.value,
        "watched": seen.value,
        "input": inputs[0],
        "event": (await layer.event(event.id)).value,
        "version": (await layer.read_version(path, 1)).value,
        "state": before[path],
        "entry": (await layer.get(path)).value,
    }
    for place, value in answers.items():
        assert value == kept, place
        assert {key: type(part) for key, part in value.items()} == {k: type(v) for k, v in kept.items()}, place
    assert seen == event == await layer.event(event.id)
    assert (await layer.verify("/tasks/T1")).ok


async def test_submitting_says_who_will_be_woken_and_waiting_gets_the_result(layer: StateLayer) -> None:
    @layer.workflow("w")
    async def answer(run: Run) -> int:
        return 42

    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"), condition=CONFIRMED)
    async with layer.running():
        idle = await layer.submit("/tasks/T1/requests/R1", {"status": "draft"}, actor=USER)
        submission = await layer.submit("/tasks/T1/requests/R2", {"status": "confirmed"}, actor=USER)
        assert (idle.triggered, submission.triggered) == ([], ["s"])
        entry = await layer.wait_for(f"/tasks/T1/workflows/w/results/{submission.event.id}", timeout=10)
        assert entry.value["output"] == 42
        with pytest.raises(TimeoutError):
            await layer.wait_for(f"/tasks/T1/workflows/w/results/{idle.event.id}", timeout=0.05)


# --- the chain, and where it stops


async def test_the_chain_comes_out_exactly(layer: StateLayer) -> None:
    stages = {"review": ("status", "reviewed"), "settle": ("stage/reviewed", "settled")}
    stages |= {"finalize": ("stage/settled", "finalized"), "archive": ("stage/finalized", "archived")}

    def register(id: str, stage: str) -> None:
        @layer.workflow(id)
        async def reach(run: Run) -> str:
            return stage

    for node, (waker, stage) in stages.items():
        register(node, stage)
        output = {"path": f"/tasks/{{taskId}}/stage/{stage}"}
        await subscribe(layer, node, f"/tasks/*/{waker}", workflow(node), output=output)
    async with layer.running():
        await layer.set("/tasks/T/status", "submitted", actor=USER)
        events = await stopped(layer, "/tasks/T")
        last = (await layer.outcome(events[-1].id, timeout=10)).executions

    seqs = {event.id: event.seq for event in events}
    assert [(e.path, e.source, e.trigger_depth, seqs.get(e.caused_by_event_id), e.version) for e in events] == [
        ("/tasks/T/status", "api", 0, None, 1),
        ("/tasks/T/stage/reviewed", "workflow_node", 1, 1, 1),
        ("/tasks/T/stage/settled", "workflow_node", 2, 2, 1),
        ("/tasks/T/stage/finalized", "workflow_node", 3, 3, 1),
    ]
    assert [event.actor for event in events[1:]] == ["workflow:review", "workflow:settle", "workflow:finalize"]
    assert [(skip.id, skip.state, skip.reason) for skip in last] == [
        (f"skip:{events[-1].id}:archive", "skipped", "max_depth")
    ]
    tree = await layer.trace_causation(task_id="T")
    assert [node.event.seq for node in tree] == [1, 2, 3, 4]
    assert (len(tree.roots), tree.links_resolved) == (1, True)
    assert (await layer.verify("/tasks/T")).ok


@pytest.mark.parametrize("fails", [False, True], ids=["results", "errors"])
async def test_e1_p7_a_subscription_that_matches_its_own_facts_stops(layer: StateLayer, fails: bool) -> None:
    @layer.agent("loop")
    async def loop(run: Run) -> str:
        if fails:
            raise RuntimeError("again")
        return "again"

    await subscribe(layer, "self", "/tasks/*/agents/*/*/*", agent("loop"))
    async with layer.running():
        await layer.set("/tasks/T1/agents/loop/notes/N", "go", actor=USER)
        events = await stopped(layer)
        skips = await executions_of(layer, events[-1])
    place = "errors" if fails else "results"
    assert [(event.trigger_depth, event.version) for event in events] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert [event.path for event in events[1:]] == [f"/tasks/T1/agents/loop/{place}/{e.id}" for e in events[:-1]]
    assert skips == {f"skip:{events[-1].id}:self": ("skipped", "max_depth")}
    assert (await layer.verify("/tasks/T1")).ok


async def test_p7_two_that_wake_each_other_stop(layer: StateLayer) -> None:
    @layer.workflow("ping")
    async def ping(run: Run) -> None: ...

    @layer.agent("pong")
    async def pong(run: Run) -> None: ...

    await subscribe(layer, "start", "/tasks/*/status", workflow("ping"), maxTriggerDepth=5)
    await subscribe(layer, "to-pong", "/tasks/*/workflows/ping/results/*", agent("pong"), maxTriggerDepth=5)
    await subscribe(layer, "to-ping", "/tasks/*/agents/pong/results/*", workflow("ping"), maxTriggerDepth=5)
    async with layer.running():
        await layer.set("/tasks/T1/status", "go", actor=USER)
        events = await stopped(layer)
        skips = await executions_of(layer, events[-1])
    assert [(e.actor, e.trigger_depth, e.version) for e in events[1:]] == [
        ("workflow:ping", 1, 1),
        ("agent:pong", 2, 1),
        ("workflow:ping", 3, 1),
        ("agent:pong", 4, 1),
        ("workflow:ping", 5, 1),
    ]
    assert skips == {f"skip:{events[-1].id}:to-pong": ("skipped", "max_depth")}


async def test_p7_one_agents_result_wakes_another_until_the_limit(layer: StateLayer) -> None:
    for name in ("first", "second"):
        layer.agent(name)(_echo)
    await subscribe(layer, "s1", "/tasks/*/requests/*", agent("first"), maxTriggerDepth=2)
    await subscribe(layer, "s2", "/tasks/*/agents/first/results/*", agent("second"), maxTriggerDepth=2)
    await subscribe(layer, "s3", "/tasks/*/agents/second/results/*", agent("first"), maxTriggerDepth=2)
    async with layer.running():
        await layer.set("/tasks/T1/requests/R", "go", actor=USER)
        events = await stopped(layer)
        skips = await executions_of(layer, events[-1])
    assert [(event.actor, event.trigger_depth) for event in events] == [
        (USER, 0),
        ("agent:first", 1),
        ("agent:second", 2),
    ]
    assert events[2].value["output"] == {"echo": events[1].value}
    assert skips == {f"skip:{events[-1].id}:s3": ("skipped", "max_depth")}


async def _echo(run: Run) -> Any:
    return {"echo": run.input}


async def _by_handle(layer: StateLayer, run: Run, path: str) -> None:
    await run.layer.set(path, "x")


async def _by_the_services_layer(layer: StateLayer, run: Run, path: str) -> None:
    await layer.set(path, "x")


async def _signed_by_a_user(layer: StateLayer, run: Run, path: str) -> None:
    await layer.set(path, "x", actor=USER, source="api")


async def _by_merge(layer: StateLayer, run: Run, path: str) -> None:
    await layer.merge(path, {"x": 1})


async def _by_append(layer: StateLayer, run: Run, path: str) -> None:
    await layer.append([Write(path=path, value="x")])


async def _by_submit(layer: StateLayer, run: Run, path: str) -> None:
    await layer.submit(path, "x")


async def _in_a_task(layer: StateLayer, run: Run, path: str) -> None:
    await asyncio.create_task(layer.set(path, "x"))


async def _in_a_task_group(layer: StateLayer, run: Run, path: str) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(layer.set, path, "x")


async def _in_a_callback(layer: StateLayer, run: Run, path: str) -> None:
    started: asyncio.Future[asyncio.Task[Any]] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: started.set_result(asyncio.ensure_future(layer.set(path, "x"))))
    await (await started)


async def _in_to_thread(layer: StateLayer, run: Run, path: str) -> None:
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(layer.set(path, "x"), loop).result(10))


async def _in_anyios_thread(layer: StateLayer, run: Run, path: str) -> None:
    await anyio.to_thread.run_sync(anyio.from_thread.run, layer.set, path, "x")


async def _in_a_thread_pool(layer: StateLayer, run: Run, path: str) -> None:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as pool:
        await loop.run_in_executor(
            pool, lambda: asyncio.run_coroutine_threadsafe(run.layer.set(path, "x"), loop).result(10)
        )


async def _in_transact(layer: StateLayer, run: Run, path: str) -> None:
    await layer.transact(lambda tx: tx.set(path, "x"), run.event.namespace)


async def _joining_a_transaction(layer: StateLayer, run: Run, path: str) -> None:
    async with layer.transaction(run.event.namespace) as tx:
        await tx.set(f"{run.event.namespace}/side/{run.event.id}", "x")
        await layer.set(path, "x")


async def _in_a_transaction_of_the_handle(layer: StateLayer, run: Run, path: str) -> None:
    async with run.layer.transaction(run.event.namespace) as tx:
        await tx.set(path, "x")


async def _naming_the_root(layer: StateLayer, run: Run, path: str) -> None:
    await run.layer.set(path, "x", caused_by=run.event.root_event_id)


async def _naming_a_foreign_root(layer: StateLayer, run: Run, path: str) -> None:
    foreign = await layer.read_version("/tasks/foreign/status", 1)
    await layer.set(path, "x", actor=USER, source="api", caused_by=foreign.id)


WAYS: dict[str, Way] = {
    way.__name__.strip("_").replace("_", "-"): way
    for way in (
        _by_handle,
        _by_the_services_layer,
        _signed_by_a_user,
        _by_merge,
        _by_append,
        _by_submit,
        _in_a_task,
        _in_a_task_group,
        _in_a_callback,
        _in_to_thread,
        _in_anyios_thread,
        _in_a_thread_pool,
        _in_transact,
        _joining_a_transaction,
        _in_a_transaction_of_the_handle,
        _naming_the_root,
        _naming_a_foreign_root,
    )
}


async def test_e1_p7_an_executor_that_does_not_name_its_cause_stops_at_the_limit(layer: StateLayer) -> None:
    """Each way of writing has a task of its own; the workflow wakes itself by what it writes there."""

    @layer.workflow("note", max_attempts=1)
    async def note(run: Run) -> None:
        way = WAYS[run.params["taskId"]]
        await way(layer, run, f"{run.event.namespace}/notes/{run.event.id}")

    await layer.set("/tasks/foreign/status", "other", actor=USER)
    await subscribe(layer, "self", "/tasks/*/notes/*", workflow("note"))
    async with layer.running():
        for way in WAYS:
            await layer.set(f"/tasks/{way}/notes/first", "go", actor=USER)
        logs = {way: await stopped(layer, f"/tasks/{way}") for way in WAYS}
    for way, events in logs.items():
        notes = [event for event in events if "/notes/" in event.path]
        assert [event.trigger_depth for event in notes] == [0, 1, 2, 3], way
        assert [event.version for event in events] == [1] * len(events), way
        results = [event for event in events if "/workflows/note/results/" in event.path]
        assert [event.trigger_depth for event in results] == [1, 2, 3], way
        skips = await layer.executions.find(event_id=notes[-1].id)
        assert [(skip.id, skip.reason) for skip in skips] == [(f"skip:{notes[-1].id}:self", "max_depth")], way
        if "naming" not in way:
            assert [note.caused_by_event_id for note in notes[1:]] == [note.id for note in notes[:-1]], way
            assert {event.root_event_id for event in events} == {notes[0].id}, way
        if "user" not in way and "foreign" not in way:
            assert {(note.actor, note.source) for note in notes[1:]} == {("workflow:note", "workflow_node")}, way
        assert (await layer.verify(f"/tasks/{way}")).ok, way


async def test_p7_a_task_that_outlives_its_executor_stays_bound_to_it(layer: StateLayer) -> None:
    gate, stragglers = Gate(), []

    @layer.workflow("w")
    async def leave_behind(run: Run) -> None:
        async def write_late() -> Event:
            await gate.pass_through()
            return await layer.set("/tasks/T1/notes/late", "x")

        stragglers.append(asyncio.create_task(write_late()))

    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    async with layer.running():
        event = await layer.set("/tasks/T1/requests/R", "go", actor=USER)
        await layer.outcome(event.id, timeout=10)
        gate.open.set()
        late = await within(10, stragglers[0])
    assert (late.trigger_depth, late.caused_by_event_id, late.actor) == (1, event.id, "workflow:w")


async def test_p7_nobody_else_is_coloured_by_an_execution(layer: StateLayer) -> None:
    gate, go = Gate(), asyncio.Event()

    @layer.workflow("w")
    async def write_beside(run: Run) -> None:
        await gate.pass_through()
        go.set()
        await asyncio.gather(*(layer.set(f"/tasks/T1/mine/{n}", n) for n in range(5)))

    async def serve(name: str) -> list[Event]:
        await go.wait()
        return await asyncio.gather(*(layer.set(f"/tasks/T1/{name}/{n}", n, actor=USER) for n in range(5)))

    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    async with in_background(serve("before")) as before, layer.running():
        event = await layer.set("/tasks/T1/requests/R", "go", actor=USER)
        await within(10, gate.reached.wait())
        async with in_background(serve("after")) as after:
            during = await layer.set("/tasks/T1/during/1", 1, actor=USER)
            gate.open.set()
            events = [during, *await within(10, before), *await within(10, after)]
        await layer.outcome(event.id, timeout=10)
    assert {(e.trigger_depth, e.caused_by_event_id, e.source, e.actor) for e in events} == {(0, None, "api", USER)}
    mine = [e for e in await written(layer) if "/mine/" in e.path]
    assert {(e.trigger_depth, e.caused_by_event_id, e.actor) for e in mine} == {(1, event.id, "workflow:w")}
    assert len(mine) == 5


async def test_what_an_executor_writes_into_another_database_can_be_verified_there(
    database: Any, layer: StateLayer
) -> None:
    other = StateLayer(database, settings=Settings(prefix="other_"))
    await other.setup()

    @layer.workflow("w")
    async def forward(run: Run) -> None:
        await other.set("/tasks/T1/copies/R", run.input, actor="system:bridge")

    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    async with layer.running():
        event = await layer.set("/tasks/T1/requests/R", "go", actor=USER)
        [execution] = (await layer.outcome(event.id, timeout=10)).executions
    assert execution.state == "succeeded"
    report = await other.verify("/tasks/T1")
    await other.aclose()
    assert report.problems == []


# --- several subscriptions


async def test_a_subscription_at_its_limit_does_not_hide_another_of_the_same_agent(layer: StateLayer) -> None:
    @layer.agent("a")
    async def act(run: Run) -> str:
        return run.subscription.name

    await subscribe(layer, "a-shallow", "/tasks/*/notes/*", agent("a"), maxTriggerDepth=1)
    await subscribe(layer, "b-deep", "/tasks/*/notes/*", agent("a"), maxTriggerDepth=2)
    await subscribe(layer, "c-deep", "/tasks/*/notes/*", agent("a"), maxTriggerDepth=2)
    async with layer.running():
        root = await layer.set("/tasks/T1/status", "go", actor=USER)
        note = await layer.set("/tasks/T1/notes/1", 1, actor=USER, caused_by=root.id)
        deeper = await layer.set("/tasks/T1/notes/2", 2, actor=USER, caused_by=note.id)
        found = (await layer.outcome(note.id, timeout=10)).executions
        at_the_limit = await executions_of(layer, deeper)
    by_id = {execution.id: execution for execution in found}
    assert set(by_id) == {f"agent:{note.id}:a", f"skip:{note.id}:a-shallow"}
    job = by_id[f"agent:{note.id}:a"]
    assert (job.state, job.subscription.name, job.also_matched) == ("succeeded", "b-deep", ("c-deep",))
    assert (await layer.event(job.result_event_id)).value["output"] == "b-deep"
    assert at_the_limit == {
        f"skip:{deeper.id}:{name}": ("skipped", "max_depth") for name in ("a-shallow", "b-deep", "c-deep")
    }


async def test_several_subscriptions_of_one_target_are_one_execution_and_two_targets_are_two(
    layer: StateLayer,
) -> None:
    runs: list[str] = []

    async def count(run: Run) -> None:
        runs.append(run.execution.id)

    layer.agent("a")(count)
    layer.agent("b")(count)
    layer.workflow("a")(count)
    for name, action in (("z", agent("a")), ("m", agent("a")), ("b", agent("b")), ("w", workflow("a"))):
        await subscribe(layer, name, "/tasks/*/requests/*", action)
    async with layer.running():
        event = await layer.set("/tasks/T1/requests/R", "go", actor=USER)
        found = (await layer.outcome(event.id, timeout=10)).executions
    owners = {execution.id: (execution.subscription.name, execution.also_matched) for execution in found}
    assert owners == {
        f"agent:{event.id}:a": ("m", ("z",)),
        f"agent:{event.id}:b": ("b", ()),
        f"workflow:{event.id}:a": ("w", ()),
    }
    assert sorted(runs) == sorted(owners)


# --- publishing


async def test_publishing_the_same_at_each_start_changes_nothing(layer: StateLayer, make_layer: MakeLayer) -> None:
    mapping = {
        "name": "s",
        "pattern": "/tasks/*/requests/*",
        "condition": {"path": "$event.value.at", "op": "lt", "value": datetime(2026, 1, 1, 8, 0, 0, 1999, tzinfo=UTC)},
        "action": {"type": "notify", "n": 1, "nested": {"b": 1, "a": [1.0, None]}},
        "maxTriggerDepth": 2,
        "inputSchema": {"type": "object"},
        "output": {"path": "/tasks/{taskId}/told/{eventId}"},
    }
    first = await layer.subscriptions.publish(mapping)
    revision = await layer.subscriptions.revision()
    for _ in range(2):
        again = await make_layer().subscriptions.publish(mapping)
        assert again == first
    assert await layer.subscriptions.revision() == revision
    changed = mapping | {"action": {"type": "notify", "n": 1.0, "nested": {"b": 1, "a": [1.0, None]}}}
    assert (await layer.subscriptions.publish(changed)).version == 2
    assert await layer.subscriptions.revision() == revision + 1


async def test_concurrent_publishers_of_one_name_take_turns(layer: StateLayer, make_layer: MakeLayer) -> None:
    other = make_layer()

    def version(n: int) -> dict[str, Any]:
        return {"name": "s", "pattern": f"/tasks/*/requests/r{n}", "action": workflow("w")}

    same = await asyncio.gather(*(which.subscriptions.publish(version(0)) for which in [layer, other] * 4))
    assert {published.version for published in same} == {1}
    await asyncio.gather(*([layer, other][n % 2].subscriptions.publish(version(n)) for n in range(1, 7)))
    stored = await layer.subscriptions.find()
    assert [found.version for found in stored] == [1, 2, 3, 4, 5, 6, 7]
    assert [found.version for found in stored if found.enabled] == [7]
    intervals = [interval for found in stored for interval in found.active_revs]
    assert [end for _, end in intervals] == [start for start, _ in intervals[1:]] + [None]


async def test_p10_a_bad_subscription_is_refused_with_every_clause_and_nothing_is_written(layer: StateLayer) -> None:
    await subscribe(layer, "sound", "/tasks/*/requests/*", workflow("w"))
    revision = await layer.subscriptions.revision()
    bad = {
        "name": "a/b",
        "pattern": "/tasks/*/re*quests",
        "condition": {"all": [{"path": "$env.x", "op": "eq", "value": 1}, {"path": "$event.op", "op": "like"}]},
        "action": {"type": "execute_agent", "agentId": ""},
        "maxTriggerDepth": 33,
        "inputSchema": {"type": 7},
        "output": {"path": "/tasks/{taskId}/x{eventId}"},
        "priority": 1,
    }
    with pytest.raises(InvalidSubscriptionError) as refused:
        await layer.subscriptions.publish(bad)
    told = "\n".join(refused.value.problems)
    for clause in (
        "name",
        "pattern",
        "condition.all[0]",
        "condition.all[1]",
        "action.agentId",
        "maxTriggerDepth",
        "inputSchema",
        "output.path",
        "priority",
    ):
        assert clause in told, told
    for nonsense in (None, [], "s", {}, {"name": "sound"}):
        with pytest.raises(InvalidSubscriptionError):
            await layer.subscriptions.publish(nonsense)
    assert await layer.subscriptions.revision() == revision
    assert [found.id for found in await layer.subscriptions.find()] == ["sound@v1"]


async def test_p8_a_transaction_is_of_the_revision_that_it_began_under(layer: StateLayer) -> None:
    """Also for what it writes after others have published, and whoever evaluates it, now or later."""
    runs: list[str] = []

    async def count(run: Run) -> None:
        runs.append(run.event.path)

    layer.workflow("w")(count)
    layer.workflow("v")(count)
    await subscribe(layer, "leaves", "/tasks/*/requests/*", workflow("v"))
    async with layer.transaction("/tasks/T1") as tx:
        await tx.set("/tasks/T1/requests/before", 1, actor=USER)
        await subscribe(layer, "comes", "/tasks/*/requests/*", workflow("w"))
        await layer.subscriptions.disable("leaves")
        early = await tx.set("/tasks/T1/requests/early", 1, actor=USER)
    late = await layer.set("/tasks/T1/requests/late", 1, actor=USER)
    async with layer.running():
        assert set(await executions_of(layer, early)) == {f"workflow:{early.id}:v"}
        assert set(await executions_of(layer, late)) == {f"workflow:{late.id}:w"}
    assert sorted(runs) == [f"/tasks/T1/requests/{name}" for name in ("before", "early", "late")]


# --- identity: D3, D8


async def test_d8_however_often_it_is_delivered_it_runs_once(layer: StateLayer, make_layer: MakeLayer) -> None:
    """Two layers listen and work, and a third one catches up from nothing while the first run still goes on."""
    runs: list[str] = []
    gate = Gate()

    async def count(run: Run) -> None:
        runs.append(run.event.id)
        await gate.pass_through()

    second, third = make_layer(), make_layer()
    for each in (layer, second, third):
        each.agent("a")(count)
    await subscribe(layer, "s", "/tasks/*/requests/*", agent("a"))
    async with layer.running(), second.running():
        events = [await layer.set(f"/tasks/T{n % 3}/requests/R{n}", n, actor=USER) for n in range(12)]
        await within(10, gate.reached.wait())
        async with third.running():
            gate.open.set()
            for event in events:
                found = await executions_of(layer, event)
                assert found == {f"agent:{event.id}:a": ("succeeded", None)}
    assert sorted(runs) == sorted(event.id for event in events)


# --- running


async def test_it_can_be_entered_in_one_task_and_left_in_another(layer: StateLayer) -> None:
    layer.workflow("w")(_echo)
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    running = layer.running()
    await asyncio.create_task(running.__aenter__())
    event = await layer.set("/tasks/T1/requests/R", 1, actor=USER)
    [execution] = (await layer.outcome(event.id, timeout=10)).executions
    await asyncio.create_task(running.__aexit__(None, None, None))
    assert execution.state == "succeeded"
    await layer.aclose()
    assert owned_tasks() == []


async def test_one_layer_listens_and_another_works(layer: StateLayer, make_layer: MakeLayer) -> None:
    worker = make_layer()
    worker.workflow("w")(_echo)
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    async with layer.running(work=False), worker.running(listen=False):
        event = await layer.set("/tasks/T1/requests/R", 1, actor=USER)
        [execution] = (await worker.outcome(event.id, timeout=10)).executions
    assert (execution.state, execution.reason) == ("succeeded", None)


async def test_it_can_run_again_after_it_has_stopped(layer: StateLayer) -> None:
    runs: list[int] = []

    @layer.workflow("w")
    async def count(run: Run) -> None:
        runs.append(run.input)

    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    for n in range(2):
        async with layer.running():
            event = await layer.set("/tasks/T1/requests/R", n, actor=USER)
            await layer.outcome(event.id, timeout=10)
        await layer.set("/tasks/T1/requests/R", n + 10, actor=USER)
    assert [entry for entry in runs if entry < 10] == [0, 1]
    assert 10 in runs
    assert 11 not in runs


async def test_a_worker_with_nobody_listening_says_so(layer: StateLayer) -> None:
    layer.workflow("w")(_echo)
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    async with layer.running(listen=False):
        event = await layer.set("/tasks/T1/requests/R", 1, actor=USER)
        with pytest.raises(TimeoutError, match="not been evaluated"):
            await layer.outcome(event.id, timeout=0.3)
        assert await layer.executions.find() == []
    async with layer.running():
        assert (await layer.outcome(event.id, timeout=10)).executions[0].state == "succeeded"


async def test_registering_the_executor_later_cures_no_executor(layer: StateLayer) -> None:
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("late"))
    async with layer.running():
        event = await layer.set("/tasks/T1/requests/R", 1, actor=USER)
        with pytest.raises(TimeoutError, match="no_executor"):
            await layer.outcome(event.id, timeout=1)
        [waiting] = await layer.executions.find(event_id=event.id)
        assert (waiting.state, waiting.reason) == ("queued", "no_executor")
        layer.workflow("late")(_echo)
        [execution] = (await layer.outcome(event.id, timeout=10)).executions
    assert (execution.state, execution.reason) == ("succeeded", None)


async def test_who_only_listens_offers_nothing(layer: StateLayer) -> None:
    """A service registers the same executors everywhere; where it does not work, nobody runs them."""
    layer.workflow("w")(_echo)
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    async with layer.running(work=False):
        event = await layer.set("/tasks/T1/requests/R", 1, actor=USER)
        with pytest.raises(TimeoutError, match="no_executor"):
            await layer.outcome(event.id, timeout=1)


async def test_stopping_waits_for_a_workflow(layer: StateLayer) -> None:
    gate = Gate()
    layer.workflow("w")(gate)
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    async with layer.running():
        event = await layer.set("/tasks/T1/requests/R", 1, actor=USER)
        await within(10, gate.reached.wait())
        asyncio.get_running_loop().call_later(0.2, gate.open.set)
    [execution] = await layer.executions.find(event_id=event.id)
    assert (execution.state, execution.attempts) == ("succeeded", 1)
    await layer.aclose()
    assert owned_tasks() == []


async def test_a_run_that_is_cancelled_drains(layer: StateLayer) -> None:
    gate = Gate()
    layer.workflow("w")(gate)
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    task = asyncio.create_task(layer.run())
    event = await layer.set("/tasks/T1/requests/R", 1, actor=USER)
    await within(10, gate.reached.wait())
    task.cancel()
    asyncio.get_running_loop().call_later(0.2, gate.open.set)
    with pytest.raises(asyncio.CancelledError):
        await within(10, task)
    [execution] = await layer.executions.find(event_id=event.id)
    assert execution.state == "succeeded"


@pytest.mark.parametrize("patience", [0.01, 0.4], ids=["at-once", "while-draining"])
async def test_a_run_that_is_cancelled_twice_leaves_no_task_behind(make_layer: MakeLayer, patience: float) -> None:
    """The second cancellation (a shutdown that lost its patience) hits the listener in a read, or the drain."""
    layer = make_layer(Settings(poll=0.1, drain_timeout=30))
    gate = Gate()
    layer.workflow("w")(gate)
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    try:
        await _run_and_cancel_twice(layer, gate, patience)
        assert owned_tasks() == []
        gc.collect()  # whatever failed with nobody looking is told now, and fails the test
        await asyncio.sleep(0)
    finally:
        gate.open.set()
        await wait_until(lambda: not owned_tasks(), message="the end of what was left")


async def _run_and_cancel_twice(layer: StateLayer, gate: Gate, patience: float) -> None:
    task = asyncio.create_task(layer.run())
    await layer.set("/tasks/T1/requests/R", 1, actor=USER)
    await within(10, gate.reached.wait())
    for _ in range(2):
        task.cancel()
        await asyncio.wait([task], timeout=patience)
    await asyncio.wait([task], timeout=15)
    assert task.cancelled()


async def test_an_anyio_scope_that_is_cancelled_leaves_no_task_behind(layer: StateLayer) -> None:
    """anyio cancels again whatever still waits inside a cancelled scope."""
    with anyio.CancelScope() as scope:
        async with layer.running():
            scope.cancel()
            await anyio.sleep_forever()
    try:
        await layer.aclose()
        assert owned_tasks() == []
    finally:
        await wait_until(lambda: not owned_tasks(), timeout=5, message="the end of what was left")


async def test_leaving_does_not_hang_when_the_driver_swallows_a_cancellation(
    make_layer: MakeLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11's ``asyncio.wait_for``, under which PyMongo connects, may return although it was cancelled."""
    layer = make_layer(Settings(poll=0.05, heartbeat=0.05))
    entered, in_the_driver = asyncio.Event(), asyncio.Event()
    report = Instances.report

    async def report_slowly(self: Instances, *arguments: Any) -> None:
        await report(self, *arguments)
        if entered.is_set() and not in_the_driver.is_set():
            in_the_driver.set()
            with suppress(asyncio.CancelledError, TimeoutError):
                await within(1, asyncio.Event().wait())

    async def enter_and_leave() -> None:
        async with layer.running(listen=False):
            entered.set()
            await in_the_driver.wait()

    monkeypatch.setattr(Instances, "report", report_slowly)
    task = asyncio.create_task(enter_and_leave())
    try:
        await asyncio.wait([task], timeout=5)
        assert task.done(), "leaving the block hangs"
    finally:
        for left in owned_tasks():
            left.cancel()


async def test_an_exception_of_the_user_leaves_the_block_as_it_is(layer: StateLayer) -> None:
    class MineError(Exception): ...

    with pytest.raises(MineError) as raised:
        async with layer.running():
            raise MineError
    assert raised.value.__context__ is None
    await layer.aclose()
    assert owned_tasks() == []


async def test_a_closed_layer_refuses_and_can_be_closed_again(layer: StateLayer) -> None:
    async with layer.running():
        await layer.set("/tasks/T1/status", 1, actor=USER)
    await layer.aclose()
    await layer.aclose()
    with pytest.raises(ClosedError):
        await layer.set("/tasks/T1/status", 2, actor=USER)
    with pytest.raises(ClosedError):
        async with layer.watch("/tasks/T1/**"):
            pass
    assert (await layer.get("/tasks/T1/status")).value == 1


async def test_closing_inside_the_block_does_not_hang_its_end(make_layer: MakeLayer) -> None:
    layer, gate = make_layer(), Gate()
    layer.workflow("w")(gate)
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))

    async def close_inside() -> None:
        async with layer.running():
            await layer.set("/tasks/T1/requests/R", 1, actor=USER)
            await gate.reached.wait()
            await layer.aclose()
            gate.open.set()

    with pytest.raises(StateLayerError):  # the result could not be written, and that is said
        await within(15, close_inside())
    assert owned_tasks() == []


async def test_a_database_that_was_never_set_up_is_refused_at_once(make_layer: MakeLayer, database: Any) -> None:
    other = make_layer(Settings(prefix="never_"))
    with pytest.raises(StateLayerError, match="setup"):
        async with other.running():
            pytest.fail("it runs")
    assert owned_tasks() == []


async def test_a_pause_holds_everything_and_loses_nothing(layer: StateLayer) -> None:
    layer.workflow("w")(_echo)
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    async with layer.running():
        await layer.pause()
        event = await layer.set("/tasks/T1/requests/R", 1, actor=USER)
        with pytest.raises(TimeoutError):
            await layer.outcome(event.id, timeout=0.5)
        await layer.unpause()
        assert (await layer.outcome(event.id, timeout=10)).executions[0].state == "succeeded"


async def test_a_service_can_start_while_dispatch_is_paused(layer: StateLayer) -> None:
    """A restored copy is paused first; its services must come up, evaluate nothing, and be the ones to unpause."""
    layer.workflow("w")(_echo)
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    await layer.pause()
    event = await layer.set("/tasks/T1/requests/R", 1, actor=USER)

    async def start() -> Outcome:
        async with layer.running():
            assert await layer.executions.find() == []
            await layer.unpause()
            return await layer.outcome(event.id, timeout=10)

    assert (await within(15, start())).executions[0].state == "succeeded"


async def test_a_listener_that_waits_for_a_revision_can_be_stopped(database: Any, layer: StateLayer) -> None:
    """A copy restored collection by collection may have events newer than its ``meta``."""
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    await layer.set("/tasks/T1/requests/R", 1, actor=USER)
    await database["meta"].update_one({"_id": "subscriptions"}, {"$inc": {"revision": -1}})

    async def run_until_it_waits() -> None:
        async with layer.running():
            await wait_until(is_red)

    async def is_red() -> bool:
        return any("restored from an older copy" in problem for problem in (await layer.health()).problems)

    task = asyncio.create_task(run_until_it_waits())
    try:
        await asyncio.wait([task], timeout=10)
        assert task.done(), "leaving the block hangs"
    finally:
        await database["meta"].update_one({"_id": "subscriptions"}, {"$inc": {"revision": 1}})
        await within(10, task)


async def test_sigterm_stops_every_layer_that_runs(make_layer: MakeLayer) -> None:
    earlier = signal.signal(signal.SIGTERM, lambda *_: None)  # whatever happens here, the suite must not die
    try:
        first, second = make_layer(), make_layer()
        tasks = [asyncio.create_task(each.run(listen=False)) for each in (first, second)]

        async def both_run() -> bool:
            return await first._database.collection("instances").count({}) == 2

        await wait_until(both_run)
        os.kill(os.getpid(), signal.SIGTERM)
        _, running = await asyncio.wait(tasks, timeout=5)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        assert not running, "one of two layers did not hear of SIGTERM"
    finally:
        signal.signal(signal.SIGTERM, earlier)


async def test_a_services_own_sigterm_handler_is_there_again_afterwards(make_layer: MakeLayer) -> None:
    def mine(*_: object) -> None: ...

    earlier = signal.signal(signal.SIGTERM, mine)
    try:
        task = asyncio.create_task(make_layer().run(listen=False))
        await wait_until(lambda: signal.getsignal(signal.SIGTERM) is not mine)
        task.cancel()
        await asyncio.wait([task])
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, earlier)


# --- H3, H5


@pytest.mark.parametrize(
    "output",
    [
        "/tasks/{requestId}/results/{eventId}",
        "/tasks/T2/results/{eventId}",
        "/threads/{taskId}/results/{eventId}",
    ],
)
async def test_h3_an_output_path_cannot_leave_the_namespace(layer: StateLayer, output: str) -> None:
    calls: list[str] = []

    @layer.agent("a")
    async def act(run: Run) -> str:
        calls.append(run.event.id)
        return "x"

    try:
        await subscribe(layer, "s", "/tasks/*/requests/*", agent("a"), output={"path": output})
    except InvalidSubscriptionError:
        return  # refusing it early is as good
    async with layer.running():
        event = await layer.set("/tasks/T1/requests/T2", "go", actor=USER)
        [execution] = (await layer.outcome(event.id, timeout=10)).executions
    assert (execution.state, execution.reason) == ("failed", "rendering_failed")
    assert calls == []  # not paid for
    assert [event.namespace for event in await written(layer, "/tasks/T1")] == ["/tasks/T1"] * 2
    assert await written(layer, "/tasks/T2") == []
    assert await written(layer, "/threads/T1") == []


NO_SEGMENTS = ["a/b", "../U/requests/1", ".", "..", "", " x", "x\n", "*", "{x}", "e\u0301", None, True, 1]


async def test_h3_an_id_that_is_no_segment_names_nothing(layer: StateLayer) -> None:
    chosen: list[Any] = []

    async def act(run: Run) -> None: ...

    class Chooses:
        def target(self, action: Any) -> Any:
            return chosen[-1]

        async def execute(self, run: Run) -> None: ...

    layer.executors.register("notify", Chooses())
    for no_segment in NO_SEGMENTS:
        chosen.append(no_segment)
        with pytest.raises((InvalidExecutorError, InvalidSubscriptionError)):
            await subscribe(layer, "s", "/tasks/*/requests/*", {"type": "notify"})
        for register in (layer.agent, layer.workflow):
            with pytest.raises(InvalidExecutorError):
                register(no_segment)(act)
        for action in (agent(no_segment), workflow(no_segment)):
            with pytest.raises(InvalidSubscriptionError):
                await subscribe(layer, "s", "/tasks/*/requests/*", action)
        if isinstance(no_segment, str) and no_segment != "a/b":  # which is two segments, an address of its own
            for path in (f"/tasks/T1/requests/{no_segment}/x", f"/tasks/{no_segment}/requests/x"):
                with pytest.raises(InvalidPathError):
                    await layer.set(path, 1, actor=USER)
    assert await layer.subscriptions.find() == []
    assert await written(layer) == []


@pytest.mark.parametrize(
    "output",
    [
        "/tasks/{taskId}/agents/other/results/{eventId}",
        "/tasks/{taskId}/agents/a/errors/{eventId}",
        "/tasks/{taskId}/workflows/w/results/{eventId}",
        "/tasks/{taskId}/steps/{eventId}",
        "/tasks/{taskId}/decision",
    ],
)
async def test_h3_an_output_path_cannot_write_what_others_own(layer: StateLayer, output: str) -> None:
    layer.agent("a")(_echo)
    try:
        await subscribe(layer, "s", "/tasks/*/requests/*", agent("a"), output={"path": output})
    except InvalidSubscriptionError:
        return
    async with layer.running():
        event = await layer.set("/tasks/T1/requests/R", "go", actor=USER)
        [execution] = (await layer.outcome(event.id, timeout=10)).executions
    assert execution.state == "failed"
    path = output.replace("{taskId}", "T1").replace("{eventId}", event.id)
    entry = await layer.get(path)
    assert entry is None or entry.value["status"] == "failed"


BLANK = ["", " ", None, True, 0, b"T1", {"$gt": ""}, ["T1"]]


@pytest.fixture
async def populated(layer: StateLayer) -> StateLayer:
    """A layer with two tasks, an execution in each."""
    await subscribe(layer, "s", "/tasks/*/requests/*", workflow("w"))
    layer.workflow("w")(_echo)
    async with layer.running():
        for task in ("T1", "T2"):
            event = await layer.set(f"/tasks/{task}/requests/R", 1, actor=USER)
            await layer.outcome(event.id, timeout=10)
    return layer


async def test_h5_a_scope_that_is_blank_or_no_text_is_refused_everywhere(populated: StateLayer) -> None:
    layer = populated

    async def drained(namespace: Any) -> list[Event]:
        return [event async for event in layer.events(namespace)]

    async def watched(pattern: Any) -> None:
        async with layer.watch(pattern, after=0):
            pass

    asked: dict[str, Callable[[Any], Awaitable[Any]]] = {
        "get": layer.get,
        "entries": layer.entries,
        "events": drained,
        "verify": layer.verify,
        "replay": layer.replay,
        "read_version": lambda path: layer.read_version(path, 1),
        "state_at": lambda namespace: layer.state_at(namespace, 1),
        "watch": watched,
        "wait_for": lambda path: layer.wait_for(path, timeout=0.01),
        "trace_causation of a task": lambda which: layer.trace_causation(task_id=which),
        "trace_causation of an event": lambda which: layer.trace_causation(event_id=which),
        "event": layer.event,
        "outcome": lambda which: layer.outcome(which, timeout=0.01),
        "set": lambda path: layer.set(path, 1, actor=USER),
        "caused_by": lambda which: layer.set("/tasks/T1/x", 1, actor=USER, caused_by=which or ""),
        "executions.get": layer.executions.get,
        "executions.cancel": layer.executions.cancel,
        "executions.requeue": layer.executions.requeue,
        "subscriptions.enable": layer.subscriptions.enable,
        "subscriptions.disable": layer.subscriptions.disable,
    }
    open_to: list[tuple[str, Any, Any]] = []
    for name, ask in asked.items():
        for blank in BLANK:
            try:
                answer = await ask(blank)
            except (InvalidInputError, NotFoundError):
                continue
            except Exception as error:  # noqa: BLE001 - whatever it is, it is no refusal
                answer = error
            if name != "event" or blank != " ":  # an id that nothing has: nothing is what it gets
                open_to.append((name, blank, answer))
    assert open_to == []
    assert len(await written(layer, "/tasks/T1")) == 2  # the request and its result, nothing of all that
    assert {found.state for found in await layer.executions.find()} == {"succeeded"}


async def test_h5_listing_executions_of_a_blank_scope_shows_none_of_another(populated: StateLayer) -> None:
    shown: list[tuple[str, Any]] = []
    for scope in ("namespace", "event_id", "target"):
        for blank in BLANK:
            with suppress(InvalidInputError):
                if await populated.executions.find(**{scope: blank}):
                    shown.append((scope, blank))
    assert shown == []


async def test_h5_a_cause_in_another_task_is_named_and_not_read(populated: StateLayer) -> None:
    foreign = (await written(populated, "/tasks/T2"))[0]
    effect = await populated.set("/tasks/T1/notes/N", 1, actor=USER, caused_by=foreign.id)
    assert effect.trigger_depth == 1
    for tree in (
        await populated.trace_causation(task_id="T1"),
        await populated.trace_causation(event_id=effect.id),
    ):
        assert (tree.links_resolved, tree.dangling_caused_by) == (False, [foreign.id])
        assert {node.event.namespace for node in tree} == {"/tasks/T1"}
    assert (await populated.verify("/tasks/T1")).ok


# --- forks


CALLS: list[Callable[[StateLayer], Any]] = [
    lambda layer: layer.set("/tasks/T1/x", 2, actor=USER),
    lambda layer: layer.get("/tasks/T1/x"),
    lambda layer: layer.verify("/tasks/T1"),
    lambda layer: layer.transact(lambda tx: tx.set("/tasks/T1/x", 3, actor=USER), "/tasks/T1"),
    lambda layer: layer.transaction("/tasks/T1"),
    lambda layer: layer.watch("/tasks/**"),
    lambda layer: layer.run(),
]


def refusals(layer: StateLayer) -> list[str]:
    """Call everything in a process that has no loop any more, and return the codes of the errors."""
    codes = []
    for call in CALLS:
        try:
            call(layer).send(None)
        except StateLayerError as error:
            codes.append(error.code)
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent is to see it
            codes.append(repr(error))
    return codes


async def test_i7_a_fork_is_refused_what_belongs_to_its_parent(layer: StateLayer) -> None:
    """In the child the driver would wait for a monitor that only runs in the parent, for ever."""
    await layer.set("/tasks/T1/x", 1, actor=USER)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which the child does not touch
        child = os.fork()
    if child == 0:
        os.write(write, ",".join(refusals(layer)).encode())
        os._exit(0)
    os.close(write)
    told = await anyio.to_thread.run_sync(os.read, read, 1000)
    await anyio.to_thread.run_sync(os.waitpid, child, 0)
    assert told.decode() == ",".join(["forked"] * len(CALLS))
    assert await layer.get("/tasks/T1/x")
