"""Appending: many callers, one hot namespace."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statelayer import StateLayer, Write
from statelayer.clock import Clock
from statelayer.drivers import Database
from statelayer.journal import Journal
from statelayer.journal.batch import Batches
from statelayer.transactions import Deadline, retried

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from statelayer.settings import Settings

ACTOR = "user:U7"
CALLERS = 64
ROUNDS = 5
WRITE_CONCERN = "majority, journaled"


@dataclass(frozen=True, slots=True)
class Row:
    """One workload beside its baseline: events per second, medians of the rounds."""

    workload: str
    baseline: str
    rate: float
    baseline_rate: float
    rounds: int
    write_concern: str

    @property
    def ratio(self) -> float:
        return self.rate / self.baseline_rate


class TransactionPerWrite:
    """The baseline: the same documents, each write in a transaction of its own, retried until it wins."""

    def __init__(self, handle: Any, settings: Settings) -> None:
        self._database = Database(handle)
        self._clock = Clock()
        self._journal = Journal(self._database, settings, self._clock)
        self._batches = Batches(self._database, settings, self._clock)

    async def set(self, path: str, value: Any) -> None:
        append = self._journal.prepare([Write(path=path, value=value, actor=ACTOR)])

        async def body(session: Any) -> None:
            await self._batches.append([append], session)

        await retried(self._database, body, deadline=Deadline(self._clock, 120), what="The baseline")


async def hot_namespace(database: Any) -> Row:
    """64 concurrent callers write to one namespace, one write at a time each."""
    layer = StateLayer(database)
    await layer.setup()
    baseline = TransactionPerWrite(database, layer.settings)

    async def ours(path: str, value: Any) -> None:
        await layer.set(path, value, actor=ACTOR)

    rates: list[float] = []
    baseline_rates: list[float] = []
    for number in range(ROUNDS):
        rates.append(await _rate(ours, f"/tasks/ours{number}", writes=2000))
        baseline_rates.append(await _rate(baseline.set, f"/tasks/base{number}", writes=128))
    await layer.aclose()
    return Row(
        workload=f"one hot namespace, {CALLERS} callers, one write each at a time",
        baseline="a transaction per write, same documents, retried",
        rate=statistics.median(rates),
        baseline_rate=statistics.median(baseline_rates),
        rounds=ROUNDS,
        write_concern=WRITE_CONCERN,
    )


async def _rate(write: Callable[[str, Any], Awaitable[None]], namespace: str, *, writes: int) -> float:
    async def caller(number: int) -> None:
        for n in range(writes // CALLERS):
            await write(f"{namespace}/caller/{number}", {"n": n})

    started = time.perf_counter()
    await asyncio.gather(*(caller(number) for number in range(CALLERS)))
    return writes // CALLERS * CALLERS / (time.perf_counter() - started)
