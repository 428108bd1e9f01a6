"""A consumer that knows plain pymongo and DESIGN §4a, and nothing else of the library; also C10, B1 and P1.

It reads the change stream of ``events`` (inserts only, no ``updateLookup``), expects each namespace in the order of its
seqs, de-duplicates by ``_id``, and after a lost position reads ``{namespace, seq > last}`` before it goes on.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import AsyncMongoClient, MongoClient, ReadPreference
from pymongo.errors import PyMongoError
from pymongo.read_concern import ReadConcern

from statelayer import Settings, StateLayer, Write
from statelayer.embedded import ReplicaSet
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.anyio

USER = "user:U7"
WEAK = "w=1&readPreference=secondaryPreferred&readConcernLevel=available"

INSERTS = [{"$match": {"operationType": "insert"}}]


class Consumer:
    """Follows the log of one database in a thread of its own, with a client of its own."""

    def __init__(self, uri: str, database: str) -> None:
        self._uri = uri
        self._name = database
        self._thread = threading.Thread(target=self._run, name="consumer", daemon=True)
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._lose = threading.Event()
        self._last: defaultdict[str, int] = defaultdict(int)
        self.seen: dict[str, dict[str, Any]] = {}
        self.order: defaultdict[str, list[int]] = defaultdict(list)
        self.repeats = 0
        self.losses = 0
        self.errors: list[str] = []
        self.faults: list[str] = []

    async def __aenter__(self) -> Consumer:
        self._thread.start()
        assert await asyncio.to_thread(self._ready.wait, 30), "the consumer did not start"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stop.set()
        await asyncio.to_thread(self._thread.join, 30)
        assert not self._thread.is_alive()

    def lose_position(self) -> None:
        """Forget where the stream was, as a consumer whose position fell out of the oplog must."""
        self._lose.set()

    def _run(self) -> None:
        with MongoClient[dict[str, Any]](self._uri, tz_aware=True) as client:
            while not self._stop.is_set():
                try:
                    self._follow(client[self._name]["events"])
                except PyMongoError as error:
                    self.errors.append(type(error).__name__)
                    self._stop.wait(0.1)

    def _follow(self, events: Any) -> None:
        self._lose.clear()
        with events.watch(INSERTS, max_await_time_ms=100) as stream:
            self._reread(events)
            self._ready.set()
            while stream.alive and not self._stop.is_set() and not self._lose.is_set():
                change = stream.try_next()
                if change is not None:
                    self._take(change["fullDocument"])
        self.losses += self._lose.is_set()

    def _reread(self, events: Any) -> None:
        for namespace in events.distinct("namespace"):
            behind = {"namespace": namespace, "seq": {"$gt": self._last[namespace]}}
            for event in events.find(behind).sort("seq", 1):
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        namespace, seq = event["namespace"], event["seq"]
        if event["_id"] in self.seen:
            self.repeats += 1
            if self.seen[event["_id"]] != event:
                self.faults.append(f"{event['_id']} changed")
            return
        if seq != self._last[namespace] + 1:
            self.faults.append(f"seq {seq} of {namespace} came after {self._last[namespace]}")
        self.seen[event["_id"]] = event
        self.order[namespace].append(seq)
        self._last[namespace] = seq


async def stored(database: Any) -> dict[str, dict[str, Any]]:
    events = await database["events"].find().to_list(None)
    return {event["_id"]: event for event in events}


async def agree(consumer: Consumer, database: Any, acknowledged: set[str]) -> None:
    """Acknowledged, stored and seen are the same events, each namespace whole and in order."""
    await wait_until(
        lambda: acknowledged <= consumer.seen.keys() or bool(consumer.faults), timeout=20, message="events unseen"
    )
    log = await stored(database)
    assert consumer.faults == []
    assert acknowledged == log.keys()
    assert log.keys() == consumer.seen.keys()
    for namespace, seqs in consumer.order.items():
        assert seqs == list(range(1, len(seqs) + 1)), namespace
    assert sum(map(len, consumer.order.values())) == len(log)


async def write(layer: StateLayer, acknowledged: set[str], writer: int, count: int) -> None:
    """Append as services do: to one namespace, to several at once, set, merge and delete."""
    for number in range(count):
        task = f"/tasks/T{(writer + number) % 5}"
        path = f"{task}/requests/W{writer}"
        if number % 7 == 3:
            others = [
                Write(path=f"/tasks/T{other}/shared/W{writer}", value=number, actor=USER) for other in range(0, 5, 2)
            ]
            events = await layer.append([Write(path=path, value=number, actor=USER), *others])
        elif number % 7 == 5:
            events = [
                await layer.merge(path, {"n": number}, actor=USER),
                await layer.delete(path, actor=USER),
            ]
        else:
            events = [await layer.set(path, {"n": number, "writer": writer}, actor=USER)]
        acknowledged.update(event.id for event in events)


@pytest.fixture
async def layers(database: Any, layer: StateLayer) -> AsyncIterator[list[StateLayer]]:
    """Two layers, as two processes would have them."""
    other = StateLayer(database)
    yield [layer, other]
    await other.aclose()


async def test_a_consumer_sees_each_event_once_and_in_order(
    statelayer_server: Any, database: Any, layers: list[StateLayer]
) -> None:
    acknowledged: set[str] = set()
    async with Consumer(statelayer_server.uri, database.name) as consumer:
        await asyncio.gather(*(write(layers[n % 2], acknowledged, n, 21) for n in range(8)))
        await agree(consumer, database, acknowledged)
        assert consumer.errors == []
        assert consumer.repeats == 0
    assert len(acknowledged) > 200


async def test_a_consumer_that_lost_its_position_reads_on_behind_the_last_seq(
    statelayer_server: Any, database: Any, layers: list[StateLayer]
) -> None:
    acknowledged: set[str] = set()
    await write(layers[0], acknowledged, 0, 20)  # before it ever looked
    async with Consumer(statelayer_server.uri, database.name) as consumer:
        writing = asyncio.gather(*(write(layers[n % 2], acknowledged, n, 30) for n in range(1, 7)))
        for loss in range(1, 5):
            seen = len(consumer.seen)
            await wait_until(
                lambda seen=seen: len(consumer.seen) > seen + 20 or writing.done(), message="the writers do not write"
            )
            consumer.lose_position()
            await wait_until(lambda loss=loss: consumer.losses >= loss)
        await writing
        await agree(consumer, database, acknowledged)
        assert consumer.losses == 4


# --- what the streams of our collections hold


PUBLIC = ("_id", "namespace", "eventId", "state", "reason", "target", "resultEventId")
PUBLIC += ("availableAt", "createdAt", "startedAt", "finishedAt")
REVIEW = {
    "name": "review",
    "pattern": "/tasks/*/orders/*",
    "condition": {"path": "$event.op", "op": "eq", "value": "set"},
    "action": {"type": "execute_workflow", "workflowId": "review"},
}


async def review(run: Any) -> dict[str, Any]:
    if run.input == 3:
        raise ValueError("three is refused")
    return {"reviewed": run.input}


def changes_since(uri: str, database: str, collection: str, start: Any, end: Any) -> list[dict[str, Any]]:
    """All changes of a collection between two operation times."""
    with MongoClient[dict[str, Any]](uri, tz_aware=True) as client:
        found = []
        with client[database][collection].watch(start_at_operation_time=start, max_await_time_ms=100) as stream:
            while True:
                change = stream.try_next()
                if change is not None:
                    found.append(change)
                elif stream.resume_token["_data"][2:18] >= f"{end.time:08x}{end.inc:08x}".upper():
                    return found


async def operation_time(database: Any) -> Any:
    return (await database.client["admin"].command("ping"))["operationTime"]


@pytest.fixture
async def changes(statelayer_server: Any, database: Any, layer: StateLayer) -> Any:
    """What each collection's stream shows of a run: executions that succeed and fail, merges, deletes, a replay."""
    layer.workflow("review", max_attempts=1)(review)
    await layer.subscriptions.publish(REVIEW)
    start = await operation_time(database)
    async with layer.running():
        events = [await layer.set(f"/tasks/T1/orders/O{number}", number, actor=USER) for number in range(5)]
        for event in events:
            await layer.outcome(event.id, timeout=20)
        await write(layer, set(), 1, 12)
        await layer.replay("/tasks/T1")
    end = await operation_time(database)
    return {
        name: await asyncio.to_thread(changes_since, statelayer_server.uri, database.name, name, start, end)
        for name in ("events", "entries", "executions")
    }


