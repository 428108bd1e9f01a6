"""Which namespaces others fight for, and how a batch is taken apart to find them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from statelayer.clock import Clock
    from statelayer.journal.queue import Pending

CONTENDED_FOR = 5.0
"""Seconds after its last conflict for which a namespace has transactions of its own."""


class Contention:
    """Remembers the namespaces that conflicted lately."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}

    def note(self, namespaces: Iterable[str]) -> None:
        """Note a conflict on these."""
        now = self._clock.monotonic()
        self._until = {namespace: until for namespace, until in self._until.items() if until > now}
        self._until |= dict.fromkeys(namespaces, now + CONTENDED_FOR)

    def holds(self, namespaces: Iterable[str]) -> bool:
        """Say whether any of these is fought for."""
        if not self._until:
            return False
        now = self._clock.monotonic()
        return any(self._until.get(namespace, 0) > now for namespace in namespaces)


def halves(batch: Sequence[Pending]) -> list[list[Pending]]:
    """Take a batch apart into two that share no namespace, or return it as the only part when that cannot be."""
    parts = _components(batch)
    if len(parts) == 1:
        return [list(batch)]
    middle = len(parts) // 2
    return [[pending for part in side for pending in part] for side in (parts[:middle], parts[middle:])]


def _components(batch: Sequence[Pending]) -> list[list[Pending]]:
    """Group appends so that two of different groups share no namespace; the order inside a group stays."""
    leader: dict[str, str] = {}

    def find(namespace: str) -> str:
        leader.setdefault(namespace, namespace)
        while leader[namespace] != namespace:
            leader[namespace] = leader[leader[namespace]]
            namespace = leader[namespace]
        return namespace

    for pending in batch:
        first, *others = pending.namespaces
        for other in others:
            leader[find(other)] = find(first)
    groups: defaultdict[str, list[Pending]] = defaultdict(list)
    for pending in batch:
        groups[find(pending.namespaces[0])].append(pending)
    return list(groups.values())
