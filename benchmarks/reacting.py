"""Reacting: from a fact to what it sets off, beside the driver's bare change stream."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from bson import Int64, ObjectId

from benchmarks.baselines import ACTOR, DURABLE
from benchmarks.measure import VALUE, Row, compare, latency
from statelayer import Settings, StateLayer, Write
from statelayer.testing import wait_until
from statelayer.testing.plugin import connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from bson import Timestamp

    from benchmarks.append import Bench
    from statelayer import Run
    from statelayer.testing.plugin import Driver

    React = Callable[[int], Awaitable[None]]

EVENTS = 100_000
NAMESPACES = 1000
SUBSCRIPTIONS = 100
MATCHING = 100
"""One event of so many matches a subscription."""

DRAINS = 3
"""Rounds of a drain, which takes long."""

CALLS = 100
REST = 0.04
"""Seconds between two calls, in which the system falls idle."""

HOPS = 3
EXECUTIONS = 1000
WORK = 0.05
AT_ONCE = 4
"""The bound of each instance, small enough for it to be what limits one of them."""


# --- draining


async def drain_on_pymongo(bench: Bench) -> Row:
    return await _drain(bench, "pymongo")


async def drain_on_motor(bench: Bench) -> Row:
    return await _drain(bench, "motor")


async def _drain(bench: Bench, driver: Driver) -> Row:
    async with bench.layer() as layer, connected(driver, bench.uri, tz_aware=True) as client:
        start = (await bench.database.command("hello"))["operationTime"]
        for n in range(SUBSCRIPTIONS):
            await layer.subscriptions.publish(_subscription(f"kind-{n}", f"w{n}"))
        await _fill(layer)

        async def ours(_: int) -> float:
            await _rewind(bench.database, start)
            async with StateLayer(client[bench.database.name]) as reader:
                return await _drained(reader)

        return await compare(
            f"drain of {EVENTS:,} events, {NAMESPACES:,} namespaces, {SUBSCRIPTIONS} subscriptions, 1% match; {driver}",
            "a bare change stream of PyMongo Async over the same events",
            ours,
            lambda _: _streamed(bench.database, start),
            target=0.3,
            rounds=DRAINS,
        )


def _subscription(kind: str, workflow: str) -> dict[str, Any]:
    return {
        "name": f"{kind}-{workflow}",
        "pattern": f"/tasks/*/{kind}/*",
        "condition": {"path": "$event.value.status", "op": "eq", "value": "confirmed"},
        "action": {"type": "execute_workflow", "workflowId": workflow},
    }


async def _fill(layer: StateLayer) -> None:
    for namespace in range(NAMESPACES):
        matching = f"kind-{namespace % SUBSCRIPTIONS}"
        kinds = [matching if n % MATCHING == 0 else f"other-{n}" for n in range(EVENTS // NAMESPACES)]
        paths = [f"/tasks/D{namespace}/{kind}/{n}" for n, kind in enumerate(kinds)]
        await layer.append([Write(path=path, value=VALUE, actor=ACTOR) for path in paths])


async def _rewind(database: Any, start: Timestamp) -> None:
    """Let the listener find what it would find had it been away since then."""
    for name in ("cursors", "executions", "checkpoints"):
        await database[name].delete_many({})
    await database["checkpoints"].insert_many(
        {"_id": partition, "lease": None, "clusterTime": start} for partition in range(Settings().partitions)
    )


async def _drained(layer: StateLayer) -> float:
    started = time.perf_counter()
    async with layer.running(work=False):
        await wait_until(lambda: layer.statistics.listeners[0].evaluated >= EVENTS, timeout=300)
        taken = time.perf_counter() - started
    return EVENTS / taken


async def _streamed(database: Any, start: Timestamp) -> float:
    started = time.perf_counter()
    seen = 0
    async with await database["events"].watch(
        [{"$match": {"operationType": "insert"}}], start_at_operation_time=start
    ) as stream:
        async for _ in stream:
            seen += 1
            if seen == EVENTS:
                break
    return EVENTS / (time.perf_counter() - started)


# --- latency


class Signals:
    """Tells who waits for a path that its executor has started."""

    def __init__(self) -> None:
        self._waiting: dict[str, asyncio.Event] = {}

    def waiting_for(self, event_id: str) -> asyncio.Event:
        return self._waiting.setdefault(event_id, asyncio.Event())

    async def __call__(self, run: Run) -> None:
        self.waiting_for(run.event.root_event_id).set()


async def set_to_start(bench: Bench) -> Row:
    async with bench.layer() as layer, _receiving(bench) as receive:
        react = await _reaction(layer, bench.fresh(), "single", hops=1)
        async with layer.running():
            return await compare(
                "set → its executor has started, idle system, p50",
                "a bare majority insert → its change has been received",
                lambda _: latency(react, calls=CALLS, pause=REST),
                lambda _: latency(receive, calls=CALLS, pause=REST),
                target=3.5,
                unit="ms",
            )


async def chain_of_hops(bench: Bench) -> Row:
    async with bench.layer() as layer:
        single = await _reaction(layer, bench.fresh(), "single", hops=1)
        chain = await _reaction(layer, bench.fresh(), "chain", hops=HOPS)

        async def so_many_single_hops(_: int) -> float:
            return HOPS * await latency(single, calls=CALLS, pause=REST)

        async with layer.running():
            return await compare(
                f"chain of {HOPS} hops, from set to the start of the last executor, p50",
                f"{HOPS} times a single hop",
                lambda _: latency(chain, calls=CALLS, pause=REST),
                so_many_single_hops,
                target=1.3,
                unit="ms",
            )


async def _reaction(layer: StateLayer, namespace: str, kind: str, *, hops: int) -> React:
    """Return a call that sets a value and returns when the last of so many executors in a row has started."""
    signals = Signals()
    pattern = f"/tasks/*/{kind}/*"
    for n in range(hops):
        name = f"{kind}-{n}"
        action = {"type": "execute_workflow", "workflowId": name}
        await layer.subscriptions.publish({"name": name, "pattern": pattern, "condition": None, "action": action})
        layer.workflow(name)(_pass_on if n < hops - 1 else signals)
        pattern = f"/tasks/*/workflows/{name}/results/*"

    async def react(_: int) -> None:
        event = await layer.set(f"{namespace}/{kind}/{ObjectId()}", VALUE, actor=ACTOR)
        await signals.waiting_for(event.id).wait()

    return react


async def _pass_on(_run: Run) -> None:
    """The result is the next one's event."""