async def test_the_stream_of_events_holds_inserts_and_nothing_else(database: Any, changes: Any) -> None:
    assert {change["operationType"] for change in changes["events"]} == {"insert"}
    shown = {change["fullDocument"]["_id"]: change["fullDocument"] for change in changes["events"]}
    assert len(shown) == len(changes["events"])
    assert shown.keys() == (await stored(database)).keys()
    assert {event["schemaVersion"] for event in shown.values()} == {1}


async def test_the_stream_of_entries_shows_versions_that_only_rise(database: Any, changes: Any) -> None:
    newest: dict[str, dict[str, Any]] = {}
    for change in changes["entries"]:
        assert change["operationType"] in ("insert", "replace"), "the change itself must carry the whole entry"
        entry = change["fullDocument"]
        assert entry["version"] > newest.get(entry["_id"], {"version": 0})["version"]
        newest[entry["_id"]] = entry
    assert newest.keys() == set(await database["entries"].distinct("_id"))
    assert {path: entry["version"] for path, entry in newest.items()} == {
        entry["_id"]: entry["version"] for entry in await database["entries"].find().to_list(None)
    }


async def test_the_public_fields_of_executions_can_be_followed(database: Any, changes: Any) -> None:
    executions: dict[str, dict[str, Any]] = {}
    states: defaultdict[str, list[str]] = defaultdict(list)
    for change in changes["executions"]:
        job = change["documentKey"]["_id"]
        if change["operationType"] == "insert":
            executions[job] = change["fullDocument"]
        else:
            assert change["operationType"] == "update"
            executions[job].update(change["updateDescription"]["updatedFields"])
            for field in change["updateDescription"]["removedFields"]:
                executions[job].pop(field, None)
        if states[job][-1:] != [executions[job]["state"]]:
            states[job].append(executions[job]["state"])
    ways = {tuple(way) for way in states.values()}
    assert {way[-1] for way in ways} == {"succeeded", "failed"}
    # Through the queue, or begun with the write that recorded it.
    assert {way[:-1] for way in ways} <= {("queued", "claimed", "running"), ("running",)}
    naive = await database["executions"].find().to_list(None)
    final = {document["_id"]: {field: document.get(field) for field in PUBLIC} for document in naive}
    followed = {job: {field: _unaware(document.get(field)) for field in PUBLIC} for job, document in executions.items()}
    assert followed == final
    assert [document["reason"] for document in final.values() if document["state"] == "failed"] == ["handler_error"]


