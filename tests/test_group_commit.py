"""The committer: batches, remembered heads, isolated contention, back-pressure, cancellation, closing (DESIGN §6)."""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from bson import Int64
from pymongo import AsyncMongoClient

from statelayer import Settings, StateLayer, Write
from statelayer.errors import (
    ClosedError,
    ContentionError,
    NotFoundError,
    StateLayerError,
    VersionConflictError,
)
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from statelayer.events import Event
    from statelayer.journal import JournalTransaction

    MakeLayer = Callable[..., StateLayer]

pytestmark = pytest.mark.anyio

USER = "user:U7"
T1 = "/tasks/T1"


@pytest.fixture
async def make_layer(database: Any, layer: StateLayer) -> AsyncIterator[MakeLayer]:
    """More layers on the same database; each has a committer of its own, as another process would."""
    made: list[StateLayer] = []

    def make(**settings: Any) -> StateLayer:
        made.append(StateLayer(database, settings=Settings(**settings)))
        return made[-1]

    yield make
    for each in made:
        await each.aclose()


@asynccontextmanager
async def held(statelayer_server: Any, database: Any, *namespaces: str) -> AsyncIterator[None]:
    """Somebody holds the heads of these namespaces in an open transaction."""
    async with AsyncMongoClient[dict[str, Any]](statelayer_server.uri) as client, client.start_session() as session:
        await session.start_transaction()
        heads = client[database.name]["namespaces"]
        for namespace in namespaces:
            await heads.update_one({"_id": namespace}, {"$inc": {"repairs": Int64(1)}}, session=session)
        try:
            yield
        finally:
            await session.abort_transaction()


async def seqs(layer: StateLayer, namespace: str) -> list[int]:
    return [event.seq async for event in layer.events(namespace)]


def soon(layer: StateLayer, *paths: str) -> list[asyncio.Task[Event]]:
    """Start a write to each of these paths."""
    return [asyncio.create_task(layer.set(path, n, actor=USER)) for n, path in enumerate(paths)]


# --- batches


async def test_what_arrives_during_a_commit_forms_the_next_batch(layer: StateLayer) -> None:
    await layer.set(f"{T1}/first", 0, actor=USER)
    before = layer.statistics.journal
    await asyncio.gather(*soon(layer, *(f"/tasks/T{n % 7}/n/{n}" for n in range(100))))
    after = layer.statistics.journal
    assert after.appends - before.appends == 100
    assert after.events - before.events == 100
    assert after.batches - before.batches <= 2
    assert after.largest_batch >= 50
    assert after.queued == 0
    assert after.mean_batch > 1
    assert 0 < after.mean_commit <= after.slowest_commit <= after.commit_seconds


async def test_one_bad_append_among_a_hundred_fails_alone(layer: StateLayer) -> None:
    await layer.set(f"{T1}/there", 1, actor=USER)
    bad = {
        VersionConflictError: layer.set(f"{T1}/there", 2, actor=USER, expected_version=5),
        NotFoundError: layer.delete(f"{T1}/never", actor=USER),
    }
    good = [layer.set(f"{T1}/n/{n}", n, actor=USER) for n in range(100)]
    results = await asyncio.gather(*good[:50], *bad.values(), *good[50:], return_exceptions=True)
    assert [type(r) for r in results if isinstance(r, BaseException)] == list(bad)
    assert await seqs(layer, T1) == list(range(1, 102))


async def test_an_append_that_the_server_refuses_fails_alone(database: Any, layer: StateLayer) -> None:
    """A validator that somebody added by hand, say."""
    await database.command({"collMod": "events", "validator": {"value": {"$ne": "poison"}}})
    writes = [layer.set(f"/tasks/T{n}/x", "poison" if n == 37 else n, actor=USER) for n in range(60)]
    results = await asyncio.gather(*writes, return_exceptions=True)
    failed = [n for n, result in enumerate(results) if isinstance(result, BaseException)]
    assert failed == [37]
    assert isinstance(results[37], StateLayerError)
    assert await seqs(layer, "/tasks/T37") == []


async def test_atomic_appends_stay_whole_inside_a_batch(layer: StateLayer) -> None:
    def pair(n: int, *, good: bool) -> list[Write]:
        first = Write(path=f"{T1}/a/{n}", value=n, actor=USER)
        return [first, Write(path=f"/tasks/T2/b/{n}", value=n, actor=USER, expected_version=None if good else 9)]

    results = await asyncio.gather(*(layer.append(pair(n, good=n % 3 != 0)) for n in range(30)), return_exceptions=True)
    assert sum(isinstance(result, VersionConflictError) for result in results) == 10
    assert await seqs(layer, T1) == await seqs(layer, "/tasks/T2") == list(range(1, 21))


