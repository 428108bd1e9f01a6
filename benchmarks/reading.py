"""Reading: the log of a namespace, replay and verify, beside what the driver and the server do for the same."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from benchmarks.baselines import ACTOR
from benchmarks.measure import VALUE, Row, compare
from statelayer import StateLayer, Write

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Awaitable, Callable

    from benchmarks.append import Bench

READ = 100_000
FOLDED = 200_000
PATHS = 2000
BARE_FOLD = "the bare $group fold in the server"


async def _fill(layer: StateLayer, namespace: str, events: int, *, caused: bool) -> None:
    """Write so many events to some paths; with ``caused``, each second one is caused by the one before it."""
    cause: str | None = None
    for start in range(0, events, 1000):
        writes = [
            Write(
                path=f"{namespace}/n/{(start + i) % PATHS}",
                value=VALUE,
                actor=ACTOR,
                caused_by=cause if caused and i % 2 else None,
            )
            for i in range(min(1000, events - start))
        ]
        cause = (await layer.append(writes))[0].id


async def _timed(count: int, work: Callable[[], Awaitable[Any]]) -> float:
    started = time.perf_counter()
    await work()
    return count / (time.perf_counter() - started)


async def _count(items: AsyncIterable[object]) -> int:
    count = 0
    async for _ in items:
        count += 1
    return count


async def read_events(bench: Bench) -> Row:
    async with bench.layer() as layer:
        namespace = bench.fresh()
        await _fill(layer, namespace, READ, caused=False)
        collection = bench.database["events"]

        async def ours() -> None:
            assert await _count(layer.events(namespace)) == READ

        async def theirs() -> None:
            assert await _count(collection.find({"namespace": namespace}).sort("seq", 1)) == READ

        return await compare(
            f"events() over {READ:,} events of a namespace, one by one",
            "the bare driver cursor into dicts",
            lambda _: _timed(READ, ours),
            lambda _: _timed(READ, theirs),
            target=0.5,
        )


async def _bare_fold(bench: Bench, namespace: str) -> None:
    pipeline = [
        {"$match": {"namespace": namespace}},
        {"$sort": {"seq": 1}},
        {
            "$group": {
                "_id": "$path",
                "op": {"$last": "$op"},
                "value": {"$last": "$value"},
                "version": {"$last": "$version"},
                "seq": {"$last": "$seq"},
            }
        },
    ]
    cursor = await bench.database["events"].aggregate(pipeline, allowDiskUse=True)
    assert len(await cursor.to_list(None)) == PATHS


async def replay(bench: Bench) -> Row:
    async with bench.layer() as layer:
        namespace = bench.fresh()
        await _fill(layer, namespace, FOLDED, caused=False)

        async def ours() -> None:
            assert (await layer.replay(namespace)).events == FOLDED

        return await compare(
            f"replay of {FOLDED:,} events",
            BARE_FOLD,
            lambda _: _timed(FOLDED, ours),
            lambda _: _timed(FOLDED, lambda: _bare_fold(bench, namespace)),
            target=0.5,
        )


async def verify(bench: Bench) -> Row:
    async with bench.layer() as layer:
        namespace = bench.fresh()
        await _fill(layer, namespace, FOLDED, caused=True)

        async def ours() -> None:
            assert (await layer.verify(namespace)).ok

        return await compare(
            f"verify of {FOLDED:,} events, half of them caused",
            BARE_FOLD,
            lambda _: _timed(FOLDED, ours),
            lambda _: _timed(FOLDED, lambda: _bare_fold(bench, namespace)),
            target=0.15,
        )


ROWS = [read_events, replay, verify]