@asynccontextmanager
async def _receiving(bench: Bench) -> AsyncIterator[React]:
    """Give a call that inserts a document and returns when a stream has shown it."""
    collection = bench.database["bare"].with_options(write_concern=DURABLE)
    await collection.insert_one({"seq": Int64(0)})
    async with await collection.watch([{"$match": {"operationType": "insert"}}]) as stream:

        async def receive(_: int) -> None:
            result = await collection.insert_one({"namespace": "/tasks/T1", "path": "/tasks/T1/x", "value": VALUE})
            while (await anext(stream))["documentKey"]["_id"] != result.inserted_id:
                pass

        yield receive


# --- working


async def two_instances(bench: Bench) -> Row:
    return await compare(
        f"{EXECUTIONS:,} executions of a workflow that waits {WORK * 1000:g} ms, two instances of bound {AT_ONCE}",
        "one instance",
        lambda _: _worked_off(bench, 2),
        lambda _: _worked_off(bench, 1),
        target=1.7,
        unit="executions/s",
        rounds=DRAINS,
    )


async def _worked_off(bench: Bench, instances: int) -> float:
    async with bench.layer() as layer, AsyncExitStack() as stack:
        await layer.subscriptions.publish(_subscription("kind", "wait"))
        await bench.database["executions"].delete_many({})
        await _queue(layer, bench)
        started = time.perf_counter()
        for _ in range(instances):
            worker = await stack.enter_async_context(StateLayer(bench.database, settings=Settings(concurrency=AT_ONCE)))
            worker.workflow("wait")(_wait)
            await stack.enter_async_context(worker.running(listen=False))

        async def done() -> bool:
            return await bench.database["executions"].count_documents({"state": "succeeded"}) == EXECUTIONS

        await wait_until(done, timeout=120, interval=0.05)
        return EXECUTIONS / (time.perf_counter() - started)


async def _queue(layer: StateLayer, bench: Bench) -> None:
    for start in range(0, EXECUTIONS, 100):
        namespace = bench.fresh()
        await layer.append([Write(path=f"{namespace}/kind/{start + n}", value=VALUE, actor=ACTOR) for n in range(100)])

    async def queued() -> bool:
        return await bench.database["executions"].count_documents({"state": "queued"}) == EXECUTIONS

    async with layer.running(work=False):
        await wait_until(queued, timeout=120)


async def _wait(_run: Run) -> None:
    await asyncio.sleep(WORK)


ROWS = [drain_on_pymongo, drain_on_motor, set_to_start, chain_of_hops, two_instances]
