"""``python -m benchmarks [--uri URI] [--json]``: run the benchmarks and print them."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pymongo import AsyncMongoClient

from benchmarks.append import Row, hot_namespace
from statelayer import embedded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

DATABASE = "statelayer_bench"


@asynccontextmanager
async def opened(uri: str | None) -> AsyncIterator[Any]:
    if uri is None:
        async with embedded.replica_set(database=DATABASE) as database:
            yield database
        return
    async with AsyncMongoClient[dict[str, Any]](uri) as client:
        yield client[DATABASE]
        await client.drop_database(DATABASE)


async def run(uri: str | None) -> list[Row]:
    async with opened(uri) as database:
        return [await hot_namespace(database)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--uri", help="a replica set of your own; by default an embedded one is started")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    rows = asyncio.run(run(arguments.uri))
    if arguments.json:
        json.dump([{**asdict(row), "ratio": row.ratio} for row in rows], sys.stdout, indent=2)
        return
    for row in rows:
        sys.stdout.write(
            f"{row.workload}\n  {row.rate:,.0f} events/s; {row.baseline}: {row.baseline_rate:,.0f} events/s\n"
            f"  {row.ratio:.1f} times the baseline (median of {row.rounds}, write concern {row.write_concern})\n"
        )


if __name__ == "__main__":
    main()
