"""The listener: every event is evaluated, once, in order, whatever happens to the stream (DESIGN §7; P4, P8)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from bson import Int64, Timestamp
from listening import REQUESTS, USER, Recorded, confirm, evaluated, listening

from statelayer import StateLayer, Write
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from statelayer.events import Event

pytestmark = pytest.mark.anyio


async def test_an_event_that_matches_wakes_and_others_do_not(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    async with listening(database, layer, recorded):
        await confirm(layer, "T1", "R1")
        await confirm(layer, "T1", "R2", "draft")
        await layer.set("/tasks/T1/status", "confirmed", actor=USER)
        await evaluated(database, await confirm(layer, "T1", "R3"))
    assert recorded.woken() == [("/tasks/T1", 1, "requests"), ("/tasks/T1", 4, "requests")]


async def test_a9_what_is_written_as_soon_as_it_has_started_is_evaluated(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    async with listening(database, layer, recorded):
        event = await confirm(layer, "T1", "R1")
        await evaluated(database, event)
    assert recorded.woken() == [("/tasks/T1", 1, "requests")]


async def test_what_was_written_before_the_first_start_is_caught_up(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    events = [await confirm(layer, f"T{n % 3}", f"R{n}") for n in range(9)]
    async with listening(database, layer, recorded, page_size=2):
        for event in events:
            await evaluated(database, event)
    assert sorted(recorded.woken()) == sorted((e.namespace, e.seq, "requests") for e in events)


async def test_what_was_written_while_it_was_down_is_evaluated_once(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    async with listening(database, layer, recorded):
        await evaluated(database, await confirm(layer, "T1", "R1"))
    missed = [await confirm(layer, "T1", f"M{n}") for n in range(5)]
    async with listening(database, layer, recorded):
        await evaluated(database, missed[-1])
    assert [seq for _, seq, _ in recorded.woken()] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("position", [Timestamp(1, 1), Timestamp(2**31, 1)])
async def test_a1_a_position_the_server_no_longer_has_means_catch_up_not_now(
    database: Any, layer: StateLayer, recorded: Recorded, position: Timestamp
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    await database["checkpoints"].insert_many(
        [{"_id": partition, "clusterTime": position} for partition in range(layer.settings.partitions)]
    )
    missed = [await confirm(layer, "T1", f"M{n}") for n in range(5)]
    async with listening(database, layer, recorded):
        await evaluated(database, missed[-1])
    assert [seq for _, seq, _ in recorded.woken()] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("live", [True, False])
async def test_b2_a_hole_in_the_log_is_passed_and_counted(
    database: Any, layer: StateLayer, recorded: Recorded, *, live: bool
) -> None:
    """Nothing of ours leaves one behind; whoever makes one by hand stalls nobody."""
    await layer.subscriptions.publish(REQUESTS)

    async def leave_a_hole() -> Event:
        await database["namespaces"].update_one({"_id": "/tasks/T1"}, {"$set": {"seq": Int64(4)}})
        return await confirm(layer, "T1", "R2")

    async with listening(database, layer, recorded):
        await evaluated(database, await confirm(layer, "T1", "R1"))
    behind = None if live else await leave_a_hole()
    async with listening(database, layer, recorded) as listener:
        await evaluated(database, behind or await leave_a_hole())
        assert listener.statistics.holes == 1
    assert recorded.woken() == [("/tasks/T1", 1, "requests"), ("/tasks/T1", 5, "requests")]
    assert [problem.kind for problem in (await layer.verify("/tasks/T1")).problems] == ["seq_gap"]


async def test_b3_cursors_move_past_events_that_match_nothing(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    async with listening(database, layer, recorded):
        writes = [Write(path=f"/tasks/T1/n/{n}", value=n, actor=USER) for n in range(300)]
        await evaluated(database, (await layer.append(writes))[-1])
    async with listening(database, layer, recorded) as second:
        await evaluated(database, await layer.set("/tasks/T1/n/0", 1, actor=USER))
        assert second.statistics.evaluated <= 2
    assert recorded.decisions == []


async def test_what_could_not_be_recorded_is_evaluated_again(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    recorded.fail_next = 2
    async with listening(database, layer, recorded) as listener:
        await evaluated(database, await confirm(layer, "T1", "R1"))
        assert listener.statistics.restarts["database"] == 2
    assert recorded.woken() == [("/tasks/T1", 1, "requests")]


async def test_two_listeners_decide_the_same_and_miss_nothing_between_them(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    """What one has evaluated already, the other may leave out; what both evaluate, both record alike."""
    await layer.subscriptions.publish(REQUESTS)
    second = Recorded()
    async with listening(database, layer, recorded), listening(database, layer, second):
        events = [await confirm(layer, f"T{n % 4}", f"R{n}") for n in range(20)]
        for event in events:
            await evaluated(database, event)
    expected = {(event.namespace, event.seq, "requests") for event in events}
    assert set(recorded.woken()) | set(second.woken()) == expected
    for one in (recorded, second):
        assert len(one.woken()) == len(set(one.woken()))


async def test_a_namespace_is_evaluated_in_the_order_of_its_seqs(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    async with listening(database, layer, recorded):
        events = await asyncio.gather(*(confirm(layer, f"T{n % 2}", f"R{n}") for n in range(60)))
        await wait_until(lambda: len(recorded.woken()) == len(events))
    for namespace in ("/tasks/T0", "/tasks/T1"):
        assert [seq for name, seq, _ in recorded.woken() if name == namespace] == list(range(1, 31))


# --- in force


async def test_p8_what_applies_to_an_event_was_settled_when_it_was_written(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await confirm(layer, "T1", "before")
    await layer.subscriptions.publish(REQUESTS)
    await confirm(layer, "T1", "between")
    await layer.subscriptions.disable("requests")
    await confirm(layer, "T1", "disabled")
    await layer.subscriptions.enable("requests")
    last = await confirm(layer, "T1", "again")
    async with listening(database, layer, recorded):
        await evaluated(database, last)
    assert [seq for _, seq, _ in recorded.woken()] == [2, 4]


async def test_p8_an_append_that_began_before_publishing_is_not_woken(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    async with listening(database, layer, recorded):
        async with layer.transaction("/tasks/T1") as tx:
            await tx.set("/tasks/T1/requests/early", {"status": "confirmed"}, actor=USER)
            await layer.subscriptions.publish(REQUESTS)
        await evaluated(database, await confirm(layer, "T1", "late"))
    assert [seq for _, seq, _ in recorded.woken()] == [2]


async def test_a_new_version_replaces_the_one_before(database: Any, layer: StateLayer, recorded: Recorded) -> None:
    async with listening(database, layer, recorded):
        await layer.subscriptions.publish(REQUESTS)
        await confirm(layer, "T1", "R1")
        changed = {**REQUESTS, "condition": {"path": "$event.value.status", "op": "eq", "value": "draft"}}
        assert (await layer.subscriptions.publish(changed)).version == 2
        await confirm(layer, "T1", "R2")
        await evaluated(database, await confirm(layer, "T1", "R3", "draft"))
    versions = [w.subscription.version for d in recorded.decisions for w in d.wakeups]
    assert [seq for _, seq, _ in recorded.woken()] == [1, 3]
    assert versions == [1, 2]


async def test_state_is_seen_as_of_the_event_whenever_it_is_evaluated(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(
        {
            "name": "reviewed",
            "pattern": "/tasks/*/requests/{request}",
            "condition": {"path": "$state.stage/{request}", "op": "eq", "value": "reviewed"},
            "action": {"type": "execute_workflow", "workflowId": "intake"},
        }
    )
    await layer.set("/tasks/T1/stage/R1", "new", actor=USER)
    await confirm(layer, "T1", "R1")
    await layer.set("/tasks/T1/stage/R1", "reviewed", actor=USER)
    await confirm(layer, "T1", "R1")
    await layer.delete("/tasks/T1/stage/R1", actor=USER)
    await confirm(layer, "T1", "R1")
    last = await layer.set("/tasks/T1/stage/R1", "reviewed", actor=USER)
    async with listening(database, layer, recorded):
        await evaluated(database, last)
    assert [seq for _, seq, _ in recorded.woken()] == [4]


# --- depth, targets


async def test_one_at_its_limit_does_not_hide_anothers_wakeup(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish({**REQUESTS, "name": "a-shallow", "maxTriggerDepth": 1})
    await layer.subscriptions.publish({**REQUESTS, "name": "b-deep", "maxTriggerDepth": 5})
    await layer.subscriptions.publish({**REQUESTS, "name": "c-deep", "maxTriggerDepth": 5})
    async with listening(database, layer, recorded):
        root = await layer.set("/tasks/T1/status", "new", actor=USER)
        path = "/tasks/T1/requests/R1"
        await evaluated(database, await layer.set(path, {"status": "confirmed"}, actor=USER, caused_by=root.id))
    [decision] = recorded.decisions
    assert [(w.subscription.name, w.also_matched) for w in decision.wakeups] == [("b-deep", ("c-deep",))]
    assert recorded.skipped() == [("a-shallow", 2, "max_depth")]


# --- operating


async def test_a_pause_stops_evaluation_and_loses_nothing(database: Any, layer: StateLayer, recorded: Recorded) -> None:
    await layer.subscriptions.publish(REQUESTS)
    async with listening(database, layer, recorded) as listener:
        await evaluated(database, await confirm(layer, "T1", "R1"))
        await layer.pause()
        await wait_until(lambda: listener.statistics.state == "paused")
        held = await confirm(layer, "T1", "R2")
        assert (await database["cursors"].find_one({"_id": "/tasks/T1"}))["at"]["seq"] == 1
        await layer.unpause()
        await evaluated(database, held)
    assert [seq for _, seq, _ in recorded.woken()] == [1, 2]


async def test_a_document_broken_by_hand_is_quarantined_and_stops_nobody(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    await layer.subscriptions.publish({**REQUESTS, "name": "sound", "action": {"type": "notify"}})
    async with listening(database, layer, recorded) as listener:
        await database["state_subscriptions"].update_one(
            {"name": "requests"}, {"$set": {"condition": {"path": "$env.x", "op": "like"}}}
        )
        await wait_until(lambda: listener.statistics.quarantined == ("requests@v1",))
        await evaluated(database, await confirm(layer, "T1", "R1"))
    assert recorded.woken() == [("/tasks/T1", 1, "sound")]
    assert recorded.skipped() == [("requests", 1, "quarantined")]


async def test_a_flag_toggled_by_hand_is_performed(database: Any, layer: StateLayer, recorded: Recorded) -> None:
    await layer.subscriptions.publish(REQUESTS)

    async def closed() -> bool:
        found = await layer.subscriptions.get("requests")
        return found is not None and found.active_revs[-1][1] is not None

    async with listening(database, layer, recorded):
        await database["state_subscriptions"].update_one({"name": "requests"}, {"$set": {"enabled": False}})
        await wait_until(closed)
        await evaluated(database, await confirm(layer, "T1", "R1"))
    assert recorded.woken() == []


async def test_an_event_broken_by_hand_wakes_nobody_and_stops_nobody(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    async with listening(database, layer, recorded) as listener:
        event = await confirm(layer, "T1", "R1")
        broken = {**(await database["events"].find_one({"_id": event.id})), "_id": "0" * 24, "seq": Int64(2)}
        broken |= {"version": Int64(2), "batchId": "0" * 24}
        del broken["actor"]
        await database.command({"insert": "events", "documents": [broken], "bypassDocumentValidation": True})
        await database["namespaces"].update_one({"_id": "/tasks/T1"}, {"$set": {"seq": Int64(2)}})
        await database["entries"].update_one({"_id": event.path}, {"$set": {"version": Int64(2)}})
        await evaluated(database, await confirm(layer, "T1", "R1"))
        assert listener.statistics.unreadable == 1
    assert [seq for _, seq, _ in recorded.woken()] == [1, 3]


@pytest.mark.parametrize("loss", ["drop", "rename", "dropDatabase"])
async def test_a4_a_lost_log_is_loud_and_stops_evaluation(
    database: Any, layer: StateLayer, recorded: Recorded, loss: str
) -> None:
    async with listening(database, layer, recorded) as listener:
        await evaluated(database, await confirm(layer, "T1", "R1"))
        if loss == "drop":
            await database["events"].drop()
        elif loss == "rename":
            await database["events"].rename("events_old")
        else:
            await database.command("dropDatabase")
        await wait_until(lambda: listener.statistics.state == "log_lost")
        await wait_until(lambda: _dispatch_is_log_lost(database))


async def _dispatch_is_log_lost(database: Any) -> bool:
    switch = await database["meta"].find_one({"_id": "dispatch"})
    return switch is not None and switch["state"] == "log_lost"