async def test_writes_to_one_path_in_one_batch_have_consecutive_versions(layer: StateLayer) -> None:
    events = await asyncio.gather(*soon(layer, *[f"{T1}/x"] * 40))
    assert sorted(event.version for event in events) == list(range(1, 41))


async def test_two_callers_with_one_key_in_one_batch_get_one_event(layer: StateLayer) -> None:
    await layer.set(f"{T1}/first", 0, actor=USER)
    same = [layer.set(f"{T1}/x", 1, actor=USER, idempotency_key="k") for _ in range(20)]
    events = await asyncio.gather(*same, layer.set(f"{T1}/y", 1, actor=USER))
    assert len({event.id for event in events[:20]}) == 1
    assert await seqs(layer, T1) == [1, 2, 3]


async def test_k7_a_batch_is_capped_in_writes_and_bytes(make_layer: MakeLayer) -> None:
    few = make_layer(max_append_writes=10)
    await asyncio.gather(*soon(few, *(f"{T1}/n/{n}" for n in range(95))))
    assert few.statistics.journal.largest_batch <= 10
    small = make_layer(max_append_bytes=100_000, max_value_bytes=50_000)
    big = [small.set(f"/tasks/T2/n/{n}", "x" * 40_000, actor=USER) for n in range(9)]
    await asyncio.gather(*big)
    assert small.statistics.journal.largest_batch <= 2
    assert await seqs(small, "/tasks/T2") == list(range(1, 10))


# --- what is remembered


async def test_another_process_is_noticed(layer: StateLayer, other: StateLayer) -> None:
    for n in range(5):
        mine = await layer.set(f"{T1}/x", n, actor=USER)
        theirs = await other.set(f"{T1}/x", n, actor=USER)
        assert (mine.seq, theirs.seq) == (2 * n + 1, 2 * n + 2)
        assert (mine.version, theirs.version) == (2 * n + 1, 2 * n + 2)


async def test_a_remembered_version_is_checked_as_a_read_one(layer: StateLayer, other: StateLayer) -> None:
    await layer.set(f"{T1}/x", 1, actor=USER)
    await layer.set(f"{T1}/x", 2, actor=USER)
    with pytest.raises(VersionConflictError) as caught:
        await layer.set(f"{T1}/x", 3, actor=USER, expected_version=1)
    assert caught.value.actual == 2
    await other.delete(f"{T1}/x", actor=USER)
    with pytest.raises(NotFoundError):
        await layer.delete(f"{T1}/x", actor=USER)
    assert (await layer.set(f"{T1}/x", 4, actor=USER, expected_version=3)).version == 4


async def test_a_merge_rests_on_the_value_that_is_there(layer: StateLayer, other: StateLayer) -> None:
    await layer.set(f"{T1}/x", {"a": 1}, actor=USER)
    await layer.merge(f"{T1}/x", {"b": 2}, actor=USER)
    await other.merge(f"{T1}/x", {"c": 3}, actor=USER)
    merged = await asyncio.gather(*(layer.merge(f"{T1}/x", {f"n{n}": n}, actor=USER) for n in range(3)))
    assert merged[-1].value == {"a": 1, "b": 2, "c": 3, "n0": 0, "n1": 1, "n2": 2}


async def test_what_an_uncommitted_transaction_learned_is_not_remembered(layer: StateLayer) -> None:
    await layer.set(f"{T1}/x", 1, actor=USER)

    async def body(tx: JournalTransaction) -> None:
        await tx.set(f"{T1}/x", 2, actor=USER)
        await layer.set(f"{T1}/x", 3, actor=USER)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await layer.transact(body, T1)
    event = await layer.set(f"{T1}/x", 4, actor=USER)
    assert (event.seq, event.version) == (2, 2)


async def test_what_a_transaction_committed_is_not_forgotten_either(layer: StateLayer) -> None:
    await layer.set(f"{T1}/x", 1, actor=USER)
    async with layer.transaction(T1) as tx:
        await tx.set(f"{T1}/x", 2, actor=USER)
    conflicts = layer.statistics.journal.conflicts
    assert (await layer.set(f"{T1}/x", 3, actor=USER)).seq == 3
    assert layer.statistics.journal.conflicts == conflicts


async def test_a_repair_is_noticed(database: Any, layer: StateLayer) -> None:
    for n in range(3):
        await layer.set(f"{T1}/x", n, actor=USER)
    await database["entries"].update_one({"_id": f"{T1}/x"}, {"$set": {"version": Int64(9)}})
    await layer.replay(T1)
    assert (await layer.set(f"{T1}/x", 9, actor=USER)).version == 4
    assert (await layer.verify(T1)).ok


