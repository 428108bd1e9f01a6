"""The condition language: what an event, and the state as of it, must say for a subscription to fire.

A condition is ``None`` (always), ``{"all": [...]}``, ``{"any": [...]}``, ``{"not": {...}}`` or a comparison
``{"path": ..., "op": ..., "value": ...}``. There is no eval, no arithmetic and no regular expression.

Paths lead to a field of the event (``$event.value.status``) or of the state as of the event, relative to its namespace
(``$state.requests/{requestId}.status``; a ``{capture}`` is the pattern's). Text is split at every dot. The elements of
a list are not split, so that it reaches what holds a dot: ``["$state", "stage/v1.2", "a.b"]``. Each step names a key of
an object; there are no steps into lists.

How values compare, without ever raising:

    missing    ``exists: false`` and ``ne`` hold, everything else is false; null is present and equals null
    numbers    int, float and Decimal128 compare exactly; a bool is not a number; NaN equals NaN and has no order
    text       by code point
    datetimes  with datetimes
    objects    equal whatever the order of keys; lists element by element
    the rest   null, bool, bytes, UUID and ObjectId equal their own kind

Only numbers, text and datetimes have an order, each within its kind; any other ordering is false.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import Enum
from itertools import chain, islice
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID

from bson.decimal128 import Decimal128
from bson.objectid import ObjectId

from statelayer import values
from statelayer.errors import InvalidConditionError, InvalidPathError, InvalidValueError
from statelayer.paths import MAX_SEGMENTS, check_segment
from statelayer.subscriptions.patterns import capture_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from statelayer.events import Event

MAX_NODES = 256
MAX_DEPTH = 16
VALUE_LIMITS = values.Limits(bytes=64 * 1024, depth=32)
"""Bounds of one value in a condition."""

EVENT_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "id": "id",
        "namespace": "namespace",
        "seq": "seq",
        "path": "path",
        "version": "version",
        "op": "op",
        "value": "value",
        "actor": "actor",
        "source": "source",
        "triggerDepth": "trigger_depth",
        "causedByEventId": "caused_by_event_id",
        "rootEventId": "root_event_id",
        "committedAt": "committed_at",
    }
)
"""The fields of an event that a condition sees, and the attributes they are; ``params`` comes with the match."""

_DEEPEST: Final[Mapping[str, int]] = {"value": sys.maxsize, "params": 2}
"""How many steps may lead into a field; the others are scalars."""


class Missing(Enum):
    """What a path leads to when nothing is there. It is not null, and equals no value."""

    MISSING = "missing"

    def __repr__(self) -> str:
        return self.value


MISSING: Final = Missing.MISSING


@dataclass(frozen=True, slots=True)
class Facts:
    """What a condition is evaluated against.

    ``event`` has the fields of the event by their names on the wire, and ``params``, the captures of the match; what
    the event does not have is left out. ``state`` has the values of ``Condition.state_paths`` as of the event; a path
    that held none is left out.
    """

    event: Mapping[str, Any]
    state: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, event: Event, params: Mapping[str, str], state: Mapping[str, Any] | None = None) -> Facts:
        """Return the facts of an event: a delete has no value, a root no cause."""
        seen = {name: getattr(event, attribute) for name, attribute in EVENT_FIELDS.items()}
        if event.op == "delete":
            del seen["value"]
        if event.caused_by_event_id is None:
            del seen["causedByEventId"]
        return cls({**seen, "params": params}, state or {})


@dataclass(frozen=True, slots=True)
class Explanation:
    """What one clause said. ``all``, ``any`` and ``not`` have ``parts``; a comparison has a path and both its sides."""

    clause: str
    op: str
    holds: bool
    parts: tuple[Explanation, ...] = ()
    path: str | tuple[str, ...] | None = None
    expected: Any = None
    actual: Any = MISSING

    def leaves(self) -> Iterator[Explanation]:
        """Yield the comparisons, in the order they are written."""
        if self.path is not None:
            yield self
        for part in self.parts:
            yield from part.leaves()


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition. Parse once, evaluate often.

    >>> condition = Condition.parse({"path": "$event.value.weight", "op": "gt", "value": 10})
    >>> condition.evaluate(Facts({"value": {"weight": 10.5}}))
    True
    >>> condition.evaluate(Facts({"value": {"weight": "11"}}))
    False
    """

    root: Group | Comparison | None
    """``None`` always holds."""

    @classmethod
    def parse(cls, source: object, where: str = "condition") -> Condition:
        """Parse a condition, or raise ``InvalidConditionError`` with everything that is wrong with it."""
        if source is None:
            return cls(None)
        _check_shape(source, where)
        parser = _Parser()
        root = parser.clause(source, where)
        if isinstance(root, Missing):
            raise InvalidConditionError(parser.problems)
        return cls(root)

    @property
    def document(self) -> dict[str, Any] | None:
        """The condition as it is stored: a copy in canonical values, which parses to an equal condition."""
        return None if self.root is None else self.root.document

    def evaluate(self, facts: Facts) -> bool:
        """Say whether the condition holds. Never raises, whatever the facts hold."""
        return self.root is None or self.root.evaluate(facts)

    def explain(self, facts: Facts) -> Explanation:
        """Evaluate every clause, also those that no longer decide, and say what each saw."""
        return Explanation("condition", "always", holds=True) if self.root is None else self.root.explain(facts)

    def state_paths(self, params: Mapping[str, str]) -> frozenset[str]:
        """Return the paths, relative to the namespace, whose values a match with these captures asks for."""
        rendered = (leaf.path.render(params) for leaf in self._leaves() if isinstance(leaf.path, StatePath))
        return frozenset(path for path in rendered if path is not None)

    def unknown_captures(self, captures: Collection[str]) -> list[str]:
        """Return a problem for each clause whose path uses a capture that is not among these."""
        return [
            f"{leaf.where}.path: the pattern has no capture {name!r}; it has {', '.join(sorted(captures)) or 'none'}"
            for leaf in self._leaves()
            for name in leaf.path.captures
            if name not in captures
        ]

    def _leaves(self) -> Iterator[Comparison]:
        return iter(()) if self.root is None else self.root.leaves()


