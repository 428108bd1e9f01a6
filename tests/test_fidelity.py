"""Every value comes back as it went in, by whichever way it is read (DESIGN §5; F1, F2, F4, F6–F11)."""

from __future__ import annotations

import asyncio
import copy
import enum
import math
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pydantic
import pytest
from bson import Binary, Code, Decimal128, Int64, ObjectId, Regex
from bson.binary import UuidRepresentation
from bson.codec_options import CodecOptions

from statelayer import Settings, StateLayer, Write
from statelayer.errors import InvalidValueError
from statelayer.values import identical, size

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from statelayer.executors import Run

pytestmark = pytest.mark.anyio

USER = "user:U7"
T1 = "/tasks/T1"

INSTANT = datetime(2026, 3, 1, 1, 30, 15, 123000, tzinfo=UTC)


class Address(pydantic.BaseModel):
    street: str
    zip_code: int = pydantic.Field(alias="zipCode")


class Order(pydantic.BaseModel):
    id: str
    address: Address
    placed: datetime


VALUES: dict[str, tuple[Any, Any]] = {
    "null": (None, None),
    "true": (True, True),
    "false": (False, False),
    "zero": (0, 0),
    "one": (1, 1),
    "int32 edge": (2**31, 2**31),
    "int64 edges": ([2**63 - 1, -(2**63)], [2**63 - 1, -(2**63)]),
    "Int64": (Int64(7), 7),
    "float": (1.0, 1.0),
    "negative zero": (-0.0, -0.0),
    "subnormal": (5e-324, 5e-324),
    "infinities": ([math.inf, -math.inf], [math.inf, -math.inf]),
    "NaN": (math.nan, math.nan),
    "decimal": (Decimal128("1.10"), Decimal128("1.10")),
    "decimals": ([Decimal128("-0E+3"), Decimal128("NaN")], [Decimal128("-0E+3"), Decimal128("NaN")]),
    "34 digits": (Decimal128("8204491.822422388382256031036376953"),) * 2,
    "text": ("Straße \U0001f600", "Straße \U0001f600"),
    "empty text": ("", ""),
    "NUL in text": ("x\0y", "x\0y"),
    "not NFC": ("é", "é"),
    "dollar text": ("$secret", "$secret"),
    "bytes": (b"\x00\xff", b"\x00\xff"),
    "empty bytes": (b"", b""),
    "Binary": (Binary(b"x", 0), b"x"),
    "datetime": (datetime(2026, 3, 1, 9, 30, 15, 123456, tzinfo=timezone(timedelta(hours=8))), INSTANT),
    "before 1970": (datetime(1, 1, 1, 0, 0, 0, 1999, tzinfo=UTC), datetime(1, 1, 1, 0, 0, 0, 1000, tzinfo=UTC)),
    "last day": (
        datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999000, tzinfo=UTC),
    ),
    "uuid": (UUID("12345678123456781234567812345678"),) * 2,
    "object id": (ObjectId("0123456789abcdef01234567"),) * 2,
    "list": ([1, 1.0, True, "1", None, [], {}], [1, 1.0, True, "1", None, [], {}]),
    "odd keys": ({"a.b": 1, "$set": {"$x": "$y"}, "": 0, "a": {"b": 2}, "0": 3},) * 2,
    "operators": ({"$literal": {"$ref": "x", "$id": 1}}, {"$literal": {"$ref": "x", "$id": 1}}),
    "extended JSON": ({"$oid": "0123456789abcdef01234567", "n": {"$numberLong": "1"}},) * 2,
    "model": (
        Order(id="o", address=Address(street="s", zipCode=1), placed=INSTANT),
        {"id": "o", "address": {"street": "s", "zipCode": 1}, "placed": INSTANT},
    ),
}


@pytest.fixture
async def elsewhere(database: Any, layer: StateLayer) -> AsyncIterator[StateLayer]:
    """A layer over a handle with options of somebody else's: naive times, old UUIDs."""
    options = CodecOptions[dict[str, Any]](tz_aware=False, uuid_representation=UuidRepresentation.JAVA_LEGACY)
    other = StateLayer(database.client.get_database(database.name, codec_options=options))
    yield other
    await other.aclose()


