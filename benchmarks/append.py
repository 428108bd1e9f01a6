"""Appending: many callers on one namespace and on many, large appends, one caller alone, a long log."""

from __future__ import annotations

import asyncio
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from benchmarks.baselines import ACTOR, BareInserts, TransactionPerWrite
from benchmarks.measure import VALUE, Row, compare, latency, rate
from statelayer import StateLayer, Write

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Set = Callable[[str, Any], Awaitable[object]]

PER_WRITE = "a transaction per write, same documents, retried"
PREFILLED = 1_000_000
FEW = 10_000
LONG = 10.0
IN_LARGE_APPENDS = (
    "A hand-written transaction with the same documents reaches 0.87. The rest is Python: checking, copying and "
    "measuring 500 values and paths takes about a sixth of the call, deciding versions and building the events a "
    "tenth, the guards on head and entries and their documents another tenth."
)


@dataclass(frozen=True)
class Bench:
    """A database to measure on, and how long each measurement takes in seconds."""

    database: Any
    uri: str
    seconds: float = 3.0
    prefilled: int = PREFILLED

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", count())

    def fresh(self) -> str:
        """Return the name of a namespace that nobody wrote."""
        return f"/tasks/B{next(self._names)}"  # type: ignore[attr-defined]

    @asynccontextmanager
    async def layer(self) -> AsyncIterator[StateLayer]:
        layer = StateLayer(self.database)
        await layer.setup()
        try:
            yield layer
        finally:
            await layer.aclose()


def _setter(layer: StateLayer) -> Set:
    async def set_(path: str, value: Any) -> None:
        await layer.set(path, value, actor=ACTOR)

    return set_


async def _hot(bench: Bench, set_: Set, callers: int) -> float:
    namespace = bench.fresh()

    async def call(caller: int, _n: int) -> None:
        await set_(f"{namespace}/caller/{caller}", VALUE)

    return await rate(call, callers=callers, seconds=bench.seconds)


async def _spread(bench: Bench, set_: Set, namespaces: int) -> float:
    fresh = [bench.fresh() for _ in range(namespaces)]

    async def call(caller: int, _n: int) -> None:
        await set_(f"{fresh[caller]}/x", VALUE)

    return await rate(call, callers=namespaces, seconds=bench.seconds)


async def _hot_beside_transactions(bench: Bench, callers: int, target: float) -> Row:
    async with bench.layer() as layer:
        baseline = TransactionPerWrite(bench.database)
        return await compare(
            f"one hot namespace, {callers:,} callers, one write each",
            PER_WRITE,
            lambda _: _hot(bench, _setter(layer), callers),
            lambda _: _hot(bench, baseline.set, callers),
            target=target,
        )


async def hot_namespace(bench: Bench) -> Row:
    return await _hot_beside_transactions(bench, 64, target=25)


async def hot_namespace_locked(bench: Bench) -> Row:
    async with bench.layer() as layer:
        baseline, lock = TransactionPerWrite(bench.database), asyncio.Lock()

        async def one_at_a_time(path: str, value: Any) -> None:
            async with lock:
                await baseline.set(path, value)

        return await compare(
            "one hot namespace, 64 callers, one write each",
            "a transaction per write behind one asyncio.Lock",
            lambda _: _hot(bench, _setter(layer), 64),
            lambda _: _hot(bench, one_at_a_time, 64),
            target=12,
        )


async def hot_namespace_crowded(bench: Bench) -> Row:
    """In less time the baseline commits next to nothing."""
    return await _hot_beside_transactions(replace(bench, seconds=max(bench.seconds, LONG)), 1000, target=60)


async def many_namespaces(bench: Bench) -> Row:
    async with bench.layer() as layer:
        baseline = TransactionPerWrite(bench.database)
        return await compare(
            "256 namespaces, 256 callers, one write each",
            PER_WRITE,
            lambda _: _spread(bench, _setter(layer), 256),
            lambda _: _spread(bench, baseline.set, 256),
            target=8,
        )


