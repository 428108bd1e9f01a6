"""``python -m benchmarks [append|read|all] [--uri URI] [--json]``: run the benchmarks and print them."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pymongo import AsyncMongoClient

from benchmarks import append, reading
from benchmarks.append import PREFILLED, Bench
from statelayer.embedded import ReplicaSet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from benchmarks.measure import Row

    MakeRow = Callable[[Bench], Awaitable[Row]]

DATABASE = "statelayer_bench"
GROUPS: dict[str, list[MakeRow]] = {"append": append.ROWS, "read": reading.ROWS}


@asynccontextmanager
async def opened(uri: str | None) -> AsyncIterator[tuple[str, Any]]:
    if uri is None:
        with ReplicaSet() as server:
            async with opened(server.uri) as both:
                yield both
        return
    async with AsyncMongoClient[dict[str, Any]](uri, tz_aware=True) as client:
        await client.drop_database(DATABASE)
        yield uri, client[DATABASE]
        await client.drop_database(DATABASE)


async def run(arguments: argparse.Namespace) -> AsyncIterator[Row]:
    wanted = [row for name in arguments.groups or GROUPS for row in GROUPS[name]]
    for make_row in wanted:
        if arguments.only and arguments.only not in make_row.__name__:
            continue
        async with opened(arguments.uri) as (uri, database):
            yield await make_row(Bench(database, uri, arguments.seconds, arguments.prefilled))


def lines_of(row: Row) -> Iterator[str]:
    verdict = "reached" if row.reached else "MISSED"
    sign = "≤" if row.unit == "ms" else "≥"
    yield row.workload
    yield f"  {row.value:,.1f} {row.unit}; {row.baseline}: {row.baseline_value:,.1f} {row.unit}"
    yield (
        f"  {row.ratio:.2f} times the baseline ({sign} {row.target:g}: {verdict}; median of {row.rounds}, "
        f"write concern {row.write_concern})"
    )


async def print_rows(arguments: argparse.Namespace) -> None:
    rows: list[Row] = []
    async for row in run(arguments):
        rows.append(row)
        if not arguments.json:
            sys.stdout.write("\n".join(lines_of(row)) + "\n")
            sys.stdout.flush()
    if arguments.json:
        json.dump([{**asdict(row), "ratio": row.ratio, "reached": row.reached} for row in rows], sys.stdout, indent=2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="what to run; by default everything")
    parser.add_argument("--only", help="a part of the name of one workload")
    parser.add_argument("--uri", help="a replica set of your own; by default an embedded one is started for each row")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each measurement of a rate takes")
    parser.add_argument("--prefilled", type=int, default=PREFILLED, help="events in the long log")
    parser.add_argument("--json", action="store_true", help="print JSON")
    asyncio.run(print_rows(parser.parse_args()))


if __name__ == "__main__":
    main()
