"""``python -m benchmarks.hammer URI DATABASE NAMESPACE``: write one namespace until terminated."""

from __future__ import annotations

import asyncio
import sys

from benchmarks.baselines import ACTOR
from statelayer import StateLayer

CALLERS = 8


async def hammer(uri: str, database: str, namespace: str) -> None:
    async with StateLayer.from_uri(uri, database) as layer:
        await layer.set(f"{namespace}/hammer", 0, actor=ACTOR)
        sys.stdout.write("at work\n")
        sys.stdout.flush()

        async def caller(number: int) -> None:
            while True:
                await layer.set(f"{namespace}/hammer/{number}", 0, actor=ACTOR)

        await asyncio.gather(*(caller(number) for number in range(CALLERS)))


if __name__ == "__main__":
    asyncio.run(hammer(*sys.argv[1:]))