def _unaware(value: Any) -> Any:
    return value.replace(tzinfo=None) if hasattr(value, "tzinfo") else value


# --- through a primary that goes away


@pytest.fixture(scope="module")
def three_nodes() -> Iterator[ReplicaSet]:
    with ReplicaSet(nodes=3) as server:
        yield server


@pytest.mark.fault
@pytest.mark.parametrize("options", ["", WEAK], ids=["default", "weak"])
async def test_c10_acknowledged_stored_and_seen_are_the_same_through_lost_primaries(
    three_nodes: ReplicaSet, options: str
) -> None:
    """Two primaries step down and one is killed, under writers and a consumer, whatever the client's options."""
    uri = f"{three_nodes.uri}&{options}".rstrip("&")
    name = "weak" if options else "plain"
    acknowledged: set[str] = set()
    stop = asyncio.Event()

    async def write_on(layer: StateLayer, writer: int) -> None:
        while not stop.is_set():
            await write(layer, acknowledged, writer, 7)

    async def more(count: int) -> None:
        reached = len(acknowledged) + count
        await wait_until(lambda: len(acknowledged) >= reached or writing.done(), timeout=30, message="no writes")

    async with (
        AsyncMongoClient[dict[str, Any]](uri, heartbeatFrequencyMS=500) as client,
        StateLayer(client[name], settings=Settings(append_timeout=40)) as layer,
        StateLayer(client[name], settings=Settings(append_timeout=40)) as other,
    ):
        await layer.setup()
        async with Consumer(three_nodes.uri, name) as consumer:
            writing = asyncio.gather(*(write_on((layer, other)[n % 2], n) for n in range(6)))
            await more(250)
            await asyncio.to_thread(three_nodes.step_down)
            await more(250)
            await asyncio.to_thread(three_nodes.step_down)
            await more(250)
            killed = await asyncio.to_thread(three_nodes.primary)
            await asyncio.to_thread(killed.kill)
            await more(250)
            stop.set()
            await writing
            await asyncio.to_thread(killed.start)
            await asyncio.to_thread(three_nodes.wait_until_complete)
            await agree(consumer, _as_a_majority_has_it(client, name), acknowledged)
            assert len(acknowledged) >= 1000


def _as_a_majority_has_it(client: Any, name: str) -> Any:
    """The database as the primary has it, whatever the client was told."""
    return client.get_database(name, read_preference=ReadPreference.PRIMARY, read_concern=ReadConcern("majority"))
