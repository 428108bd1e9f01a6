"""Matching: what an event costs among many subscriptions. No database takes part."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bson import ObjectId

from benchmarks.measure import Row, compare
from statelayer import Subscription
from statelayer.events import Event
from statelayer.subscriptions import Facts, StoredSubscription
from statelayer.subscriptions.catalogue import Catalogue
from statelayer.subscriptions.evaluation import evaluate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from benchmarks.append import Bench
    from statelayer.subscriptions.state import StateReader, Wanted

MANY = 10_000
FEW = 10
EVENTS = 2000
EVENTS_IN_TURN = 10

CONDITION = {
    "all": [
        {"path": "$event.value.status", "op": "eq", "value": "confirmed"},
        {"path": "$event.value.amount", "op": "gt", "value": 1000},
    ]
}
FAMILIES = (
    "/tasks/*/agents/agent-{n}/results/*",
    "/tasks/*/agents/agent-{n}/**",
    "/tasks/{{task}}/*/agent-{n}/results/{{event}}",
)
"""Three that match what an agent says, as three services would write them; each agent has its three."""


class NoState:
    """These conditions ask for no state."""

    async def read(self, wanted: Iterable[Wanted]) -> Mapping[Wanted, Any]:
        assert not list(wanted)
        return {}


def catalogue(size: int) -> Catalogue:
    return Catalogue(_documents(size), revision=1)


def _documents(size: int) -> Iterator[dict[str, Any]]:
    for n in range(size):
        definition = {
            "name": f"s{n}",
            "pattern": FAMILIES[n % 3].format(n=n // 3),
            "condition": CONDITION,
            "action": {"type": "execute_workflow", "workflowId": f"w{n}"},
        }
        subscription = StoredSubscription.first_in_force(
            Subscription.parse(definition), version=1, revision=1, target=f"w{n}", published_at=datetime.now(UTC)
        )
        yield subscription.to_document()


def events(count: int) -> list[Event]:
    """Return events that three subscriptions match, whichever number of them there is."""
    return [
        Event(
            _id=str(ObjectId()),
            namespace=f"/tasks/T{n}",
            seq=1,
            path=f"/tasks/T{n}/agents/agent-{n % (FEW // 3)}/results/E{n}",
            version=1,
            op="set",
            value={"status": "confirmed", "amount": 1250},
            actor="agent:a",
            source="api",
            batch_id=str(ObjectId()),
            subscriptions_rev=1,
            committed_at=datetime.now(UTC),
        )
        for n in range(count)
    ]


async def _evaluated(among: Catalogue, these: list[Event]) -> float:
    """Return the seconds that it takes to decide these events."""
    state: StateReader = NoState()  # type: ignore[assignment]
    started = time.perf_counter()
    decisions = await evaluate(these, among, state)
    taken = time.perf_counter() - started
    assert all(len(decision.wakeups) == 3 for decision in decisions)
    return taken


async def _tested_in_turn(among: Catalogue, these: list[Event]) -> float:
    """Return the seconds that a loop over all subscriptions takes to find the same."""
    started = time.perf_counter()
    for event in these:
        segments = event.path[1:].split("/")
        woken = 0
        for subscription in among.subscriptions:
            params = subscription.parsed_pattern.match(segments)
            if params is not None and subscription.in_force(event.subscriptions_rev):
                woken += subscription.parsed_condition.evaluate(Facts.of(event, params))
        assert woken == 3
    return time.perf_counter() - started


async def matching_among_many(_bench: Bench) -> Row:
    many, few, these = catalogue(MANY), catalogue(FEW), events(EVENTS)

    async def microseconds(among: Catalogue) -> float:
        return await _evaluated(among, these) / EVENTS * 1e6

    return await compare(
        f"matching and deciding one event, {MANY:,} subscriptions of which 3 match",
        f"the same among {FEW}",
        lambda _: microseconds(many),
        lambda _: microseconds(few),
        target=2,
        unit="µs",
    )


async def matching_beside_a_loop(_bench: Bench) -> Row:
    many, these = catalogue(MANY), events(EVENTS)

    async def ours(_: int) -> float:
        return EVENTS / await _evaluated(many, these)

    async def theirs(_: int) -> float:
        return EVENTS_IN_TURN / await _tested_in_turn(many, these[:EVENTS_IN_TURN])

    return await compare(
        f"{MANY:,} subscriptions, matching and conditions",
        "testing each in turn, with the same compiled patterns and conditions",
        ours,
        theirs,
        target=200,
    )


ROWS = [matching_among_many, matching_beside_a_loop]
