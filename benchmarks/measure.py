"""Measuring one thing beside its baseline: in turns, several times, medians compared."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Measure = Callable[[int], Awaitable[float]]
    """Takes the number of the round and returns what it measured."""

ROUNDS = 5
WRITE_CONCERN = "majority, journaled"
VALUE = {"status": "confirmed", "amount": 1250, "currency": "EUR", "note": "x" * 100}
"""What is written, wherever it does not matter."""

Unit = Literal["events/s", "executions/s", "ms", "µs"]

LATENCIES = ("ms", "µs")


@dataclass(frozen=True, slots=True)
class Row:
    """A workload beside its baseline, as medians of the rounds, and the ratio it must reach."""

    workload: str
    baseline: str
    value: float
    baseline_value: float
    unit: Unit
    rounds: int
    target: float
    note: str = ""
    """Where the time goes, for a row that is hard to reach."""
    write_concern: str = WRITE_CONCERN

    @property
    def bound(self) -> str:
        """What the ratio must reach, or must not exceed."""
        return f"{'≤' if self.unit in LATENCIES else '≥'} {self.target:g}"

    @property
    def ratio(self) -> float:
        return self.value / self.baseline_value if self.baseline_value else math.inf

    @property
    def reached(self) -> bool:
        """A rate must reach its target; a latency must stay below it."""
        return self.ratio <= self.target if self.unit in LATENCIES else self.ratio >= self.target


async def compare(
    workload: str,
    baseline: str,
    ours: Measure,
    theirs: Measure,
    *,
    target: float,
    unit: Unit = "events/s",
    rounds: int = ROUNDS,
    note: str = "",
) -> Row:
    """Measure both in turns, so that what else the machine does meets both."""
    values: list[float] = []
    baseline_values: list[float] = []
    for number in range(rounds):
        values.append(await ours(number))
        baseline_values.append(await theirs(number))
    return Row(
        workload=workload,
        baseline=baseline,
        value=statistics.median(values),
        baseline_value=statistics.median(baseline_values),
        unit=unit,
        rounds=rounds,
        target=target,
        note=note,
    )


async def rate(call: Callable[[int, int], Awaitable[object]], *, callers: int, seconds: float) -> float:
    """Let each caller call one after the other until the time is up; return the calls per second that ended."""
    ended = 0

    async def caller(number: int) -> None:
        nonlocal ended
        n = 0
        while True:
            await call(number, n)
            n += 1
            ended += 1

    tasks = [asyncio.ensure_future(caller(number)) for number in range(callers)]
    started = time.perf_counter()
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    elapsed, counted = time.perf_counter() - started, ended
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    return counted / elapsed


async def latency(call: Callable[[int], Awaitable[object]], *, calls: int, pause: float = 0.0) -> float:
    """Call one after the other, with ``pause`` seconds of rest between; return the median in milliseconds."""
    taken: list[float] = []
    for n in range(calls):
        await asyncio.sleep(pause)
        started = time.perf_counter()
        await call(n)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1000