async def test_an_entry_removed_by_hand_is_not_taken_for_granted(database: Any, layer: StateLayer) -> None:
    for n in range(3):
        await layer.set(f"{T1}/x", n, actor=USER)
    await database["entries"].delete_one({"_id": f"{T1}/x"})
    with pytest.raises(StateLayerError, match="replay"):
        await layer.set(f"{T1}/x", 9, actor=USER)
    await layer.replay(T1)
    assert (await layer.set(f"{T1}/x", 9, actor=USER)).version == 4


# --- contention


async def test_a_namespace_that_somebody_holds_does_not_hold_up_others(
    statelayer_server: Any, database: Any, layer: StateLayer
) -> None:
    calm = [f"/tasks/T{n}/x" for n in range(20)]
    await asyncio.gather(*soon(layer, "/tasks/HELD/x", *calm))
    async with held(statelayer_server, database, "/tasks/HELD"):
        stuck = soon(layer, "/tasks/HELD/x")
        for _ in range(10):
            await asyncio.gather(*soon(layer, *calm))
        assert not stuck[0].done()
        assert layer.statistics.journal.contended == 1
    assert (await stuck[0]).seq == 2
    await wait_until(lambda: layer.statistics.journal.contended == 0)
    for path in calm:
        assert await seqs(layer, path[:-2]) == list(range(1, 12))


async def test_an_append_over_a_held_namespace_waits_whole(
    statelayer_server: Any, database: Any, layer: StateLayer
) -> None:
    await asyncio.gather(*soon(layer, f"{T1}/x", "/tasks/HELD/x"))
    async with held(statelayer_server, database, "/tasks/HELD"):
        writes = [Write(path=path, value=1, actor=USER) for path in (f"{T1}/y", "/tasks/HELD/y")]
        stuck = asyncio.create_task(layer.append(writes))
        for n in range(5):
            await layer.set(f"{T1}/x", n, actor=USER)
        assert await layer.get(f"{T1}/y") is None
    assert [event.namespace for event in await stuck] == [T1, "/tasks/HELD"]
    assert await seqs(layer, T1) == list(range(1, 8))


async def test_a_held_namespace_ends_in_contention_at_the_callers_deadline(
    statelayer_server: Any, database: Any, make_layer: MakeLayer
) -> None:
    brisk = make_layer(append_timeout=0.5)
    await brisk.set(f"{T1}/x", 0, actor=USER)
    async with held(statelayer_server, database, T1):
        with pytest.raises(ContentionError, match="Nothing was written") as caught:
            await brisk.set(f"{T1}/x", 1, actor=USER)
        assert caught.value.attempts > 1
    assert await seqs(brisk, T1) == [1]


async def test_a_hammered_namespace_does_not_hold_up_others(layer: StateLayer, other: StateLayer) -> None:
    done = asyncio.Event()

    async def hammer(number: int) -> None:
        while not done.is_set():
            await other.set(f"/tasks/HOT/n/{number}", 0, actor=USER)

    hammering = [asyncio.create_task(hammer(number)) for number in range(8)]
    hot = [asyncio.create_task(layer.set(f"/tasks/HOT/m/{n}", n, actor=USER)) for n in range(5)]
    for _ in range(20):
        await asyncio.gather(*soon(layer, *(f"/tasks/T{n}/x" for n in range(16))))
    await asyncio.gather(*hot)
    done.set()
    await asyncio.gather(*hammering)
    for n in range(16):
        assert await seqs(layer, f"/tasks/T{n}") == list(range(1, 21))
    assert (await layer.verify("/tasks/HOT")).ok


async def test_two_processes_that_want_the_same_namespaces_both_get_on(layer: StateLayer, other: StateLayer) -> None:
    """Each at least a quarter of an even share."""
    count = 64
    written = {layer: 0, other: 0}
    done = asyncio.Event()

    async def caller(one: StateLayer, number: int) -> None:
        while not done.is_set():
            await one.set(f"/tasks/T{number}/x", 0, actor=USER)
            written[one] += 1

    callers = [asyncio.create_task(caller(one, number)) for one in written for number in range(count)]
    await wait_until(lambda: sum(written.values()) > 20 * count, timeout=60)
    done.set()
    await asyncio.gather(*callers)
    assert min(written.values()) >= sum(written.values()) / 2 / 4
    for number in range(count):
        heads = await seqs(layer, f"/tasks/T{number}")
        assert heads == list(range(1, len(heads) + 1))