# --- the parsed tree --------------------------------------------------------------------------------------------------


_JOIN: Final[Mapping[str, Callable[[Iterator[bool]], bool]]] = {
    "all": all,
    "any": any,
    "not": lambda held: not any(held),
}


@dataclass(frozen=True, slots=True)
class Group:
    """``all``, ``any`` or ``not`` of some clauses; ``not`` has one."""

    where: str = field(compare=False)
    op: str
    parts: tuple[Group | Comparison, ...]

    @property
    def document(self) -> dict[str, Any]:
        parts = [part.document for part in self.parts]
        return {self.op: parts[0] if self.op == "not" else parts}

    def evaluate(self, facts: Facts) -> bool:
        return _JOIN[self.op](part.evaluate(facts) for part in self.parts)

    def explain(self, facts: Facts) -> Explanation:
        parts = tuple(part.explain(facts) for part in self.parts)
        return Explanation(self.where, self.op, _JOIN[self.op](part.holds for part in parts), parts)

    def leaves(self) -> Iterator[Comparison]:
        for part in self.parts:
            yield from part.leaves()


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is at a path, compared with a value by an operator."""

    where: str = field(compare=False)
    path: EventPath | StatePath
    op: str
    value: Any

    @property
    def document(self) -> dict[str, Any]:
        source = self.path.source
        path = source if isinstance(source, str) else list(source)
        return {"path": path, "op": self.op, "value": values.canonical(self.value, limits=VALUE_LIMITS, where="value")}

    def evaluate(self, facts: Facts) -> bool:
        return _OPERATORS[self.op](self.path.resolve(facts), self.value)

    def explain(self, facts: Facts) -> Explanation:
        actual = self.path.resolve(facts)
        holds = _OPERATORS[self.op](actual, self.value)
        return Explanation(self.where, self.op, holds, path=self.path.source, expected=self.value, actual=actual)

    def leaves(self) -> Iterator[Comparison]:
        yield self


# --- paths ------------------------------------------------------------------------------------------------------------


PathSource: TypeAlias = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EventPath:
    """A field of the event, or a key below one."""

    source: PathSource
    keys: tuple[str, ...] = field(compare=False)

    @property
    def captures(self) -> tuple[str, ...]:
        return self.keys[1:] if self.keys[0] == "params" else ()

    def resolve(self, facts: Facts) -> Any:
        return _descend(facts.event, self.keys)


@dataclass(frozen=True, slots=True)
class StatePath:
    """The value at a path relative to the namespace, or a key below it."""

    source: PathSource
    segments: tuple[str, ...] = field(compare=False)
    keys: tuple[str, ...] = field(compare=False)

    @property
    def captures(self) -> tuple[str, ...]:
        return tuple(name for segment in self.segments if (name := capture_name(segment)))

    def render(self, params: Mapping[str, str]) -> str | None:
        """Return the path with its captures filled in, ``None`` when one of them is not given."""
        parts = [params.get(name) if (name := capture_name(segment)) else segment for segment in self.segments]
        return None if None in parts else "/".join(map(str, parts))

    def resolve(self, facts: Facts) -> Any:
        path = self.render(facts.event.get("params", {}))
        return MISSING if path is None else _descend(facts.state, (path, *self.keys))


def _descend(value: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return MISSING
        value = value[key]
    return value


def _parse_path(source: object) -> EventPath | StatePath:
    """Parse the path of a comparison, or raise ``ValueError`` with what is wrong."""
    kept: PathSource = source if isinstance(source, str) else _listed(source)
    root, *keys = kept.split(".") if isinstance(kept, str) else kept
    if isinstance(kept, str) and not all(keys):
        raise ValueError(f"{kept!r:.80} has an empty step; the list form takes empty keys")
    if root == "$event":
        return _event_path(kept, keys)
    if root == "$state":
        return _state_path(kept, keys)
    raise ValueError(f"{root!r:.80} is nothing to look into; a path begins with $event or $state")


def _listed(source: object) -> tuple[str, ...]:
    if not isinstance(source, list) or not source or not all(isinstance(step, str) for step in source):
        raise ValueError('a path is text, or a list of text such as ["$event", "value", "a.b"]')
    return tuple(source)


def _event_path(source: PathSource, keys: list[str]) -> EventPath:
    known = [*EVENT_FIELDS, "params"]
    if not keys:
        raise ValueError(f"$event alone is no value; name one of its fields: {' '.join(known)}")
    if keys[0] not in known:
        raise ValueError(f"an event has no field {keys[0]!r:.80}; use one of {' '.join(known)}")
    if len(keys) > _DEEPEST.get(keys[0], 1):
        raise ValueError(f"there is nothing below {keys[_DEEPEST.get(keys[0], 1) - 1]!r:.80}")
    return EventPath(source, tuple(keys))


def _state_path(source: PathSource, keys: list[str]) -> StatePath:
    if not keys:
        raise ValueError("$state alone is no value; name a path relative to the namespace: $state.stage/reviewed")
    segments = tuple(keys[0].split("/"))
    if len(segments) > MAX_SEGMENTS - 2:
        raise ValueError(f"no path has more than {MAX_SEGMENTS - 2} segments below its namespace")
    for segment in segments:
        _check_state_segment(segment)
    return StatePath(source, segments, tuple(keys[1:]))


def _check_state_segment(segment: str) -> None:
    if capture_name(segment):
        return
    try:
        check_segment(segment)
    except InvalidPathError as error:
        problem = error.problem.removeprefix("the segment ")
        raise ValueError(f"segment {segment!r:.80} of the $state path {problem}") from error


# --- parsing ----------------------------------------------------------------------------------------------------------


def _check_shape(source: object, where: str) -> None:
    """Bound the tree without recursion, so that what follows may recurse."""
    nodes, level, pending = 0, 1, [source]
    while pending:
        nodes += len(pending)
        if level > MAX_DEPTH:
            raise InvalidConditionError([f"{where}: it is nested deeper than {MAX_DEPTH} clauses"])
        if nodes > MAX_NODES:
            raise InvalidConditionError([f"{where}: it has more than {MAX_NODES} clauses"])
        parts = chain.from_iterable(map(_parts, pending))
        level, pending = level + 1, list(islice(parts, MAX_NODES + 1))


def _parts(clause: object) -> Iterator[object]:
    if not isinstance(clause, Mapping):
        return
    for key in ("all", "any"):
        if isinstance(clause.get(key), list):
            yield from clause[key]
    if "not" in clause:
        yield clause["not"]


class _Parser:
    """Builds the tree and gathers what is wrong; in place of that stands ``MISSING``."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def clause(self, source: object, where: str) -> Group | Comparison | Missing:
        if not isinstance(source, Mapping):
            return self._refuse(where, f"a clause is an object, not {_kind(source)}")
        keys = set(source)
        if keys in ({"all"}, {"any"}):
            return self._group(source, next(iter(keys)), where)
        if keys == {"not"}:
            part = self.clause(source["not"], f"{where}.not")
            return MISSING if part is MISSING else Group(where, "not", (part,))
        return self._comparison(source, where)

    def _group(self, source: Mapping[str, Any], op: str, where: str) -> Group | Missing:
        listed = source[op]
        if not isinstance(listed, list) or not listed:
            return self._refuse(f"{where}.{op}", "it takes a list of at least one clause")
        parts = [self.clause(part, f"{where}.{op}[{index}]") for index, part in enumerate(listed)]
        sound = tuple(part for part in parts if part is not MISSING)
        return Group(where, op, sound) if len(sound) == len(parts) else MISSING

    def _comparison(self, source: Mapping[str, Any], where: str) -> Comparison | Missing:
        if unknown := sorted(map(str, source.keys() - {"path", "op", "value"})):
            return self._refuse(where, f"unknown key {', '.join(map(_shown, unknown))}; a clause is {_FORMS}")
        if not {"path", "op"} <= source.keys():
            return self._refuse(where, f"it lacks {_lacking(source)}; a clause is {_FORMS}")
        path = self._path(source["path"], f"{where}.path")
        op = source["op"]
        if not isinstance(op, str) or op not in _OPERATORS:
            return self._refuse(f"{where}.op", f"unknown operator {_shown(op)}; use one of {' '.join(_OPERATORS)}")
        value = self._value(source, op, where)
        return MISSING if path is MISSING or value is MISSING else Comparison(where, path, op, value)

    def _path(self, source: object, where: str) -> EventPath | StatePath | Missing:
        try:
            path = _parse_path(source)
            values.canonical([*path.keys], limits=VALUE_LIMITS, where=where)
        except InvalidValueError as error:
            return self._refuse(where, error.problem)
        except ValueError as error:
            return self._refuse(where, str(error))
        return path

    def _value(self, source: Mapping[str, Any], op: str, where: str) -> Any:
        at = f"{where}.value"
        if op == "exists":
            value = source.get("value", True)
            return value if isinstance(value, bool) else self._refuse(at, f"{op} takes a bool, not {_kind(value)}")
        if "value" not in source:
            return self._refuse(at, f"{op} needs a value to compare with")
        if op == "in" and not isinstance(source["value"], list):
            return self._refuse(at, f"in takes a list of values, not {_kind(source['value'])}")
        try:
            return values.canonical(source["value"], limits=VALUE_LIMITS, where=at)
        except InvalidValueError as error:
            return self._refuse(error.where, error.problem)

    def _refuse(self, where: str, problem: str) -> Missing:
        self.problems.append(f"{where}: {problem}")
        return MISSING


