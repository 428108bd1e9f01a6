"""What this process remembers of heads and versions between two batches, to save reading them again.

It is safe to be wrong: a head is written under the condition that it is still what was remembered, and whoever changes
anything in a namespace, a replay included, changes its head. A batch that was wrong is aborted and reads. So only
namespaces that nobody else writes are worth remembering, and one that was met changed is read for a while.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statelayer.journal.judge import PathState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from statelayer.clock import Clock
    from statelayer.journal.judge import Head, Ledger

MOST_PATHS = 50_000
"""How many paths are remembered over all namespaces; a namespace without any counts as one."""

SHARED_FOR = 10.0
"""Seconds for which a namespace that somebody else wrote is read for every batch."""


@dataclass(slots=True)
class _Remembered:
    head: Head
    is_complete: bool
    """Whether no other path was ever written: it began here, and none was dropped."""
    states: OrderedDict[str, PathState] = field(default_factory=OrderedDict)

    @property
    def size(self) -> int:
        return 1 + len(self.states)


class Memory:
    """Heads, and the versions of paths without their values, of the namespaces written last."""

    def __init__(self, clock: Clock, most_paths: int = MOST_PATHS) -> None:
        self._clock = clock
        self._most = most_paths
        self._size = 0
        self._namespaces: OrderedDict[str, _Remembered] = OrderedDict()
        self._shared_until: dict[str, float] = {}

    def head(self, namespace: str) -> Head | None:
        """Return the head as this process left it, or ``None`` when it must be read."""
        known = self._namespaces.get(namespace)
        return known.head if known else None

    def state(self, namespace: str, path: str) -> PathState | None:
        """Return what the path was left as, without its value, or ``None`` when it must be read."""
        known = self._namespaces.get(namespace)
        return known.states.get(path) if known else None

    def is_complete(self, namespace: str) -> bool:
        """Whether a path of which nothing is remembered was never written."""
        known = self._namespaces.get(namespace)
        return known is not None and known.is_complete

    def learn(self, ledger: Ledger) -> None:
        """Take over what a committed batch left behind."""
        written: defaultdict[str, dict[str, PathState]] = defaultdict(dict)
        for event in ledger.events:
            written[event.namespace][event.path] = PathState(event.version, deleted=event.op == "delete")
        for namespace, states in written.items():
            if not self._is_shared(namespace):
                began_here = ledger.head_read(namespace) is None
                self._take(namespace, ledger.heads[namespace], states, is_complete=began_here)
        self._shrink()

    def _take(self, namespace: str, head: Head, states: dict[str, PathState], *, is_complete: bool) -> None:
        known = self._namespaces.pop(namespace, None)
        if known is None:
            known = _Remembered(head, is_complete)
        else:
            self._size -= known.size
        known.head = head
        for path, state in states.items():
            known.states[path] = state
            known.states.move_to_end(path)
        self._namespaces[namespace] = known
        self._size += known.size

    def forget(self, namespaces: Iterable[str]) -> None:
        """Read these again the next time."""
        for namespace in namespaces:
            known = self._namespaces.pop(namespace, None)
            self._size -= known.size if known else 0

    def share(self, namespaces: Iterable[str]) -> None:
        """Note that somebody else writes these, too."""
        now = self._clock.monotonic()
        self._shared_until = {namespace: until for namespace, until in self._shared_until.items() if until > now}
        for namespace in namespaces:
            self.forget([namespace])
            self._shared_until[namespace] = now + SHARED_FOR

    def _is_shared(self, namespace: str) -> bool:
        return self._shared_until.get(namespace, 0) > self._clock.monotonic()

    def _shrink(self) -> None:
        """Drop what was not written for longest: namespaces, or paths of the one that is left."""
        while self._size > self._most:
            if len(self._namespaces) > 1:
                _, dropped = self._namespaces.popitem(last=False)
                self._size -= dropped.size
            else:
                [known] = self._namespaces.values()
                known.states.popitem(last=False)
                known.is_complete = False
                self._size -= 1
