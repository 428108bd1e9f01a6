"""What caused what, for a report: a task's chain of stages, and trees of facts. No I/O here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelayer.demo.report import Chain, Fact, Hop, Stop

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from statelayer.causation import CausationNode, CausationTree
    from statelayer.events import Event
    from statelayer.executors import Execution


def stages_of(tree: CausationTree) -> list[Event]:
    """Return the writes of a task's status and stages, in the order of the log."""
    stages = [node.event for node in tree if node.event.path.split("/")[3] in ("status", "stage")]
    return sorted(stages, key=lambda event: event.seq)


def chain_of(stages: Sequence[Event], skipped: Iterable[Execution]) -> Chain:
    """Number the stages of one task, and say at which of them a subscription matched and did not fire."""
    numbers = {event.id: number for number, event in enumerate(stages, start=1)}
    stops = [Stop(numbers[skip.event_id], skip.subscription.name, str(skip.reason)) for skip in skipped]
    return Chain(stages[0].namespace.rpartition("/")[2], [_hop(event, numbers) for event in stages], stops)


def fact_of(node: CausationNode) -> Fact:
    """Return an event and what it caused."""
    event = node.event
    return Fact(
        path=event.path,
        source=event.source,
        actor=event.actor,
        depth=event.trigger_depth,
        event_id=event.id,
        caused_by_event_id=event.caused_by_event_id,
        children=[fact_of(child) for child in node.children],
    )


def _hop(event: Event, numbers: Mapping[str, int]) -> Hop:
    cause = event.caused_by_event_id
    return Hop(numbers[event.id], event.path, event.source, event.trigger_depth, numbers.get(cause) if cause else None)
