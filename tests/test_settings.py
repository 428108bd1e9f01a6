"""Every setting does something, and what cannot be meant is refused (STYLE, Options)."""

from __future__ import annotations

import asyncio
import gc
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError
from pymongo import AsyncMongoClient
from pymongo.monitoring import CommandListener

from statelayer import Settings, StateLayer, embedded, mongo_indexes
from statelayer.errors import (
    ContentionError,
    FormatMismatchError,
    InvalidPathError,
    InvalidSubscriptionError,
    SetupRequiredError,
    StateLayerError,
)
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pymongo.monitoring import CommandStartedEvent
    from workbench import Gate

pytestmark = pytest.mark.anyio

USER = "user:U7"
REQUEST = "/tasks/T1/requests/R1"
REVIEW = {
    "name": "review",
    "pattern": "/tasks/*/requests/*",
    "action": {"type": "execute_workflow", "workflowId": "review"},
}

HELD_BY = {
    "prefix": ("test_settings", "test_a_prefix_keeps_everything_apart"),
    "roots": ("test_settings", "test_roots_are_the_same_for_writing_reading_watching_and_subscribing"),
    "partitions": ("test_settings", "test_the_number_of_partitions_is_fixed_by_the_first_setup"),
    "max_value_bytes": ("test_append", "test_limits_of_an_append_are_settings"),
    "max_append_writes": ("test_append", "test_limits_of_an_append_are_settings"),
    "max_append_bytes": ("test_append", "test_limits_of_an_append_are_settings"),
    "max_queued_writes": ("test_group_commit", "test_callers_wait_when_the_queue_is_full"),
    "max_queued_bytes": ("test_group_commit", "test_the_queue_is_bounded_in_bytes_too"),
    "append_timeout": ("test_settings", "test_an_append_is_retried_no_longer_than_its_timeout"),
    "lease": ("test_settings", "test_an_execution_is_leased_for_so_long"),
    "heartbeat": ("test_settings", "test_the_instance_reports_itself_with_each_heartbeat"),
    "poll": ("test_settings", "test_the_worker_looks_for_work_with_each_poll"),
    "concurrency": ("test_settings", "test_no_more_run_at_a_time_than_concurrency_allows"),
    "drain_timeout": ("test_settings", "test_leaving_waits_no_longer_than_the_drain_timeout"),
    "page_size": ("test_settings", "test_the_log_is_read_in_pages"),
}
"""Which test fails when the setting is ignored."""


def test_each_setting_has_a_test_that_holds_it() -> None:
    assert set(HELD_BY) == set(Settings.model_fields)
    for module, name in HELD_BY.values():
        assert f"def {name}(" in (Path(__file__).parent / f"{module}.py").read_text()


# --- what is refused


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ValidationError, match="leaseSeconds"):
        Settings(leaseSeconds=3)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prefix", "a.b"),
        ("prefix", "a$"),
        ("prefix", "p" * 33),
        ("prefix", "ends\n"),
        ("partitions", 0),
        ("partitions", 1025),
        ("max_value_bytes", 1023),
        ("max_value_bytes", 4 * 1024 * 1024 + 1),
        ("max_append_writes", 0),
        ("max_append_bytes", 1),
        ("max_queued_writes", 0),
        ("max_queued_bytes", 1),
        ("concurrency", 0),
        ("page_size", 0),
        *(
            (name, value)
            for name in ("append_timeout", "lease", "heartbeat", "poll", "drain_timeout")
            for value in (0, -1, float("inf"), float("nan"))
        ),
    ],
)
def test_values_out_of_bounds_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValidationError, match=name):
        Settings(**{name: value})


@pytest.mark.parametrize("root", ["", "a/b", "*", "{x}", "a b", "..", "$tasks"])
def test_a_root_that_is_no_segment_is_refused(root: str) -> None:
    with pytest.raises(ValidationError, match="roots"):
        Settings(roots=("tasks", root))


def test_no_roots_at_all_are_refused() -> None:
    with pytest.raises(ValidationError, match="roots"):
        Settings(roots=())


@pytest.mark.parametrize(("heartbeat", "lease"), [(30, 30), (31, 30), (10, 5)])
def test_a_heartbeat_that_lets_the_lease_run_out_is_refused(heartbeat: float, lease: float) -> None:
    with pytest.raises(ValidationError, match="must be shorter than lease"):
        Settings(heartbeat=heartbeat, lease=lease)


def test_a_lease_below_the_default_heartbeat_is_refused() -> None:
    with pytest.raises(ValidationError, match="must be shorter than lease"):
        Settings(lease=10)


