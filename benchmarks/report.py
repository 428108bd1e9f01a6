"""Printing what was measured: on the terminal, as JSON, and as ``docs/benchmarks.md``."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.table import markdown_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.indexes import IndexCosts
    from benchmarks.measure import Row
    from benchmarks.peers.table import PeersTable


@dataclass(slots=True)
class Results:
    """What one run measured. ``server`` is the version of mongod."""

    rows: list[Row] = field(default_factory=list)
    indexes: IndexCosts | None = None
    peers: PeersTable | None = None
    server: str = "unknown"

    def as_json(self) -> dict[str, Any]:
        rows = [{**asdict(row), "ratio": row.ratio, "reached": row.reached} for row in self.rows]
        return {
            "machine": machine(self.server),
            "rows": rows,
            "indexes": asdict(self.indexes) if self.indexes else None,
            "peers": asdict(self.peers) if self.peers else None,
        }


def row_lines(row: Row) -> Iterator[str]:
    """One workload for the terminal."""
    verdict = "reached" if row.reached else "MISSED"
    yield row.workload
    yield f"  {row.value:,.1f} {row.unit}; {row.baseline}: {row.baseline_value:,.1f} {row.unit}"
    yield (
        f"  {row.ratio:.2f} times the baseline ({row.bound}: {verdict}; median of {row.rounds}, "
        f"write concern {row.write_concern})"
    )


def index_lines(costs: IndexCosts) -> Iterator[str]:
    """The indexes on ``events`` for the terminal."""
    yield f"indexes on events: {costs.with_all:,.0f} events/s with all, {costs.with_none:,.0f} with none but _id"
    for cost in costs.each:
        yield f"  {cost.share:6.1%}  {cost.name}: {cost.events_per_second:,.0f} events/s without it"


def machine(server: str) -> str:
    """What the numbers depend on."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("pymongo", "pydantic"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}; "
        f"Python {platform.python_version()}, {packages}, mongod {server}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def document(results: Results) -> str:
    """Return ``docs/benchmarks.md``."""
    return "\n".join(_document_lines(results)) + "\n"


def _document_lines(results: Results) -> Iterator[str]:
    yield "# Benchmarks"
    yield ""
    yield "Written by `make bench`, which measures all of it again on an embedded replica set; on yours, printed, with"
    yield "`make bench ARGS='--uri mongodb://…'`. `python -m benchmarks --help` names the parts."
    yield ""
    yield f"Measured on {datetime.now(UTC):%Y-%m-%d} with the server on the same machine:"
    yield f"{machine(results.server)}."
    if results.rows:
        yield ""
        yield from _row_table(results.rows)
    if results.indexes:
        yield ""
        yield from _index_table(results.indexes)
    if results.peers:
        yield ""
        yield "## Beside other libraries"
        yield ""
        yield from markdown_lines(results.peers)


def _row_table(rows: list[Row]) -> Iterator[str]:
    yield "## Beside what a team would write by hand"
    yield ""
    yield f"Each workload and its baseline in turns, the median of {rows[0].rounds} rounds. Every write is acknowledged"
    yield f"with write concern {rows[0].write_concern}. What counts is the ratio; the rates are this machine's."
    yield ""
    yield "| Workload | Here | Baseline | | Ratio | Bound |"
    yield "|---|--:|---|--:|--:|---|"
    for row in rows:
        verdict = "" if row.reached else ", **missed**"
        yield (
            f"| {row.workload} | {_quantity(row.value, row)} | {row.baseline} | {_quantity(row.baseline_value, row)} "
            f"| {row.ratio:.2f} | {row.bound}{verdict} |"
        )
    for row in rows:
        if row.note and not row.reached:
            yield ""
            yield f"*{row.workload}*: {row.note}"


def _quantity(value: float, row: Row) -> str:
    if row.unit == "ms":
        return f"{value:,.2f} ms"
    return f"{value:,.0f} {row.unit}" if value >= 10 else f"{value:.1f} {row.unit}"


def _index_table(costs: IndexCosts) -> Iterator[str]:
    yield "## What the indexes on `events` cost"
    yield ""
    yield "The driver inserts events in batches of 500 into collections that differ by one index; each event bears all"
    yield f"that can be indexed. With every index {costs.with_all:,.0f} events/s, with none but `_id`"
    yield f"{costs.with_none:,.0f}. An index whose field most events lack costs those next to nothing."
    yield ""
    yield "| Index | Without it | Its share of the time | What needs it |"
    yield "|---|--:|--:|---|"
    for cost in costs.each:
        yield f"| `{cost.name}` | {cost.events_per_second:,.0f} events/s | {cost.share:.0%} | {cost.needed_by} |"
