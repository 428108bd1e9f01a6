"""Executors: registering, what they are handed, what they write (DESIGN §8; P6, P7)."""

from __future__ import annotations

import asyncio
import functools
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from workbench import AGENT, WORKFLOW, Workbench

from statelayer import paths
from statelayer.errors import InvalidExecutorError, InvalidPathError, InvalidValueError, ReservedPathError
from statelayer.events import Write
from statelayer.executors import (
    ANY,
    AgentRequest,
    AgentResponse,
    Execution,
    Registry,
    RetryPolicy,
    Run,
    SubscriptionRef,
)
from statelayer.executors.envelopes import describe, error_path, origin_of, result_place, template_values
from statelayer.executors.inputs import check_input
from statelayer.subscriptions import Output, Subscription
from statelayer.testing import wait_until

pytestmark = pytest.mark.anyio

EVENT = "0123456789abcdef01234567"


def execution(action: dict[str, Any], target: str, **fields: Any) -> Execution:
    return Execution(
        id="job",
        namespace="/tasks/T1",
        event_id=EVENT,
        root_event_id="root",
        trigger_depth=1,
        subscription=SubscriptionRef(name="intake", version=2),
        action=action,
        target=target,
        state="running",
        created_at=datetime.now(UTC),
        **fields,
    )


async def outcome_of(bench: Workbench, action: dict[str, Any], value: Any = "v", **definition: Any) -> Execution:
    """Write an event, wake the action for it, and return the execution when it has ended."""
    subscription = await bench.subscription(action, **definition)
    async with bench.working():
        return await bench.ended(await bench.wake(await bench.event(value=value), subscription))


# --- the table of DESIGN §8


@pytest.mark.parametrize(
    ("action", "target", "home", "actor", "source"),
    [
        (AGENT, "facade", "agents/facade", "agent:facade", "agent_callback"),
        (WORKFLOW, "review", "workflows/review", "workflow:review", "workflow_node"),
        ({"type": "send_mail"}, "intake", "executors/send_mail/intake", "system:send_mail", "subscription"),
    ],
)
def test_where_results_go_and_who_signs_them(
    action: dict[str, Any], target: str, home: str, actor: str, source: str
) -> None:
    run = execution(action, target)
    assert result_place(run, None).path == f"/tasks/T1/{home}/results/{EVENT}"
    assert error_path(run) == f"/tasks/T1/{home}/errors/{EVENT}"
    assert all(paths.reserved(paths.parse(path)) for path in (result_place(run, None).path, error_path(run)))
    origin = origin_of(run)
    assert (origin.actor, origin.source) == (actor, source)
    assert (origin.event_id, origin.root_event_id, origin.depth) == (EVENT, "root", 1)


def test_fixed_names_hide_captures_of_the_same_name() -> None:
    run = execution(AGENT, "facade", params={"eventId": "E9", "agentId": "other", "requestId": "R1"})
    known = template_values(run)
    assert (known["eventId"], known["agentId"], known["taskId"]) == (EVENT, "facade", "T1")
    assert (known["params.eventId"], known["params.agentId"]) == ("E9", "other")
    assert known["requestId"] == known["params.requestId"] == "R1"


@pytest.mark.parametrize(
    ("template", "path", "shared"),
    [
        ("/tasks/{taskId}/agents/{agentId}/results/{eventId}", f"/tasks/T1/agents/facade/results/{EVENT}", False),
        ("/tasks/{taskId}/answers/{requestId}", "/tasks/T1/answers/R1", True),
        ("/tasks/{taskId}/answers/{params.eventId}", "/tasks/T1/answers/E9", True),
    ],
)
def test_an_output_path_is_rendered(template: str, path: str, shared: bool) -> None:
    run = execution(AGENT, "facade", params={"requestId": "R1", "eventId": "E9"})
    place = result_place(run, Output(path=template))
    assert (place.path, place.shared) == (path, shared)


@pytest.mark.parametrize("template", ["/tasks/{other}/answers/{eventId}", "/tasks/{taskId}/answers/{unknown}"])
def test_an_output_path_stays_in_its_namespace(template: str) -> None:
    with pytest.raises(InvalidPathError):
        result_place(execution(AGENT, "facade", params={"other": "T2"}), Output(path=template))


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@given(st.text(st.characters(), max_size=3000))
def test_any_message_is_told_in_a_form_that_can_be_stored(message: str) -> None:
    told = describe(ValueError(message))
    assert len(told["message"]) <= 2000
    assert told["message"].encode().decode() == told["message"]
    assert (told["type"], told["code"]) == ("ValueError", None)