@asynccontextmanager
async def _hammered(bench: Bench, namespace: str) -> AsyncIterator[None]:
    """Another process writes this namespace as fast as it can."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.hammer",
        bench.uri,
        bench.database.name,
        namespace,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()  # it is at work
        yield
    finally:
        process.terminate()
        await process.wait()


async def one_hammered(bench: Bench) -> Row:
    async with bench.layer() as layer:

        async def measured(*, inside: bool) -> float:
            fresh = [bench.fresh() for _ in range(256)]

            async def call(caller: int, _n: int) -> None:
                await layer.set(f"{fresh[caller]}/x", VALUE, actor=ACTOR)

            async with _hammered(bench, fresh[0] if inside else bench.fresh()):
                return await rate(call, callers=256, seconds=bench.seconds)

        return await compare(
            "256 namespaces, one of them hammered by another process",
            "the same with the hammered one elsewhere",
            lambda _: measured(inside=True),
            lambda _: measured(inside=False),
            target=0.5,
        )


async def large_appends(bench: Bench, size: int = 500) -> Row:
    async with bench.layer() as layer:
        bare = BareInserts(bench.database)

        async def ours(_: int) -> float:
            namespace = bench.fresh()

            async def call(_caller: int, n: int) -> None:
                await layer.append([Write(path=f"{namespace}/{n}/{i}", value=VALUE, actor=ACTOR) for i in range(size)])

            return size * await rate(call, callers=1, seconds=bench.seconds)

        async def theirs(_: int) -> float:
            namespace = bench.fresh()

            async def call(_caller: int, n: int) -> None:
                await bare.append([f"{namespace}/{n}/{i}" for i in range(size)], n * size + 1, VALUE)

            return size * await rate(call, callers=1, seconds=bench.seconds)

        return await compare(
            f"append of {size} writes per call, one caller",
            "the driver inserting the same documents without a transaction",
            ours,
            theirs,
            target=0.7,
            note=IN_LARGE_APPENDS,
        )


async def one_caller(bench: Bench) -> Row:
    async with bench.layer() as layer:
        baseline = TransactionPerWrite(bench.database)
        namespace, other = bench.fresh(), bench.fresh()

        async def measured(set_: Set, namespace: str) -> float:
            return await latency(lambda n: set_(f"{namespace}/x/{n % 10}", VALUE), calls=200)

        return await compare(
            "one caller, one write at a time, p50",
            "a hand-written transaction with the same writes",
            lambda _: measured(_setter(layer), namespace),
            lambda _: measured(baseline.set, other),
            target=1.3,
            unit="ms",
        )


async def long_log(bench: Bench) -> Row:
    """The order is turned: the short log is measured in a database of its own."""
    short = Bench(bench.database.client[f"{bench.database.name}_short"], bench.uri, bench.seconds)
    try:
        async with bench.layer() as layer, short.layer() as other:
            await _fill(layer, bench.prefilled)
            await _fill(other, FEW)
            return await compare(
                f"one hot namespace, 64 callers, {bench.prefilled:,} events in the log",
                f"the same with {FEW:,}",
                lambda _: _hot(bench, _setter(layer), 64),
                lambda _: _hot(short, _setter(other), 64),
                target=0.8,
            )
    finally:
        await bench.database.client.drop_database(short.database.name)


async def _fill(layer: StateLayer, events: int) -> None:
    async def fill(start: int) -> None:
        for n in range(start, events, 4 * 500):
            namespace = f"/tasks/F{n % 997}"
            await layer.append([Write(path=f"{namespace}/{n}/{i % 50}", value=VALUE, actor=ACTOR) for i in range(500)])

    await asyncio.gather(*(fill(start * 500) for start in range(4)))


ROWS = [
    hot_namespace,
    hot_namespace_locked,
    hot_namespace_crowded,
    many_namespaces,
    one_hammered,
    large_appends,
    one_caller,
    long_log,
]
