"""What a fact may hold, and the one form it is held in.

A value is what BSON keeps without loss: None, bool, int (64 bits), float, ``Decimal128``, str, bytes, aware datetime,
``uuid.UUID``, ``ObjectId``, list, and dict with str keys. ``canonical`` decides once, at the boundary, so that the
returned event, the entry, an executor's input and a replay agree.
"""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import dataclass, is_dataclass
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from uuid import UUID

import bson
from bson import json_util
from bson.binary import Binary, UuidRepresentation
from bson.codec_options import CodecOptions, TypeDecoder, TypeRegistry
from bson.datetime_ms import DatetimeMS
from bson.dbref import DBRef
from bson.decimal128 import Decimal128
from bson.errors import BSONError
from bson.int64 import Int64
from bson.objectid import ObjectId
from pydantic import BaseModel

from statelayer.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

MAX_DEPTH: Final = 64
MIN_INT: Final = -(2**63)
MAX_INT: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Limits:
    """What one value may take: ``bytes`` as ``size`` counts them, and how many lists and dicts inside each other."""

    bytes: int
    depth: int = MAX_DEPTH


# --- the stored form --------------------------------------------------------------------------------------------------


class _Int64Decoder(TypeDecoder):
    bson_type = Int64

    def transform_bson(self, value: Int64) -> int:
        return int(value)


class _ReferenceDecoder(TypeDecoder):
    """Undoes what the driver does to a dict with ``$ref`` and ``$id``; these two come back as its first keys."""

    bson_type = DBRef

    def transform_bson(self, value: DBRef) -> dict[str, Any]:
        return dict(value.as_doc())


CODEC_OPTIONS: Final[CodecOptions[dict[str, Any]]] = CodecOptions(
    document_class=dict,
    tz_aware=True,
    tzinfo=UTC,
    uuid_representation=UuidRepresentation.STANDARD,
    type_registry=TypeRegistry([_Int64Decoder(), _ReferenceDecoder()]),
)
"""For every collection of ours: values come back as ``canonical`` made them, whatever client was handed in."""


def size(value: object) -> int:
    """Bytes of the BSON document ``{"": value}``, for a value in canonical form."""
    return len(bson.encode({"": value}, codec_options=CODEC_OPTIONS))


# --- the canonical form -----------------------------------------------------------------------------------------------

_TOO_DEEP = "it is nested too deeply"
_FLATTEN = "Flatten it, or store the inner part under a path of its own."
_DECODE = "Decode the text properly, or pass bytes."
_ROOM: Final = 4  # times the limit, below which the size is worth telling exactly
_SHOWN_CHARACTERS: Final = 64


def canonical(value: object, *, limits: Limits, where: str = "value") -> Any:
    """Return a copy in canonical form that shares nothing mutable with ``value``.

    Datetimes become UTC and lose what is below a millisecond; pydantic models are dumped by alias; ``Int64`` becomes
    int. What would not come back as it went in, or exceeds a limit, raises ``InvalidValueError`` with its place
    (``value.items[3].when``).
    """
    return measured(value, limits=limits, where=where)[0]


def measured(value: object, *, limits: Limits, where: str = "value") -> tuple[Any, int]:
    """Return the value in canonical form, as ``canonical`` does, and its ``size`` in bytes."""
    room = _Room(_ROOM * limits.bytes)
    try:
        copied = _copy(value, limits.depth, room)
        taken, about = size(copied), ""
    except _RefusedError as refused:
        raise refused.at(where) from refused.__cause__
    except _FullError:
        taken, about = _ROOM * limits.bytes, "more than "
    if taken > limits.bytes:
        problem = f"it takes {about}{taken} bytes; {limits.bytes} are permitted"
        raise InvalidValueError(where, problem, "Keep the large part elsewhere and store a reference to it.")
    return copied, taken


_Key: TypeAlias = str | int


