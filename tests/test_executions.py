"""Executions as documents: moves, recording, looking up, moving by hand (DESIGN §4, §8; P5)."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import TYPE_CHECKING, Any, get_args

import pytest
from plans import plan_of_find
from workbench import AGENT, USER, WORKFLOW, Workbench

from statelayer import mongo_indexes as names
from statelayer.errors import DatabaseError, ExecutionStateError, InvalidActorError, InvalidExecutorError, NotFoundError
from statelayer.executors import RetryPolicy, moves
from statelayer.executors.leases import Leases, queued_for, queued_for_nobody
from statelayer.executors.models import ENDED, MOVES, Reason, State, job_id
from statelayer.subscriptions.decisions import Decision, Wakeup

if TYPE_CHECKING:
    from collections.abc import Iterator

    from statelayer.executors.moves import Move

pytestmark = pytest.mark.anyio

MAIL = {"type": "send_mail", "to": "a@example.org"}


async def put(bench: Workbench, job: str, state: str) -> None:
    """Bring an execution into a state, as somebody else would have done it."""
    await bench.handle["executions"].update_one({"_id": job}, {"$set": {"state": state}})


# --- the table of moves


def test_states_and_reasons_are_those_of_the_database() -> None:
    assert get_args(State) == names.EXECUTION_STATES
    assert get_args(Reason) == names.EXECUTION_REASONS
    assert set(MOVES) == set(get_args(State))


def test_moves_are_those_of_the_design() -> None:
    into_queue = {state for state, after in MOVES.items() if "queued" in after}
    assert into_queue == {"claimed", "running", "interrupted", "failed"}
    assert MOVES["running"] >= {"succeeded", "failed", "interrupted", "waiting_external"}
    assert MOVES["waiting_external"] >= {"succeeded", "failed", "interrupted"}
    assert {state for state, after in MOVES.items() if "cancelled" in after} == set(get_args(State)) - ENDED
    assert [state for state in ENDED if MOVES[state]] == ["failed"]
    assert not any("skipped" in after for after in MOVES.values())


def all_moves() -> Iterator[Move]:
    yield moves.claimed(owner="o", token="t", lease=1)
    yield moves.started(lease=1)
    yield moves.given_back()
    yield moves.retried(wait=1, reason="timeout", warning={})
    yield moves.cancelled("user:U7")
    yield moves.requeued()
    for state in ("succeeded", "failed", "interrupted", "waiting_external"):
        yield moves.ended(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("move", list(all_moves()), ids=lambda move: move.after)
def test_every_move_is_in_the_table(move: Move) -> None:
    assert all(move.after in MOVES[state] for state in move.before)
    assert move.filter(_id="x")["state"] == {"$in": list(move.before)}


# --- retries


def test_waits_grow_to_the_cap() -> None:
    policy = RetryPolicy(wait=1, factor=3, cap=20, jitter=lambda wait: wait)
    assert [policy.wait_after(attempts) for attempts in (1, 2, 3, 4, 5000)] == [1, 3, 9, 20, 20]


def test_jitter_keeps_at_least_half_of_the_wait() -> None:
    assert all(4 <= RetryPolicy(wait=8).wait_after(1) <= 8 for _ in range(100))


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"wait": -1}, {"factor": 0.5}, {"cap": float("nan")}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidExecutorError):
        RetryPolicy(**wrong)


# --- recording


async def test_one_event_and_target_is_one_execution(bench: Workbench) -> None:
    """D8: in-process, listener and catch-up deliver the same event."""
    event = await bench.event()
    wakeup = Wakeup(await bench.subscription(AGENT), {"taskId": "T1"}, also_matched=("second",))
    decision = Decision(event, wakeups=(wakeup,))
    await asyncio.gather(*(bench.recorder.record([decision, decision]) for _ in range(3)))
    [execution] = await bench.executions.find()
    assert execution.id == f"agent:{event.id}:facade"
    assert (execution.also_matched, execution.params, execution.action) == (("second",), {"taskId": "T1"}, AGENT)
    assert (execution.namespace, execution.event_id, execution.root_event_id) == ("/tasks/T1", event.id, event.id)


async def test_recording_again_changes_nothing_of_what_runs(bench: Workbench) -> None:
    event, subscription = await bench.event(), await bench.subscription(AGENT)
    job = await bench.wake(event, subscription)
    await put(bench, job, "running")
    other = await bench.subscription(WORKFLOW, name="other")
    await bench.recorder.record([Decision(event, wakeups=(Wakeup(subscription, {}), Wakeup(other, {})))])
    assert await bench.state_of(job) == "running"
    assert len(await bench.executions.find(event_id=event.id)) == 2


async def test_c5_a_job_id_that_is_taken_means_that_it_is_queued(bench: Workbench) -> None:
    event, subscription = await bench.event(), await bench.subscription(AGENT)
    job = await bench.wake(event, subscription)
    before = await bench.executions.get(job)
    fresh = Wakeup(await bench.subscription(WORKFLOW, name="other"), {})
    await bench.recorder.record([Decision(event, wakeups=(Wakeup(subscription, {"taskId": "T2"}), fresh))])
    assert await bench.executions.get(job) == before
    assert {execution.state for execution in await bench.executions.find(event_id=event.id)} == {"queued"}
    assert len(await bench.executions.find(event_id=event.id)) == 2


async def test_another_error_beside_a_duplicate_is_raised(bench: Workbench) -> None:
    event, subscription = await bench.event(), await bench.subscription(AGENT)
    await bench.wake(event, subscription)
    broken = (await bench.subscription(WORKFLOW, name="other")).model_copy(update={"target": 7})
    with pytest.raises(DatabaseError):
        await bench.recorder.record([Decision(event, wakeups=(Wakeup(subscription, {}), Wakeup(broken, {})))])


async def test_what_is_recorded_is_available_at_once(bench: Workbench) -> None:
    job = await bench.wake(await bench.event(), await bench.subscription(AGENT))
    leases = Leases(bench.database, bench.clock, owner="w", lease=1)
    assert [document["_id"] for document in await leases.candidates({("execute_agent", "facade")}, 5)] == [job]


async def test_ids_and_attempts_by_action_type(bench: Workbench) -> None:
    @bench.registry.workflow("twice", max_attempts=2)
    async def twice(run: Any) -> None: ...

    event = await bench.event()
    for number, (action, kind, target, attempts) in enumerate(
        [
            (AGENT, "agent", "facade", 1),
            (WORKFLOW, "workflow", "review", 3),
            ({"type": "execute_workflow", "workflowId": "twice"}, "workflow", "twice", 2),
            (MAIL, "send_mail", "s3", 3),
        ]
    ):
        job = await bench.wake(event, await bench.subscription(action, name=f"s{number}"))
        assert job == f"{kind}:{event.id}:{target}" == job_id(action["type"], event.id, target)
        assert (await bench.executions.get(job)).max_attempts == attempts


async def test_a_skip_is_visible_and_ended(bench: Workbench) -> None:
    event = await bench.event()
    await bench.skip(event, "loop", "max_depth")
    await bench.skip(event, "loop", "max_depth")
    [skip] = await bench.executions.find(state="skipped")
    assert (skip.id, skip.reason, skip.has_ended, skip.target) == (f"skip:{event.id}:loop", "max_depth", True, "")
    with pytest.raises(ExecutionStateError):
        await bench.executions.cancel(skip.id)


async def test_what_nobody_offers_says_so_at_once(bench: Workbench) -> None:
    job = await bench.wake(await bench.event(), await bench.subscription(WORKFLOW))
    assert (await bench.executions.get(job)).reason == "no_executor"


async def test_what_another_live_instance_offers_waits_without_a_reason(bench: Workbench) -> None:
    other = Workbench(bench.handle)

    @other.registry.workflow("review")
    async def review(run: Any) -> None: ...

    subscription = await bench.subscription(WORKFLOW)
    await bench.dispatch("paused")
    async with other.working():
        job = await bench.wake(await bench.event(), subscription)
        assert (await bench.executions.get(job)).reason is None


async def test_dollar_values_come_back_as_they_were(bench: Workbench) -> None:
    """D5, where executions are written."""
    action = {"type": "mail", "a": "$secret", "b": {"$x": 1}, "c": {"a.b": 1}}
    job = await bench.wake(await bench.event(), await bench.subscription(action, target="t"), {"p": "$secret"})
    execution = await bench.executions.get(job)
    assert execution.action == action
    assert execution.params == {"p": "$secret"}
    cancelled = await bench.executions.cancel(job, actor="user:$secret")
    assert cancelled.cancelled_by == "user:$secret"
    assert cancelled.action == action


# --- looking up


async def test_find_by_state_event_namespace_and_target(bench: Workbench) -> None:
    subscription, other = await bench.subscription(AGENT), await bench.subscription(WORKFLOW, name="other")
    first, second = await bench.event(), await bench.event("/tasks/T2/requests/R1")
    jobs = [await bench.wake(first, subscription), await bench.wake(first, other), await bench.wake(second, other)]
    await put(bench, jobs[0], "failed")

    async def ids(**wanted: Any) -> list[str]:
        return [execution.id for execution in await bench.executions.find(**wanted)]

    assert await ids() == jobs
    assert await ids(state="failed") == jobs[:1]
    assert await ids(event_id=first.id) == jobs[:2]
    assert await ids(namespace="/tasks/T2") == jobs[2:]
    assert await ids(target="review", namespace="/tasks/T1") == jobs[1:2]
    assert len(await ids(limit=2)) == 2


async def test_an_unknown_execution_is_not_found(bench: Workbench) -> None:
    for ask in (bench.executions.get, bench.executions.cancel, bench.executions.requeue):
        with pytest.raises(NotFoundError):
            await ask("agent:0:none")


# --- moving by hand


@pytest.mark.parametrize("state", sorted(set(get_args(State)) - ENDED))
async def test_what_has_not_ended_can_be_cancelled(bench: Workbench, state: str) -> None:
    job = await bench.wake(await bench.event(), await bench.subscription(AGENT))
    await put(bench, job, state)
    execution = await bench.executions.cancel(job, actor=USER)
    assert (execution.state, execution.reason, execution.cancelled_by) == ("cancelled", "cancelled", USER)
    assert execution.finished_at is not None
    with pytest.raises(ExecutionStateError, match="is cancelled; it cannot be cancelled"):
        await bench.executions.cancel(job)


async def test_who_cancels_is_checked(bench: Workbench) -> None:
    with pytest.raises(InvalidActorError):
        await bench.executions.cancel("agent:0:none", actor="me")


@pytest.mark.parametrize("state", sorted(set(get_args(State)) - {"failed"}))
async def test_only_what_failed_is_requeued(bench: Workbench, state: str) -> None:
    job = await bench.wake(await bench.event(), await bench.subscription(AGENT))
    await put(bench, job, state)
    with pytest.raises(ExecutionStateError):
        await bench.executions.requeue(job)


async def test_a_document_with_nulls_can_be_read(bench: Workbench) -> None:
    job = await bench.wake(await bench.event(), await bench.subscription(AGENT))
    nulls = dict.fromkeys(("reason", "lease", "resultEventId", "startedAt", "finishedAt"))
    await bench.handle["executions"].update_one({"_id": job}, {"$set": nulls})
    assert (await bench.executions.get(job)).lease is None


# --- indexes


OFFERS = {("execute_agent", f"a{n}") for n in range(3)} | {("execute_workflow", "w1"), ("mail", None)}


@pytest.mark.parametrize(
    ("wanted", "sort", "index"),
    [
        ({"$or": [{**queued, **moves.AVAILABLE} for queued in queued_for(OFFERS)]}, {"availableAt": 1}, "claim"),
        ({"$or": queued_for_nobody(OFFERS)}, None, "claim"),
        ({"state": {"$in": ["claimed", "running"]}, **moves.EXPIRED}, None, "reap"),
        ({"eventId": "0"}, None, "eventId"),
        ({"namespace": "/tasks/T1", "state": "failed"}, None, "namespace_state"),
    ],
    ids=["claim", "no_executor", "reap", "by event", "by namespace"],
)
async def test_the_index_that_is_used(bench: Workbench, wanted: Any, sort: Any, index: str) -> None:
    await fill(bench)
    plan = await plan_of_find(bench.handle, "executions", wanted, sort)
    assert plan.index == index


async def fill(bench: Workbench) -> None:
    """Put in a thousand executions: a third each queued, running under good leases, and ended."""
    now = bench.clock.now()
    lease = {"owner": "w", "token": "t", "until": now + timedelta(hours=1)}
    one = {"subscription": {"name": "s"}, "attempts": 0, "maxAttempts": 1, "createdAt": now, "availableAt": now}
    await bench.handle["executions"].insert_many(
        one
        | {
            "_id": f"agent:{number:024x}:a{number % 100}",
            "eventId": f"{number:024x}",
            "namespace": f"/tasks/T{number % 50}",
        }
        | {"action": {"type": "execute_agent"}, "target": f"a{number % 100}"}
        | ({"state": "running", "lease": lease} if number % 3 == 0 else {"state": ("queued", "failed")[number % 3 - 1]})
        for number in range(1000)
    )


async def test_claiming_reads_only_what_is_offered_and_due(bench: Workbench) -> None:
    await fill(bench)
    [wanted] = queued_for({("execute_agent", "a1"), ("execute_agent", "a2")})
    plan = await plan_of_find(bench.handle, "executions", wanted | moves.AVAILABLE, {"availableAt": 1}, limit=5)
    assert (plan.returned, plan.sorts_in_memory) == (5, False)
    assert plan.keys_examined <= 8


def test_a_fence_holds_only_for_its_token_while_it_runs() -> None:
    document = {"_id": "j", "state": "running", "lease": {"token": "t", "until": 1}}
    assert moves.Fence("j", "t").holds(document)
    assert not moves.Fence("j", "other").holds(document)
    assert not moves.Fence("j", "t", until=2).holds(document)
    assert not moves.Fence("j", "t").holds({**document, "state": "queued"})
    assert not moves.Fence("j", "t").holds(None)
