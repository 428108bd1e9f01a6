"""Watching: catch-up and live without a gap, one stream for all, nobody held up by another (DESIGN §7)."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from bson import Int64
from bson.timestamp import Timestamp

from statelayer.clock import Clock
from statelayer.drivers import Database
from statelayer.errors import (
    ClosedError,
    HistoryLostError,
    IntegrityError,
    InvalidInputError,
    LogLostError,
    PrivilegeRequiredError,
)
from statelayer.events import Event, Write
from statelayer.history import Change, History, Position, Watch
from statelayer.history.changes import Sieve
from statelayer.history.reader import CAPACITY
from statelayer.history.watch import AHEAD
from statelayer.journal import Journal
from statelayer.mongo_indexes import setup
from statelayer.settings import Settings
from statelayer.streams import AWAIT
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

pytestmark = pytest.mark.anyio

USER = "user:U7"
NAMESPACES = ("/tasks/T1", None)
"""A watch of one namespace, and one of all of them."""


def everything(segments: Sequence[str]) -> bool:
    return bool(segments)


@dataclass
class Tower:
    """A journal to write with and a history to watch with."""

    database: Database
    journal: Journal
    history: History

    async def set(self, path: str, value: Any = None) -> Event:
        [event] = await self.journal.append([Write(path=path, value=value, actor=USER)])
        return event

    async def batch(self, count: int, path: str = "/tasks/T1/n") -> list[Event]:
        return await self.journal.append([Write(path=path, value=n, actor=USER) for n in range(count)])

    @asynccontextmanager
    async def fault(self, *commands: str, code: int, times: int | None = 1) -> AsyncIterator[None]:
        """Let the server answer these commands on a stream of this database with an error; ``None`` is every time."""
        data = {"failCommands": commands, "errorCode": code, "namespace": f"{self.database.name}.$cmd.aggregate"}
        mode = "alwaysOn" if times is None else {"times": times}
        await self.database.admin_command({"configureFailPoint": "failCommand", "mode": mode, "data": data})
        try:
            yield
        finally:
            await self.database.admin_command({"configureFailPoint": "failCommand", "mode": "off"})


@pytest.fixture
async def tower(database: Any) -> AsyncIterator[Tower]:
    settings, clock = Settings(page_size=5), Clock()
    ours = Database(database)
    await setup(ours, settings)
    history = History(ours, settings, clock)
    yield Tower(ours, Journal(ours, settings, clock), history)
    await history.aclose()


@asynccontextmanager
async def both(tower: Tower) -> AsyncIterator[list[Watch]]:
    """A watch of one namespace, and one of all of them."""
    async with (
        tower.history.watch("/tasks/T1", everything) as here,
        tower.history.watch(None, everything) as everywhere,
    ):
        yield [here, everywhere]


async def take(events: Watch, count: int) -> list[Event]:
    async with asyncio.timeout(20):
        return [await anext(events) for _ in range(count)]


async def is_quiet(tower: Tower, events: Watch) -> bool:
    """Whether nothing but a last event, written now, is to come."""
    last = await tower.set("/tasks/T1/last")
    [event] = await take(events, 1)
    return event.id == last.id


# --- catch-up and live


@pytest.mark.parametrize("namespace", NAMESPACES)
async def test_a_watch_begins_now(tower: Tower, namespace: str | None) -> None:
    await tower.batch(3)
    async with tower.history.watch(namespace, everything) as events:
        written = await tower.batch(7)
        assert [event.id for event in await take(events, 7)] == [event.id for event in written]
        assert await is_quiet(tower, events)


async def test_a_second_watch_begins_now_though_the_stream_is_behind(tower: Tower) -> None:
    async with tower.history.watch(None, everything):
        for n in range(20):
            await tower.set("/tasks/T1/n", n)
            async with tower.history.watch(None, everything) as events:
                assert await is_quiet(tower, events)


async def test_a_watch_of_a_namespace_goes_on_behind_a_seq(tower: Tower) -> None:
    await tower.batch(12)
    async with tower.history.watch("/tasks/T1", everything, after=3) as events:
        assert [event.seq for event in await take(events, 9)] == list(range(4, 13))
        await tower.batch(2)
        assert [event.seq for event in await take(events, 2)] == [13, 14]
        assert events.position == 14


async def test_a_watch_of_everything_goes_on_behind_a_position(tower: Tower) -> None:
    async with tower.history.watch(None, everything) as events:
        await tower.batch(6)
        await tower.set("/tasks/T2/a")
        head = await take(events, 4)
        position = events.position  # in the middle of a transaction
    assert [event.seq for event in head] == [1, 2, 3, 4]
    async with tower.history.watch(None, everything, after=position) as events:
        await tower.set("/tasks/T3/a")
        rest = [(event.namespace, event.seq) for event in await take(events, 4)]
        assert rest == [("/tasks/T1", 5), ("/tasks/T1", 6), ("/tasks/T2", 1), ("/tasks/T3", 1)]
        assert await is_quiet(tower, events)


async def test_each_position_leads_to_exactly_what_is_left(tower: Tower) -> None:
    async with tower.history.watch(None, everything) as events:
        written = [*await tower.batch(3), await tower.set("/tasks/T2/a"), *await tower.batch(3, "/tasks/T1/m")]
        positions = [events.position]
        for _ in written:
            await take(events, 1)
            positions.append(events.position)
    for n, position in enumerate(positions):
        async with tower.history.watch(None, everything, after=position) as events:
            left = await take(events, len(written) - n)
            assert [event.id for event in left] == [event.id for event in written[n:]]


@pytest.mark.parametrize("namespace", NAMESPACES)
async def test_a9_nothing_is_lost_or_repeated_between_catch_up_and_live(tower: Tower, namespace: str | None) -> None:
    """Events are written all the while: before, during and after the change from the one to the other."""
    async with tower.history.watch(None, everything) as events:
        after = 0 if namespace else events.position
    written: list[str] = []
    done = asyncio.Event()

    async def write() -> None:
        while not done.is_set():
            written.append((await tower.set("/tasks/T1/n", len(written))).id)

    writing = asyncio.ensure_future(write())
    await wait_until(lambda: len(written) > 20)
    async with tower.history.watch(namespace, everything, after=after) as events:
        read = [event.id for event in await take(events, 20)]
        more = len(written) + 20
        await wait_until(lambda: len(written) > more)
        done.set()
        await writing
        read += [event.id for event in await take(events, len(written) - 20)]
        assert read == written
        assert await is_quiet(tower, events)


async def test_a9_what_is_written_at_once_after_the_entry_is_seen(tower: Tower) -> None:
    for n in range(5):
        async with both(tower) as watches:
            event = await tower.set("/tasks/T1/n", n)
            for events in watches:
                assert [seen.id for seen in await take(events, 1)] == [event.id]


async def test_only_what_matches_is_seen(tower: Tower) -> None:
    def results(segments: Sequence[str]) -> bool:
        return segments[2] == "results"

    async with (
        tower.history.watch("/tasks/T1", results) as here,
        tower.history.watch(None, results) as everywhere,
    ):
        for namespace in ("/tasks/T2", "/tasks/T1"):
            await tower.set(f"{namespace}/noise/a")
            await tower.set(f"{namespace}/results/a")
        assert [event.path for event in await take(here, 1)] == ["/tasks/T1/results/a"]
        both = [event.path for event in await take(everywhere, 2)]
        assert both == ["/tasks/T2/results/a", "/tasks/T1/results/a"]


async def test_an_event_is_the_same_from_the_stream_and_from_the_log(tower: Tower) -> None:
    value = {"n": Int64(5_000_000_000), "ref": {"$ref": "orders", "$id": 7}}
    async with both(tower) as [here, everywhere]:
        written = await tower.set("/tasks/T1/a", value)
        [log], [stream] = await take(here, 1), await take(everywhere, 1)
    assert log.model_dump() == stream.model_dump() == written.model_dump()
    assert type(stream.value["n"]) is int


async def test_f10_watchers_share_nothing(tower: Tower) -> None:
    async with (
        tower.history.watch(None, everything) as first,
        tower.history.watch(None, everything) as second,
    ):
        await tower.set("/tasks/T1/a", {"list": [1]})
        [mine], [yours] = await take(first, 1), await take(second, 1)
        mine.value["list"].append(2)
        assert yours.value == {"list": [1]}


# --- consumers that come and go, hurry and dawdle


@pytest.mark.parametrize("namespace", NAMESPACES)
async def test_a10_a_consumer_may_give_up_waiting_as_often_as_it_likes(tower: Tower, namespace: str | None) -> None:
    """A wait that is cancelled costs nothing, whatever the stream is doing at that moment."""
    async with tower.history.watch(namespace, everything) as events:
        read: list[Event] = []
        for n in range(10):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(events), 0.002)
            event = await tower.set("/tasks/T1/n", n)
            while not read or read[-1].id != event.id:
                with suppress(TimeoutError):
                    read.append(await asyncio.wait_for(anext(events), 0.002))
        assert [event.value for event in read] == list(range(10))


async def test_a10_an_idle_stream_stays_alive(tower: Tower) -> None:
    """Over several of its waits on the server it delivers each event, and is never opened anew."""
    async with both(tower) as [here, everywhere]:
        for n in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(here), 1.2 * AWAIT)
            event = await tower.set("/tasks/T1/n", n)
            for events in (here, everywhere):
                assert [seen.id for seen in await take(events, 1)] == [event.id]
    assert tower.history.reader.statistics.reopened == 0


@pytest.mark.parametrize("namespace", NAMESPACES)
async def test_a_slow_watcher_loses_nothing_and_holds_nobody_up(tower: Tower, namespace: str | None) -> None:
    count = CAPACITY + AHEAD + 50
    async with (
        tower.history.watch(namespace, everything) as slow,
        tower.history.watch(None, everything) as quick,
    ):
        for _ in range(2):
            written = [event.id for event in await tower.batch(count)]
            assert [event.id for event in await take(quick, count)] == written
            if namespace is None:
                await wait_until(lambda: tower.history.reader.statistics.overflows)
            assert [event.id for event in await take(slow, count)] == written
        assert await is_quiet(tower, slow)


async def test_the_position_of_an_idle_watch_moves_on(tower: Tower) -> None:
    """Or it would age out of the oplog while nothing matches."""

    def is_rare(segments: Sequence[str]) -> bool:
        return segments[2] == "rare"

    async with tower.history.watch(None, is_rare) as events:
        before = str(events.position)

        async def moves_on() -> bool:
            await tower.set("/tasks/T1/often")
            return str(events.position) > before

        await wait_until(moves_on)
        rare = await tower.set("/tasks/T1/rare")
        position = events.position
        assert [event.id for event in await take(events, 1)] == [rare.id]
    async with tower.history.watch(None, is_rare, after=position) as events:
        assert [event.id for event in await take(events, 1)] == [rare.id]


async def test_a_position_never_runs_ahead_of_its_consumer(tower: Tower) -> None:
    async with tower.history.watch(None, everything) as events:
        written = await tower.batch(AHEAD + 20)
        for event in written:
            assert [seen.id for seen in await take(events, 1)] == [event.id]
            assert Position.parse(events.position).event_id == event.id


# --- one stream for all


async def test_a11_one_stream_serves_everybody_and_closes_after_the_last(tower: Tower) -> None:
    statistics = tower.history.reader.statistics
    assert (statistics.watchers, statistics.is_open) == (0, False)
    async with asyncio.TaskGroup() as group, tower.history.watch(None, everything):
        leave = asyncio.Event()
        entered = [asyncio.Event() for _ in range(30)]
        for event in entered:
            group.create_task(_watch_until(tower, leave, event))
        for event in entered:
            await event.wait()
        assert tower.history.reader.statistics.watchers == 31
        assert await _open_streams(tower) == 1
        leave.set()
    await wait_until(lambda: not tower.history.reader.statistics.is_open)
    await wait_until(lambda: _no_streams(tower))


async def _watch_until(tower: Tower, leave: asyncio.Event, entered: asyncio.Event) -> None:
    async with tower.history.watch("/tasks/T1", everything):
        entered.set()
        await leave.wait()


async def _no_streams(tower: Tower) -> bool:
    return await _open_streams(tower) == 0


async def _open_streams(tower: Tower) -> int:
    match = {"cursor.originatingCommand.pipeline.0.$changeStream": {"$exists": True}}
    pipeline = [
        {"$currentOp": {"idleCursors": True}},
        {"$match": {"ns": {"$regex": f"^{tower.database.name}\\."}, **match}},
    ]
    reply = await tower.database.admin_command({"aggregate": 1, "pipeline": pipeline, "cursor": {}})
    return len(reply["cursor"]["firstBatch"])


async def test_a_stream_can_be_opened_again_after_it_was_closed(tower: Tower) -> None:
    for n in range(5):
        async with tower.history.watch(None, everything) as events:
            await tower.set("/tasks/T1/n", n)
            assert [event.value for event in await take(events, 1)] == [n]


async def test_the_stream_runs_in_nobodys_context(tower: Tower) -> None:
    request: ContextVar[str] = ContextVar("request", default="none")
    request.set("of the first watcher")
    seen: list[str] = []

    def matches(segments: Sequence[str]) -> bool:
        seen.append(request.get())
        return True

    async with tower.history.watch("/tasks/T1", matches) as here, tower.history.watch(None, matches) as everywhere:
        await tower.set("/tasks/T1/a")
        await take(here, 1)
        await take(everywhere, 1)
    assert set(seen) == {"none"}


async def test_changes_of_executions_are_seen_and_renewed_leases_are_not(tower: Tower) -> None:
    executions = tower.database.handle["executions"]
    job = "workflow:0123456789abcdef01234567:review"

    def of_the_job(change: Change) -> bool:
        return change.collection == "executions" and change.id == job

    async with tower.history.reader.watching(of_the_job) as watcher:
        await executions.insert_one({"_id": job, "state": "queued"}, bypass_document_validation=True)
        await executions.insert_one({"_id": job + "2", "state": "queued"}, bypass_document_validation=True)
        for update in ({"lease.until": 1}, {"state": "running"}, {"reason": "no_executor"}):
            await executions.update_one({"_id": job}, {"$set": update}, bypass_document_validation=True)
        changes: list[Change] = []
        while len(changes) < 3:
            changes += (await asyncio.wait_for(watcher.read(), 10)).changes
    assert [change.fields for change in changes] == [
        {"_id": job, "state": "queued"},
        {"state": "running"},
        {"reason": "no_executor"},
    ]


# --- what goes wrong


async def test_a_stream_that_breaks_goes_on_where_it_broke(tower: Tower) -> None:
    async with both(tower) as watches:
        before = [event.id for event in await tower.batch(2)]
        for events in watches:
            assert [event.id for event in await take(events, 2)] == before
        async with tower.fault("getMore", code=43):
            await wait_until(lambda: tower.history.reader.statistics.reopened)
            after = [event.id for event in await tower.batch(2)]
        for events in watches:
            assert [event.id for event in await take(events, 2)] == after


async def test_killed_cursors_cost_nothing(tower: Tower) -> None:
    """I9."""
    async with both(tower) as watches:
        for n in range(1, 3):
            await _kill_streams(tower)
            await wait_until(lambda: tower.history.reader.statistics.reopened == n)  # noqa: B023 - awaited here
            event = await tower.set("/tasks/T1/n", n)
            for events in watches:
                assert [seen.id for seen in await take(events, 1)] == [event.id]


async def _kill_streams(tower: Tower) -> None:
    pipeline = [
        {"$currentOp": {"idleCursors": True, "localOps": True}},
        {"$match": {"ns": {"$regex": f"^{tower.database.name}\\."}, "cursor.cursorId": {"$exists": True}}},
    ]
    reply = await tower.database.admin_command({"aggregate": 1, "pipeline": pipeline, "cursor": {}})
    cursors = [operation["cursor"]["cursorId"] for operation in reply["cursor"]["firstBatch"]]
    await tower.database.command({"killCursors": "$cmd.aggregate", "cursors": cursors})


async def test_a_stream_that_cannot_be_opened_is_tried_again_and_not_in_a_hot_loop(tower: Tower) -> None:
    async with tower.fault("aggregate", code=43, times=3), tower.history.watch("/tasks/T1", everything) as events:
        await tower.set("/tasks/T1/n")
        await take(events, 1)
    assert 1 <= tower.history.reader.statistics.reopened <= 3


async def test_what_cannot_heal_reaches_every_watcher(tower: Tower) -> None:
    async with both(tower) as watches, tower.fault("getMore", code=13):
        for events in watches * 2:
            with pytest.raises(PrivilegeRequiredError):
                await take(events, 1)
    async with tower.history.watch(None, everything) as events:
        assert await is_quiet(tower, events)


async def test_a_stream_that_lost_its_place_costs_no_event_that_can_be_read(tower: Tower) -> None:
    """It is opened again at a later time; the watchers are told that they missed what lies between."""
    async with both(tower) as watches:
        async with tower.fault("getMore", "aggregate", code=286, times=None):
            await wait_until(lambda: tower.history.reader.statistics.reopened)
            written = [event.id for event in await tower.batch(3)]
            await tower.database.handle["noise"].insert_one({})
        for events in watches:
            assert [event.id for event in await take(events, 3)] == written


async def test_a_stream_that_breaks_repeats_no_event(tower: Tower) -> None:
    async with tower.history.reader.watching() as watcher:
        written: list[str] = []
        seen: list[str] = []
        for n in range(1, 4):
            written.append((await tower.set("/tasks/T1/n", n)).id)
            while len(seen) < n:
                seen += [change.id for change in (await asyncio.wait_for(watcher.read(), 10)).changes]
            async with tower.fault("getMore", code=43):
                await wait_until(lambda: tower.history.reader.statistics.reopened == n)  # noqa: B023 - awaited here
        assert seen == written


async def test_a_position_that_the_server_no_longer_has_is_reported(tower: Tower) -> None:
    async with tower.history.watch(None, everything) as events:
        await tower.batch(2)
        await take(events, 1)
        position = events.position
        with pytest.raises(HistoryLostError, match=r"Read each namespace on from its last seq with events"):
            async with (
                tower.fault("aggregate", code=286),  # the shared stream is open: this is the watch's own
                tower.history.watch(None, everything, after=position),
            ):
                pass


async def test_a_malformed_position_is_refused(tower: Tower) -> None:
    positions: list[Any] = ["", "now", "0" * 15, "0" * 16 + "-", "g" * 16, 5, True, b"0" * 16]
    for position in positions:
        with pytest.raises(InvalidInputError, match=r"events\.position"):
            tower.history.watch(None, everything, after=position)


async def test_a_position_of_the_future_is_refused(tower: Tower) -> None:
    position = str(Position(Timestamp(2**32 - 1, 1)))
    with pytest.raises(InvalidInputError, match="future"):
        async with tower.history.watch(None, everything, after=position):
            pass


async def test_a_seq_that_is_none_is_refused(tower: Tower) -> None:
    seqs: list[Any] = [-1, True, "5", 1.0]
    for seq in seqs:
        with pytest.raises(InvalidInputError, match="after"):
            tower.history.watch("/tasks/T1", everything, after=seq)


@pytest.mark.parametrize("loss", ["drop", "rename", "dropDatabase"])
async def test_a_lost_log_is_told(tower: Tower, loss: str) -> None:
    handle = tower.database.handle
    async with both(tower) as watches:
        if loss == "drop":
            await handle["events"].drop()
        elif loss == "rename":
            await handle["events"].rename("old")
        else:
            await handle.client.drop_database(handle.name)
        for events in watches:
            with pytest.raises(LogLostError):
                await take(events, 1)


async def test_an_event_broken_by_hand_is_told_and_passed(tower: Tower) -> None:
    """B2: it stops nobody for ever."""
    broken = {"_id": "0" * 24, "namespace": "/tasks/T1", "path": "/tasks/T1/a", "seq": Int64(1)}
    head = {"_id": "/tasks/T1", "seq": Int64(1), "repairs": Int64(0), "partition": 0}
    async with both(tower) as watches:
        await tower.database.handle["events"].insert_one(broken, bypass_document_validation=True)
        for events in watches:
            with pytest.raises(IntegrityError, match="0" * 24):
                await take(events, 1)
        await tower.database.handle["namespaces"].insert_one(head)
        last = await tower.set("/tasks/T1/last")
        for events in watches:
            assert [event.id for event in await take(events, 1)] == [last.id]


async def test_closing_ends_every_watch(tower: Tower) -> None:
    async with both(tower) as watches:
        await tower.history.aclose()
        for events in watches:
            with pytest.raises(ClosedError):
                await take(events, 1)
    with pytest.raises(ClosedError):
        async with tower.history.watch(None, everything):
            pass


# --- positions


def change(event_id: str, time: int) -> Change:
    return Change("events", event_id, {}, Timestamp(time, 1))


def test_a_sieve_lets_each_event_through_once() -> None:
    sieve = Sieve(Position(Timestamp(5, 1)))
    stream = [change("a", 4), change("b", 5), change("c", 5), change("d", 7)]
    assert [c.id for c in stream if sieve.admits(c)] == ["b", "c", "d"]
    assert not any(sieve.admits(c) for c in stream)
    assert sieve.position == Position(Timestamp(7, 1), "d")


def test_a_sieve_goes_on_within_a_transaction() -> None:
    sieve = Sieve(Position.parse(str(Position(Timestamp(5, 1), "b"))))
    stream = [change("a", 5), change("b", 5), change("c", 5), change("d", 6)]
    assert [c.id for c in stream if sieve.admits(c)] == ["c", "d"]


def test_a_sieve_that_is_told_of_the_time_keeps_what_it_knows_of_it() -> None:
    sieve = Sieve(Position(Timestamp(5, 1)))
    assert sieve.admits(change("a", 5))
    sieve.advance(Timestamp(5, 1))
    assert not sieve.admits(change("a", 5))
    sieve.advance(Timestamp(6, 1))
    assert sieve.position == Position(Timestamp(6, 1))
