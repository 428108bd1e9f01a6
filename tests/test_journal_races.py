"""What a cancellation, a second process or a shutdown may do to appends that are on their way (DESIGN §6; C7, K4)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import pytest
from bson import Int64

from statelayer import Settings, StateLayer, Write
from statelayer.clock import Clock
from statelayer.drivers import Database
from statelayer.errors import (
    ClosedError,
    IdempotencyConflictError,
    IntegrityError,
    InvalidValueError,
    LeaseLostError,
    NotFoundError,
    StateLayerError,
    VersionConflictError,
)
from statelayer.events import Event, check_write
from statelayer.journal.append import Append
from statelayer.journal.judge import Head, Ledger
from statelayer.journal.memory import Memory
from statelayer.journal.queue import Admission
from statelayer.testing import wait_until
from statelayer.transactions import Deadline, transaction
from statelayer.values import Limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence

    from workbench import Workbench

    from statelayer.journal import JournalTransaction
    from statelayer.testing.plugin import Driver, ExternalServer

pytestmark = pytest.mark.anyio

USER = "user:U7"
T1 = "/tasks/T1"


async def seqs(layer: StateLayer, namespace: str) -> list[int]:
    return [event.seq async for event in layer.events(namespace)]


# --- cancelling, wherever it happens

PAUSES = [0.0] * 8 + [n * 0.0004 for n in range(30)]
"""Seconds until the cancellation: first after so many turns of the event loop, then all over a commit."""


async def cancelled_after(turns: int, work: Coroutine[Any, Any, object]) -> None:
    task = asyncio.create_task(work)
    for pause in PAUSES[: turns + 1] if turns < 8 else [PAUSES[turns]]:
        await asyncio.sleep(pause)
    task.cancel()
    await asyncio.wait([task])


async def no_transaction_is_open(database: Any) -> None:
    async def none_open() -> bool:
        pipeline = [
            {"$currentOp": {"allUsers": True, "idleSessions": True}},
            {"$match": {"transaction.parameters.txnNumber": {"$exists": True}}},
        ]
        reply = await database.client["admin"].command({"aggregate": 1, "pipeline": pipeline, "cursor": {}})
        return reply["cursor"]["firstBatch"] == []

    await wait_until(none_open)


async def test_c7_wherever_an_append_is_cancelled_it_is_there_once_or_not_at_all(
    database: Any, layer: StateLayer, other: StateLayer
) -> None:
    for turns in range(len(PAUSES)):
        pair = [Write(path=f"{T1}/n/{turns}", value=n, actor=USER) for n in range(2)]
        await cancelled_after(turns, layer.append(pair, idempotency_key=f"k{turns}"))
        again = await (layer, other)[turns % 2].append(pair, idempotency_key=f"k{turns}")
        assert [event.version for event in again] == [1, 2]
    assert await seqs(other, T1) == list(range(1, 2 * len(PAUSES) + 1))
    await no_transaction_is_open(database)


@pytest.mark.parametrize("way", ["transact", "transaction"])
async def test_c7_wherever_a_transaction_is_cancelled_it_happened_whole_or_not_at_all(
    database: Any, layer: StateLayer, other: StateLayer, way: str
) -> None:
    await database["orders"].insert_one({"_id": -1})

    async def write(tx: JournalTransaction, number: int) -> None:
        await database["orders"].insert_one({"_id": number}, session=tx.session)
        await tx.set(f"{T1}/n/{number}", number, actor=USER)

    async def run(number: int) -> None:
        if way == "transact":
            await layer.transact(lambda tx: write(tx, number), T1)
        else:
            async with layer.transaction(T1) as tx:
                await write(tx, number)

    for turns in range(len(PAUSES)):
        await cancelled_after(turns, run(turns))
        async with asyncio.timeout(5):
            await other.set(f"{T1}/beside", turns, actor=USER)
        order = await database["orders"].find_one({"_id": turns})
        assert (order is None) == (await other.get(f"{T1}/n/{turns}") is None)
    written = await seqs(other, T1)
    assert written == list(range(1, len(written) + 1))
    await no_transaction_is_open(database)


class Steps:
    """Counts the steps that tasks take: whatever runs between one suspension and the next, in any task of the loop."""

    def __init__(self) -> None:
        self.taken = 0
        self._at = 0
        self._victim: asyncio.Task[Any] | None = None

    async def cancelled_at(self, step: int, work: Coroutine[Any, Any, object]) -> bool:
        """Run the work, cancel it as soon as so many steps were taken, and say whether it came so far."""
        loop = asyncio.get_running_loop()
        before = loop.get_task_factory()
        loop.set_task_factory(self._counted)
        try:
            self.taken, self._at = 0, step
            self._victim = asyncio.ensure_future(work)
            await asyncio.wait([self._victim])
            return self.taken >= step
        finally:
            self._victim = None
            loop.set_task_factory(before)

    def _counted(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.Task(Stepped(work, self), loop=loop, **options)

    def take(self) -> None:
        self.taken += 1
        if self.taken == self._at and self._victim is not None:
            self._victim.cancel()


class Stepped(Coroutine[Any, Any, Any]):
    """A coroutine that tells of each of its steps after it was taken."""

    def __init__(self, work: Coroutine[Any, Any, Any], steps: Steps) -> None:
        self._work = work
        self._steps = steps

    def send(self, value: Any) -> Any:
        try:
            return self._work.send(value)
        finally:
            self._steps.take()

    def throw(self, *error: Any) -> Any:
        try:
            return self._work.throw(*error)
        finally:
            self._steps.take()

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()


class Orders:
    """One order after the other, each with an event; by one of the ways that a service has."""

    def __init__(self, database: Any, layer: StateLayer) -> None:
        self.collection = database["orders"]
        self.ours = Database(database)
        self.layer = layer

    async def append(self, number: int) -> None:
        await self.layer.append(pair(number), idempotency_key=f"k{number}")

    async def transact(self, number: int) -> None:
        await self.layer.transact(lambda tx: self._body(tx, number), T1)

    async def transaction(self, number: int) -> None:
        async with self.layer.transaction(T1) as tx:
            await self._body(tx, number)

    async def _body(self, tx: JournalTransaction, number: int) -> None:
        await self.collection.insert_one({"_id": number}, session=tx.session)
        await tx.append(pair(number), idempotency_key=f"k{number}")

    async def bare(self, number: int) -> None:
        """In the transaction on which all of these stand."""
        async with transaction(self.ours, Deadline(Clock(), 10)) as session:
            await self.collection.insert_one({"_id": number}, session=session)
            await self.collection.insert_one({"_id": -number}, session=session)


def pair(number: int) -> list[Write]:
    return [Write(path=f"{T1}/orders/{number}", value=part, actor=USER) for part in ("ordered", "paid")]


MOST_STEPS = 400


@pytest.mark.parametrize("way", ["append", "transact", "transaction"])
async def test_c7_at_whichever_step_a_caller_is_cancelled_his_key_finds_the_outcome(
    database: Any, layer: StateLayer, other: StateLayer, way: str
) -> None:
    orders, steps = Orders(database, layer), Steps()
    await orders.collection.insert_one({"_id": -1})
    await orders.append(0)
    number, reached = 0, True
    while reached:
        number += 1
        assert number < MOST_STEPS
        reached = await steps.cancelled_at(number, getattr(orders, way)(number))
        if way != "append":  # what is left of an append may still be on its way; of a block, nothing
            await no_transaction_is_open(database)
            ordered = await orders.collection.find_one({"_id": number})
            assert (ordered is None) == (await other.get(f"{T1}/orders/{number}") is None)
        events = await (layer, other)[number % 2].append(pair(number), idempotency_key=f"k{number}")
        assert [(event.version, event.value) for event in events] == [(1, "ordered"), (2, "paid")]
        assert (await layer.set(f"{T1}/beside", number, actor=USER)).version == number
        await no_transaction_is_open(database)
    assert number > 5
    assert await seqs(other, T1) == list(range(1, 3 * number + 3))
    assert (await other.verify(T1)).ok


async def test_c7_at_whichever_step_a_transaction_is_cancelled_it_is_closed(database: Any, layer: StateLayer) -> None:
    orders, steps = Orders(database, layer), Steps()
    await orders.collection.insert_one({"_id": 0})
    number, reached, kept = 0, True, 0
    while reached:
        number += 1
        assert number < MOST_STEPS
        reached = await steps.cancelled_at(number, orders.bare(number))
        await no_transaction_is_open(database)
        found = await orders.collection.count_documents({"_id": {"$in": [number, -number]}})
        assert found in (0, 2)
        kept += found
    assert number > 5
    assert kept > 0


# --- one among many


class LostFence:
    """What goes with the result of an execution that somebody else has taken over."""

    collection = "executions"
    id = "job"

    def judge(self, document: Any) -> StateLayerError | None:
        return LeaseLostError("job")

    def operation(self, events: Sequence[Event]) -> Any:
        raise AssertionError("it was refused")


async def test_each_that_is_refused_among_a_hundred_fails_alone(bench: Workbench) -> None:
    limit = bench.settings.max_value_bytes
    await bench.layer.set(f"{T1}/there", {"a": "x" * (limit - 100)}, actor=USER)
    await bench.layer.set(f"{T1}/keyed", 1, actor=USER, idempotency_key="k")
    refused: dict[type[StateLayerError], Awaitable[object]] = {
        VersionConflictError: bench.layer.set(f"{T1}/there", 2, actor=USER, expected_version=5),
        NotFoundError: bench.layer.delete(f"{T1}/never", actor=USER),
        IdempotencyConflictError: bench.layer.set(f"{T1}/keyed", 2, actor=USER, idempotency_key="k"),
        InvalidValueError: bench.layer.merge(f"{T1}/there", {"b": "x" * 200}, actor=USER),
        LeaseLostError: bench.journal.append(
            [Write(path=f"{T1}/result", value=1, actor=USER)], companions=[LostFence()]
        ),
    }
    good = [bench.layer.set(f"{T1}/n/{n}", n, actor=USER) for n in range(100)]
    results = await asyncio.gather(*good[:50], *refused.values(), *good[50:], return_exceptions=True)
    assert [type(result) for result in results if isinstance(result, BaseException)] == list(refused)
    log = bench.handle["events"].find({"namespace": T1}).sort("seq", 1)
    assert [event["seq"] async for event in log] == list(range(1, 103))


# --- two processes

RIVAL = """
import asyncio, json, sys
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient
from statelayer import StateLayer

