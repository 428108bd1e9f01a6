"""The listener when its stream, its position, its server or its clock fails: nothing is skipped (DESIGN §7; P4)."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from anyio import to_thread
from bson import Timestamp
from listening import REQUESTS, USER, Recorded, confirm, evaluated, listening
from structlog.testing import capture_logs

from statelayer import Settings, StateLayer, Write
from statelayer.clock import Clock
from statelayer.drivers import Database
from statelayer.embedded import ReplicaSet
from statelayer.executors import RetryPolicy
from statelayer.subscriptions import listener as listener_module
from statelayer.subscriptions.evaluation import evaluate
from statelayer.subscriptions.state import StateReader
from statelayer.testing import wait_until
from statelayer.testing.plugin import PARAMETERS, connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from datetime import datetime

    from statelayer.executors import Run
    from statelayer.testing.plugin import Driver

pytestmark = pytest.mark.anyio

MISSED = 50


@asynccontextmanager
async def failing(database: Any, *commands: str, times: int | None = 1, code: int) -> AsyncIterator[None]:
    """Let the server refuse the commands of this database's streams, so many times or always."""
    data = {"failCommands": list(commands), "errorCode": code, "namespace": f"{database.name}.$cmd.aggregate"}
    mode = "alwaysOn" if times is None else {"times": times}
    await database.client["admin"].command({"configureFailPoint": "failCommand", "mode": mode, "data": data})
    try:
        yield
    finally:
        await database.client["admin"].command({"configureFailPoint": "failCommand", "mode": "off"})


def seqs(recorded: Recorded, namespace: str = "/tasks/T1") -> list[int]:
    return [seq for where, seq, _ in recorded.woken() if where == namespace]


# --- A1, A2: the position is gone


