"""Which paths a subscription or a watcher listens to.

A pattern is matched segment by segment, never as a regular expression, so that one match costs as much as the path has
segments, whatever is written in them.

    literal     that segment
    *           any one segment; after a known collection its capture is named by it (``/requests/*`` is ``requestId``)
    {name}      any one segment, captured under that name
    **          one segment or more; only at the end

The root may be a literal or any wildcard: ``/*/*/requests/*`` listens under every configured root.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statelayer.errors import InvalidPathError
from statelayer.paths import COLLECTION_CAPTURES, MAX_PATH_BYTES, MAX_SEGMENTS, MIN_SEGMENTS, check_segment

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

_CAPTURE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed pattern.

    >>> pattern = Pattern.parse("/tasks/*/requests/{request}", roots=("tasks",))
    >>> pattern.match(("tasks", "T1", "requests", "R1"))
    {'taskId': 'T1', 'request': 'R1'}
    """

    text: str
    segments: tuple[str, ...] = field(repr=False, compare=False)
    literals: tuple[str | None, ...] = field(repr=False, compare=False)
    """What each segment must be, ``None`` where any will do; without a final ``**``."""

    open_ended: bool = field(repr=False, compare=False)
    """Whether the pattern ends in ``**``."""

    positions: Mapping[str, int] = field(repr=False, compare=False)
    """Which segment each capture takes."""

    @classmethod
    def parse(cls, text: str, roots: Collection[str] | None = None) -> Pattern:
        """Parse a pattern, or raise ``InvalidPathError`` naming the segment that breaks a rule.

        Without ``roots`` only the form is checked: which roots there are is known to the layer it is published in.
        """
        segments = _split(text)
        for position, segment in enumerate(segments, start=1):
            _check(text, position, segment, last=position == len(segments))
        open_ended = segments[-1] == "**"
        literals = tuple(None if _any_one(segment) else segment for segment in segments[: len(segments) - open_ended])
        _check_root(text, literals, roots)
        _check_reach(text, literals, open_ended=open_ended)
        return cls(text, segments, literals, open_ended, _positions(text, segments))

    def match(self, segments: Sequence[str]) -> dict[str, str] | None:
        """Return the captures if these segments of a path match, else ``None``."""
        if self.mismatch(segments) is not None:
            return None
        return {name: segments[position] for name, position in self.positions.items()}

    def mismatch(self, segments: Sequence[str]) -> int | None:
        """Return the index of the first segment that does not match, ``None`` when all do.

        The index lies one behind the path when the path ends too early, and one behind the pattern when it goes on.
        """
        for index, literal in enumerate(self.literals):
            if index == len(segments) or literal not in (None, segments[index]):
                return index
        matched = len(self.literals)
        return None if (len(segments) > matched) is self.open_ended else matched

    @property
    def captures(self) -> frozenset[str]:
        """The names that a match captures."""
        return frozenset(self.positions)

    @property
    def namespace(self) -> str | None:
        """The namespace, when the pattern fixes it: its first two segments are literal."""
        root, name = (*self.literals, None, None)[:2]
        return None if root is None or name is None else f"/{root}/{name}"

    def __str__(self) -> str:
        return self.text


def _split(text: object) -> tuple[str, ...]:
    if not isinstance(text, str):
        raise InvalidPathError(text, "a pattern is text")
    if not text.startswith("/"):
        raise InvalidPathError(text, "a pattern begins with '/'")
    return tuple(text[1:].split("/"))


def _check(text: str, position: int, segment: str, *, last: bool) -> None:
    if segment == "**" and not last:
        raise InvalidPathError(text, f"segment {position} ('**') is not the last")
    if _any_one(segment) or segment == "**":
        return
    if any(character in segment for character in "*{}"):
        advice = "A segment is a literal, '*', '{name}', or '**' at the end."
        raise InvalidPathError(text, f"segment {position} ({segment!r}) is a wildcard only in part", advice)
    try:
        check_segment(segment)
    except InvalidPathError as error:
        problem = error.problem.removeprefix("the segment ")
        raise InvalidPathError(text, f"segment {position} ({error.path!r}) {problem}") from error


def capture_name(segment: str) -> str | None:
    """Return ``name`` when the segment is ``{name}``."""
    found = _CAPTURE.fullmatch(segment)
    return found and found[1]


def _any_one(segment: str) -> bool:
    return segment == "*" or capture_name(segment) is not None


def _check_root(text: str, literals: tuple[str | None, ...], roots: Collection[str] | None) -> None:
    root = next(iter(literals), None)
    if roots is not None and root is not None and root not in roots:
        raise InvalidPathError(text, f"segment 1 ({root!r}) is not a root", f"Roots are {', '.join(roots)}.")


def _check_reach(text: str, literals: tuple[str | None, ...], *, open_ended: bool) -> None:
    """Refuse what could never match, because no path is that short or that long."""
    count = len(literals) + open_ended
    if count < MIN_SEGMENTS and not open_ended:
        raise InvalidPathError(text, f"it ends at segment {count}, and every path has {MIN_SEGMENTS} or more")
    if count > MAX_SEGMENTS:
        raise InvalidPathError(text, f"it asks for {count} segments, and no path has more than {MAX_SEGMENTS}")
    shortest = count + open_ended + sum(len((literal or "*").encode()) for literal in literals)
    if shortest > MAX_PATH_BYTES:
        raise InvalidPathError(text, f"it asks for {shortest} bytes, and no path has more than {MAX_PATH_BYTES}")


def _positions(text: str, segments: tuple[str, ...]) -> dict[str, int]:
    """Return where each capture is taken.

    What is written as ``{name}`` goes before what ``*`` implies, and of implied names that are equal the first one
    holds, so that a longer pattern never changes what a name meant in the shorter one.
    """
    written: dict[str, int] = {}
    implied: dict[str, int] = {}
    for position, segment in enumerate(segments):
        if name := capture_name(segment):
            if name in written:
                raise InvalidPathError(text, f"segment {position + 1} captures {name!r} a second time")
            written[name] = position
        elif segment == "*" and position and (name := COLLECTION_CAPTURES.get(segments[position - 1])):
            implied.setdefault(name, position)
    return dict(sorted({**implied, **written}.items(), key=lambda item: item[1]))
