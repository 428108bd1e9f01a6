"""What each index on ``events`` costs: the same inserts with all of them, and with all but one."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bson import ObjectId
from pymongo import IndexModel

from benchmarks.baselines import DURABLE, event_document
from benchmarks.measure import ROUNDS, VALUE
from statelayer.mongo_indexes import COLLECTIONS, EVENTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.append import Bench
    from statelayer.mongo_indexes import Index

BATCH = 500
BATCHES = 10
ALL = "all of them"
NONE = "none but _id"
NEEDED_BY = {
    "namespace_seq": "reading a log in order, catch-up, `verify`; one event per seq",
    "namespace_path_version": "`read_version`, `history`, `replay`; one event per version",
    "namespace_path_seq": "`state_at`, and `$state` as of an event",
    "namespace_idempotencyKey": "finding the append that a key made; one per namespace",
    "causedByEventId": "`trace` downwards, from a cause to its effects",
    "namespace_rootEventId": "the whole chain of a root",
}


@dataclass(frozen=True, slots=True)
class Cost:
    """The rate of inserts with an index or without it, and how much of their time it takes."""

    name: str
    events_per_second: float
    share: float
    needed_by: str


@dataclass(frozen=True, slots=True)
class IndexCosts:
    """The rates with every index and with none, and the cost of each."""

    with_all: float
    with_none: float
    each: Sequence[Cost]


async def index_costs(bench: Bench, rounds: int = ROUNDS) -> IndexCosts:
    """Insert the same events into collections that differ by one index, in turns."""
    indexes = next(spec for spec in COLLECTIONS if spec.name == EVENTS).indexes
    variants = {ALL: indexes, NONE: ()}
    variants |= {index.name: tuple(other for other in indexes if other is not index) for index in indexes}
    collections = {name: await _collection(bench, number, kept) for number, (name, kept) in enumerate(variants.items())}
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name, collection in collections.items():
            rates[name].append(await _rate(collection, number))
    medians = {name: statistics.median(measured) for name, measured in rates.items()}
    each = [
        Cost(index.name, medians[index.name], 1 - medians[ALL] / medians[index.name], NEEDED_BY[index.name])
        for index in indexes
    ]
    return IndexCosts(medians[ALL], medians[NONE], each)


async def _collection(bench: Bench, number: int, indexes: Sequence[Index]) -> Any:
    collection = bench.database.with_options(write_concern=DURABLE)[f"indexed_{number}"]
    if indexes:
        await collection.create_indexes(
            [IndexModel(index.pattern, name=index.name, **index.options) for index in indexes]
        )
    return collection


async def _rate(collection: Any, round_number: int) -> float:
    batches = [list(_events(round_number * BATCHES + n)) for n in range(BATCHES)]
    started = time.perf_counter()
    for batch in batches:
        await collection.insert_many(batch)
    return BATCH * BATCHES / (time.perf_counter() - started)


def _events(batch: int) -> Iterator[dict[str, Any]]:
    """Events with all that can be indexed: each has a cause, a root and a key."""
    for n in range(BATCH):
        path = f"/tasks/B{batch % 50}/n/{n}"
        yield event_document(path, batch * BATCH + n + 1, batch + 1, VALUE) | {
            "causedByEventId": str(ObjectId()),
            "rootEventId": str(ObjectId()),
            "idempotencyKey": f"{batch}-{n}",
            "batchSize": 1,
        }