def test_an_error_without_a_message_is_told_too() -> None:
    assert describe(UnspeakableError())["message"] == "(its message could not be made)"
    assert describe(InvalidValueError("x", "y"))["code"] == "invalid_value"


# --- input


def test_the_failing_field_of_an_input_is_named() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["b"]}
    with pytest.raises(InvalidValueError, match=r"input\.a\[1\]: 'x' is not of type 'integer'"):
        check_input({"a": [1, "x"], "b": 1}, schema)
    with pytest.raises(InvalidValueError, match="'b' is a required property"):
        check_input({}, schema)
    check_input({"b": None}, schema)


def test_a_schema_fetches_nothing() -> None:
    with pytest.raises(InvalidValueError, match=r"refers to something that is not in it: https://example\.org/x"):
        check_input({}, {"$ref": "https://example.org/x"})


# --- the registry


class Mailer:
    async def execute(self, run: Run) -> Any:
        return {"sent": run.input}

    def target(self, action: Any) -> str:
        return str(action.params.get("queue", "default"))


class Plain:
    async def execute(self, run: Run) -> Any:
        return None


def subscription(action: dict[str, Any]) -> Subscription:
    return Subscription.parse({"name": "intake", "pattern": "/tasks/**", "action": action})


def test_what_a_registry_offers() -> None:
    registry = Registry()

    @registry.workflow("review")
    async def review(run: Run) -> None: ...

    @registry.agent("facade")
    async def classify(run: Run) -> None: ...

    registry.register("send_mail", Mailer())
    assert registry.offers() == {("execute_workflow", "review"), ("execute_agent", "facade"), ("send_mail", ANY)}
    found = registry.find("send_mail", "anything")
    assert found is not None
    assert isinstance(found.executor, Mailer)
    assert registry.find("execute_agent", "other") is None


def test_targets() -> None:
    registry = Registry()
    registry.register("send_mail", Mailer())
    registry.register("plain", Plain())
    assert registry.target_of(subscription(AGENT)) == "facade"
    assert registry.target_of(subscription(WORKFLOW)) == "review"
    assert registry.target_of(subscription({"type": "send_mail", "queue": "slow"})) == "slow"
    assert registry.target_of(subscription({"type": "plain"})) == "intake"
    assert registry.target_of(subscription({"type": "elsewhere"})) == "intake"
    with pytest.raises(InvalidExecutorError, match="chose no valid target for 'intake'"):
        registry.target_of(subscription({"type": "send_mail", "queue": "a/b"}))


@pytest.mark.parametrize("id", ["", "a/b", "{x}", "..", "x" * 256, "\ue000", 7])
def test_an_id_is_one_segment_and_part_of_an_actor(id: Any) -> None:
    with pytest.raises(InvalidExecutorError):
        Registry().agent(id)(Plain().execute)


@pytest.mark.parametrize("action_type", ["agent", "workflow", "skip", "execute_agent", "a:b", "Mail", "", "x" * 300])
def test_reserved_and_malformed_types_are_refused(action_type: str) -> None:
    with pytest.raises(InvalidExecutorError):
        Registry().register(action_type, Plain())


def test_only_asynchronous_executors_are_taken() -> None:
    registry = Registry()
    for wrong in (len, print, Plain()):
        with pytest.raises(InvalidExecutorError):
            registry.workflow("review")(wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidExecutorError):
        registry.register("mail", print)  # type: ignore[arg-type]
    with pytest.raises(InvalidExecutorError):
        registry.agent_runtime("facade", Plain())  # type: ignore[arg-type]
    registry.workflow("partial")(functools.partial(Plain.execute, Plain()))
    assert registry.offers() == {("execute_workflow", "partial")}


def test_an_id_is_registered_once() -> None:
    registry = Registry()
    registry.agent("facade")(Plain().execute)
    registry.workflow("facade")(Plain().execute)
    registry.register("mail", Plain())
    for again in (lambda: registry.agent("facade")(Plain().execute), lambda: registry.register("mail", Plain())):
        with pytest.raises(InvalidExecutorError, match="registered already"):
            again()


