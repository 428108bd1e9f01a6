"""Which index each read and conditional write uses: the commands that the layer really sends, explained (DESIGN §4).

Nothing here repeats a query of the library. A client's commands are recorded while a layer does its work, and these are
explained afterwards, so that a query that changes to something without an index fails here.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from bson import ObjectId
from plans import plan_of
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandListener

from statelayer import Settings, StateLayer, Write, mongo_indexes
from statelayer.clock import Clock
from statelayer.subscriptions.listener import Listener
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from pymongo.monitoring import CommandStartedEvent

    from statelayer.events import Event
    from statelayer.testing.plugin import Driver

pytestmark = pytest.mark.anyio

USER = "user:U7"
NAMESPACES = 24
REQUESTS = 12
T5 = "/tasks/T5"
PATH = f"{T5}/requests/R3"
SETTINGS = Settings(page_size=50, poll=0.05, heartbeat=0.1, lease=5, drain_timeout=5)

GROWING = {spec.name for spec in mongo_indexes.COLLECTIONS if spec.grows}
EXPLAINED = ("find", "aggregate", "update", "delete", "findAndModify")
OF_THE_SESSION = {"lsid", "txnNumber", "autocommit", "startTransaction", "readConcern", "writeConcern"}


class Commands(CommandListener):
    """Keeps what a client sent, as it was when it was sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def started(self, event: CommandStartedEvent) -> None:
        if event.command_name in EXPLAINED:
            self.sent.append(deepcopy(dict(event.command)))

    def succeeded(self, event: Any) -> None: ...

    def failed(self, event: Any) -> None: ...


@dataclass(frozen=True)
class Use:
    """What one command did with one collection. ``indexes`` are all that it read, also in joins and unions."""

    collection: str
    command: dict[str, Any]
    indexes: frozenset[str]
    scans: bool
    sorts: bool
    keys: int
    docs: int

    @property
    def kind(self) -> str:
        return next(iter(self.command))


@dataclass
class Uses:
    """Everything that was sent in a block."""

    all: list[Use] = field(default_factory=list)

    def of(self, collection: str, kind: str | None = None) -> list[Use]:
        return [use for use in self.all if use.collection == collection and kind in (None, use.kind)]

    def indexes(self) -> dict[str, set[str]]:
        """Which indexes were used, by collection."""
        found: defaultdict[str, set[str]] = defaultdict(set)
        for use in self.all:
            found[use.collection] |= use.indexes
        return dict(found)

    def refuse_scans(self) -> None:
        for use in self.all:
            assert not (use.scans and use.collection in GROWING), f"reads the whole collection: {use.command}"


class Workshop:
    """A layer on a client whose commands are recorded, and what explains them."""

    def __init__(self, layer: StateLayer, commands: Commands, database: Any) -> None:
        self.layer = layer
        self.database = database
        self._commands = commands

    @asynccontextmanager
    async def recorded(self) -> AsyncIterator[Uses]:
        """Fill ``Uses`` at the end of the block, and refuse that a collection which grows is read whole."""
        uses = Uses()
        self._commands.sent.clear()
        yield uses
        sent = list(self._commands.sent)
        seen: list[dict[str, Any]] = []
        for command in sent:
            for single in explainable(command):
                if single not in seen:
                    seen.append(single)
                    uses.all.append(await self._explained(single))
        uses.refuse_scans()

    async def _explained(self, command: dict[str, Any]) -> Use:
        reply = await self.database.command({"explain": command, "verbosity": "executionStats"})
        plan = await plan_of(self.database, command)
        winning = list(values_of(reply, "winningPlan"))
        stages = [stage for found in winning for stage in values_of(found, "stage")]
        joins = {index for indexes in values_of(reply, "indexesUsed") for index in indexes}
        by_id = {"_id_"} if {"IDHACK", "CLUSTERED_IXSCAN"} & set(stages) else set()
        return Use(
            collection=command[next(iter(command))],
            command=command,
            indexes=frozenset({*by_id, *joins, *(name for found in winning for name in values_of(found, "indexName"))}),
            scans="COLLSCAN" in stages or any(int(scans) for scans in values_of(reply, "collectionScans")),
            sorts="SORT" in stages,
            keys=plan.keys_examined,
            docs=plan.docs_examined,
        )


