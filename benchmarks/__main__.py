"""``python -m benchmarks [GROUP …] [--uri URI] [--json]``: measure beside a baseline, and print."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pymongo import AsyncMongoClient

from benchmarks import append, matching, reacting, reading
from benchmarks.append import PREFILLED, Bench
from benchmarks.indexes import index_costs
from benchmarks.measure import ROUNDS
from benchmarks.peers.table import peers, text_lines
from benchmarks.report import Results, document, index_lines, row_lines
from statelayer.embedded import ReplicaSet

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence

    from benchmarks.measure import Row

    MakeRow = Callable[[Bench], Coroutine[Any, Any, Row]]

DATABASE = "statelayer_bench"
ROWS: Mapping[str, Sequence[MakeRow]] = {
    "append": append.ROWS,
    "read": reading.ROWS,
    "match": matching.ROWS,
    "react": reacting.ROWS,
}
INDEXES = "indexes"
PEERS = "peers"
GROUPS = [*ROWS, INDEXES, PEERS]


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


async def measured_rows(arguments: argparse.Namespace, results: Results) -> AsyncIterator[Row]:
    wanted = [row for name in arguments.groups or ROWS for row in ROWS.get(name, ())]
    for make_row in wanted:
        if arguments.only and arguments.only not in make_row.__name__:
            continue
        async with bench(arguments, results) as opened_bench:
            yield await make_row(opened_bench)


@asynccontextmanager
async def bench(arguments: argparse.Namespace, results: Results) -> AsyncIterator[Bench]:
    async with opened(arguments.uri) as (uri, database):
        results.server = (await database.client.server_info())["version"]
        yield Bench(database, uri, arguments.seconds, arguments.prefilled)


async def run(arguments: argparse.Namespace) -> Results:
    """Measure what was asked for, and show each part when it is done."""
    results = Results()
    show = _ignore if arguments.json else _print
    async for row in measured_rows(arguments, results):
        results.rows.append(row)
        show(row_lines(row))
    if wants(arguments, INDEXES):
        async with bench(arguments, results) as opened_bench:
            results.indexes = await index_costs(opened_bench)
        show(index_lines(results.indexes))
    if wants(arguments, PEERS):
        async with bench(arguments, results) as opened_bench:
            results.peers = await peers(
                opened_bench.uri, seconds=arguments.seconds, rounds=ROUNDS, cache=arguments.cache
            )
        show(text_lines(results.peers))
    return results


def wants(arguments: argparse.Namespace, group: str) -> bool:
    return group in arguments.groups or not (arguments.groups or arguments.only)


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _ignore(lines: Iterable[str]) -> None:
    """Show nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="what to run; by default everything")
    parser.add_argument("--only", help="a part of the name of one workload")
    parser.add_argument("--uri", help="a replica set of your own; by default an embedded one is started for each row")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long each measurement of a rate takes")
    parser.add_argument("--prefilled", type=int, default=PREFILLED, help="events in the long log")
    parser.add_argument(
        "--cache", type=Path, default=Path(".benchmarks"), help="where the environments of the peers are kept"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the results as a Markdown document, too")
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments))
    if arguments.json:
        json.dump(results.as_json(), sys.stdout, indent=2)
    if arguments.write:
        arguments.write.write_text(document(results), encoding="utf-8")


if __name__ == "__main__":
    main()