@pytest.mark.parametrize("terms", [{"timeout": 0}, {"timeout": float("inf")}, {"concurrency": 0}, {"max_attempts": 0}])
def test_terms_that_make_no_sense_are_refused(terms: dict[str, Any]) -> None:
    with pytest.raises(InvalidExecutorError):
        Registry().workflow("review", **terms)(Plain().execute)
    with pytest.raises(InvalidExecutorError):
        Registry().workflow("review", max_attempts=1, retry=RetryPolicy())


# --- results


async def test_a_result_is_a_fact_of_the_executor(bench: Workbench) -> None:
    @bench.registry.agent("facade")
    async def classify(run: Run) -> Any:
        return {"code": run.input["text"], "attempt": run.attempt}

    subscription = await bench.subscription(AGENT)
    async with bench.working():
        event = await bench.event(value={"text": "0901"})
        done = await bench.ended(await bench.wake(event, subscription))
    assert (done.state, done.reason, done.attempts, done.lease) == ("succeeded", None, 1, None)
    fact = await bench.result_of(done)
    assert (fact["path"], fact["actor"]) == (f"/tasks/T1/agents/facade/results/{event.id}", "agent:facade")
    assert (fact["source"], fact["triggerDepth"]) == ("agent_callback", 1)
    assert fact["causedByEventId"] == fact["rootEventId"] == event.id
    assert fact["value"] == {
        "status": "succeeded",
        "output": {"code": "0901", "attempt": 1},
        "target": "facade",
        "eventId": event.id,
        "subscription": {"name": "intake", "version": 1},
        "startedAt": done.started_at,
        "finishedAt": fact["value"]["finishedAt"],
    }
    assert done.started_at is not None
    assert done.started_at <= fact["value"]["finishedAt"]


async def test_none_is_an_output_of_null(bench: Workbench) -> None:
    bench.registry.register("plain", Plain())
    fact = await bench.result_of(await outcome_of(bench, {"type": "plain"}))
    assert fact["path"].startswith("/tasks/T1/executors/plain/intake/results/")
    assert fact["value"]["output"] is None


@pytest.mark.parametrize("output", ["$secret", {"$x": 1}, {"a.b": 1}, [{"$literal": "$$NOW"}]])
async def test_dollar_outputs_come_back_as_they_were(bench: Workbench, output: Any) -> None:
    """D5."""
    bench.registry.agent("facade")(functools.partial(returning, output))
    subscription = await bench.subscription(AGENT)
    async with bench.working(instance=bench.instance("$owner")):
        done = await bench.ended(await bench.wake(await bench.event(value=output), subscription, {"p": "$secret"}))
    assert (await bench.result_of(done))["value"]["output"] == output
    assert (done.params, done.action) == ({"p": "$secret"}, AGENT)


async def returning(output: Any, run: Run) -> Any:
    return output


@pytest.mark.parametrize("message", ["$secret", "$$ROOT", "lone \ud800 surrogate", "x" * 5000])
@pytest.mark.parametrize("attempts", [1, 2])
async def test_any_error_message_becomes_an_error_fact(bench: Workbench, message: str, attempts: int) -> None:
    @bench.registry.workflow("review", retry=RetryPolicy(max_attempts=attempts, wait=0))
    async def review(run: Run) -> None:
        raise ValueError(message)

    done = await outcome_of(bench, WORKFLOW)
    fact = await bench.result_of(done)
    told = fact["value"]["error"]
    assert (done.state, done.reason, done.attempts) == ("failed", "handler_error", attempts)
    assert fact["path"] == f"/tasks/T1/workflows/review/errors/{done.event_id}"
    assert (told["type"], told["code"], fact["value"]["reason"]) == ("ValueError", None, "handler_error")
    assert told["message"] == describe(ValueError(message))["message"]
    assert [warning["message"] for warning in done.warnings] == [told["message"]] * (attempts - 1)


@pytest.mark.parametrize("output", [{1, 2}, object(), "x" * (1024 * 1024), {"a": "\ud800"}, datetime(2026, 1, 1)])  # noqa: DTZ001
async def test_an_output_that_cannot_be_stored_is_an_error_fact(bench: Workbench, output: Any) -> None:
    bench.registry.workflow("review")(functools.partial(returning, output))
    done = await outcome_of(bench, WORKFLOW)
    fact = await bench.result_of(done)
    assert (done.state, done.reason, done.attempts) == ("failed", "invalid_output", 1)
    assert fact["value"]["error"]["code"] == "invalid_value"
    assert "output" in fact["value"]["error"]["message"]


