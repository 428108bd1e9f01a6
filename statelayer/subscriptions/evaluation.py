"""Deciding what an event leads to: the same for every instance, live, in catch-up and next year."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from statelayer.subscriptions.conditions import Facts
from statelayer.subscriptions.decisions import Decision, Skip, Wakeup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statelayer.events import Event
    from statelayer.subscriptions.catalogue import Catalogue, Quarantined
    from statelayer.subscriptions.models import StoredSubscription
    from statelayer.subscriptions.state import StateReader, Wanted


@dataclass(frozen=True, slots=True)
class _Match:
    """A subscription in force whose pattern matches, and the state paths that its condition asks for."""

    subscription: StoredSubscription
    params: Mapping[str, str]
    wanted: Mapping[str, Wanted]


@dataclass(slots=True)
class _Matches:
    event: Event
    matches: list[_Match] = field(default_factory=list)
    broken: list[Quarantined] = field(default_factory=list)


async def evaluate(events: Sequence[Event], catalogue: Catalogue, state: StateReader) -> list[Decision]:
    """Return the decision of each event, in order. The catalogue must be at least as new as every event's revision."""
    matched = [_match(event, catalogue) for event in events]
    values = await state.read(want for m in matched for match in m.matches for want in match.wanted.values())
    return [_decide(m, values) for m in matched]


def _match(event: Event, catalogue: Catalogue) -> _Matches:
    segments = event.path[1:].split("/")
    matches = [
        _with_state(subscription, event, segments)
        for subscription in catalogue.candidates(segments)
        if subscription.in_force(event.subscriptions_rev)
    ]
    return _Matches(event, matches, catalogue.broken(segments))


def _with_state(subscription: StoredSubscription, event: Event, segments: Sequence[str]) -> _Match:
    params = subscription.parsed_pattern.match(segments) or {}
    wanted = {
        relative: (event.namespace, f"{event.namespace}/{relative}", event.seq)
        for relative in subscription.parsed_condition.state_paths(params)
    }
    return _Match(subscription, params, wanted)


def _decide(matched: _Matches, values: Mapping[Wanted, Any]) -> Decision:
    event = matched.event
    if not matched.matches and not matched.broken:
        return Decision(event)
    holding = [match for match in matched.matches if _holds(match, event, values)]
    stopped = [match for match in holding if event.trigger_depth >= match.subscription.max_trigger_depth]
    firing = [match for match in holding if event.trigger_depth < match.subscription.max_trigger_depth]
    skips = [Skip(broken.name, broken.version, "quarantined") for broken in matched.broken]
    skips += [Skip(match.subscription.name, match.subscription.version, "max_depth") for match in stopped]
    return Decision(event, _wakeups(firing), tuple(skips))


def _holds(match: _Match, event: Event, values: Mapping[Wanted, Any]) -> bool:
    state = {relative: values[want] for relative, want in match.wanted.items() if want in values}
    return match.subscription.parsed_condition.evaluate(Facts.of(event, match.params, state))


def _wakeups(firing: Sequence[_Match]) -> tuple[Wakeup, ...]:
    """One for each target: the first subscription by name owns it, the others are named beside it."""
    owners: dict[tuple[str, str], list[_Match]] = {}
    for match in firing:
        key = (match.subscription.action.type, match.subscription.target)
        owners.setdefault(key, []).append(match)
    return tuple(
        Wakeup(first.subscription, first.params, tuple(other.subscription.name for other in others))
        for first, *others in owners.values()
    )