async def test_f4_f6_f7_f11_every_type_comes_back_by_every_way(layer: StateLayer, elsewhere: StateLayer) -> None:
    """One event for each type, and each way to read it."""
    seen: dict[str, Any] = {}
    handed: dict[str, Any] = {}

    @layer.workflow("look")
    async def look(run: Run) -> None:
        seen[run.event.path] = run.event.value
        handed[run.event.path] = run.input

    await layer.subscriptions.publish(
        {"name": "look", "pattern": "/tasks/*/v/*", "action": {"type": "execute_workflow", "workflowId": "look"}}
    )
    expected = {f"{T1}/v/{n}": value for n, (_, value) in enumerate(VALUES.values())}
    writes = [Write(path=f"{T1}/v/{n}", value=given, actor=USER) for n, (given, _) in enumerate(VALUES.values())]
    async with layer.watch(f"{T1}/**") as here, layer.watch("/**") as everywhere, layer.running():
        returned = {event.path: event.value for event in await layer.append(writes)}
        watched = [{(e := await anext(events)).path: e.value for _ in writes} for events in (here, everywhere)]
        for event in [each async for each in layer.events(T1) if each.path in expected]:
            await layer.outcome(event.id, timeout=30)
    ways: dict[str, dict[str, Any]] = {"returned": returned, "run.event": seen}
    ways |= {"watch of a namespace": watched[0], "watch of all": watched[1]}
    for name, one in {"ours": layer, "other options": elsewhere}.items():
        events = [event async for event in one.events(T1) if event.path in expected]
        ways[f"events, {name}"] = {event.path: event.value for event in events}
        ways[f"event, {name}"] = {e.path: (await one.event(e.id)).value for e in events}  # type: ignore[union-attr]
        ways[f"read_version, {name}"] = {
            path: (await one.read_version(path, 1)).value
            for path in expected  # type: ignore[union-attr]
        }
        ways[f"get, {name}"] = {path: (await one.get(path)).value for path in expected}  # type: ignore[union-attr]
        ways[f"entries, {name}"] = {entry.path: entry.value for entry in await one.entries(f"{T1}/v")}
        ways[f"state_at, {name}"] = await one.state_at(T1, len(expected))
    for way, values in ways.items():
        wrong = {path: (values[path], value) for path, value in expected.items() if not identical(values[path], value)}
        assert not wrong, way
        assert values.keys() == expected.keys(), way


async def test_a_replay_brings_back_every_type(database: Any, layer: StateLayer) -> None:
    writes = [Write(path=f"{T1}/v/{n}", value=given, actor=USER) for n, (given, _) in enumerate(VALUES.values())]
    await layer.append(writes)
    before = {entry.path: entry for entry in await layer.entries(T1)}
    await database["entries"].delete_many({})
    assert (await layer.replay(T1)).entries_written == len(writes)
    after = {entry.path: entry for entry in await layer.entries(T1)}
    assert after.keys() == before.keys()
    for path, entry in after.items():
        assert identical(entry.value, before[path].value), path
    assert (await layer.verify(T1)).ok


async def test_a_merge_keeps_every_type(layer: StateLayer) -> None:
    fields = {f"f{n}": given for n, (given, _) in enumerate(VALUES.values())}
    await layer.set(f"{T1}/x", {"kept": Decimal128("1.10")}, actor=USER)
    event = await layer.merge(f"{T1}/x", fields, actor=USER)
    expected = {f"f{n}": value for n, (_, value) in enumerate(VALUES.values())}
    assert identical(event.value, {"kept": Decimal128("1.10"), **expected})
    assert identical(event.patch, expected)
    read = await layer.read_version(f"{T1}/x", 2)
    assert read is not None
    assert identical(read.value, event.value)
    assert identical(read.patch, expected)


async def test_a_model_is_read_back(layer: StateLayer) -> None:
    order = Order(id="o", address=Address(street="s", zipCode=1), placed=INSTANT)
    await layer.set(f"{T1}/x", order, actor=USER)
    entry = await layer.get(f"{T1}/x", Order)
    assert entry is not None
    assert entry.value == order


# --- what is refused


class Colour(enum.Enum):
    RED = "red"


class Text(str):
    __slots__ = ()


def _cycle() -> Any:
    value: dict[str, Any] = {}
    value["deep"] = [value]
    return value


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