_FORMS: Final = '{"all": [...]}, {"any": [...]}, {"not": {...}} or {"path", "op", "value"}'


def _lacking(source: Mapping[str, Any]) -> str:
    return " and ".join(repr(key) for key in ("path", "op") if key not in source)


def _shown(value: object) -> str:
    return f"{value!r:.80}" if isinstance(value, str) else _kind(value)


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


# --- comparing --------------------------------------------------------------------------------------------------------


_ALIKE: Final = (str, bool, NoneType, datetime, bytes, UUID, ObjectId)
"""Kinds of scalars, apart from numbers, that equal their own kind only."""


def equal(left: Any, right: Any) -> bool:
    """Say whether two values are equal in the language of conditions. ``MISSING`` equals nothing."""
    if isinstance(left, Mapping):
        return isinstance(right, Mapping) and _equal_objects(left, right)
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(equal, left, right))
    if _is_number(left):
        return _is_number(right) and _equal_numbers(left, right)
    return any(isinstance(left, kind) and isinstance(right, kind) and bool(left == right) for kind in _ALIKE)


def _equal_objects(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(equal(value, right[key]) for key, value in left.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal128) and not isinstance(value, bool)


def _equal_numbers(left: Any, right: Any) -> bool:
    left, right = _exact(left, right)
    return _is_nan(right) if _is_nan(left) else not _is_nan(right) and bool(left == right)


def _exact(left: Any, right: Any) -> tuple[Any, Any]:
    """Return two numbers as Python compares them exactly: int and float as they are, else both as decimals.

    Mixed with floats, decimals would obey the thread's decimal context, which may be set to raise.
    """
    if isinstance(left, Decimal128) or isinstance(right, Decimal128):
        return _decimal(left), _decimal(right)
    return left, right


def _decimal(number: Any) -> Decimal:
    if isinstance(number, Decimal128):
        return number.to_decimal()
    if isinstance(number, float):
        return Decimal.from_float(number)  # noqa: FURB164  the constructor obeys the context, which may be set to raise
    return Decimal(number)


def _is_nan(number: Any) -> bool:
    return number.is_nan() if isinstance(number, Decimal) else bool(number != number)


def _ordering(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def holds(actual: Any, expected: Any) -> bool:
        if _is_number(actual) and _is_number(expected):
            actual, expected = _exact(actual, expected)
            return not _is_nan(actual) and not _is_nan(expected) and compare(actual, expected)
        return _share_an_order(actual, expected) and compare(actual, expected)

    return holds


def _share_an_order(left: Any, right: Any) -> bool:
    if isinstance(left, datetime) and isinstance(right, datetime):
        return (left.utcoffset() is None) is (right.utcoffset() is None)
    return isinstance(left, str) and isinstance(right, str)


def _not_equal(actual: Any, expected: Any) -> bool:
    return not equal(actual, expected)


def _is_in(actual: Any, expected: list[Any]) -> bool:
    return any(equal(actual, element) for element in expected)


def _contains(actual: Any, expected: Any) -> bool:
    if isinstance(actual, str):
        return isinstance(expected, str) and expected in actual
    return isinstance(actual, list) and any(equal(element, expected) for element in actual)


def _exists(actual: Any, expected: bool) -> bool:
    return (actual is not MISSING) is expected


_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "eq": equal,
    "ne": _not_equal,
    "gt": _ordering(operator.gt),
    "gte": _ordering(operator.ge),
    "lt": _ordering(operator.lt),
    "lte": _ordering(operator.le),
    "in": _is_in,
    "contains": _contains,
    "exists": _exists,
}
