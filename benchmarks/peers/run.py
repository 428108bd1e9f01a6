"""``python -m benchmarks.peers.run WORKER URI DATABASE SECONDS``: measure one peer once, and print JSON.

It runs in the peer's own environment, so that it needs the standard library and that peer alone.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from benchmarks.measure import VALUE, latency, rate

if TYPE_CHECKING:
    from collections.abc import Sequence

WARM_UP = 20
CALLS = 200
WRITERS = 16
BATCH = 50
READ = 10_000


class Worker(Protocol):
    """A peer at work. Whoever loses against another writer of the stream tries again until the event is stored."""

    async def append(self, stream: str, value: dict[str, Any]) -> None:
        """Store one event durably."""

    async def read(self, stream: str) -> int:
        """Read all events of a stream in order, each as an object, and return their number."""

    async def aclose(self) -> None:
        """Let go of the database."""


@runtime_checkable
class BatchWorker(Worker, Protocol):
    """A peer that stores several events at once."""

    async def append_many(self, stream: str, values: Sequence[dict[str, Any]]) -> None:
        """Store these events durably."""


async def measured(worker: Worker, seconds: float) -> dict[str, float]:
    async def append(caller: int, n: int) -> None:
        await worker.append("hot", {**VALUE, "n": n, "caller": caller})

    await latency(lambda n: append(0, n), calls=WARM_UP)
    found = {
        "single": await latency(lambda n: append(0, n), calls=CALLS),
        "writers": await rate(append, callers=WRITERS, seconds=seconds),
    }
    if isinstance(worker, BatchWorker):
        found["batch"] = await _batches(worker, seconds)
        for start in range(0, READ, BATCH):
            await worker.append_many("long", [{**VALUE, "n": start + i} for i in range(BATCH)])
    else:
        for n in range(READ):
            await worker.append("long", {**VALUE, "n": n})
    started = time.perf_counter()
    assert await worker.read("long") == READ
    found["read"] = READ / (time.perf_counter() - started)
    return found


async def _batches(worker: BatchWorker, seconds: float) -> float:
    async def append_batch(_caller: int, n: int) -> None:
        await worker.append_many("batch", [{**VALUE, "n": n + i} for i in range(BATCH)])

    await append_batch(0, 0)
    return BATCH * await rate(append_batch, callers=1, seconds=seconds)


async def main(name: str, uri: str, database: str, seconds: str) -> None:
    module = importlib.import_module(f"benchmarks.peers.workers.{name}")
    worker = await module.opened(uri, database)
    try:
        json.dump(await measured(worker, float(seconds)), sys.stdout)
    finally:
        await worker.aclose()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