# --- back-pressure


async def test_callers_wait_when_the_queue_is_full(
    statelayer_server: Any, database: Any, make_layer: MakeLayer
) -> None:
    narrow = make_layer(max_queued_writes=4)
    await narrow.set(f"{T1}/x", 0, actor=USER)
    async with held(statelayer_server, database, T1):
        waiting = soon(narrow, *(f"{T1}/n/{n}" for n in range(10)))
        await wait_until(lambda: narrow.statistics.journal.waiting == 6)
        assert narrow.statistics.journal.queued == 4
        waiting[-1].cancel()
        await wait_until(lambda: narrow.statistics.journal.waiting == 5)
    await asyncio.gather(*waiting[:-1])
    assert await seqs(narrow, T1) == list(range(1, 11))
    assert (narrow.statistics.journal.queued, narrow.statistics.journal.waiting) == (0, 0)


async def test_the_queue_is_bounded_in_bytes_too(statelayer_server: Any, database: Any, make_layer: MakeLayer) -> None:
    narrow = make_layer(max_queued_bytes=5000)
    await narrow.set(f"{T1}/x", 0, actor=USER)
    async with held(statelayer_server, database, T1):
        waiting = [asyncio.create_task(narrow.set(f"{T1}/n/{n}", "x" * 2000, actor=USER)) for n in range(5)]
        await wait_until(lambda: narrow.statistics.journal.waiting == 3)
    await asyncio.gather(*waiting)


async def test_an_append_larger_than_the_queue_goes_alone(make_layer: MakeLayer) -> None:
    narrow = make_layer(max_queued_writes=2)
    events = await narrow.append([Write(path=f"{T1}/n/{n}", value=n, actor=USER) for n in range(5)])
    assert len(events) == 5


async def test_waiting_for_room_ends_at_the_deadline(
    statelayer_server: Any, database: Any, make_layer: MakeLayer
) -> None:
    narrow = make_layer(max_queued_writes=1, append_timeout=0.3)
    await narrow.set(f"{T1}/x", 0, actor=USER)
    async with held(statelayer_server, database, T1):
        results = await asyncio.gather(*soon(narrow, f"{T1}/a", f"{T1}/b"), return_exceptions=True)
    assert [type(result) for result in results] == [ContentionError] * 2


# --- cancelling and closing


async def test_c7_a_caller_cancelled_during_his_commit_finds_the_outcome_by_his_key(layer: StateLayer) -> None:
    await layer.set(f"{T1}/first", 0, actor=USER)
    for pause in range(12):
        key = f"k{pause}"
        task = asyncio.create_task(layer.set(f"{T1}/x", pause, actor=USER, idempotency_key=key))
        beside = asyncio.create_task(layer.set(f"{T1}/beside", pause, actor=USER))
        await asyncio.sleep(pause * 0.001)
        task.cancel()
        await asyncio.wait([task])
        await beside
        again = await layer.set(f"{T1}/x", pause, actor=USER, idempotency_key=key)
        assert again.version == pause + 1
    assert (await layer.verify(T1)).ok


async def test_closing_waits_for_what_was_accepted_behind_a_transaction(make_layer: MakeLayer) -> None:
    closing = make_layer()
    await closing.set(f"{T1}/x", 0, actor=USER)
    async with closing.transaction(T1) as tx:
        await tx.set(f"{T1}/x", 1, actor=USER)
        accepted: list[asyncio.Task[Event]] = []

        async def outside() -> None:
            accepted.extend(soon(closing, f"{T1}/y"))

        await asyncio.create_task(outside(), context=contextvars.Context())
        await wait_until(lambda: closing.statistics.journal.queued == 1)
        shutting = asyncio.create_task(closing.aclose())
        await asyncio.sleep(0)
    await shutting
    assert (await accepted[0]).seq == 3


async def test_closing_turns_away_whoever_waits_for_room(
    statelayer_server: Any, database: Any, make_layer: MakeLayer
) -> None:
    narrow = make_layer(max_queued_writes=1)
    await narrow.set(f"{T1}/x", 0, actor=USER)
    async with held(statelayer_server, database, T1):
        inside, outside = soon(narrow, f"{T1}/a", f"{T1}/b")
        await wait_until(lambda: narrow.statistics.journal.waiting == 1)
        shutting = asyncio.create_task(narrow.aclose())
        with pytest.raises(ClosedError, match="nothing was written"):
            await outside
        with pytest.raises(ClosedError):
            await narrow.set(f"{T1}/c", 1, actor=USER)
    await shutting
    assert (await inside).seq == 2