async def test_an_input_that_breaks_the_schema_never_runs(bench: Workbench) -> None:
    ran = []

    @bench.registry.agent("facade")
    async def classify(run: Run) -> None:
        ran.append(run)

    schema = {"type": "object", "properties": {"hs": {"type": "string"}}}
    done = await outcome_of(bench, AGENT, value={"hs": 7}, inputSchema=schema)
    told = (await bench.result_of(done))["value"]["error"]
    assert (done.state, done.reason, ran) == ("failed", "invalid_input", [])
    assert "input.hs" in told["message"]


async def test_a_result_goes_where_the_subscription_says(bench: Workbench) -> None:
    bench.registry.register("plain", Plain())
    done = await outcome_of(bench, {"type": "plain"}, output={"path": "/tasks/{taskId}/answers/{eventId}"})
    assert (await bench.result_of(done))["path"] == f"/tasks/T1/answers/{done.event_id}"


async def test_a_path_that_cannot_be_rendered_is_an_error_before_the_code_runs(bench: Workbench) -> None:
    ran = []

    @bench.registry.workflow("review")
    async def review(run: Run) -> None:
        ran.append(run)

    subscription = await bench.subscription(
        WORKFLOW, pattern="/tasks/*/requests/{which}", output={"path": "/tasks/{taskId}/answers/{which}"}
    )
    async with bench.working():
        job = await bench.wake(await bench.event(), subscription, {"which": "not a segment"})
        done = await bench.ended(job)
    assert (done.state, done.reason, ran) == ("failed", "rendering_failed", [])
    assert (await bench.result_of(done))["value"]["error"]["code"] == "invalid_path"


async def test_a_newer_result_on_a_shared_path_stays(bench: Workbench) -> None:
    gates: dict[str, asyncio.Event] = {"old": asyncio.Event(), "new": asyncio.Event()}

    @bench.registry.workflow("review")
    async def review(run: Run) -> str:
        await gates[run.input].wait()
        return str(run.input)

    definition: dict[str, Any] = {
        "pattern": "/tasks/*/requests/*",
        "output": {"path": "/tasks/{taskId}/answers/{requestId}"},
    }
    subscription = await bench.subscription(WORKFLOW, **definition)
    async with bench.working():
        old, new = [
            await bench.wake(await bench.event(value=value), subscription, {"requestId": "R1"}) for value in gates
        ]
        gates["new"].set()
        await bench.ended(new)
        gates["old"].set()
        done = await bench.ended(old)
    assert (done.state, done.reason, done.result_event_id) == ("succeeded", "superseded", None)
    [fact] = await bench.events_at("/tasks/T1/answers/R1")
    assert fact["value"]["output"] == "new"


async def test_an_older_result_on_a_shared_path_is_followed(bench: Workbench) -> None:
    @bench.registry.workflow("review")
    async def review(run: Run) -> str:
        return str(run.input)

    definition: dict[str, Any] = {
        "pattern": "/tasks/*/requests/*",
        "output": {"path": "/tasks/{taskId}/answers/{requestId}"},
    }
    subscription = await bench.subscription(WORKFLOW, **definition)
    async with bench.working():
        for value in ("old", "new"):
            await bench.ended(await bench.wake(await bench.event(value=value), subscription, {"requestId": "R1"}))
    assert [fact["value"]["output"] for fact in await bench.events_at("/tasks/T1/answers/R1")] == ["old", "new"]


async def test_a_subscription_that_is_gone_is_told(bench: Workbench) -> None:
    bench.registry.workflow("review")(Plain().execute)
    subscription = await bench.subscription(WORKFLOW)
    await bench.handle["state_subscriptions"].delete_many({})
    async with bench.working():
        done = await bench.ended(await bench.wake(await bench.event(), subscription))
    assert (done.state, done.reason) == ("failed", "quarantined")