def test_settings_cannot_be_changed_behind_the_layers_back() -> None:
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.poll = 5  # type: ignore[misc]


# --- what each does


@asynccontextmanager
async def opened(database: Any, **settings: Any) -> AsyncIterator[StateLayer]:
    layer = StateLayer(database, settings=Settings(**settings))
    await layer.setup()
    yield layer
    await layer.aclose()


class Commands(CommandListener):
    """The commands that a client sent."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def started(self, event: CommandStartedEvent) -> None:
        self.sent.append(dict(event.command))

    def succeeded(self, event: Any) -> None: ...

    def failed(self, event: Any) -> None: ...

    def limits_of(self, collection: str) -> set[int]:
        return {command["limit"] for command in self.sent if command.get("find") == collection and "limit" in command}


@asynccontextmanager
async def listened(server: Any, database: Any, **settings: Any) -> AsyncIterator[tuple[StateLayer, Commands]]:
    """A layer whose commands can be seen."""
    commands = Commands()
    async with (
        AsyncMongoClient[dict[str, Any]](server.uri, event_listeners=[commands]) as client,
        opened(client[database.name], **settings) as layer,
    ):
        yield layer, commands


async def test_a_prefix_keeps_everything_apart(database: Any) -> None:
    """The service has collections with our names; a second layer with another prefix lives beside the first."""
    await database["events"].insert_one({"_id": "the service's own"})
    async with opened(database, prefix="one_") as one, opened(database, prefix="two_") as two:
        one.workflow("review")(_done)
        await one.subscriptions.publish(REVIEW)
        async with one.running(), two.running():
            event = await one.set(REQUEST, 1, actor=USER)
            outcome = await one.outcome(event.id, timeout=20)
            assert [execution.state for execution in outcome.executions] == ["succeeded"]
            assert (await one.wait_for(REQUEST, timeout=5)).value == 1
            assert await two.get(REQUEST) is None
            assert (await two.set(REQUEST, 2, actor=USER)).seq == 1
            assert (await two.outcome((await two.set(REQUEST, 3, actor=USER)).id, timeout=20)).executions == ()
        report = await one.verify("/tasks/T1")
        assert (report.ok, report.events) == (True, 2)
        await one.replay("/tasks/T1")
        assert len(await one.trace_causation(task_id="T1")) == 2
    names = set(await database.list_collection_names())
    assert names == {"events"} | {
        prefix + spec.name for prefix in ("one_", "two_") for spec in mongo_indexes.COLLECTIONS
    }
    assert await database["events"].count_documents({}) == 1


async def _done(run: Any) -> str:
    return "done"


async def test_another_prefix_is_another_database_to_set_up(database: Any, layer: StateLayer) -> None:
    other = StateLayer(database, settings=Settings(prefix="other_"))
    with pytest.raises(SetupRequiredError):
        await other.set(REQUEST, 1, actor=USER)


async def test_roots_are_the_same_for_writing_reading_watching_and_subscribing(database: Any) -> None:
    async with opened(database, roots=("orders",)) as layer:
        event = await layer.set("/orders/O1/status", "new", actor=USER)
        assert (await layer.entries("/orders/O1"))[0].value == "new"
        await layer.subscriptions.publish(REVIEW | {"pattern": "/orders/*/requests/*"})
        async with layer.watch("/orders/O1/**", after=0) as events:
            assert (await anext(aiter(events))).id == event.id
        assert (await layer.verify("/orders/O1")).ok
        for refused in (layer.get(REQUEST), layer.set(REQUEST, 1, actor=USER), layer.verify("/tasks/T1")):
            with pytest.raises(InvalidPathError, match="tasks"):
                await refused
        with pytest.raises(InvalidSubscriptionError, match="tasks"):
            await layer.subscriptions.publish(REVIEW)
        with pytest.raises(InvalidPathError, match="tasks"):
            async with layer.watch("/tasks/T1/**"):
                pass


async def test_the_number_of_partitions_is_fixed_by_the_first_setup(database: Any) -> None:
    async with opened(database, partitions=2) as layer:
        events = [await layer.set(f"/tasks/T{number}/status", "new", actor=USER) for number in range(20)]
        assert {event.partition for event in events} == {0, 1}
        assert set(await database["namespaces"].distinct("partition")) == {0, 1}
        other = StateLayer(database, settings=Settings(partitions=3))
        for refused in (other.setup(), other.get(REQUEST), other.set(REQUEST, 1, actor=USER)):
            with pytest.raises(FormatMismatchError, match=r"Settings\(partitions=2\)"):
                await refused
        with pytest.raises(FormatMismatchError):
            async with other.running():
                pass


async def test_an_append_is_retried_no_longer_than_its_timeout(statelayer_server: Any, database: Any) -> None:
    async with opened(database, append_timeout=0.5) as layer, AsyncMongoClient(statelayer_server.uri) as client:
        await layer.set(REQUEST, 1, actor=USER)
        async with client.start_session() as session:
            await session.start_transaction()
            head = {"_id": "/tasks/T1"}
            await client[database.name]["namespaces"].update_one(head, {"$set": {"held": True}}, session=session)
            async with asyncio.timeout(15):
                for refused in (
                    layer.set(REQUEST, 2, actor=USER),
                    layer.transact(lambda tx: tx.set(REQUEST, 2, actor=USER), "/tasks/T1"),
                ):
                    with pytest.raises(ContentionError):
                        await refused
            await session.abort_transaction()
        assert (await layer.set(REQUEST, 3, actor=USER)).version == 2


async def queue_one(layer: StateLayer, gate: Gate | None = None) -> str:
    """Wake one execution of the workflow ``review`` and return its job id."""
    layer.workflow("review")(gate or _done)
    await layer.subscriptions.publish(REVIEW)
    event = await layer.set(REQUEST, 1, actor=USER)
    return f"workflow:{event.id}:review"


class Waiting:
    """A workflow that does not end, and knows how many of it run."""

    def __init__(self) -> None:
        self.started = 0
        self.cancelled = 0

    async def __call__(self, run: Any) -> None:
        self.started += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


@pytest.mark.parametrize("lease", [20.0, 60.0])
async def test_an_execution_is_leased_for_so_long(database: Any, lease: float) -> None:
    async with opened(database, lease=lease, heartbeat=19.0, drain_timeout=0.1) as layer:
        waiting = Waiting()
        async with layer.running():
            job = await queue_one(layer, waiting)  # type: ignore[arg-type]
            await wait_until(lambda: waiting.started)
            execution = await layer.executions.get(job)
            assert execution.lease is not None
            assert execution.started_at is not None
            assert abs(execution.lease.until - execution.started_at - timedelta(seconds=lease)) < timedelta(seconds=1)


async def test_the_instance_reports_itself_with_each_heartbeat(database: Any) -> None:
    async with opened(database, heartbeat=0.05, lease=20) as layer, layer.running():
        reported: set[Any] = set()

        async def often() -> bool:
            reported.update(await database["instances"].distinct("heartbeatAt"))
            return len(reported) >= 5

        await wait_until(often, timeout=5, message="by default it takes ten seconds to the next one")


async def test_leases_are_renewed_with_each_heartbeat(database: Any) -> None:
    async with opened(database, heartbeat=0.05, lease=20, drain_timeout=0.1) as layer, layer.running():
        waiting = Waiting()
        job = await queue_one(layer, waiting)  # type: ignore[arg-type]
        await wait_until(lambda: waiting.started)
        ends: set[Any] = set()

        async def often() -> bool:
            execution = await layer.executions.get(job)
            ends.add(execution.lease and execution.lease.until)
            return len(ends) >= 5

        await wait_until(often, timeout=5, message="by default it takes ten seconds to the next one")


async def test_the_worker_looks_for_work_with_each_poll(statelayer_server: Any, database: Any) -> None:
    async with listened(statelayer_server, database, poll=0.02) as (layer, commands), layer.running(listen=False):

        def looked() -> bool:
            asked = [c for c in commands.sent if c.get("find") == "meta" and c["filter"] == {"_id": "dispatch"}]
            return len(asked) >= 20

        await wait_until(looked, timeout=8, message="by default it looks once a second")


async def test_a_paused_listener_looks_with_each_poll_whether_it_may_go_on(
    statelayer_server: Any, database: Any
) -> None:
    async with listened(statelayer_server, database, poll=0.02) as (layer, commands):
        await layer.pause()
        async with layer.running(work=False):

            def looked() -> bool:
                asked = [c for c in commands.sent if c.get("find") == "meta" and c["filter"] == {"_id": "dispatch"}]
                return len(asked) >= 20

            await wait_until(looked, timeout=8, message="by default it looks once a second")


async def test_no_more_run_at_a_time_than_concurrency_allows(database: Any) -> None:
    async with opened(database, concurrency=3, poll=0.05, drain_timeout=0.1) as layer, layer.running():
        waiting = Waiting()
        await queue_one(layer, waiting)  # type: ignore[arg-type]
        for number in range(2, 9):
            await layer.set(f"/tasks/T1/requests/R{number}", 1, actor=USER)
        await wait_until(lambda: waiting.started == 3)

        async def states() -> list[str]:
            return sorted(execution.state for execution in await layer.executions.find())

        async def recorded() -> bool:
            return len(await states()) == 8

        await wait_until(recorded)
        assert await states() == ["queued"] * 5 + ["running"] * 3
        assert waiting.started == 3


async def test_leaving_waits_no_longer_than_the_drain_timeout(database: Any) -> None:
    waiting = Waiting()
    async with opened(database, drain_timeout=0.1) as layer:
        async with asyncio.timeout(15):  # by default it waits for half a minute
            async with layer.running():
                await queue_one(layer, waiting)  # type: ignore[arg-type]
                await wait_until(lambda: waiting.started)
        assert waiting.cancelled == 1


async def test_leaving_waits_for_what_ends_within_the_drain_timeout(database: Any) -> None:
    let_go, started = asyncio.Event(), asyncio.Event()

    async def slow(run: Any) -> str:
        started.set()
        await let_go.wait()
        return "done"

    async with opened(database, drain_timeout=20) as layer:
        async with layer.running():
            job = await queue_one(layer, slow)  # type: ignore[arg-type]
            await started.wait()
            asyncio.get_running_loop().call_later(0.3, let_go.set)
        assert (await layer.executions.get(job)).state == "succeeded"


@pytest.mark.fault
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")  # of the driver's monitors, see below
async def test_leaving_ends_although_the_server_is_away() -> None:
    """What cannot be told to the server is left to the leases; the process must be able to go."""
    server = embedded.ReplicaSet()
    await asyncio.to_thread(server.start)
    try:
        for _ in range(3):  # each time at another moment of what fails meanwhile
            await leave_without(server)
            await asyncio.to_thread(server.nodes[0].start)
            await asyncio.to_thread(server.primary)
    finally:
        await asyncio.to_thread(server.stop)
        gc.collect()  # the sockets of monitors that were cancelled while they connected in vain


async def leave_without(server: embedded.ReplicaSet) -> None:
    settings = Settings(append_timeout=0.5, poll=0.05, heartbeat=0.1, lease=1, drain_timeout=0.1)
    uri = f"{server.uri}&serverSelectionTimeoutMS=300"
    async with StateLayer.from_uri(uri, "orders", settings=settings) as layer:
        await layer.setup()
        hosted = layer.running()
        await hosted.__aenter__()
        server.nodes[0].kill()
        with pytest.raises(StateLayerError):
            await layer.set(REQUEST, 1, actor=USER)
        leaving = asyncio.ensure_future(hosted.__aexit__(None, None, None))
        _, late = await asyncio.wait([leaving], timeout=20)
        assert not late, "running() cannot be left"
        await leaving


async def test_the_log_is_read_in_pages(statelayer_server: Any, database: Any) -> None:
    async with listened(statelayer_server, database, page_size=7) as (layer, commands):
        for number in range(20):
            await layer.set(f"/tasks/T1/requests/R{number}", number, actor="user:ä")  # judged here, not in the server
        for read in (_all_events, _traced, _watched, _caught_up):
            commands.sent.clear()
            assert await read(layer) >= 20, read.__name__
            limits = commands.limits_of("events") - {1}
            assert limits == {7}, read.__name__
        commands.sent.clear()
        assert (await layer.verify("/tasks/T1")).events == 20
        pages = [c for c in commands.sent if c.get("aggregate") == "events" and {"$limit": 7} in c["pipeline"]]
        assert len(pages) >= 3


async def _all_events(layer: StateLayer) -> int:
    return len([event async for event in layer.events("/tasks/T1")])


async def _traced(layer: StateLayer) -> int:
    return len(await layer.trace_causation(task_id="T1"))


async def _watched(layer: StateLayer) -> int:
    async with layer.watch("/tasks/T1/**", after=0) as events:
        async for event in events:
            if event.seq == 20:
                return event.seq
    raise AssertionError


async def _caught_up(layer: StateLayer) -> int:
    newest = (await layer.read_version("/tasks/T1/requests/R19", 1)) or pytest.fail("no event")
    async with layer.running(work=False):
        await layer.outcome(newest.id, timeout=20)
        [listener] = (await layer.health()).listeners
    return listener.evaluated