uri, database, driver, seconds = sys.argv[1:]


async def main():
    counts = [0] * 256
    client = {"motor": AsyncIOMotorClient, "pymongo": AsyncMongoClient}[driver](uri)
    async with StateLayer(client[database]) as layer:
        await layer.get("/tasks/T0/x")
        print("ready", flush=True)
        sys.stdin.readline()

        async def caller(number):
            while True:
                await layer.set(f"/tasks/T{number}/x", 0, actor="user:U7")
                counts[number] += 1

        callers = [asyncio.ensure_future(caller(number)) for number in range(256)]
        await asyncio.wait(callers, timeout=float(seconds), return_when=asyncio.FIRST_EXCEPTION)
        print(json.dumps(counts), flush=True)
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)


asyncio.run(main())
"""


@pytest.mark.fault
async def test_two_processes_that_want_the_same_256_namespaces_share_them(
    layer: StateLayer, database: Any, statelayer_server: ExternalServer, driver: Driver
) -> None:
    """Each gets at least a quarter of an even share, over ten seconds."""
    arguments = [sys.executable, "-c", RIVAL, statelayer_server.uri, database.name, driver, "10"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    rivals = [await asyncio.create_subprocess_exec(*arguments, **pipes) for _ in range(2)]
    try:
        for rival in rivals:
            assert rival.stdout is not None
            assert await rival.stdout.readline() == b"ready\n"
        outputs = await asyncio.gather(*(rival.communicate(b"go\n") for rival in rivals))
    finally:
        for rival in rivals:
            if rival.returncode is None:
                rival.kill()
    totals = [sum(json.loads(output)) for output, _ in outputs]
    assert min(totals) >= sum(totals) / 2 / 4, totals
    for number in range(0, 256, 16):
        log = await seqs(layer, f"/tasks/T{number}")
        assert log == list(range(1, len(log) + 1))


# --- a writer that dies

DYING = """
import asyncio, sys
from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient
from statelayer import StateLayer