async def test_an_execution_ends_although_the_log_takes_neither_result_nor_error(bench: Workbench) -> None:
    """D1: an error record, never an endless repeat."""
    bench.registry.workflow("review")(Plain().execute)
    event, subscription = await bench.event(), await bench.subscription(WORKFLOW)
    await bench.handle["namespaces"].update_one(
        {"_id": "/tasks/T1"}, {"$set": {"seq": "broken"}}, bypass_document_validation=True
    )
    async with bench.working():
        done = await bench.ended(await bench.wake(event, subscription))
    assert (done.state, done.result_event_id) == ("failed", None)
    assert done.warnings[-1]["code"] == "integrity"


# --- what a run is handed


async def test_executors_share_nothing(bench: Workbench) -> None:
    """F10."""
    seen: dict[str, Any] = {}

    async def spoil(name: str, run: Run) -> Any:
        seen[name] = (run.input["items"][:], run.event.value["items"][:], dict(run.params))
        run.input["items"].append(name)
        run.event.value["items"].append(name)
        run.execution.action["type"] = name
        run.params["p"] = name  # type: ignore[index]
        return run.input

    for name in ("one", "two"):
        bench.registry.workflow(name)(functools.partial(spoil, name))
    event = await bench.event(value={"items": [1]})
    async with bench.working():
        for name in ("one", "two"):
            action = {"type": "execute_workflow", "workflowId": name}
            job = await bench.wake(event, await bench.subscription(action, name=name), {"p": "x"})
            done = await bench.ended(job)
            assert (await bench.result_of(done))["value"]["output"] == {"items": [1, name]}
            assert (done.action, done.params) == (action, {"p": "x"})
    assert seen == dict.fromkeys(("one", "two"), ([1], [1], {"p": "x"}))
    [stored] = await bench.events_at(event.path)
    assert stored["value"] == {"items": [1]}


async def test_the_input_is_the_snapshot_not_the_current_value(bench: Workbench) -> None:
    bench.registry.workflow("review")(echo)
    subscription = await bench.subscription(WORKFLOW)
    event = await bench.event(value="then")
    await bench.event(value="now")
    async with bench.working():
        done = await bench.ended(await bench.wake(event, subscription))
    assert (await bench.result_of(done))["value"]["output"] == "then"


async def echo(run: Run) -> Any:
    return run.input


async def test_writes_of_an_executor_carry_cause_and_depth(bench: Workbench) -> None:
    """E1: through its own handle, through the service's, from tasks and threads; nothing resets the depth."""
    written: dict[str, Any] = {}
    foreign = await bench.event("/tasks/T9/other/x")

    async def write(layer: Any, name: str, **options: Any) -> None:
        written[name] = await layer.set(f"/tasks/T1/notes/{name}", 1, **options)

    @bench.registry.workflow("review")
    async def review(run: Run) -> None:
        loop = asyncio.get_running_loop()
        await write(run.layer, "own")
        await write(bench.layer, "service")
        await asyncio.create_task(write(bench.layer, "task"))

        def in_thread() -> None:
            asyncio.run_coroutine_threadsafe(write(bench.layer, "thread"), loop).result(10)

        await asyncio.to_thread(in_thread)
        await loop.run_in_executor(
            None, lambda: asyncio.run_coroutine_threadsafe(write(run.layer, "bare-thread"), loop).result(10)
        )
        await write(run.layer, "foreign", caused_by=foreign.id)
        await write(run.layer, "party", actor="user:U9", source="task_node")

    cause = await bench.event("/tasks/T1/first")
    event = await bench.event(caused_by=cause.id)
    subscription = await bench.subscription(WORKFLOW)
    async with bench.working():
        done = await bench.ended(await bench.wake(event, subscription))
    assert done.state == "succeeded"
    for name in ("own", "service", "task", "thread", "bare-thread"):
        fact = written[name]
        assert (fact.caused_by_event_id, fact.root_event_id, fact.trigger_depth) == (event.id, cause.id, 2), name
        assert (fact.actor, fact.source) == ("workflow:review", "workflow_node"), name
    assert (written["foreign"].caused_by_event_id, written["foreign"].trigger_depth) == (foreign.id, 2)
    assert (written["party"].actor, written["party"].source, written["party"].trigger_depth) == (
        "user:U9",
        "task_node",
        2,
    )
    assert (await bench.result_of(done))["triggerDepth"] == 2


async def test_outside_an_execution_nothing_is_bound(bench: Workbench) -> None:
    bench.registry.workflow("review")(Plain().execute)
    await outcome_of(bench, WORKFLOW)
    event = await bench.event("/tasks/T1/later")
    assert (event.caused_by_event_id, event.trigger_depth, event.source) == (None, 0, "api")