def explainable(command: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Take from a command what only its session needs; the server explains one update or delete at a time."""
    kind = next(iter(command))
    if any("$changeStream" in stage for stage in command.get("pipeline", ())) or command[kind] == 1:
        return
    plain = {k: v for k, v in command.items() if k not in OF_THE_SESSION and not k.startswith("$")}
    for several in ("updates", "deletes"):
        for single in plain.get(several, ()):
            yield {kind: plain[kind], several: [single]}
    if kind in ("find", "aggregate", "findAndModify"):
        yield plain


def values_of(reply: Any, key: str) -> Iterator[Any]:
    """Yield every value of a key, at any depth."""
    if isinstance(reply, dict):
        if key in reply:
            yield reply[key]
        for value in reply.values():
            yield from values_of(value, key)
    elif isinstance(reply, list):
        for value in reply:
            yield from values_of(value, key)


@pytest.fixture
def driver() -> Driver:
    return "pymongo"


@pytest.fixture
async def shop(statelayer_server: Any, database: Any) -> AsyncIterator[Workshop]:
    """24 namespaces with 24 events each, so that the planner has something to choose."""
    commands = Commands()
    async with AsyncMongoClient[dict[str, Any]](statelayer_server.uri, event_listeners=[commands]) as client:
        layer = StateLayer(client[database.name], settings=SETTINGS)
        await layer.setup()
        for version in range(2):
            for n in range(NAMESPACES):
                paths = [f"/tasks/T{n}/requests/R{r}" for r in range(REQUESTS)]
                await layer.append([Write(path=path, value=version, actor=USER) for path in paths])
        yield Workshop(layer, commands, database)
        await layer.aclose()


async def many_executions(shop: Workshop) -> None:
    """Some 900 executions in all states, of targets that nobody here offers, and old ones of those somebody does."""
    now = datetime.now(UTC) - timedelta(hours=1)
    documents = []
    for n in range(900):
        event_id, target = str(ObjectId()), ("review", "elsewhere", "other")[n % 3]
        state = ("succeeded", "failed", "queued")[n % 3 if target != "review" else n % 2]
        documents.append(
            {
                "_id": f"workflow:{event_id}:{target}",
                "namespace": f"/tasks/T{n % NAMESPACES}",
                "eventId": event_id,
                "rootEventId": event_id,
                "triggerDepth": 0,
                "subscription": {"name": "s", "version": 1},
                "action": {"type": "execute_workflow", "workflowId": target},
                "target": target,
                "state": state,
                "attempts": 1,
                "maxAttempts": 3,
                "availableAt": now,
                "createdAt": now,
                "reads": [],
                "warnings": [],
            }
        )
    await shop.database["executions"].insert_many(documents)


# --- appending


async def test_an_append_reads_and_writes_by_key(shop: Workshop) -> None:
    cause = await shop.layer.set(PATH, "cause", actor=USER)
    writes = [
        Write(path=PATH, value={"a": 1}, actor=USER, caused_by=cause.id, expected_version=3),
        Write(path="/tasks/T6/requests/R3", value=1, actor=USER),
        Write(path="/tasks/T6/fresh", value=1, actor=USER),
        Write(path="/tasks/new/fresh", value=1, actor=USER),
    ]
    async with shop.recorded() as uses:
        first = await shop.layer.append(writes, idempotency_key="K1")
        assert await shop.layer.append(writes, idempotency_key="K1") == first
        await shop.layer.merge(PATH, {"b": 1}, actor=USER, idempotency_key="K2")
        await shop.layer.delete(PATH, actor=USER)
    assert uses.indexes() == {
        "meta": {"_id_"},
        "namespaces": {"_id_"},
        "entries": {"_id_"},
        "events": {"_id_", "namespace_idempotencyKey", "namespace_seq"},
    }
    assert len(uses.of("namespaces", "update")) >= 4
    assert len(uses.of("entries", "update")) >= 4
    for use in uses.all:
        assert use.docs <= 4, use
        assert use.keys <= 10, use
        assert not use.sorts, use


async def test_a_transaction_reads_and_writes_by_key(shop: Workshop) -> None:
    async def body(tx: Any) -> Event:
        return await tx.set(PATH, 1, actor=USER)

    async with shop.recorded() as uses:
        await shop.layer.transact(body, T5)
    assert uses.indexes() == {name: {"_id_"} for name in ("meta", "namespaces", "entries")}
    assert all(use.docs <= 1 for use in uses.all)


# --- dispatch


def subscription(**others: Any) -> dict[str, Any]:
    action = {"type": "execute_workflow", "workflowId": "review"}
    return {"name": "review", "pattern": "/tasks/*/reviews/*", "condition": None, "action": action, **others}


async def evaluated(shop: Workshop, event: Event) -> None:
    async def reached() -> bool:
        cursor = await shop.database["cursors"].find_one({"_id": event.namespace})
        return cursor is not None and cursor["at"]["seq"] >= event.seq

    await wait_until(reached, message="not evaluated")


async def test_catching_up_reads_heads_by_id_and_the_log_by_seq(shop: Workshop) -> None:
    [last] = [event async for event in shop.layer.events("/tasks/T9", after=2 * REQUESTS - 1)]
    async with shop.recorded() as uses, shop.layer.running(work=False):
        await evaluated(shop, last)
    indexes = uses.indexes()
    assert indexes["events"] == {"namespace_seq"}
    assert indexes["cursors"] == {"_id_"}
    assert indexes["namespaces"] <= {"_id_", "partition"}
    assert not any(use.sorts for use in uses.all if use.collection in ("events", "cursors"))
    logs = [use for use in uses.of("events") if use.command["filter"].get("namespace") == "/tasks/T9"]
    assert logs
    assert all(use.docs == 2 * REQUESTS for use in logs)


async def test_a_few_partitions_are_caught_up_without_reading_all_heads(shop: Workshop) -> None:
    """As instances share them: the page of heads is found by its partitions, in the order of ids."""
    heads = [
        {"_id": f"/tasks/X{n:05}", "seq": 0, "repairs": 0, "partition": n % SETTINGS.partitions} for n in range(3000)
    ]
    await shop.database.command("insert", "namespaces", documents=heads, bypassDocumentValidation=True)
    listener = Listener(
        shop.layer._database,
        SETTINGS,
        Clock(),
        subscriptions=shop.layer.subscriptions,
        recorder=None,  # type: ignore[arg-type] - not called while pages are read
    )
    async with shop.recorded() as uses:
        pages = [page async for page in listener._pages_of_heads({3})]
    found = sum(map(len, pages))
    assert found >= 3000 // SETTINGS.partitions
    for use in uses.of("namespaces"):
        assert use.docs <= 2 * found, f"{use.docs} heads are read for {found}"


async def test_a_gap_is_read_by_seq(shop: Workshop) -> None:
    """The stream is opened after some of a namespace was evaluated and more was written."""
    first = await shop.layer.set(PATH, 1, actor=USER)
    async with shop.layer.running(work=False):
        await evaluated(shop, first)
    await shop.database["checkpoints"].delete_many({})
    behind = [await shop.layer.set(PATH, n, actor=USER) for n in range(5)]
    async with shop.recorded() as uses, shop.layer.running(work=False):
        await evaluated(shop, behind[-1])
    reads = [use for use in uses.of("events", "find") if "seq" in use.command["filter"]]
    assert reads
    assert {index for use in reads for index in use.indexes} == {"namespace_seq"}
    assert max(use.docs for use in reads) == 5
    assert uses.indexes()["cursors"] == {"_id_"}


async def test_state_as_of_a_seq_costs_one_or_two_keys(shop: Workshop) -> None:
    """However often the path, and its neighbours, were written since (a wrong index measured 50,001)."""
    stage = f"{T5}/stage/reviewed"
    state = {"path": "$state.stage/reviewed", "op": "eq", "value": "then"}
    await shop.layer.subscriptions.publish(subscription(condition=state))
    await shop.layer.set(stage, "earlier", actor=USER)
    await shop.layer.set(stage, "then", actor=USER)
    near = [await shop.layer.set(f"{T5}/reviews/R{n}", 1, actor=USER) for n in range(5)]
    await shop.layer.append([Write(path=f"{T5}/neighbour/N{n}", value=1, actor=USER) for n in range(1000)])
    far = await shop.layer.set(f"{T5}/reviews/far", 1, actor=USER)
    for _ in range(2):
        await shop.layer.append([Write(path=stage, value="later", actor=USER) for _ in range(1000)])
    await shop.database.command("profile", 2)
    async with shop.recorded() as uses, shop.layer.running(work=False):
        await evaluated(shop, far)
        for event in (*near, far):
            assert [found.state for found in await shop.layer.executions.find(event_id=event.id)] == ["queued"]
    await shop.database.command("profile", 0)
    as_of = [use for use in uses.of("events", "find") if use.command["filter"].get("path") == stage]
    assert len(as_of) == 6, "the condition was not read as of each seq"
    for use in as_of:
        assert use.indexes == {"namespace_path_seq"}
        assert use.keys <= 2, f"{use.keys} keys for one value"
        assert use.docs <= 1
    assert uses.indexes()["entries"] == {"_id_"}
    # Explaining plans anew; what was really executed may have come from the planner's cache.
    wanted = {"op": "query", "ns": f"{shop.database.name}.events", "command.filter.path": stage}
    executed = await shop.database["system.profile"].find(wanted).to_list(None)
    assert len(executed) == 6
    assert max(operation["keysExamined"] for operation in executed) <= 2


# --- executing


async def test_claiming_running_and_reaping(shop: Workshop) -> None:
    """One execution is run among 900; another one was left by a worker that died, a third one is claimed by it."""
    await many_executions(shop)
    shop.layer.workflow("review")(_done)
    await shop.layer.subscriptions.publish(subscription())
    lost = {"owner": "dead", "token": "t", "until": datetime.now(UTC) - timedelta(minutes=1)}
    for state in ("running", "claimed"):
        await shop.database["executions"].update_one(
            {"state": "succeeded", "target": "review"}, {"$set": {"state": state, "lease": lost}}
        )
    async with shop.recorded() as uses, shop.layer.running():
        event = await shop.layer.set(f"{T5}/reviews/R1", 1, actor=USER)
        outcome = await shop.layer.outcome(event.id, timeout=20)
        assert [execution.state for execution in outcome.executions] == ["succeeded"]

        async def nothing_lost() -> bool:
            return await shop.database["executions"].count_documents({"lease.owner": "dead"}) == 0

        await wait_until(nothing_lost, message="the dead worker's executions")
    assert uses.indexes()["executions"] == {"_id_", "claim", "eventId", "reap"}

    sorted_by_time = [use for use in uses.of("executions", "find") if "availableAt" in use.command.get("sort", ())]
    assert sorted_by_time
    for use in sorted_by_time:
        assert use.indexes == {"claim"}, use
        assert use.docs <= 10, "what nobody here offers stands in the way"
    expired = [use for use in uses.of("executions", "find") if "reap" in use.indexes]
    assert expired
    assert all(use.docs <= 5 for use in expired)
    for use in uses.of("executions"):
        if use.kind in ("update", "findAndModify"):
            named = (use.command.get("query") or use.command["updates"][0]["q"])["_id"]
            assert use.docs <= (len(named["$in"]) + 5 if isinstance(named, dict) else 1), use


async def test_a_registered_type_is_claimed_target_by_target(shop: Workshop) -> None:
    """However many of them wait, those that waited longest are found without reading the others."""
    await many_executions(shop)
    await shop.database["executions"].update_many({"state": "queued"}, {"$set": {"action": {"type": "tell"}}})

    class Tell:
        async def execute(self, run: Any) -> None:
            await asyncio.Event().wait()

    shop.layer.executors.register("tell", Tell(), concurrency=3)
    async with shop.recorded() as uses, shop.layer.running(listen=False):

        async def claimed() -> bool:
            return await shop.database["executions"].count_documents({"state": "running"}) == 3

        await wait_until(claimed)
        await shop.database["executions"].delete_many({"state": "queued"})
    candidates = [use for use in uses.of("executions", "find") if "availableAt" in use.command.get("sort", ())]
    assert candidates
    for use in candidates:
        assert use.indexes == {"claim"}
        assert not use.sorts
    targets = uses.of("executions", "aggregate")
    assert targets
    assert all(use.keys <= 6 for use in targets), targets


async def test_what_nobody_offers_is_marked_through_the_claim_index(shop: Workshop) -> None:
    await many_executions(shop)
    shop.layer.workflow("review")(_done)
    async with shop.recorded() as uses, shop.layer.running(listen=False):

        async def marked() -> bool:
            return await shop.database["executions"].count_documents({"reason": "no_executor"}) > 0

        await wait_until(marked)
    marks = [use for use in uses.of("executions", "find") if "$or" in use.command["filter"]]
    assert marks
    assert {index for use in marks for index in use.indexes} == {"claim"}
    queued = await shop.database["executions"].count_documents({"state": "queued"})
    assert all(use.docs <= queued for use in marks)


async def _done(run: Any) -> str:
    return "done"


@pytest.mark.parametrize(
    ("wanted", "indexes"),
    [
        ({"event_id": "first"}, ["eventId"]),
        ({"namespace": T5}, ["namespace_state"]),
        ({"namespace": T5, "state": "failed"}, ["namespace_state"]),
        ({"state": "failed"}, ["claim"]),
        ({"event_id": "first", "namespace": T5, "state": "failed"}, ["eventId", "namespace_state"]),
    ],
    ids=str,
)
async def test_executions_are_found_through_an_index(
    shop: Workshop, wanted: dict[str, Any], indexes: list[str]
) -> None:
    await many_executions(shop)
    one = await shop.database["executions"].find_one({"namespace": T5})
    given = {key: one["eventId"] if value == "first" else value for key, value in wanted.items()}
    async with shop.recorded() as uses:
        await shop.layer.executions.find(**given)
        await shop.layer.executions.get(one["_id"])
    [found] = [use for use in uses.of("executions") if use.command["filter"] != {"_id": one["_id"]}]
    assert found.indexes
    assert found.indexes <= set(indexes)
    matching = await shop.database["executions"].count_documents(found.command["filter"])
    assert found.docs <= max(matching, 900 // NAMESPACES)


# --- reading


async def _get(layer: StateLayer) -> None:
    assert await layer.get(PATH)


async def _entries(layer: StateLayer) -> None:
    assert len(await layer.entries(T5)) == REQUESTS


async def _prefix(layer: StateLayer) -> None:
    assert len(await layer.entries(f"{T5}/requests")) == REQUESTS


async def _one_entry(layer: StateLayer) -> None:
    assert len(await layer.entries(PATH)) == 1


async def _events(layer: StateLayer) -> None:
    assert len([event async for event in layer.events(T5, after=3)]) == 2 * REQUESTS - 3


async def _version(layer: StateLayer) -> None:
    assert await layer.read_version(PATH, 2)


async def _state_at(layer: StateLayer) -> None:
    assert len(await layer.state_at(T5, REQUESTS + 3)) == REQUESTS


async def _trace_task(layer: StateLayer) -> None:
    assert len(await layer.trace_causation(task_id="T5")) == 2 * REQUESTS


async def _watch(layer: StateLayer) -> None:
    async with layer.watch(f"{T5}/**", after=2) as events:
        async for event in events:
            if event.seq == 2 * REQUESTS:
                return


async def _wait_for(layer: StateLayer) -> None:
    assert await layer.wait_for(PATH, timeout=5)


@pytest.mark.parametrize(
    ("read", "collection", "indexes", "docs"),
    [
        (_get, "entries", {"_id_"}, 1),
        (_entries, "entries", {"_id_"}, REQUESTS),
        (_prefix, "entries", {"_id_"}, REQUESTS),
        (_one_entry, "entries", {"_id_"}, 1),
        (_wait_for, "entries", {"_id_"}, 1),
        (_events, "events", {"namespace_seq"}, 2 * REQUESTS),
        (_watch, "events", {"namespace_seq"}, 2 * REQUESTS),
        (_version, "events", {"namespace_path_version"}, 1),
        (_state_at, "events", {"namespace_seq", "namespace_path_seq"}, 2 * REQUESTS),
        (_trace_task, "events", {"namespace_seq"}, 2 * REQUESTS),
    ],
)
async def test_a_public_read_uses_its_index(
    shop: Workshop, read: Callable[[StateLayer], Awaitable[None]], collection: str, indexes: set[str], docs: int
) -> None:
    await shop.layer.get(PATH)  # readiness is checked once
    async with shop.recorded() as uses:
        await read(shop.layer)
    assert uses.of(collection)
    assert uses.indexes().keys() == {collection}
    assert uses.indexes()[collection] <= indexes
    for use in uses.all:
        assert use.docs <= docs, use
        assert not use.sorts, use


async def test_an_event_and_its_tree_are_found_by_their_ids(shop: Workshop) -> None:
    root = await shop.layer.set(PATH, "root", actor=USER)
    effect = await shop.layer.set(PATH, "effect", actor=USER, caused_by=root.id)
    async with shop.recorded() as uses:
        assert await shop.layer.event(effect.id)
    assert [(use.indexes, use.docs) for use in uses.all] == [({"_id_"}, 1)]
    async with shop.recorded() as uses:
        assert len(await shop.layer.trace_causation(event_id=effect.id)) == 2
    assert uses.indexes() == {"events": {"_id_", "namespace_rootEventId"}}
    assert max(use.docs for use in uses.all) <= 3, uses.all


async def test_subscriptions_are_found_through_an_index_where_one_is_wanted(shop: Workshop) -> None:
    for n in range(40):
        await shop.layer.subscriptions.publish(subscription(name=f"s{n}"))
    async with shop.recorded() as uses:
        await shop.layer.subscriptions.get("s7")
        await shop.layer.subscriptions.get("s7", version=1)
        await shop.layer.subscriptions.disable("s7")
        await shop.layer.subscriptions.enable("s7")
        await shop.layer.subscriptions.publish(subscription(name="s7", maxTriggerDepth=2))
    assert uses.indexes()["state_subscriptions"] <= {"name_version", "_id_"}
    for use in uses.of("state_subscriptions"):
        assert not use.scans
        assert use.docs <= 2, use
        assert not use.sorts, use
    async with shop.recorded() as uses:
        assert len(await shop.layer.subscriptions.find(enabled=True)) == 40
    [found] = uses.of("state_subscriptions")
    assert not found.sorts


@pytest.mark.parametrize("work", ["verify", "replay"])
async def test_verify_and_replay_read_their_namespace_and_no_other(shop: Workshop, work: str) -> None:
    deleted = await shop.layer.delete(PATH, actor=USER)
    await shop.layer.set(PATH, "again", actor=USER, caused_by=deleted.id)
    if work == "replay":
        await shop.database["entries"].delete_one({"_id": PATH})
        await shop.database["entries"].update_one({"_id": f"{T5}/requests/R4"}, {"$set": {"value": "changed"}})
    async with shop.recorded() as uses:
        report = await getattr(shop.layer, work)(T5)
    assert report.events == 2 * REQUESTS + 2
    assert uses.of("events")
    assert uses.of("entries")
    allowed = {"namespace_seq", "namespace_path_version", "namespace_path_seq", "_id_"}
    assert uses.indexes()["events"] <= allowed
    assert uses.indexes()["entries"] <= allowed
    for use in uses.all:
        assert use.docs <= 2 * (2 * REQUESTS + 2), f"{use.docs} documents of a namespace of {report.events}: {use}"


# --- everything at once


async def test_nothing_that_a_service_does_reads_a_growing_collection_whole(shop: Workshop) -> None:
    await many_executions(shop)
    layer = shop.layer
    async with shop.recorded() as uses:
        await layer.setup()
        layer.workflow("review")(_done)
        layer.workflow("fails", max_attempts=2)(_fails)
        await layer.subscriptions.publish(subscription())
        action = {"type": "execute_workflow", "workflowId": "fails"}
        await layer.subscriptions.publish(subscription(name="fails", action=action))
        async with layer.running(), layer.watch("/tasks/**") as events:
            submission = await layer.submit(f"{T5}/reviews/R1", 1, actor=USER)
            assert sorted(submission.triggered) == ["fails", "review"]
            assert (await anext(aiter(events))).id == submission.event.id
            outcome = await layer.outcome(submission.event.id, timeout=30)
            failed = next(execution for execution in outcome.executions if execution.target == "fails")
            await layer.executions.requeue(failed.id)
            await layer.pause()
            await layer.unpause()
            await layer.health()
        await layer.set(PATH, 9, actor=USER)
        await layer.get(PATH)
        await layer.entries(T5)
        await layer.wait_for(PATH, timeout=5)
        assert [event async for event in layer.events(T5)]
        await layer.event(submission.event.id)
        await layer.read_version(PATH, 1)
        await layer.state_at(T5, 9)
        await layer.trace_causation(task_id="T5")
        await layer.trace_causation(event_id=submission.event.id)
        await layer.verify(T5)
        await layer.replay(T5)
    kinds = {(use.collection, use.kind) for use in uses.all}
    assert kinds >= {
        ("events", "find"),
        ("events", "aggregate"),
        ("entries", "find"),
        ("entries", "aggregate"),
        ("entries", "update"),
        ("namespaces", "update"),
        ("executions", "find"),
        ("executions", "update"),
        ("executions", "findAndModify"),
        ("cursors", "find"),
        ("cursors", "update"),
    }


async def _fails(run: Any) -> None:
    raise ValueError("as it must")