REFUSED: dict[str, tuple[Any, str]] = {
    "naive datetime": ({"at": datetime(2026, 1, 1)}, "value.at"),  # noqa: DTZ001 - that is the point
    "date": ({"at": date(2026, 1, 1)}, "value.at"),
    "timedelta": ({"for": timedelta(1)}, "value.for"),
    "Decimal": ({"price": Decimal("1.10")}, "value.price"),
    "inexact Decimal": ([Decimal("8204491.822422388382256031036376953125")], "value[0]"),
    "set": ({"tags": {1}}, "value.tags"),
    "tuple": ({"pair": (1, 2)}, "value.pair"),
    "enum": ({"colour": Colour.RED}, "value.colour"),
    "bytearray": ({"raw": bytearray(b"x")}, "value.raw"),
    "complex": ([0, 1j], "value[1]"),
    "str subclass": ({"text": Text("x")}, "value.text"),
    "too large an int": ({"n": [1, 2**63]}, "value.n[1]"),
    "Regex": ({"r": Regex("x")}, "value.r"),
    "Code": ({"c": Code("x")}, "value.c"),
    "old UUID": ({"u": Binary(b"x" * 16, 3)}, "value.u"),
    "lone surrogate": ({"a": {"text": "\ud800"}}, "value.a.text"),
    "surrogate key": ({"a": {"\ud800": 1}}, "value.a"),
    "NUL in a key": ({"a": [{"x\0y": 1}]}, "value.a[0]"),
    "int key": ({"a": {1: 1}}, "value.a"),
    "None key": ({None: 1}, "value"),
    "cycle": (_cycle(), "value.deep"),
    "too deep": (_nested(65), "value"),
    "far too deep": (_nested(5000), "value"),
    "object": ({"o": object()}, "value.o"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_f2_f4_f11_what_is_refused_is_refused_with_its_place(layer: StateLayer, name: str) -> None:
    value, place = REFUSED[name]
    await layer.set(f"{T1}/first", 0, actor=USER)
    writes = [Write(path=f"{T1}/good", value=1, actor=USER), Write(path=f"{T1}/bad", value=value, actor=USER)]
    with pytest.raises(InvalidValueError) as caught:
        await layer.append(writes)
    assert place in str(caught.value)
    assert (await layer.set(f"{T1}/next", 0, actor=USER)).seq == 2
    assert await layer.get(f"{T1}/good") is None


async def test_f8_the_deepest_value_survives_every_copy(layer: StateLayer) -> None:
    """Into the event, the executor's input, its output, and the result that nests it."""

    @layer.workflow("echo")
    async def echo(run: Run) -> Any:
        return run.event.value[0][0]

    await layer.subscriptions.publish(
        {"name": "s", "pattern": "/tasks/*/x", "action": {"type": "execute_workflow", "workflowId": "echo"}}
    )
    async with layer.running():
        event = await layer.set(f"{T1}/x", _nested(63), actor=USER)
        outcome = await layer.outcome(event.id, timeout=10)
    [execution] = outcome.executions
    assert execution.state == "succeeded"
    result = await layer.event(execution.result_event_id)  # type: ignore[arg-type]
    assert result is not None
    assert result.value["output"] == _nested(61)


@pytest.mark.parametrize("over", [0, 1])
async def test_f9_the_largest_value_fits_with_everything_around_it(database: Any, layer: StateLayer, over: int) -> None:
    wide = StateLayer(database, settings=Settings(max_value_bytes=4 * 1024 * 1024))
    actor = "user:" + "U" * 300
    path = f"/tasks/{'T' * 200}/{'p' * 255}/{'q' * 255}/{'r' * 250}"
    value = {"text": "x" * (4 * 1024 * 1024 - 100)}
    rest = 4 * 1024 * 1024 - size(value)
    value["text"] += "x" * (rest + over)
    if over:
        with pytest.raises(InvalidValueError, match="bytes"):
            await wide.set(path, value, actor=actor)
        with pytest.raises(InvalidValueError):
            await layer.set(path, {"text": "x" * (1024 * 1024)}, actor=actor)
        return
    await wide.set(path, value, actor=actor, idempotency_key="k" * 512)
    await wide.merge(path, {"text": value["text"]}, actor=actor)
    entry = await wide.get(path)
    assert entry is not None
    assert entry.value == value
    assert (await wide.verify(entry.namespace)).ok
    await wide.aclose()


# --- nobody holds what another sees


async def test_f10_executors_of_one_event_do_not_share_its_value(layer: StateLayer) -> None:
    seen: list[Any] = []

    async def spoil(run: Run) -> Any:
        seen.append(copy.deepcopy(run.event.value))
        run.event.value["items"].append("spoilt")
        return run.event.value

    for name in ("a", "b"):
        layer.workflow(name)(spoil)
        action = {"type": "execute_workflow", "workflowId": name}
        await layer.subscriptions.publish({"name": name, "pattern": "/tasks/*/x", "action": action})
    given = {"items": [1]}
    async with layer.running():
        event = await layer.set(f"{T1}/x", given, actor=USER)
        await layer.outcome(event.id, timeout=10)
    assert seen == [{"items": [1]}] * 2
    stored = await layer.event(event.id)
    assert stored is not None
    assert stored.value == given == {"items": [1]}


@pytest.mark.parametrize("change", [lambda e: e.value["items"].append(9), lambda e: e.value.clear()])
async def test_f10_two_writes_of_one_dict_are_two_facts(layer: StateLayer, change: Callable[[Any], Any]) -> None:
    given: dict[str, Any] = {"items": [1]}
    first, second = await asyncio.gather(
        layer.set(f"{T1}/a", given, actor=USER), layer.set(f"{T1}/b", given, actor=USER)
    )
    change(first)
    given["items"].append(2)
    assert second.value == {"items": [1]}
    assert (await layer.set(f"{T1}/c", given, actor=USER)).value == {"items": [1, 2]}
    entries = {entry.path[-1]: entry.value for entry in await layer.entries(T1)}
    assert entries == {"a": {"items": [1]}, "b": {"items": [1]}, "c": {"items": [1, 2]}}