async def test_a_foreign_owner_path_is_a_handler_error(bench: Workbench) -> None:
    @bench.registry.workflow("review", max_attempts=1)
    async def review(run: Run) -> None:
        await run.layer.append([Write(path="/tasks/T1/agents/other/results/x", value=1)])

    done = await outcome_of(bench, WORKFLOW)
    told = (await bench.result_of(done))["value"]["error"]
    assert (done.reason, told["type"], told["code"]) == ("handler_error", "ReservedPathError", ReservedPathError.code)


@pytest.mark.parametrize("leave", [SystemExit, asyncio.CancelledError, RecursionError])
async def test_code_cannot_take_the_worker_down(bench: Workbench, leave: type[BaseException]) -> None:
    @bench.registry.agent("facade")
    async def classify(run: Run) -> None:
        raise leave

    done = await outcome_of(bench, AGENT)
    assert (done.state, done.reason) == ("failed", "handler_error")
    assert (await bench.result_of(done))["value"]["error"]["type"] == leave.__name__


# --- agents by runtime


class Runtime:
    def __init__(self) -> None:
        self.requests: list[AgentRequest] = []

    async def run(self, request: AgentRequest) -> AgentResponse:
        self.requests.append(request)
        return AgentResponse(output={"answer": request.input}, usage={"tokens": 3})


async def test_a_runtime_gets_prompt_input_and_budget(bench: Workbench) -> None:
    runtime = Runtime()
    bench.registry.agent_runtime("facade", runtime, system_prompt="Classify.", budget={"tokens": 10})
    fact = await bench.result_of(await outcome_of(bench, AGENT, value="tea"))
    assert runtime.requests == [AgentRequest(system_prompt="Classify.", input="tea", budget={"tokens": 10})]
    assert (fact["value"]["output"], fact["value"]["usage"]) == ({"answer": "tea"}, {"tokens": 3})


async def test_the_stored_contract_goes_before_the_registration(bench: Workbench) -> None:
    runtime = Runtime()
    bench.registry.agent_runtime("facade", runtime, system_prompt="Old.", budget={"tokens": 10})
    bench.contract = {"systemPrompt": "New.", "budget": {"tokens": 5}}
    await outcome_of(bench, AGENT)
    assert runtime.requests == [AgentRequest(system_prompt="New.", input="v", budget={"tokens": 5})]


async def test_an_agent_without_a_prompt_fails_and_says_so(bench: Workbench) -> None:
    bench.registry.agent_runtime("facade", Runtime())
    done = await outcome_of(bench, AGENT)
    assert "has no system prompt" in (await bench.result_of(done))["value"]["error"]["message"]


async def test_an_agent_is_attempted_once(bench: Workbench) -> None:
    @bench.registry.agent("facade")
    async def classify(run: Run) -> None:
        raise OSError("no")

    done = await outcome_of(bench, AGENT)
    assert (done.attempts, done.max_attempts, done.reason) == (1, 1, "handler_error")


async def test_a_failed_execution_gets_one_fresh_attempt(bench: Workbench) -> None:
    mood = ["bad", "bad", "good"]

    @bench.registry.agent("facade")
    async def classify(run: Run) -> str:
        if (now := mood.pop(0)) == "bad":
            raise ValueError(now)
        return now

    subscription = await bench.subscription(AGENT)
    async with bench.working():
        job = await bench.wake(await bench.event(), subscription)
        first = await bench.ended(job)
        again = await bench.executions.requeue(job)
        assert (again.state, again.max_attempts, again.reason, again.result_event_id) == ("queued", 2, None, None)
        second = await wait_until(lambda: ended_after(bench, job, 2))
        assert (second.state, second.attempts) == ("failed", 2)
        await bench.executions.requeue(job)
        third = await wait_until(lambda: ended_after(bench, job, 3))
    assert (third.state, third.attempts, third.reason) == ("succeeded", 3, None)
    errors = await bench.events_at(f"/tasks/T1/agents/facade/errors/{first.event_id}")
    assert [error["_id"] for error in errors] == [first.result_event_id, second.result_event_id]


async def ended_after(bench: Workbench, job: str, attempts: int) -> Execution | None:
    execution = await bench.executions.get(job)
    return execution if execution.has_ended and execution.attempts == attempts else None