uri, database, driver, way = sys.argv[1:]


async def main():
    client = {"motor": AsyncIOMotorClient, "pymongo": AsyncMongoClient}[driver](uri)
    layer = StateLayer(client[database])
    batches = layer._journal._committer._batches
    write = batches.write

    async def write_and_hang(*arguments):
        await write(*arguments)
        print("taken", flush=True)
        await asyncio.Event().wait()

    batches.write = layer._journal._transactions._batches.write = write_and_hang
    if way == "append":
        await layer.set("/tasks/T1/dying", 1, actor="user:U7")
    else:
        await layer.transact(lambda tx: tx.set("/tasks/T1/dying", 1, actor="user:U7"), "/tasks/T1")


asyncio.run(main())
"""

LIFETIME = "transactionLifetimeLimitSeconds"


@pytest.fixture
async def dead_transactions_end_soon(database: Any) -> AsyncIterator[None]:
    """What a killed process had open holds its namespaces for a minute by default."""
    admin = database.client["admin"]
    limit = (await admin.command({"getParameter": 1, LIFETIME: 1}))[LIFETIME]
    await admin.command({"setParameter": 1, LIFETIME: 1})
    yield
    await admin.command({"setParameter": 1, LIFETIME: limit})


@pytest.mark.fault
@pytest.mark.parametrize("way", ["append", "transact"])
async def test_b2_a_writer_that_is_killed_after_it_took_a_seq_leaves_no_hole(
    database: Any,
    layer: StateLayer,
    statelayer_server: ExternalServer,
    driver: Driver,
    dead_transactions_end_soon: None,
    way: str,
) -> None:
    await layer.set(f"{T1}/x", 1, actor=USER)
    arguments = [sys.executable, "-c", DYING, statelayer_server.uri, database.name, driver, way]
    writer = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert await writer.stdout.readline() == b"taken\n"
        waiting = asyncio.create_task(layer.set(f"{T1}/x", 2, actor=USER))
        elsewhere = await layer.set("/tasks/T2/x", 1, actor=USER)
    finally:
        writer.kill()
        await writer.communicate()
    assert elsewhere.seq == 1
    assert (await waiting).seq == 2
    assert [event.path async for event in layer.events(T1)] == [f"{T1}/x"] * 2
    assert (await layer.verify(T1)).ok


# --- closing


async def test_what_is_stored_when_a_layer_closes_is_what_was_acknowledged(
    database: Any, layer: StateLayer, other: StateLayer
) -> None:
    """Some are being committed, some are queued, some wait for room."""
    closing = StateLayer(database, settings=Settings(max_queued_writes=40, max_append_writes=10))
    await closing.set("/tasks/T9/first", 0, actor=USER)
    asked = [asyncio.create_task(closing.set(f"{T1}/n/{n}", n, actor=USER)) for n in range(100)]
    await wait_until(lambda: closing.statistics.journal.batches > 2, interval=0.001)
    await closing.aclose()
    results = await asyncio.gather(*asked, return_exceptions=True)
    acknowledged = {result.id for result in results if not isinstance(result, BaseException)}
    refused = [result for result in results if isinstance(result, BaseException)]
    assert {type(error) for error in refused} == {ClosedError}
    assert {event.id async for event in other.events(T1)} == acknowledged
    assert len(acknowledged) >= 20


async def test_an_append_whose_turn_came_while_the_layer_closed_is_turned_away() -> None:
    """Whoever leaves gives his place to the next, who has not run yet when the layer closes."""
    admission, clock = Admission(Settings(max_queued_writes=1)), Clock()
    entered = False

    async def enter() -> None:
        nonlocal entered
        async with admission.entered(append_of(1), Deadline(clock, 10)):
            entered = True

    async with admission.entered(append_of(1), Deadline(clock, 10)):
        next_one, after_him = (asyncio.create_task(enter()) for _ in range(2))
        await wait_until(lambda: admission.waiting == 2)
    assert (admission.inside, admission.waiting) == (1, 1)  # his turn has come
    admission.close()
    results = await asyncio.gather(next_one, after_him, return_exceptions=True)
    assert [type(result) for result in results] == [ClosedError] * 2
    assert not entered
    assert (admission.inside, admission.waiting) == (0, 0)


async def test_a_layer_that_closes_as_an_appends_turn_comes_has_committed_or_refused_it(
    database: Any, layer: StateLayer
) -> None:
    closing = StateLayer(database, settings=Settings(max_queued_writes=1))
    await closing.set(f"{T1}/first", 0, actor=USER)
    inside = asyncio.create_task(closing.set(f"{T1}/a", 1, actor=USER))
    waiting = asyncio.create_task(closing.set(f"{T1}/b", 1, actor=USER))
    await wait_until(lambda: closing.statistics.journal.waiting == 1, interval=0.001)
    closed: list[asyncio.Task[None]] = []
    inside.add_done_callback(lambda _: closed.append(asyncio.ensure_future(closing.aclose())))
    event = await inside
    [result] = await asyncio.gather(waiting, return_exceptions=True)
    await closed[0]
    acknowledged = [event.id] + ([] if isinstance(result, ClosedError) else [result.id])
    assert [e.id async for e in layer.events(T1) if e.seq > 1] == acknowledged
    assert closing.statistics.journal.queued == 0


def append_of(writes: int) -> Append:
    checked = [
        check_write(Write(path=f"{T1}/n/{n}", value=n, actor=USER), roots=("tasks",), limits=Limits(bytes=1024))
        for n in range(writes)
    ]
    return Append.of(checked, settings=Settings(), clock=Clock(), key=None, origin=None)


# --- what need not be read


async def test_a_namespace_that_began_here_is_known_whole(layer: StateLayer, other: StateLayer) -> None:
    for n in range(3):
        assert (await layer.set(f"{T1}/mine/{n}", {"n": n}, actor=USER)).version == 1
    assert (await layer.merge(f"{T1}/mine/2", {"m": 3}, actor=USER)).value == {"n": 2, "m": 3}
    assert (await layer.merge(f"{T1}/mine/3", {"m": 4}, actor=USER)).version == 1
    assert layer.statistics.journal.conflicts == 0
    assert (await other.set(f"{T1}/theirs", 1, actor=USER)).seq == 6
    assert (await layer.merge(f"{T1}/theirs", {"a": 1}, actor=USER)).version == 2
    assert (await layer.set(f"{T1}/mine/0", 1, actor=USER)).version == 2
    with pytest.raises(NotFoundError):
        await layer.delete(f"{T1}/never", actor=USER)
    assert (await layer.verify(T1)).ok


def test_a_namespace_of_which_a_path_was_dropped_is_known_in_part() -> None:
    memory = Memory(Clock(), most_paths=3)
    memory.learn(ledger({"/tasks/T1": None}, "/tasks/T1/a", "/tasks/T1/b"))
    memory.learn(ledger({"/tasks/T2": Head(4)}, "/tasks/T2/a"))
    assert memory.head("/tasks/T1") is None  # there is room for one of them
    assert not memory.is_complete("/tasks/T2")
    memory.learn(ledger({"/tasks/T3": None}, "/tasks/T3/a", "/tasks/T3/b"))
    assert memory.is_complete("/tasks/T3")
    memory.learn(ledger({"/tasks/T3": Head(2)}, "/tasks/T3/c"))
    assert not memory.is_complete("/tasks/T3")
    assert memory.state("/tasks/T3", "/tasks/T3/a") is None
    assert memory.state("/tasks/T3", "/tasks/T3/c") is not None


def ledger(heads: dict[str, Head | None], *paths: str) -> Ledger:
    """A batch that wrote these paths for the first time, in namespaces with these heads."""
    read = {namespace: head for namespace, head in heads.items() if head is not None}
    clock = Clock()
    batch = Ledger(heads=read, states={}, keyed={}, causes={}, committed={}, companions={}, revision=0, now=clock.now())
    for path in paths:
        namespace = "/".join(path.split("/")[:3])
        batch.heads[namespace] = Head(1)
        batch.events.append(event_of(path, namespace))
    return batch


def event_of(path: str, namespace: str) -> Event:
    return Event(
        id="a" * 24,
        namespace=namespace,
        seq=1,
        path=path,
        version=1,
        op="set",
        actor=USER,
        source="api",
        batch_id="a" * 24,
        committed_at=Clock().now(),
    )


# --- a log without its head


async def test_c5_a_head_that_is_gone_is_reported(database: Any, layer: StateLayer, other: StateLayer) -> None:
    for n in range(3):
        await layer.set(f"{T1}/{n}", n, actor=USER)
    await database["namespaces"].delete_one({"_id": T1})
    with pytest.raises(IntegrityError, match="its log goes on to 3"):
        await other.set(f"{T1}/new", 9, actor=USER)
    with pytest.raises(IntegrityError, match="has no head"):
        await other.set(f"{T1}/0", 9, actor=USER)


async def test_c5_an_entry_of_a_namespace_that_nobody_wrote_is_reported_and_mended_by_replay(
    database: Any, layer: StateLayer
) -> None:
    await layer.set(f"{T1}/x", 1, actor=USER)
    entry = await database["entries"].find_one({"_id": f"{T1}/x"})
    await database["entries"].insert_one(entry | {"_id": "/tasks/T2/x", "namespace": "/tasks/T2"})
    with pytest.raises(IntegrityError, match="/tasks/T2 has no head"):
        await layer.set("/tasks/T2/x", 1, actor=USER)
    await layer.replay("/tasks/T2")
    assert (await layer.set("/tasks/T2/x", 1, actor=USER)).version == 1


async def test_k4_a_head_that_cannot_count_on_is_reported_at_once(
    database: Any, layer: StateLayer, other: StateLayer
) -> None:
    await layer.set(f"{T1}/x", 1, actor=USER)
    await database["namespaces"].update_one({"_id": T1}, {"$set": {"seq": Int64(2**63 - 1)}})
    with pytest.raises(IntegrityError, match="head"):
        await other.set(f"{T1}/x", 2, actor=USER)
    assert await seqs(other, T1) == [1]