class _RefusedError(Exception):
    """Travels from the fault to ``canonical``; the containers on its way note themselves, innermost first."""

    def __init__(self, problem: str, advice: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.advice = advice
        self.trail: list[tuple[object, _Key]] = []

    def at(self, where: str) -> InvalidValueError:
        trail = self.trail[::-1]
        if self.problem is _TOO_DEEP and (cycle := _cycle(trail)):
            return InvalidValueError(_place(where, trail[:cycle]), "it contains itself", "Store a tree.")
        return InvalidValueError(_place(where, trail), self.problem, self.advice)


def _cycle(trail: Sequence[tuple[object, _Key]]) -> int | None:
    seen: set[int] = set()
    for index, (container, _) in enumerate(trail):
        if id(container) in seen:
            return index
        seen.add(id(container))
    return None


def _place(where: str, trail: Sequence[tuple[object, _Key]]) -> str:
    return where + "".join(_step(key) for _, key in trail)


def _step(key: _Key) -> str:
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if key.isidentifier() and len(key) <= _SHOWN_CHARACTERS else f"[{_shown(key)}]"


class _FullError(Exception):
    """The lower bound alone is far beyond the limit."""


class _Room:
    """Bytes left by a lower bound, so that a value that is aliased over and over ends before the memory does."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise _FullError


def _copy(value: Any, depth: int, room: _Room) -> Any:
    return (_COPIERS.get(type(value)) or _copy_unusual)(value, depth, room)


def _copy_dict(value: dict[Any, Any], depth: int, room: _Room) -> dict[str, Any]:
    _enter(value, depth, room)
    _check_keys(value, room)
    copied: dict[str, Any] = {}
    key = ""
    try:
        for key, item in value.items():
            copied[key] = (_COPIERS.get(type(item)) or _copy_unusual)(item, depth - 1, room)
    except _RefusedError as refused:
        refused.trail.append((value, key))
        raise
    return copied


def _copy_list(value: list[Any], depth: int, room: _Room) -> list[Any]:
    _enter(value, depth, room)
    copied: list[Any] = []
    try:
        for item in value:
            # The length so far is the place of a fault.
            copied.append((_COPIERS.get(type(item)) or _copy_unusual)(item, depth - 1, room))  # noqa: PERF401
    except _RefusedError as refused:
        refused.trail.append((value, len(copied)))
        raise
    return copied


def _enter(container: dict[Any, Any] | list[Any], depth: int, room: _Room) -> None:
    if depth <= 0:
        raise _RefusedError(_TOO_DEEP, _FLATTEN)
    room.take(2 * len(container))


def _check_keys(value: dict[Any, Any], room: _Room) -> None:
    if not _PLAIN_TEXT.issuperset(map(type, value)):
        key = next(key for key in value if type(key) is not str)
        raise _RefusedError(f"it has a key that is {_type_name(key)}, not str", "Make every key a plain str.")
    keys = "".join(value)
    room.take(len(keys))
    if "\0" in keys:
        key = next(key for key in value if "\0" in key)
        raise _RefusedError(f"its key {_shown(key)} holds a NUL, which ends a key in BSON", "Leave the NUL out.")
    if not _is_text(keys):
        key = next(key for key in value if not _is_text(key))
        raise _RefusedError(f"its key {_shown(key)} holds a lone surrogate", _DECODE)
    if "$db" in value and value["$db"] is None and "$id" in value and type(value.get("$ref")) is str:
        # The driver reads such a dict as a DBRef, in which a database of None and none at all are the same.
        raise _RefusedError("its '$db': None would be lost beside '$ref' and '$id'", "Leave '$db' out.")


def _copy_nothing(value: Any, _depth: int, _room: _Room) -> Any:
    return value


def _copy_str(value: str, _depth: int, room: _Room) -> str:
    room.take(len(value))
    if not value.isascii() and not _is_text(value):
        raise _RefusedError("it holds a lone surrogate, which is not text", _DECODE)
    return value


def _copy_bytes(value: bytes, _depth: int, room: _Room) -> bytes:
    room.take(len(value))
    return value


def _copy_int(value: int, _depth: int, _room: _Room) -> int:
    if not MIN_INT <= value <= MAX_INT:
        raise _RefusedError("it is an int of more than 64 bits", "Store a Decimal128 or text.")
    return int(value)


def _copy_datetime(value: datetime, _depth: int, _room: _Room) -> datetime:
    if value.utcoffset() is None:
        raise _RefusedError("it is a datetime without a time zone", "Use datetime.now(UTC), or attach its tzinfo.")
    try:
        utc = value.astimezone(UTC)
    except OverflowError:
        raise _RefusedError("it lies outside the years 1 to 9999 in UTC", "Store text.") from None
    return utc.replace(microsecond=utc.microsecond // 1000 * 1000, fold=0)


def _copy_unusual(value: object, depth: int, room: _Room) -> Any:
    if isinstance(value, BaseModel):
        return _copy(_dump(value), depth, room)
    if type(value) is Binary and value.subtype == 0:
        return _copy_bytes(bytes(value), depth, room)
    raise _RefusedError(f"it is {_type_name(value)}, which has no canonical form", _advice(value))


def _dump(model: BaseModel) -> Any:
    try:
        dumped = model.model_dump(mode="python", by_alias=True)
    except (ValueError, RecursionError) as error:
        raise _RefusedError(f"{_type_name(model)} cannot be dumped: {error}", "Mend its serializers.") from error
    if isinstance(dumped, BaseModel):
        raise _RefusedError(f"{_type_name(model)} is dumped as another model", "Let its serializer return a dict.")
    return dumped


_PLAIN_TEXT: Final = frozenset({str})
_COPIERS: Final[Mapping[type, Callable[[Any, int, _Room], Any]]] = {
    **dict.fromkeys((NoneType, bool, float, Decimal128, UUID, ObjectId), _copy_nothing),
    str: _copy_str,
    dict: _copy_dict,
    int: _copy_int,
    list: _copy_list,
    datetime: _copy_datetime,
    bytes: _copy_bytes,
    Int64: _copy_int,
}
_ADVICE: Final[Sequence[tuple[type | tuple[type, ...], str]]] = (
    (Enum, "Store its value: member.value."),
    (tuple, "Make it a list: list(x)."),
    ((set, frozenset), "Make it a list in an order of your own: sorted(x)."),
    (datetime, "Make it a plain datetime.datetime."),
    (DatetimeMS, "Make it a datetime: x.as_datetime()."),
    (date, "Store an aware datetime, or text: x.isoformat()."),
    (time, "Store text: x.isoformat()."),
    (timedelta, "Store seconds: x.total_seconds()."),
    (Decimal, "Use bson.Decimal128(str(x))."),
    (UUID, "Make it a plain uuid.UUID."),
    (Binary, "Store bytes, or a uuid.UUID."),
    ((bytes, bytearray, memoryview), "Make it bytes: bytes(x)."),
    (dict, "Make it a plain dict: dict(x)."),
    (list, "Make it a plain list: list(x)."),
    (str, "Make it a plain str: ''.join(x)."),
    (int, "Make it a plain int: int(x)."),
    (float, "Make it a plain float: float(x)."),
)
_ACCEPTED: Final = (
    "Use None, bool, int, float, Decimal128, str, bytes, an aware datetime, UUID, ObjectId, list or dict, "
    "or a pydantic model of these."
)


def _advice(value: object) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        return "Make it a dict: dataclasses.asdict(x)."
    return next((advice for kind, advice in _ADVICE if isinstance(value, kind)), _ACCEPTED)


def _is_text(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _shown(key: str) -> str:
    return json.dumps(key if len(key) <= _SHOWN_CHARACTERS else key[:_SHOWN_CHARACTERS] + "…")


# --- sameness ---------------------------------------------------------------------------------------------------------


def identical(a: object, b: object) -> bool:
    """Whether two canonical values are the same fact: same types and same values, all the way down.

    1 is neither 1.0 nor True, and ``Decimal128("1.0")`` is not ``Decimal128("1.00")``. Floats are compared as stored:
    0.0 is not -0.0, while every NaN is the same NaN. The order of keys does not count.
    """
    if type(a) is not type(b):
        return False
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(key in b and identical(item, b[key]) for key, item in a.items())
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return _same_float(a, b)
    return a == b


def _same_float(a: float, b: float) -> bool:
    if a == b:
        return math.copysign(1.0, a) == math.copysign(1.0, b)
    return math.isnan(a) and math.isnan(b)


# --- JSON -------------------------------------------------------------------------------------------------------------

_JSON_OPTIONS: Final = json_util.JSONOptions(
    json_mode=json_util.JSONMode.RELAXED,
    uuid_representation=UuidRepresentation.STANDARD,
    tz_aware=True,
    tzinfo=UTC,
)
_JSON_DEPTH: Final = MAX_DEPTH + 2  # {"$date": {"$numberLong": …}} takes two


def to_json(value: object) -> Any:
    """Return a canonical value as MongoDB Extended JSON, relaxed, in objects that ``json.dumps`` writes.

    ``from_json`` is its inverse, except that Extended JSON cannot tell a dict whose only key is a wrapper's, such as
    ``{"$oid": …}``, from what the wrapper stands for.
    """
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, str | int):
        return value
    return json_util.default(value, _JSON_OPTIONS)


def from_json(data: object, *, where: str = "value") -> Any:
    """Read MongoDB Extended JSON, relaxed or canonical, from what ``json.loads`` returned.

    The result is input like any other, for ``canonical`` to judge. A malformed wrapper (``{"$oid": 5}``) and one of a
    type that no value holds (``{"$timestamp": …}``) raise ``InvalidValueError`` with its place. Stricter than
    ``bson.json_util``, which makes a new id of ``{"$oid": null}`` and 1 of ``{"$numberLong": 1.9}``.
    """
    try:
        return _read(data, _JSON_DEPTH)
    except _RefusedError as refused:
        raise refused.at(where) from refused.__cause__


def _read(data: Any, depth: int) -> Any:
    if not isinstance(data, dict | list):
        return data
    if depth <= 0:
        raise _RefusedError(_TOO_DEEP, _FLATTEN)
    if isinstance(data, list):
        return list(_read_items(data, enumerate(data), depth))
    read = dict(zip(data, _read_items(data, data.items(), depth), strict=True))
    return _unwrap(read) if len(read) == 1 else read


def _read_items(container: object, items: Iterable[tuple[_Key, Any]], depth: int) -> Iterator[Any]:
    for key, item in items:
        try:
            yield _read(item, depth - 1)
        except _RefusedError as refused:
            refused.trail.append((container, key))
            raise


def _unwrap(read: dict[str, Any]) -> Any:
    ((wrapper, content),) = read.items()
    if wrapper in _FOREIGN_WRAPPERS:
        raise _RefusedError(f"{wrapper} stands for a BSON type that no value holds", _ACCEPTED)
    if wrapper not in _READERS:
        return read
    try:
        return _READERS[wrapper](content)
    except (TypeError, ValueError, ArithmeticError, LookupError, BSONError) as error:
        raise _RefusedError(f"its {wrapper} is malformed", "Write it as MongoDB Extended JSON.") from error


def _text(content: object) -> str:
    if not isinstance(content, str):
        raise TypeError(content)
    return content


def _read_int(content: object) -> int:
    if not _INTEGER.fullmatch(_text(content)):
        raise ValueError(content)
    return int(_text(content))


def _read_date(content: object) -> datetime:
    if type(content) is int:
        return _EPOCH + timedelta(milliseconds=content)
    return datetime.fromisoformat(_text(content))


def _read_binary(content: Any) -> bytes | UUID:
    data = base64.b64decode(_text(content["base64"]), validate=True)
    if len(content) != 2 or content["subType"] not in {"00", "04"}:
        raise ValueError(content)
    return UUID(bytes=data) if content["subType"] == "04" else data


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_INTEGER: Final = re.compile(r"-?[0-9]+")
_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "$oid": lambda content: ObjectId(_text(content)),
    "$date": _read_date,
    "$binary": _read_binary,
    "$uuid": lambda content: UUID(_text(content)),
    "$numberInt": _read_int,
    "$numberLong": _read_int,
    "$numberDouble": lambda content: float(_text(content)),
    "$numberDecimal": lambda content: Decimal128(_text(content)),
}
_FOREIGN_WRAPPERS: Final = frozenset(
    {"$code", "$dbPointer", "$maxKey", "$minKey", "$regularExpression", "$symbol", "$timestamp", "$undefined"}
)
