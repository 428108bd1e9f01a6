"""One segment trie for every pattern, so that an event costs nearly the same beside 1 or 10,000 subscriptions."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statelayer.subscriptions.patterns import Pattern

T = TypeVar("T", bound=Hashable)


@dataclass(slots=True)
class _Node(Generic[T]):
    """A place in the trie. Items are the keys of dicts: ordered sets, cheap to remove from."""

    children: dict[str | None, _Node[T]] = field(default_factory=dict)  # None leads on for any one segment
    ending: dict[T, None] = field(default_factory=dict)
    open_ended: dict[T, None] = field(default_factory=dict)

    def items(self, pattern: Pattern) -> dict[T, None]:
        return self.open_ended if pattern.open_ended else self.ending

    def step(self, segment: str) -> Iterator[_Node[T]]:
        for key in (segment, None):
            if (child := self.children.get(key)) is not None:
                yield child

    @property
    def empty(self) -> bool:
        return not (self.children or self.ending or self.open_ended)


class PatternTrie(Generic[T]):
    """Items by the pattern they wait behind.

    Names of captures do not count: patterns of one shape are one place, which holds an item once.
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    def insert(self, pattern: Pattern, item: T) -> None:
        """Make the item a candidate for the paths that the pattern matches."""
        node = self._root
        for literal in pattern.literals:
            node = node.children.setdefault(literal, _Node())
        node.items(pattern)[item] = None

    def remove(self, pattern: Pattern, item: T) -> None:
        """Take the item back from under this pattern, or raise ``KeyError`` if it is not there."""
        trail = [self._root]
        for literal in pattern.literals:
            trail.append(trail[-1].children[literal])
        del trail[-1].items(pattern)[item]
        self._prune(trail, pattern)

    def candidates(self, segments: Sequence[str]) -> list[T]:
        """Return the items whose pattern matches, in no particular order."""
        live = [self._root]
        found: list[T] = []
        for segment in segments:
            for node in live:
                found.extend(node.open_ended)
            live = [child for node in live for child in node.step(segment)]
            if not live:
                break
        for node in live:
            found.extend(node.ending)
        return found

    @staticmethod
    def _prune(trail: list[_Node[T]], pattern: Pattern) -> None:
        for parent, literal, child in reversed(list(zip(trail, pattern.literals, trail[1:], strict=False))):
            if child.empty:
                del parent.children[literal]
