"""Many instances share the partitions: fairly, through joins and deaths, and without doing work twice (DESIGN §7)."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
from bson import Timestamp
from pymongo.errors import OperationFailure

from statelayer import Settings, StateLayer, Write
from statelayer.clock import Clock
from statelayer.drivers import Database
from statelayer.instances import Instance, Instances
from statelayer.subscriptions.cursors import Checkpoints
from statelayer.subscriptions.shares import Share
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.anyio

USER = "user:U7"
SETTINGS = Settings(lease=1.0, heartbeat=0.2, poll=0.05)
WHOLE = frozenset(range(SETTINGS.partitions))


def share(database: Any, name: str) -> Share:
    ours, clock = Database(database), Clock()
    instances = Instances(ours, clock, lease=SETTINGS.lease)
    return Share(ours, SETTINGS, clock, instances, Instance(instances, name))


async def turn(*shares: Share) -> None:
    """Let each do what its listener has it do between two batches."""
    for one in shares:
        await one.keep()
        if one.is_due:
            await one.settle()


def sizes(shares: Sequence[Share]) -> list[int]:
    return sorted(len(one.held) for one in shares)


async def expire(database: Any, name: str) -> None:
    """Let an instance fall silent, as if it had been killed a lease ago."""
    long_ago = Clock().now().replace(year=2020)
    await database["instances"].update_one({"_id": name}, {"$set": {"heartbeatAt": long_ago}})
    await database["checkpoints"].update_many({"lease.owner": name}, {"$set": {"lease.until": long_ago}})


async def test_the_only_instance_holds_everything(database: Any, layer: StateLayer) -> None:
    one = share(database, "a")
    assert await one.settle()
    assert one.held == WHOLE
    assert not await one.settle()


@pytest.mark.parametrize("count", [2, 3, 8])
async def test_partitions_are_shared_evenly(database: Any, layer: StateLayer, count: int) -> None:
    shares = [share(database, f"i{number}") for number in range(count)]
    for one in shares:
        await one.settle()
    for _ in range(3):
        await turn(*shares)
    least, most = sizes(shares)[0], sizes(shares)[-1]
    assert most - least <= 1
    assert frozenset().union(*(one.held for one in shares)) == WHOLE
    assert sum(sizes(shares)) == len(WHOLE)
    assert not any(one.is_due for one in shares)


async def test_what_the_dead_held_is_taken_over_and_what_came_back_is_not_taken_twice(
    database: Any, layer: StateLayer
) -> None:
    alive, dead = share(database, "a"), share(database, "b")
    await alive.settle()
    await dead.settle()
    await turn(alive, dead, alive, dead)
    assert sizes([alive, dead]) == [32, 32]
    await expire(database, "b")
    await turn(alive)
    assert alive.held == WHOLE
    await asyncio.sleep(SETTINGS.heartbeat)
    await dead.keep()
    assert dead.held == frozenset()
    await turn(alive, dead, alive, dead)
    assert sizes([alive, dead]) == [32, 32]


async def test_what_the_dead_have_open_is_ended_by_the_living(database: Any, layer: StateLayer) -> None:
    """A transaction outlives its process by a minute, and would hold its namespaces until then."""
    theirs = Database(database)
    dead = Instance(Instances(theirs, Clock(), lease=SETTINGS.lease), "dead")
    await layer.set("/tasks/T1/status", "new", actor=USER)
    async with theirs.session() as session:
        await theirs.start_transaction(session)
        await database["namespaces"].update_one({"_id": "/tasks/T1"}, {"$inc": {"repairs": 1}}, session=session)
        await dead.listens([])
        [lsid] = (await database["instances"].find_one({"_id": "dead"}))["sessions"]
        assert lsid == str(session.session_id["id"].as_uuid())
        await expire(database, "dead")
        alive = share(database, "alive")
        await alive.settle()
        await alive.keep()
        assert (await layer.set("/tasks/T1/status", "done", actor=USER)).seq == 2
        with pytest.raises(OperationFailure):
            await database["namespaces"].find_one({"_id": "/tasks/T1"}, session=session)
    assert await database["instances"].find_one({"_id": "dead"}) is None


async def test_who_leaves_gives_everything_back_at_once(database: Any, layer: StateLayer) -> None:
    one, two = share(database, "a"), share(database, "b")
    await one.settle()
    await one.leave()
    await two.settle()
    assert two.held == WHOLE
    assert [document["_id"] for document in await database["instances"].find().to_list(length=10)] == ["b"]


async def test_partitions_change_hands_in_settle_only(database: Any, layer: StateLayer) -> None:
    """Whoever evaluates stores how far he is before he gives anything away."""
    one, two = share(database, "a"), share(database, "b")
    await one.settle()
    await two.settle()
    await one.keep()
    assert (one.is_due, one.has_surplus, one.held) == (True, True, WHOLE)
    assert (await two.settle(), two.held) == (False, frozenset())


async def test_a7_only_the_holder_moves_a_position_and_only_forward(database: Any, layer: StateLayer) -> None:
    one = share(database, "a")
    await one.settle()
    checkpoints = Checkpoints(Database(database))
    await checkpoints.save("a", WHOLE, Timestamp(200, 1))
    await checkpoints.save("a", WHOLE, Timestamp(100, 1))
    await checkpoints.save("b", WHOLE, Timestamp(300, 1))
    assert await checkpoints.oldest(WHOLE) == (Timestamp(200, 1), set())


async def test_a_position_that_is_none_counts_as_missing(database: Any, layer: StateLayer) -> None:
    await database.command({"collMod": "checkpoints", "validationLevel": "off"})
    broken = {1: "yesterday", 2: 17, 3: None, 4: Timestamp(100, 1)}
    await database["checkpoints"].insert_many([{"_id": n, "clusterTime": value} for n, value in broken.items()])
    assert await Checkpoints(Database(database)).oldest(range(1, 6)) == (Timestamp(100, 1), {1, 2, 3, 5})


# --- whole instances


class Fleet:
    """Instances on one database, each with a layer of its own."""

    def __init__(self, database: Any, stack: AsyncExitStack) -> None:
        self._database = database
        self._stack = stack
        self.layers: list[StateLayer] = []

    async def start(self, count: int) -> None:
        for _ in range(count):
            layer = await self._stack.enter_async_context(StateLayer(self._database, settings=SETTINGS))
            layer.workflow("review")(nothing)
            await self._stack.enter_async_context(layer.running())
            self.layers.append(layer)

    def held(self) -> list[tuple[int, ...]]:
        return [layer.statistics.listeners[0].partitions for layer in self.layers]

    def evaluated(self) -> list[int]:
        return [layer.statistics.listeners[0].evaluated for layer in self.layers]

    def is_even(self) -> bool:
        counts = Counter(partition for held in self.held() for partition in held)
        lengths = [len(held) for held in self.held()]
        return set(counts) == WHOLE and max(counts.values()) == 1 and max(lengths) - min(lengths) <= 1


async def nothing(run: Any) -> None:
    """Do nothing."""


@pytest.fixture
async def fleet(database: Any, layer: StateLayer) -> Any:
    await layer.subscriptions.publish(
        {
            "name": "review",
            "pattern": "/tasks/*/requests/*",
            "action": {"type": "execute_workflow", "workflowId": "review"},
        }
    )
    async with AsyncExitStack() as stack:
        yield Fleet(database, stack)


async def at_heads(database: Any, count: int) -> bool:
    heads = {d["_id"]: d["seq"] for d in await database["namespaces"].find().to_list(length=None)}
    cursors = {d["_id"]: d["at"]["seq"] for d in await database["cursors"].find().to_list(length=None)}
    return len(heads) == count and all(cursors.get(name, 0) == seq for name, seq in heads.items())


def reached(database: Any, count: int) -> Callable[[], Any]:
    return lambda: at_heads(database, count)


@pytest.mark.timeout(180)
async def test_d11_eight_instances_evaluate_each_event_once_and_share_it_evenly(
    database: Any, layer: StateLayer, fleet: Fleet
) -> None:
    """A thousand namespaces: each instance does a fair part of the work, within a fifth."""
    await fleet.start(8)
    await wait_until(fleet.is_even, timeout=30, message="the partitions are not shared")
    namespaces = [f"/tasks/T{n}" for n in range(1000)]
    for begin in range(0, 1000, 250):
        writes = [Write(path=f"{name}/facts/F", value=begin, actor=USER) for name in namespaces[begin : begin + 250]]
        await layer.append(writes)
    await wait_until(reached(database, 1000), timeout=60, message="not everything was evaluated")
    assert sum(fleet.evaluated()) == 1000
    assert all(100 <= evaluated <= 150 for evaluated in fleet.evaluated()), fleet.evaluated()


@pytest.mark.timeout(180)
async def test_joining_and_leaving_loses_nothing_and_runs_nothing_twice(
    database: Any, layer: StateLayer, fleet: Fleet
) -> None:
    """Instances come and go while events pour in; every event wakes its workflow exactly once."""
    writing = asyncio.create_task(pour(layer, 300))
    await fleet.start(1)
    await fleet.start(2)
    async with StateLayer(database, settings=SETTINGS) as passing, passing.running(work=False):
        await asyncio.sleep(0.5)
    events = await writing
    for event_id in events:
        outcome = await layer.outcome(event_id, timeout=60)
        assert [execution.id for execution in outcome.executions] == [f"workflow:{event_id}:review"]
    results = await database["events"].count_documents({"path": {"$regex": "/workflows/review/results/"}})
    assert results == len(events)
    await wait_until(fleet.is_even, timeout=30, message="the partitions are not shared again")


async def pour(layer: StateLayer, count: int) -> list[str]:
    return [(await layer.set(f"/tasks/T{n % 40}/requests/R{n}", n, actor=USER)).id for n in range(count)]