async def test_a1_a2_what_was_written_beyond_a_lost_position_is_read_from_the_log(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    async with listening(database, layer, recorded):
        await evaluated(database, await confirm(layer, "T1", "R0"))
    for n in range(MISSED):
        last = await confirm(layer, "T1", f"M{n}")
    lost = failing(database, "aggregate", code=286)
    with capture_logs() as logs:
        async with lost, listening(database, layer, recorded) as listener:
            await evaluated(database, last)
            await evaluated(database, await confirm(layer, "T1", "after"))
            assert listener.statistics.restarts == {"history_lost": 1}
    assert seqs(recorded) == list(range(1, MISSED + 3))
    told = [line["event"] for line in logs]
    assert told.count("stream_restarted") == 1
    assert told.index("stream_restarted") < told.index("catch_up_started")


async def test_a2_a_position_that_stays_lost_is_asked_for_less_and_less_often(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    with capture_logs() as logs:
        lost = failing(database, "aggregate", times=5, code=286)
        async with lost, listening(database, layer, recorded) as listener:
            await evaluated(database, await confirm(layer, "T1", "R1"))
            assert listener.statistics.restarts == {"history_lost": 5}
    pauses = [line["pause"] for line in logs if line["event"] == "stream_restarted"]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6]


@pytest.mark.parametrize("position", ["nonsense", {}, 0, None, Timestamp(1, 1), Timestamp(2**31, 1)], ids=repr)
async def test_a4_a_position_that_makes_no_sense_is_given_up(
    database: Any, layer: StateLayer, recorded: Recorded, position: object
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    missed = [await confirm(layer, "T1", f"M{n}") for n in range(3)]
    documents = [{"_id": n, "clusterTime": position, "lease": None} for n in range(layer.settings.partitions)]
    await database.command({"insert": "checkpoints", "documents": documents, "bypassDocumentValidation": True})
    async with listening(database, layer, recorded):
        await evaluated(database, missed[-1])
        await evaluated(database, await confirm(layer, "T1", "after"))
    assert seqs(recorded) == [1, 2, 3, 4]


@pytest.mark.parametrize("command", ["aggregate", "getMore"])
@pytest.mark.parametrize("code", [286, 280, 260, 10334, 15, 8000, 43, 237, 11601, 91], ids=str)
async def test_a4_a5_whatever_the_server_says_of_a_stream_it_is_read_again(
    database: Any, layer: StateLayer, recorded: Recorded, command: str, code: int
) -> None:
    """A code that nobody has heard of costs the position, which the log makes up for; so does a change too large."""
    await layer.subscriptions.publish(REQUESTS)
    async with listening(database, layer, recorded):
        await evaluated(database, await confirm(layer, "T1", "R1"))
    await confirm(layer, "T1", "R2")
    async with failing(database, command, times=2, code=code), listening(database, layer, recorded) as listener:
        await confirm(layer, "T1", "R3")
        await wait_until(lambda: listener.statistics.restarts.total() >= 2)
        await evaluated(database, await confirm(layer, "T1", "R4"))
    assert sorted(set(seqs(recorded))) == [1, 2, 3, 4]


async def test_a5_the_largest_value_that_is_taken_streams(database: Any, recorded: Recorded) -> None:
    settings = Settings(max_value_bytes=4 * 2**20)
    async with StateLayer(database, settings=settings) as layer:
        await layer.setup()
        await layer.subscriptions.publish(REQUESTS)
        async with listening(database, layer, recorded) as listener:
            large = {"status": "confirmed", "text": "x" * (4 * 2**20 - 100)}
            events = await layer.append(
                [Write(path=f"/tasks/T1/requests/R{n}", value=large, actor=USER) for n in range(2)]
            )
            await evaluated(database, events[-1])
            await evaluated(database, await confirm(layer, "T1", "small"))
            assert not listener.statistics.restarts
    assert seqs(recorded) == [1, 2, 3]


# --- A4: the log is gone


async def test_a4_a_log_that_was_replaced_while_nobody_looked_stops_everything(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    async with listening(database, layer, recorded):
        await evaluated(database, await confirm(layer, "T1", "R1"))
    for name in ("events", "namespaces", "entries", "checkpoints"):
        await database[name].delete_many({})
    await layer.setup()
    await confirm(layer, "T1", "another")
    async with listening(database, layer, recorded) as listener:
        await wait_until(lambda: listener.statistics.state == "log_lost")

        async def is_told() -> bool:
            return any("log was lost" in problem for problem in (await layer.health()).problems)

        await wait_until(is_told)
    assert recorded.decisions == []


async def test_a4_after_an_operator_has_decided_it_goes_on(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    async with listening(database, layer, recorded) as listener:
        await evaluated(database, await confirm(layer, "T1", "R1"))
        for name in ("events", "namespaces", "entries", "cursors"):
            await database[name].drop()
        await wait_until(lambda: listener.statistics.state == "log_lost")
        await layer.setup()
        await layer.subscriptions.publish(REQUESTS)
        anew = await confirm(layer, "T1", "R1")
        assert recorded.decisions == []
        await database["meta"].update_one({"_id": "dispatch"}, {"$set": {"state": "on"}})
        await evaluated(database, anew)
    assert seqs(recorded) == [1]


# --- the stream breaks


async def test_a_stream_whose_cursor_is_killed_is_opened_again(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    async with listening(database, layer, recorded):
        for n in range(5):
            await kill_every_cursor(database)
            await evaluated(database, await confirm(layer, "T1", f"R{n}"))
    assert sorted(set(seqs(recorded))) == [1, 2, 3, 4, 5]


async def kill_every_cursor(database: Any) -> None:
    pipeline = [
        {"$currentOp": {"allUsers": True, "idleCursors": True}},
        {"$match": {"cursor.cursorId": {"$exists": True}, "ns": {"$regex": f"^{database.name}\\."}}},
    ]
    answer = await database.client["admin"].command({"aggregate": 1, "pipeline": pipeline, "cursor": {}})
    for found in answer["cursor"]["firstBatch"]:
        collection = found["ns"].partition(".")[2]
        await database.command({"killCursors": collection, "cursors": [found["cursor"]["cursorId"]]})


async def test_sessions_that_are_killed_cost_nothing(database: Any, layer: StateLayer, recorded: Recorded) -> None:
    await layer.subscriptions.publish(REQUESTS)
    async with listening(database, layer, recorded):
        for n in range(5):
            await database.client["admin"].command({"killAllSessions": []})
            await evaluated(database, await confirm(layer, "T1", f"R{n}"))
    assert sorted(set(seqs(recorded))) == [1, 2, 3, 4, 5]


async def test_i9_a_catch_up_is_paged_by_seq_and_outlives_its_cursors(
    database: Any, layer: StateLayer, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds one page at a time, however long the log is."""
    await layer.subscriptions.publish(REQUESTS)
    for n in range(10):
        writes = [
            Write(path=f"/tasks/T{n % 2}/requests/{n}-{i}", value={"status": "confirmed"}, actor=USER)
            for i in range(500)
        ]
        last = await layer.append(writes)
    pages: list[int] = []
    original = listener_module.Listener._evaluate

    async def counted(self: Any, documents: Any) -> None:
        pages.append(len(documents))
        await original(self, documents)

    monkeypatch.setattr(listener_module.Listener, "_evaluate", counted)
    async with listening(database, layer, recorded, page_size=200):
        while (await layer.health()).unevaluated:
            await kill_every_cursor(database)
        await evaluated(database, last[-1])
    assert max(pages) == 200
    assert sorted(recorded.woken()) == [(f"/tasks/T{t}", s, "requests") for t in range(2) for s in range(1, 2501)]


async def test_b3_ten_thousand_events_that_match_nothing_are_not_read_again(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    async with listening(database, layer, recorded):
        for n in range(10):
            writes = [Write(path=f"/tasks/T{n}/other/{i}", value=i, actor=USER) for i in range(1000)]
            last = await layer.append(writes)
        await evaluated(database, last[-1])
    async with listening(database, layer, recorded) as listener:
        await evaluated(database, await confirm(layer, "T1", "R1"))
        assert listener.statistics.evaluated == 1
    assert len(recorded.woken()) == 1


async def test_the_position_of_a_quiet_log_moves_with_what_else_is_written(
    database: Any, layer: StateLayer, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would age out of the oplog, for want of an event."""
    monkeypatch.setattr(listener_module, "CHECKPOINT_INTERVAL", 0)

    async def oldest() -> Timestamp | None:
        found = await database["checkpoints"].find({}).to_list(None)
        times = [document.get("clusterTime") for document in found]
        return None if None in times or not times else min(times)

    async with listening(database, layer, recorded):
        await evaluated(database, await confirm(layer, "T1", "R1"))
        before = await wait_until(oldest)
        await asyncio.gather(*(database["orders"].insert_one({"n": n}) for n in range(3)))

        async def has_moved() -> bool:
            now = await oldest()
            return now is not None and now > before

        await wait_until(has_moved)


# --- edits by hand


async def test_subscriptions_edited_by_hand_while_events_pour_in_stop_nobody(
    database: Any, layer: StateLayer, recorded: Recorded
) -> None:
    await layer.subscriptions.publish(REQUESTS)
    for name in ("broken", "toggled"):
        action = {"type": "execute_workflow", "workflowId": name}
        await layer.subscriptions.publish({**REQUESTS, "name": name, "action": action})
    subscriptions = database["state_subscriptions"]
    done = asyncio.Event()

    async def pour() -> None:
        for n in range(150):
            await confirm(layer, f"T{n % 3}", f"R{n}")
        done.set()

    async def edit() -> None:
        broken = await subscriptions.find_one({"name": "broken"})
        while not done.is_set():
            await database.command(
                {
                    "update": "state_subscriptions",
                    "updates": [{"q": {"name": "broken"}, "u": {"$set": {"condition": {"op": "no such"}}}}],
                    "bypassDocumentValidation": True,
                }
            )
            await subscriptions.update_one({"name": "toggled"}, [{"$set": {"enabled": {"$not": "$enabled"}}}])
            await asyncio.sleep(0.02)
            await subscriptions.update_one({"name": "broken"}, {"$set": {"condition": broken["condition"]}})

    async with listening(database, layer, recorded):
        await asyncio.gather(pour(), edit())
        for task in range(3):
            await evaluated(database, await confirm(layer, f"T{task}", "last"))
    sound = sorted((where, seq) for where, seq, name in recorded.woken() if name == "requests")
    assert sound == [(f"/tasks/T{task}", seq) for task in range(3) for seq in range(1, 52)]
    events = [event for task in range(3) for event in [e async for e in layer.events(f"/tasks/T{task}")]]
    again = await evaluate(events, await layer.subscriptions.refresh(), StateReader(Database(database)))
    toggled = [(d.event.namespace, d.event.seq) for d in again for w in d.wakeups if w.subscription.name == "toggled"]
    assert 0 < len(toggled) < len(events)
    assert sorted((where, seq) for where, seq, name in recorded.woken() if name == "toggled") == sorted(toggled)


# --- connections, processes, clocks, privileges


async def test_a11_many_subscriptions_and_readers_need_few_connections(
    database: Any, driver: Driver, statelayer_server: Any
) -> None:
    few = connected(driver, statelayer_server.uri, maxPoolSize=20)
    async with few as client, StateLayer(client[database.name]) as layer:
        await layer.setup()
        layer.workflow("intake")(_nothing)
        for n in range(50):
            await layer.subscriptions.publish({**REQUESTS, "name": f"s{n}", "pattern": f"/tasks/*/kind-{n}/*"})
        await layer.subscriptions.publish(REQUESTS)
        ready: list[int] = []

        async def read(n: int) -> str:
            async with layer.watch("/tasks/**") as watch:
                ready.append(n)
                return (await anext(aiter(watch))).id

        async with layer.running():
            readers = [asyncio.create_task(read(n)) for n in range(50)]
            await wait_until(lambda: len(ready) == 50)
            event = await confirm(layer, "T1", "R1")
            outcome = await layer.outcome(event.id, timeout=20)
            assert set(await asyncio.gather(*readers)) == {event.id}
    assert [execution.state for execution in outcome.executions] == ["succeeded"]


async def _nothing(run: Run) -> None: ...


class ShiftedClock(Clock):
    """A machine whose clock is wrong."""

    def __init__(self, shift: timedelta) -> None:
        super().__init__()
        self._shift = shift

    def now(self) -> datetime:
        return super().now() + self._shift


async def test_instances_whose_clocks_are_hours_apart_agree(database: Any, layer: StateLayer) -> None:
    """Leases, heartbeats and availability are the server's; only its clock decides who is dead and what is due."""
    settings = Settings(lease=1, heartbeat=0.2, poll=0.05)
    runs: list[tuple[str, int]] = []

    async def flaky(run: Run) -> None:
        runs.append((run.event.id, run.attempt))
        await asyncio.sleep(1.5)  # longer than a lease
        if run.attempt == 1 and run.input["n"] % 2:
            raise ValueError("once")

    layers = [StateLayer(database, settings=settings, clock=ShiftedClock(timedelta(hours=hours))) for hours in (-1, 1)]
    await layer.subscriptions.publish({**REQUESTS, "condition": None})
    for each in layers:
        each.workflow("intake", retry=RetryPolicy(wait=0.1))(flaky)
    async with layers[0].running(), layers[1].running():
        await wait_until(lambda: all(0 < len(_partitions(each)) < settings.partitions for each in layers))
        events = [await layers[n % 2].set(f"/tasks/T{n}/requests/R", {"n": n}, actor=USER) for n in range(8)]
        outcomes = await asyncio.gather(*(layer.outcome(event.id, timeout=30) for event in events))
    for each in layers:
        await each.aclose()
    assert {execution.state for outcome in outcomes for execution in outcome.executions} == {"succeeded"}
    assert sorted(runs) == sorted((e.id, a) for n, e in enumerate(events) for a in ((1, 2) if n % 2 else (1,)))


def _partitions(layer: StateLayer) -> tuple[int, ...]:
    return layer.statistics.listeners[0].partitions


async def test_i4_a_user_who_may_read_and_write_this_database_needs_no_more(driver: Driver, tmp_path: Any) -> None:
    key = tmp_path / "key"
    key.write_text("c2VjcmV0" * 8)
    key.chmod(0o400)
    server = ReplicaSet(parameters=PARAMETERS)
    try:
        await to_thread.run_sync(server.start)
        [node] = server.nodes
        async with connected(driver, server.uri) as client:
            roles = [{"role": "readWrite", "db": "service"}]
            await client["service"].command("createUser", "service", pwd="s3cret", roles=roles)
        await to_thread.run_sync(node.stop)
        node._command += ["--keyFile", str(key)]
        node.launch()
        await wait_until(lambda: to_thread.run_sync(lambda: node.hello().get("isWritablePrimary")), timeout=30)
        uri = server.uri.replace("mongodb://", "mongodb://service:s3cret@") + "&authSource=service"
        async with connected(driver, uri) as client, StateLayer(client["service"]) as layer:
            await layer.setup()
            layer.workflow("intake")(_nothing)
            await layer.subscriptions.publish(REQUESTS)
            async with layer.running(), layer.watch("/tasks/**") as watch:
                event = await confirm(layer, "T1", "R1")
                outcome = await layer.outcome(event.id, timeout=20)
                assert [execution.state for execution in outcome.executions] == ["succeeded"]
                assert (await anext(aiter(watch))).id == event.id
                assert (await layer.health()).ok
                await layer.pause()
                await layer.unpause()
            assert (await layer.verify("/tasks/T1")).ok
            await layer.replay("/tasks/T1")
    finally:
        await to_thread.run_sync(server.stop)
