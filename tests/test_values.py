"""What a fact may hold: one canonical form, stored and read back without loss."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any
from uuid import UUID

import bson
import pytest
from bson import SON, Binary, Code, DBRef, Decimal128, Int64, MinKey, ObjectId, Regex, Timestamp
from bson.datetime_ms import DatetimeMS
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, RootModel, field_serializer, model_serializer

from statelayer.errors import InvalidValueError
from statelayer.values import (
    CODEC_OPTIONS,
    MAX_INT,
    MIN_INT,
    Limits,
    canonical,
    from_json,
    identical,
    size,
    to_json,
)

thorough = settings(deadline=None, max_examples=300)

LIMITS = Limits(bytes=1024 * 1024)
MOMENT = datetime(2024, 5, 6, 7, 8, 9, 123_000, tzinfo=UTC)

offsets = st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
keys = st.one_of(
    st.sampled_from(["", "a.b", "$set", "$ref", "$id", "$oid", "a", "b"]),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(MIN_INT, MAX_INT),
    st.floats(),
    st.decimals(allow_nan=False, places=3, min_value=-(10**9), max_value=10**9).map(Decimal128),
    texts,
    st.binary(max_size=12),
    st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=offsets),  # noqa: DTZ001  bounds are naive
    st.uuids(),
    st.binary(min_size=12, max_size=12).map(ObjectId),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=12,
)


def through_bson(value: object) -> Any:
    return bson.decode(bson.encode({"value": value}, codec_options=CODEC_OPTIONS), CODEC_OPTIONS)["value"]


def refusal(value: object, limits: Limits = LIMITS) -> InvalidValueError:
    with pytest.raises(InvalidValueError) as caught:
        canonical(value, limits=limits)
    return caught.value


def containers(value: object) -> list[object]:
    if isinstance(value, dict):
        return [value, *(inner for item in value.values() for inner in containers(item))]
    if isinstance(value, list):
        return [value, *(inner for item in value for inner in containers(item))]
    return []


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


# --- round trips ------------------------------------------------------------------------------------------------------


@thorough
@given(values)
def test_f6_f11_a_canonical_value_is_stored_without_loss(value: object) -> None:
    held = canonical(value, limits=LIMITS)
    assert identical(through_bson(held), held)


@thorough
@given(values)
def test_canonical_is_idempotent(value: object) -> None:
    held = canonical(value, limits=LIMITS)
    assert identical(canonical(held, limits=LIMITS), held)


@thorough
@given(values)
def test_f10_the_callers_object_is_neither_changed_nor_shared(value: object) -> None:
    before = copy.deepcopy(value)
    held = canonical(value, limits=LIMITS)
    assert identical(value, before)
    assert not {id(inner) for inner in containers(held)} & {id(inner) for inner in containers(value)}


def test_f10_one_object_held_twice_becomes_two() -> None:
    shared: dict[str, int] = {"n": 1}
    held = canonical({"a": shared, "b": [shared]}, limits=LIMITS)
    held["a"]["n"] = 2
    assert held["b"] == [{"n": 1}]
    assert shared == {"n": 1}


@pytest.mark.parametrize(
    "value",
    [
        {"a.b": 1},
        {"$set": 1},
        {"": 1},
        {"a": {"b": 1}, "a.b": 2},
        {"_id": 1},
        {"$oid": "x"},
        {"$date": {"$numberLong": "1"}},
    ],
)
def test_f1_dots_dollars_and_empty_keys_are_stored_as_they_are(value: object) -> None:
    assert identical(through_bson(canonical(value, limits=LIMITS)), value)


@pytest.mark.parametrize(
    "value",
    [
        {"$ref": "x", "$id": 1},
        {"$id": 1, "$ref": "x"},
        {"$ref": "x", "$id": None, "$db": "d", "extra": {"$ref": "y", "$id": [1]}},
        {"collection": 1, "id": 2, "database": 3, "$ref": "x", "$id": 1},
        [{"$ref": "x", "$id": {"$ref": "y", "$id": 2**40}}],
        {"$ref": 5, "$id": 1, "$db": None},
        {"$ref": "x", "$db": None},
    ],
)
def test_f1_a_dict_that_looks_like_a_reference_comes_back_as_that_dict(value: object) -> None:
    read = through_bson(canonical(value, limits=LIMITS))
    assert identical(read, value)
    assert {type(inner) for inner in containers(read)} <= {dict, list}


def test_f1_the_one_reference_the_driver_cannot_return_is_refused() -> None:
    lossy = {"$ref": "x", "$id": 1, "$db": None}
    assert through_bson(lossy) != lossy  # when the driver mends this, so can we
    assert refusal({"a": lossy}).where == "value.a"


def test_large_integers_come_back_as_plain_int() -> None:
    for number in (Int64(5), 2**40, MIN_INT, MAX_INT):
        held = canonical({"n": [number]}, limits=LIMITS)
        assert type(held["n"][0]) is type(through_bson(held)["n"][0]) is int
        assert through_bson(held) == {"n": [number]}


def test_nul_inside_a_text_is_kept() -> None:
    assert through_bson(canonical("x\0y", limits=LIMITS)) == "x\0y"


def test_f7_uuids_are_stored_in_the_standard_form() -> None:
    uuid = UUID(int=7)
    stored = bson.encode({"u": canonical(uuid, limits=LIMITS)}, codec_options=CODEC_OPTIONS)
    assert bson.decode(stored)["u"] == Binary(uuid.bytes, 4)
    assert bson.decode(stored, CODEC_OPTIONS)["u"] == uuid


def test_f11_generic_binary_becomes_bytes() -> None:
    held = canonical(Binary(b"x"), limits=LIMITS)
    assert type(held) is bytes
    assert held == b"x"


# --- datetimes --------------------------------------------------------------------------------------------------------


def test_f6_datetimes_become_utc_with_milliseconds() -> None:
    singapore = timezone(timedelta(hours=8))
    held = canonical(datetime(2024, 1, 2, 3, 4, 5, 678_999, tzinfo=singapore), limits=LIMITS)
    assert held == datetime(2024, 1, 1, 19, 4, 5, 678_000, tzinfo=UTC)
    assert held.tzinfo is UTC
    assert through_bson(held).tzinfo is UTC


def test_f6_milliseconds_are_floored_before_1970_too() -> None:
    held = canonical(datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC), limits=LIMITS)
    assert held.microsecond == 999_000
    assert through_bson(held) == held


def test_f6_the_first_and_the_last_moment_can_be_stored() -> None:
    for moment in (datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)):
        held = canonical(moment, limits=LIMITS)
        assert through_bson(held) == held


@pytest.mark.parametrize(
    "moment",
    [
        datetime.max.replace(tzinfo=timezone(timedelta(hours=-8))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=8))),
    ],
)
def test_f6_what_leaves_the_calendar_in_utc_is_refused(moment: datetime) -> None:
    assert "years 1 to 9999" in str(refusal(moment))


def test_f6_naive_datetimes_are_refused() -> None:
    class Nowhere(tzinfo):
        def utcoffset(self, dt: datetime | None) -> None:
            return None

    for moment in (MOMENT.replace(tzinfo=None), MOMENT.replace(tzinfo=Nowhere())):
        error = refusal({"items": [0, {"when": moment}]})
        assert error.where == "value.items[1].when"
        assert "time zone" in str(error)


# --- what is refused --------------------------------------------------------------------------------------------------


class Colour(Enum):
    RED = 1


class Name(StrEnum):
    A = "a"


class Level(IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class Whole(int):
    pass


class Real(float):
    pass


class Moment(datetime):
    pass


@dataclass
class Record:
    a: int


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ((1,), "list(x)"),
        (namedtuple("Pair", "a")(1), "list(x)"),
        ({1}, "sorted(x)"),
        (frozenset(), "sorted(x)"),
        (date(2024, 1, 1), "isoformat()"),
        (time(1), "isoformat()"),
        (timedelta(1), "total_seconds()"),
        (Decimal("1.10"), "bson.Decimal128(str(x))"),
        (Colour.RED, "member.value"),
        (Name.A, "member.value"),
        (Level.LOW, "member.value"),
        (bytearray(b"x"), "bytes(x)"),
        (memoryview(b"x"), "bytes(x)"),
        (Binary(b"x", 5), "Store bytes"),
        (Binary(bytes(16), 4), "uuid.UUID"),
        (Moment(2024, 1, 1, tzinfo=UTC), "plain datetime"),
        (DatetimeMS(0), "as_datetime()"),
        (SON(a=1), "dict(x)"),
        (OrderedDict(a=1), "dict(x)"),
        (Text("x"), "plain str"),
        (Whole(1), "int(x)"),
        (Real(1), "float(x)"),
        (Record(1), "asdict(x)"),
        (Code("x"), "plain str"),
        (Regex("x"), "Use None, bool"),
        (Timestamp(1, 1), "Use None, bool"),
        (DBRef("a", 1), "Use None, bool"),
        (MinKey(), "Use None, bool"),
        (object(), "Use None, bool"),
        (Record, "Use None, bool"),
        (BaseModel, "Use None, bool"),
        (1j, "Use None, bool"),
        (2**63, "Decimal128"),
        (-(2**63) - 1, "Decimal128"),
        ("\ud800", "Decode"),
    ],
)
def test_f2_f4_f11_what_would_not_come_back_is_refused_with_advice(value: object, advice: str) -> None:
    error = refusal({"a": [value]})
    assert error.where == "value.a[0]"
    assert advice in str(error)
    assert str(error).encode()


@pytest.mark.parametrize("key", ["a\0b", "\ud800", 1, None, True, b"a", Name.A, Text("a"), ("a",)])
def test_f2_keys_are_plain_text(key: object) -> None:
    error = refusal({"outer": [{"fine": 1, key: 1}]})
    assert error.where == "value.outer[0]"
    assert "key" in error.problem
    assert str(error).encode()


def test_f2_surrogates_in_two_keys_do_not_make_a_pair() -> None:
    refusal(dict.fromkeys(["\ud83d", "\ude00"], 1))


def test_keys_that_are_no_identifiers_are_quoted_in_a_place() -> None:
    assert refusal({"a.b": {"": {'q"': [{"客户": object()}]}}}).where == r'value["a.b"][""]["q\""][0].客户'


def test_a_place_begins_where_the_caller_says() -> None:
    with pytest.raises(InvalidValueError) as caught:
        canonical({"a": object()}, limits=LIMITS, where="writes[2].value")
    assert caught.value.where == "writes[2].value.a"


# --- depth, cycles and size -------------------------------------------------------------------------------------------


def test_f8_depth_is_limited_exactly() -> None:
    assert canonical(nested(64), limits=LIMITS) == nested(64)
    error = refusal(nested(65))
    assert "nested" in error.problem
    assert error.where == "value" + "[0]" * 64
    assert "nested" in refusal({"a": {}}, Limits(bytes=1000, depth=1)).problem
    assert canonical({"a": 1}, limits=Limits(bytes=1000, depth=1)) == {"a": 1}


def test_f8_a_hundred_thousand_levels_are_refused_like_sixty_five() -> None:
    assert "nested" in refusal(nested(100_000)).problem


def test_f8_a_cycle_is_named_where_it_closes() -> None:
    mapping: dict[str, Any] = {"a": [1, {}]}
    mapping["a"][1]["again"] = mapping
    error = refusal({"outer": mapping})
    assert error.where == "value.outer.a[1].again"
    assert "contains itself" in error.problem
    items: list[Any] = []
    items.append(items)
    assert refusal(items).where == "value[0]"


def test_size_is_limited_exactly_and_both_sizes_are_named() -> None:
    value = {"text": "é" * 100}
    taken = len(bson.encode({"": value}))
    assert size(value) == taken
    assert canonical(value, limits=Limits(bytes=taken)) == value
    error = refusal(value, Limits(bytes=taken - 1))
    assert f"{taken} bytes; {taken - 1} are permitted" in error.problem


def test_an_aliased_value_that_would_fill_the_memory_is_refused_early() -> None:
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    keys: dict[str, Any] = {"k" * 100_000: 1}
    for value in (bomb, ["x" * 1_000_000] * 100_000, [b"x" * 1_000_000] * 100_000, [keys] * 100_000):
        assert "more than" in refusal(value).problem


# --- pydantic ---------------------------------------------------------------------------------------------------------


class Line(BaseModel):
    unit_price: Any = Field(serialization_alias="unitPrice")


class Order(BaseModel):
    lines: list[Line]


class Tags(RootModel[list[str]]):
    pass


def test_f11_models_are_dumped_by_alias_wherever_they_stand() -> None:
    held = canonical({"order": Order(lines=[Line(unit_price=MOMENT)]), "tags": [Tags(["a"])]}, limits=LIMITS)
    assert held == {"order": {"lines": [{"unitPrice": MOMENT}]}, "tags": [["a"]]}


def test_f4_a_model_is_judged_like_a_dict() -> None:
    error = refusal({"order": Order(lines=[Line(unit_price=Decimal("1.10"))])})
    assert error.where == "value.order.lines[0].unitPrice"
    assert "Decimal128" in str(error)


def test_f10_a_model_shares_nothing_with_its_copy() -> None:
    inner: dict[str, Any] = {"n": [1]}
    line = Line(unit_price=inner)
    held = canonical(line, limits=LIMITS)
    inner["n"].append(2)
    assert held == {"unitPrice": {"n": [1]}}


class Failing(BaseModel):
    x: int = 1

    @field_serializer("x")
    def fail(self, x: int) -> int:
        raise TypeError("no")


class Evasive(BaseModel):
    @model_serializer
    def itself(self) -> Any:
        return self


@pytest.mark.parametrize("model", [Failing(), Evasive()])
def test_a_model_that_cannot_be_dumped_is_refused(model: BaseModel) -> None:
    error = refusal({"m": [model]})
    assert error.where == "value.m[0]"
    assert "dumped" in error.problem


def test_f8_a_model_hides_no_depth() -> None:
    assert "nested" in refusal(Line(unit_price=nested(64))).problem


# --- sameness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (0, False),
        (1, 1.0),
        (1, "1"),
        (1, Decimal128("1")),
        (Decimal128("1.0"), Decimal128("1.00")),
        (0.0, -0.0),
        (None, False),
        ("", None),
        (b"a", "a"),
        ([], {}),
        ([1], [1, 1]),
        ([1, 2], [2, 1]),
        ({"a": None}, {}),
        ({"a": None}, {"b": None}),
        ({"a": [1]}, {"a": [1.0]}),
        ({"a": 1}, {"a": True}),
        (ObjectId(bytes(12)), bytes(12)),
        (UUID(int=1), str(UUID(int=1))),
        (MOMENT, MOMENT + timedelta(milliseconds=1)),
        (float("nan"), 1.0),
        (float("inf"), float("-inf")),
    ],
)
def test_g2_values_of_other_types_or_content_are_not_identical(a: object, b: object) -> None:
    assert not identical(a, b)
    assert not identical(b, a)
    assert identical(a, copy.deepcopy(a))


def test_nan_is_itself_and_the_order_of_keys_does_not_count() -> None:
    assert identical(float("nan"), -float("nan"))
    assert identical(Decimal128("NaN"), Decimal128("NaN"))
    assert identical({"a": 1, "b": [float("nan")]}, {"b": [float("nan")], "a": 1})


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def stored(value: Any) -> bytes:
    """BSON with sorted keys and one NaN."""

    def settled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: settled(value[key]) for key in sorted(value)}
        if isinstance(value, list):
            return [settled(item) for item in value]
        return value if value == value else "NaN"

    return bson.encode({"": settled(value)}, codec_options=CODEC_OPTIONS)


small = st.recursive(
    st.sampled_from([0, 1, -0.0, 0.0, 1.0, True, False, None, "", float("nan"), Decimal128("1"), Decimal128("1.0")]),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=3,
)


@thorough
@given(small, small)
def test_identical_values_are_those_that_are_stored_alike(a: object, b: object) -> None:
    assert identical(a, b) == (stored(a) == stored(b))


@thorough
@given(values)
def test_a_value_is_identical_to_its_copy_in_another_order(value: object) -> None:
    held = canonical(value, limits=LIMITS)
    assert identical(held, reordered(held))


# --- JSON -------------------------------------------------------------------------------------------------------------


def has_lone_wrapper(value: object) -> bool:
    return any(
        len(inner) == 1 and next(iter(inner)).startswith("$") for inner in containers(value) if isinstance(inner, dict)
    )


@thorough
@given(values)
def test_json_gives_back_every_value_but_dicts_that_look_like_wrappers(value: object) -> None:
    held = canonical(value, limits=LIMITS)
    assume(not has_lone_wrapper(held))
    wire = json.dumps(to_json(held), allow_nan=False)
    assert identical(canonical(from_json(json.loads(wire)), limits=LIMITS), held)


def test_json_is_relaxed_extended_json() -> None:
    value = {
        "n": 2**40,
        "f": 1.5,
        "nan": float("nan"),
        "d": Decimal128("1.10"),
        "t": MOMENT,
        "old": datetime(1960, 1, 1, tzinfo=UTC),
        "o": ObjectId("a" * 24),
        "b": b"ab",
        "u": UUID(int=1),
    }
    assert to_json(value) == {
        "n": 2**40,
        "f": 1.5,
        "nan": {"$numberDouble": "NaN"},
        "d": {"$numberDecimal": "1.10"},
        "t": {"$date": "2024-05-06T07:08:09.123Z"},
        "old": {"$date": {"$numberLong": "-315619200000"}},
        "o": {"$oid": "a" * 24},
        "b": {"$binary": {"base64": "YWI=", "subType": "00"}},
        "u": {"$binary": {"base64": "AAAAAAAAAAAAAAAAAAAAAQ==", "subType": "04"}},
    }


def test_canonical_extended_json_is_read_too() -> None:
    data = {
        "i": {"$numberInt": "5"},
        "l": {"$numberLong": "-7"},
        "f": {"$numberDouble": "1.0"},
        "u": {"$uuid": "0" * 32},
    }
    assert identical(from_json(data), {"i": 5, "l": -7, "f": 1.0, "u": UUID(int=0)})


def test_f6_a_date_without_a_zone_on_the_wire_is_refused_like_a_naive_one() -> None:
    assert "time zone" in str(refusal(from_json({"$date": "2024-01-01T00:00:00"})))


def test_every_millisecond_survives_the_wire() -> None:
    for millisecond in range(1000):
        moment = MOMENT.replace(microsecond=millisecond * 1000)
        assert from_json(to_json(moment)) == moment


@pytest.mark.parametrize(
    "wrapper",
    [
        {"$oid": None},
        {"$oid": "xyz"},
        {"$date": "yesterday"},
        {"$date": True},
        {"$date": 10**30},
        {"$date": 1.5},
        {"$numberInt": "1_0"},
        {"$numberInt": 5},
        {"$numberLong": 1.9},
        {"$numberLong": "9" * 5000},
        {"$numberDouble": None},
        {"$numberDecimal": "x"},
        {"$numberDecimal": "1." + "1" * 50},
        {"$uuid": "x"},
        {"$binary": 5},
        {"$binary": {"base64": "!!", "subType": "00"}},
        {"$binary": {"base64": "YWI=", "subType": "05"}},
        {"$binary": {"base64": "YWI=", "subType": "04"}},
        {"$binary": {"base64": "YWI=", "subType": ["00"]}},
        {"$binary": {"base64": "YWI=", "subType": "00", "x": 1}},
        {"$timestamp": {"t": 1, "i": 1}},
        {"$regularExpression": {"pattern": "a", "options": ""}},
        {"$undefined": True},
        {"$symbol": "x"},
    ],
)
def test_f11_a_wrapper_that_holds_no_value_is_refused_with_its_place(wrapper: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError) as caught:
        from_json({"a": [0, wrapper]})
    assert caught.value.where == "value.a[1]"


@pytest.mark.parametrize(
    "data", [{"$oid": 1, "x": 2}, {"$ref": "x", "$id": 1, "$db": None}, {"$set": 1}, {"$regex": "a", "$options": ""}]
)
def test_f1_dollar_keys_that_wrap_nothing_stay_a_dict(data: dict[str, Any]) -> None:
    assert identical(from_json(data), data)


def test_f8_json_is_read_as_deep_as_values_go() -> None:
    deepest: Any = MOMENT
    for _ in range(64):
        deepest = [deepest]
    assert from_json(to_json(deepest)) == deepest
    with pytest.raises(InvalidValueError, match="nested"):
        from_json(nested(100_000))
