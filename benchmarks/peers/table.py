"""The peers beside each other: same server, same event, same durability, in turns."""

from __future__ import annotations

import json
import os
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pymongo import AsyncMongoClient

from benchmarks.peers.environments import output_of, python_with

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

REPOSITORY = Path(__file__).parents[2]

MEASURES = {
    "single": "durable single append, p50",
    "writers": "16 writers on one stream",
    "batch": "batches of 50",
    "read": "read 10,000",
}


@dataclass(frozen=True, slots=True)
class Peer:
    """A library, how it was used, and what it leaves to its user that this one does."""

    name: str
    worker: str
    requirements: Sequence[str]
    use: str
    lacks: str = ""
    """Empty for this library."""


PEERS = (
    Peer(
        "statelayer",
        "layer",
        (),
        "`layer.set` and `layer.append` on one path of the stream's namespace, `layer.events` to read.",
    ),
    Peer(
        "aett",
        "aett",
        ("aett[mongodb]",),
        "`AsyncCommitStore.commit` at the next revision; whoever loses reads what is new, pauses and tries again.",
        "It takes its checkpoint number before it stores the commit, so that a later one may be seen first; it keeps "
        "no current values, wakes nobody, and lets the writers of one stream fail each other.",
    ),
    Peer(
        "langgraph-checkpoint-mongodb",
        "langgraph",
        ("langgraph-checkpoint-mongodb", "langgraph"),
        "`MongoDBSaver.aput` of a checkpoint with the value in one channel, `alist` to read; it has no append of "
        "several.",
        "A checkpoint is an upsert without an order between writers or a check of what was there; it has no causes, no "
        "idempotency key, and wakes nobody.",
    ),
    Peer(
        "beanie",
        "beanie",
        ("beanie",),
        "`Document.insert` and `insert_many` into a collection with an index on the stream, sorted by `_id` to read.",
        "Documents, not a log: no sequence, no versions, batches may be written in part, nobody is woken.",
    ),
    Peer(
        "eventsourcing, SQLite",
        "eventsourcing",
        ("eventsourcing",),
        "`EventStore.put` in threads on a database file in WAL mode with `synchronous=FULL`, one fsync per commit; "
        "whoever loses a version reads the newest, pauses and tries again.",
        "One file and one machine, no server in between, so that its latency is no network's; one writer at a time, "
        "no executions, nothing that wakes somebody durably.",
    ),
)


@dataclass(frozen=True, slots=True)
class PeersTable:
    """Medians by peer and measure. What a peer has no operation for is missing."""

    rounds: int
    medians: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


async def peers(uri: str, *, seconds: float, rounds: int, cache: Path) -> PeersTable:
    """Measure every peer so many times in turns, each in a database of its own. Raises ``PeerError`` when one fails."""
    pythons = {
        peer.name: await python_with(peer.requirements, cache / peer.worker) if peer.requirements else sys.executable
        for peer in PEERS
    }
    found: dict[str, list[dict[str, float]]] = {peer.name: [] for peer in PEERS}
    for _ in range(rounds):
        for peer in PEERS:
            found[peer.name].append(await _measured(peer, pythons[peer.name], uri, seconds))
    medians = {
        name: {measure: statistics.median(one[measure] for one in results) for measure in results[0]}
        for name, results in found.items()
    }
    return PeersTable(rounds, medians)


async def _measured(peer: Peer, python: str, uri: str, seconds: float) -> dict[str, float]:
    database = f"statelayer_bench_peer_{peer.worker}"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = (python, "-m", "benchmarks.peers.run", peer.worker, uri, database, str(seconds))
    async with AsyncMongoClient[dict[str, object]](uri) as client:
        try:
            measured: dict[str, float] = json.loads(await output_of(*command, environment=environment))
        finally:
            await client.drop_database(database)
    return measured


def text_lines(table: PeersTable) -> Iterator[str]:
    """The table for the terminal."""
    yield f"peers (median of {table.rounds})"
    for name, medians in table.medians.items():
        yield f"  {name:30}" + "".join(f"{_quantity(measure, medians):>18}" for measure in MEASURES)


def markdown_lines(table: PeersTable) -> Iterator[str]:
    """The table as Markdown, with how each was used and what it lacks."""
    yield "Libraries that store events, each in an environment of its own, in turns; the median of"
    yield f"{table.rounds} rounds. The same event of some 200 bytes, acknowledged by a majority and journaled, on the"
    yield "same server, or with an fsync of the file per commit. They do different things: below stands how each was"
    yield "used, and what it leaves to its user."
    yield ""
    yield "| | " + " | ".join(MEASURES.values()) + " |"
    yield "|---|" + "--:|" * len(MEASURES)
    for name, medians in table.medians.items():
        yield f"| {name} | " + " | ".join(_quantity(measure, medians) for measure in MEASURES) + " |"
    yield ""
    for peer in PEERS:
        yield " ".join(filter(None, (f"- **{peer.name}**: {peer.use}", peer.lacks)))


def _quantity(measure: str, medians: Mapping[str, float]) -> str:
    if measure not in medians:
        return "—"
    value = medians[measure]
    return f"{value:,.2f} ms" if measure == "single" else f"{value:,.0f} events/s"
