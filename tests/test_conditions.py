"""The condition language: its truth table, its paths, what it refuses, and how it explains itself."""

from __future__ import annotations

import decimal
import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from bson import Decimal128, Int64, MaxKey, ObjectId, Regex, Timestamp
from bson.binary import Binary
from hypothesis import given
from hypothesis import strategies as st

from statelayer.errors import InvalidConditionError, StateLayerError
from statelayer.events import Event
from statelayer.subscriptions import MISSING, Condition, Facts

NAN = math.nan
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
SAME_NOON = NOON.astimezone(timezone(timedelta(hours=8)))
UUID_1 = UUID(int=1)
ID_1 = ObjectId("0123456789abcdef01234567")
ORDERINGS = ("gt", "gte", "lt", "lte")
OPERATORS = ("eq", "ne", *ORDERINGS, "in", "contains", "exists")


def leaf(op: str, value: Any = None, path: Any = "$event.value.x") -> dict[str, Any]:
    return {"path": path, "op": op, "value": value}


def holds(condition: Any, value: Any = MISSING, **facts: Any) -> bool:
    event = {} if value is MISSING else {"value": value}
    return Condition.parse(condition).evaluate(Facts(event | facts.pop("event", {}), **facts))


def compare(actual: Any, op: str, expected: Any) -> bool:
    """Compare through a whole condition; ``actual`` may be ``MISSING``."""
    return holds(leaf(op, expected), {} if actual is MISSING else {"x": actual})


# --- the truth table --------------------------------------------------------------------------------------------------

TRUTH = [
    # actual, op, expected, holds
    pytest.param(MISSING, "exists", False, True, id="G1-missing-does-not-exist"),
    pytest.param(MISSING, "exists", True, False, id="G1-missing-exists"),
    pytest.param(MISSING, "ne", None, True, id="G1-missing-ne-null"),
    pytest.param(MISSING, "ne", 1, True, id="G1-missing-ne"),
    pytest.param(MISSING, "eq", None, False, id="G1-missing-eq-null"),
    pytest.param(MISSING, "in", [None], False, id="G1-missing-in"),
    pytest.param(MISSING, "contains", None, False, id="G1-missing-contains"),
    pytest.param(MISSING, "lt", 1, False, id="G1-missing-lt"),
    pytest.param(MISSING, "gte", 0, False, id="G1-missing-gte"),
    pytest.param(None, "exists", True, True, id="G1-null-exists"),
    pytest.param(None, "exists", False, False, id="G1-null-does-not-exist"),
    pytest.param(None, "eq", None, True, id="G1-null-eq-null"),
    pytest.param(None, "ne", None, False, id="G1-null-ne-null"),
    pytest.param(None, "in", [1, None], True, id="G1-null-in"),
    pytest.param("5", "gt", 10, False, id="G2-text-gt-number"),
    pytest.param("5", "lt", 10, False, id="G2-text-lt-number"),
    pytest.param(None, "gt", 10, False, id="G2-null-gt-number"),
    pytest.param(None, "lt", 10, False, id="G2-null-lt-number"),
    pytest.param(True, "lt", 10, False, id="G2-bool-lt-number"),
    pytest.param([11], "gt", 10, False, id="G2-list-gt-number"),
    pytest.param({}, "gt", 10, False, id="G2-object-gt-number"),
    pytest.param(NAN, "gt", 10, False, id="G2-nan-gt-number"),
    pytest.param(NAN, "lte", NAN, False, id="G2-nan-lte-nan"),
    pytest.param(NAN, "eq", NAN, True, id="G2-nan-eq-nan"),
    pytest.param(NAN, "eq", Decimal128("NaN"), True, id="G2-nan-eq-decimal-nan"),
    pytest.param(Decimal128("sNaN"), "eq", NAN, True, id="G2-signalling-nan-eq-nan"),
    pytest.param(Decimal128("sNaN"), "lt", 1, False, id="G2-signalling-nan-lt"),
    pytest.param(NAN, "ne", 1, True, id="G2-nan-ne-number"),
    pytest.param(1, "eq", NAN, False, id="G2-number-eq-nan"),
    pytest.param(NOON, "gt", 10, False, id="G2-datetime-gt-number"),
    pytest.param(NOON, "gt", "2020", False, id="G2-datetime-gt-text"),
    pytest.param(True, "eq", 1, False, id="G2-bool-eq-number"),
    pytest.param(1, "eq", True, False, id="G2-number-eq-bool"),
    pytest.param(False, "ne", 0, True, id="G2-bool-ne-number"),
    pytest.param(1.0, "eq", 1, True, id="G2-float-eq-int"),
    pytest.param(Decimal128("1"), "eq", 1, True, id="G2-decimal-eq-int"),
    pytest.param(1, "eq", Decimal128("1.00"), True, id="G2-int-eq-decimal"),
    pytest.param(Int64(1), "eq", 1, True, id="G2-int64-eq-int"),
    pytest.param("1", "eq", 1, False, id="G2-text-eq-number"),
    pytest.param(True, "in", [1], False, id="G2-bool-in-numbers"),
    pytest.param([1], "eq", 1, False, id="G2-list-eq-its-element"),
    pytest.param(1, "in", [[1]], False, id="G2-number-in-nested-list"),
    pytest.param(0, "eq", 0, True, id="G3-zero-eq"),
    pytest.param("", "eq", "", True, id="G3-empty-text-eq"),
    pytest.param(False, "eq", False, True, id="G3-false-eq"),
    pytest.param([], "eq", [], True, id="G3-empty-list-eq"),
    pytest.param({}, "eq", {}, True, id="G3-empty-object-eq"),
    pytest.param(1.0, "gt", 0, True, id="G3-gt-zero"),
    pytest.param(0, "lt", 1, True, id="G3-zero-lt"),
    pytest.param(0, "exists", True, True, id="G3-zero-exists"),
    pytest.param("", "exists", True, True, id="G3-empty-text-exists"),
    pytest.param(False, "exists", True, True, id="G3-false-exists"),
    pytest.param([], "exists", True, True, id="G3-empty-list-exists"),
    pytest.param("cat", "contains", "a", True, id="G6-text-contains"),
    pytest.param("cat", "contains", "", True, id="G6-text-contains-empty"),
    pytest.param("5", "contains", 5, False, id="G6-text-contains-number"),
    pytest.param(["a"], "contains", "a", True, id="G6-list-contains"),
    pytest.param(["cat"], "contains", "a", False, id="G6-list-contains-part"),
    pytest.param({"a": 1}, "contains", "a", False, id="G6-object-contains-key"),
    pytest.param(5, "contains", "a", False, id="G6-number-contains"),
    pytest.param(None, "contains", "a", False, id="G6-null-contains"),
    pytest.param([True], "contains", 1, False, id="G6-bools-contain-number"),
    pytest.param([1.0], "contains", 1, True, id="G6-floats-contain-int"),
    pytest.param([None], "contains", None, True, id="G6-list-contains-null"),
    pytest.param([{"a": 1, "b": 2}], "contains", {"b": 2, "a": 1.0}, True, id="G6-list-contains-object"),
    pytest.param(b"cat", "contains", b"a", False, id="G6-bytes-contain"),
    pytest.param(2**53 + 1, "gt", float(2**53), True, id="exact-int-gt-float"),
    pytest.param(2**53 + 1, "eq", float(2**53), False, id="exact-int-eq-float"),
    pytest.param(0.1, "eq", Decimal128("0.1"), False, id="exact-float-eq-decimal"),
    pytest.param(0.1, "gt", Decimal128("0.1"), True, id="exact-float-gt-decimal"),
    pytest.param(2**63 - 1, "lt", Decimal128("9223372036854775807.5"), True, id="exact-int-lt-decimal"),
    pytest.param(Decimal128("1E+6144"), "gt", 2**62, True, id="huge-decimal-gt-int"),
    pytest.param(Decimal128("Infinity"), "gt", 1.7e308, True, id="decimal-infinity-gt-float"),
    pytest.param(Decimal128("Infinity"), "eq", math.inf, True, id="infinities-eq"),
    pytest.param(-math.inf, "lt", Decimal128("-1E+6144"), True, id="infinity-lt-decimal"),
    pytest.param(-0.0, "eq", 0, True, id="minus-zero-eq"),
    pytest.param("b", "gt", "a", True, id="text-gt"),
    pytest.param("Z", "lt", "a", True, id="text-lt-by-code-point"),
    pytest.param("\U0001f600", "gt", "\uffff", True, id="text-gt-beyond-utf-16"),
    pytest.param("é", "eq", "e\u0301", False, id="text-eq-not-normalized"),
    pytest.param(NOON, "eq", SAME_NOON, True, id="datetime-eq-other-zone"),
    pytest.param(NOON, "gte", SAME_NOON, True, id="datetime-gte"),
    pytest.param(NOON, "lt", NOON + timedelta(milliseconds=1), True, id="datetime-lt"),
    pytest.param(NOON, "eq", NOON + timedelta(microseconds=1), True, id="F6-datetime-eq-below-millisecond"),
    pytest.param(NOON.replace(tzinfo=None), "lt", NOON, False, id="F6-naive-datetime-lt"),
    pytest.param(NOON.replace(tzinfo=None), "eq", NOON, False, id="F6-naive-datetime-eq"),
    pytest.param(UUID_1, "eq", UUID_1, True, id="F7-uuid-eq"),
    pytest.param(UUID_1, "eq", str(UUID_1), False, id="F7-uuid-eq-text"),
    pytest.param(UUID_1, "in", [uuid4(), UUID_1], True, id="F7-uuid-in"),
    pytest.param(UUID(int=2), "gt", UUID_1, False, id="uuids-have-no-order"),
    pytest.param(ID_1, "eq", ID_1, True, id="objectid-eq"),
    pytest.param(ID_1, "eq", str(ID_1), False, id="objectid-eq-text"),
    pytest.param(ObjectId(), "gt", ID_1, False, id="objectids-have-no-order"),
    pytest.param(b"a", "eq", b"a", True, id="bytes-eq"),
    pytest.param(b"a", "eq", "a", False, id="bytes-eq-text"),
    pytest.param(Binary(b"a", 128), "eq", b"a", False, id="binary-of-another-kind-eq-bytes"),
    pytest.param(b"b", "gt", b"a", False, id="bytes-have-no-order"),
    pytest.param(True, "gt", False, False, id="bools-have-no-order"),
    pytest.param(None, "gte", None, False, id="null-has-no-order"),
    pytest.param([2], "gt", [1], False, id="lists-have-no-order"),
    pytest.param({"a": 1, "b": [1.0]}, "eq", {"b": [1], "a": Decimal128("1")}, True, id="object-eq-any-key-order"),
    pytest.param({"a": True}, "eq", {"a": 1}, False, id="object-eq-compares-inside"),
    pytest.param({"a": None}, "eq", {}, False, id="object-eq-null-field"),
    pytest.param({"a": NAN}, "eq", {"a": NAN}, True, id="object-eq-nan-inside"),
    pytest.param([1, 2], "eq", [2, 1], False, id="list-eq-in-order"),
    pytest.param([1], "eq", [1, 2], False, id="list-eq-length"),
    pytest.param([], "eq", {}, False, id="list-eq-object"),
    pytest.param(1, "in", [], False, id="in-nothing"),
    pytest.param({"a": 1}, "in", [{"a": 1.0}], True, id="object-in"),
]


@pytest.mark.parametrize(("actual", "op", "expected", "verdict"), TRUTH)
def test_truth_table(actual: Any, op: str, expected: Any, verdict: bool) -> None:
    assert compare(actual, op, expected) is verdict


@pytest.mark.parametrize("op", ORDERINGS)
@pytest.mark.parametrize("actual", ["5", None, MISSING, True, [11], {}, NAN, NOON, b"x", UUID_1, ID_1])
def test_g2_ordering_across_types_is_false(actual: Any, op: str) -> None:
    assert compare(actual, op, 10) is False


@pytest.mark.parametrize(("op", "verdicts"), [("gt", "001"), ("gte", "011"), ("lt", "100"), ("lte", "110")])
def test_orderings(op: str, verdicts: str) -> None:
    assert [compare(actual, op, 2) for actual in (1, 2, 3)] == [verdict == "1" for verdict in verdicts]


def test_comparing_ignores_what_the_thread_wants_of_decimals() -> None:
    strict = decimal.Context(prec=1, traps=[decimal.FloatOperation, decimal.InvalidOperation, decimal.Inexact])
    with decimal.localcontext(strict):
        assert compare(0.1, "gt", Decimal128("0.1"))
        assert compare(Decimal128("0.1"), "lt", 0.1)
        assert not compare(Decimal128("sNaN"), "lt", 12)
        assert compare(12, "eq", Decimal128("12"))


# --- groups -----------------------------------------------------------------------------------------------------------

YES, NO = leaf("eq", 1), leaf("eq", 2)


@pytest.mark.parametrize(
    ("condition", "verdict"),
    [
        (None, True),
        (YES, True),
        (NO, False),
        ({"all": [YES, YES]}, True),
        ({"all": [YES, NO]}, False),
        ({"any": [NO, YES]}, True),
        ({"any": [NO, NO]}, False),
        ({"not": NO}, True),
        ({"not": {"any": [NO, {"not": NO}]}}, False),
    ],
)
def test_groups(condition: Any, verdict: bool) -> None:
    assert holds(condition, {"x": 1}) is verdict


# --- paths ------------------------------------------------------------------------------------------------------------

DOTTED = {"a": {"b": 1}, "a.b": 2, "": 3, "$set": 4, "0": 5}


@pytest.mark.parametrize(
    ("path", "actual"),
    [
        ("$event.value.a.b", 1),
        (["$event", "value", "a", "b"], 1),
        (["$event", "value", "a.b"], 2),
        (["$event", "value", ""], 3),
        ("$event.value.$set", 4),
        ("$event.value.0", 5),
        ("$event.value", DOTTED),
        ("$event.seq", 7),
        ("$event.params.taskId", "T1"),
        ("$event.value.a.b.c", MISSING),
        ("$event.version", MISSING),
    ],
)
def test_f1_paths_into_the_event(path: Any, actual: Any) -> None:
    facts = Facts({"value": DOTTED, "seq": 7, "params": {"taskId": "T1"}})
    assert Condition.parse(leaf("exists", True, path)).explain(facts).actual == actual


def test_no_step_leads_into_a_list() -> None:
    assert not holds(leaf("exists", True, "$event.value.0"), ["a"])


@pytest.mark.parametrize(
    ("path", "actual"),
    [
        ("$state.stage/reviewed.a.b", 1),
        (["$state", "stage/reviewed", "a.b"], 2),
        (["$state", "stage/v1.2", "ok"], True),
        ("$state.stage/reviewed", {"a": {"b": 1}, "a.b": 2}),
        ("$state.requests/{requestId}.status", "new"),
        (["$state", "requests/{requestId}", "status"], "new"),
        ("$state.null", None),
        ("$state.absent", MISSING),
        ("$state.requests/{other}.status", MISSING),
    ],
)
def test_paths_into_the_state(path: Any, actual: Any) -> None:
    state = {
        "stage/reviewed": {"a": {"b": 1}, "a.b": 2},
        "stage/v1.2": {"ok": True},
        "requests/R1": {"status": "new"},
        "null": None,
    }
    facts = Facts({"params": {"requestId": "R1"}}, state)
    assert Condition.parse(leaf("exists", True, path)).explain(facts).actual == actual


def test_the_needed_state_is_known_before_evaluation() -> None:
    condition = Condition.parse(
        {
            "any": [
                leaf("eq", 1, "$state.stage/reviewed.a"),
                {"not": leaf("eq", 1, ["$state", "stage/reviewed", "b.c"])},
                leaf("eq", 1, "$state.requests/{requestId}/note"),
                leaf("eq", 1, "$state.x/{other}"),
                leaf("eq", 1, "$event.value.x"),
            ]
        }
    )
    assert condition.state_paths({"requestId": "R1"}) == {"stage/reviewed", "requests/R1/note"}
    assert Condition.parse(None).state_paths({}) == frozenset()


def test_captures_that_the_pattern_lacks_are_named_by_clause() -> None:
    condition = Condition.parse(
        {"all": [leaf("eq", 1, "$event.params.taskId"), {"not": leaf("eq", 1, "$state.r/{requestId}.x")}]}
    )
    assert condition.unknown_captures({"taskId", "requestId"}) == []
    assert condition.unknown_captures({"taskId"}) == [
        "condition.all[1].not.path: the pattern has no capture 'requestId'; it has taskId"
    ]
    assert condition.unknown_captures(())[0].startswith("condition.all[0].path:")


# --- facts of an event ------------------------------------------------------------------------------------------------


def event(**changes: Any) -> Event:
    fields = {
        "id": "e" * 24,
        "namespace": "/tasks/T1",
        "seq": 3,
        "path": "/tasks/T1/requests/R1",
        "version": 2,
        "op": "set",
        "value": {"status": "confirmed"},
        "actor": "user:U7",
        "source": "api",
        "trigger_depth": 1,
        "caused_by_event_id": "c" * 24,
        "root_event_id": "d" * 24,
        "batch_id": "b",
        "committed_at": NOON,
    }
    return Event(**(fields | changes))


def test_facts_are_the_event_by_its_names_on_the_wire() -> None:
    facts = Facts.of(event(), {"taskId": "T1"})
    assert facts.event == {
        "id": "e" * 24,
        "namespace": "/tasks/T1",
        "seq": 3,
        "path": "/tasks/T1/requests/R1",
        "version": 2,
        "op": "set",
        "value": {"status": "confirmed"},
        "actor": "user:U7",
        "source": "api",
        "triggerDepth": 1,
        "causedByEventId": "c" * 24,
        "rootEventId": "d" * 24,
        "committedAt": NOON,
        "params": {"taskId": "T1"},
    }
    for name in facts.event:
        assert holds(leaf("exists", True, f"$event.{name}"), event=facts.event)


def test_g1_a_delete_has_no_value_and_a_root_no_cause() -> None:
    facts = Facts.of(event(op="delete", value=None, caused_by_event_id=None), {})
    for name in ("value", "causedByEventId"):
        assert Condition.parse(leaf("exists", False, f"$event.{name}")).evaluate(facts)
    assert Condition.parse(leaf("exists", True, "$event.value")).evaluate(Facts.of(event(value=None), {}))


# --- what is refused --------------------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    condition: Any = YES
    for _ in range(depth - 1):
        condition = {"not": condition}
    return condition


def deep_list(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CYCLE: dict[str, Any] = {}
CYCLE["not"] = CYCLE

MALFORMED = [
    pytest.param({}, "condition: it lacks 'path' and 'op'", id="empty"),
    pytest.param([], "condition: a clause is an object, not list", id="list"),
    pytest.param("x", "condition: a clause is an object, not str", id="text"),
    pytest.param(True, "condition: a clause is an object, not bool", id="bool"),
    pytest.param({"all": {}}, "condition.all: it takes a list", id="all-object"),
    pytest.param({"all": "x"}, "condition.all: it takes a list", id="all-text"),
    pytest.param({"all": (YES,)}, "condition.all: it takes a list", id="all-tuple"),
    pytest.param({"any": []}, "condition.any: it takes a list of at least one", id="any-empty"),
    pytest.param({"any": [None]}, "condition.any[0]: a clause is an object, not null", id="any-null"),
    pytest.param({"not": []}, "condition.not: a clause is an object, not list", id="not-list"),
    pytest.param({"not": None}, "condition.not: a clause is an object, not null", id="not-null"),
    pytest.param({"all": [YES], "any": [YES]}, "condition: unknown key 'all', 'any'", id="two-groups"),
    pytest.param({"not": YES, "path": "$event.op"}, "condition: unknown key 'not'", id="group-and-leaf"),
    pytest.param({**YES, "flags": "i"}, "condition: unknown key 'flags'", id="unknown-key"),
    pytest.param({1: 2}, "condition: unknown key '1'", id="key-that-is-no-text"),
    pytest.param({"op": "eq", "value": 1}, "condition: it lacks 'path'", id="no-path"),
    pytest.param({"path": "$event.op", "value": 1}, "condition: it lacks 'op'", id="no-op"),
    pytest.param(leaf("like", 1), "condition.op: unknown operator 'like'; use one of eq ne gt gte", id="op"),
    pytest.param(leaf("EQ", 1), "condition.op: unknown operator 'EQ'", id="op-case"),
    pytest.param({**YES, "op": ["eq"]}, "condition.op: unknown operator list", id="op-list"),
    pytest.param({**YES, "op": deep_list(5_000)}, "condition.op: unknown operator list", id="op-deep-list"),
    pytest.param({"path": "$event.op", "op": "eq"}, "condition.value: eq needs a value", id="no-value"),
    pytest.param(leaf("in", "abc"), "condition.value: in takes a list of values, not str", id="in-text"),
    pytest.param(leaf("in", (1, 2)), "condition.value: in takes a list of values, not tuple", id="in-tuple"),
    pytest.param(leaf("in", {"a": 1}), "condition.value: in takes a list", id="in-object"),
    pytest.param(leaf("exists", 1), "condition.value: exists takes a bool, not int", id="exists-number"),
    pytest.param(leaf("exists", None), "condition.value: exists takes a bool, not null", id="exists-null"),
    pytest.param(leaf("eq", NOON.replace(tzinfo=None)), "condition.value: ", id="naive-datetime"),
    pytest.param(leaf("eq", {"when": [NOON.replace(tzinfo=None)]}), "condition.value.when[0]: ", id="naive-inside"),
    pytest.param(leaf("eq", object()), "condition.value: ", id="foreign-value"),
    pytest.param(leaf("eq", 2**63), "condition.value: ", id="int-too-large"),
    pytest.param(leaf("eq", "\ud800"), "condition.value: ", id="surrogate"),
    pytest.param(leaf("eq", "x" * 70_000), "condition.value: ", id="value-too-large"),
    pytest.param(leaf("eq", deep_list(33)), "condition.value", id="value-too-deep"),
    pytest.param(leaf("eq", deep_list(5_000)), "condition.value", id="value-far-too-deep"),
    pytest.param(leaf("eq", 1, "$event"), "condition.path: $event alone", id="event-alone"),
    pytest.param(leaf("eq", 1, ["$event"]), "condition.path: $event alone", id="event-alone-list"),
    pytest.param(leaf("eq", 1, "$state"), "condition.path: $state alone", id="state-alone"),
    pytest.param(leaf("eq", 1, "$event..x"), "condition.path: '$event..x' has an empty step", id="event-empty-step"),
    pytest.param(leaf("eq", 1, "$event.value."), "condition.path: '$event.value.' has an empty", id="event-trailing"),
    pytest.param(leaf("eq", 1, "$state..x"), "condition.path: '$state..x' has an empty step", id="state-empty-step"),
    pytest.param(leaf("eq", 1, "$env.x"), "condition.path: '$env' is nothing to look into", id="env"),
    pytest.param(leaf("eq", 1, "event.op"), "condition.path: 'event' is nothing", id="no-dollar"),
    pytest.param(leaf("eq", 1, ""), "condition.path: '' is nothing", id="path-empty"),
    pytest.param(leaf("eq", 1, "$event.status"), "condition.path: an event has no field 'status'; use", id="field"),
    pytest.param(leaf("eq", 1, "$event.patch"), "condition.path: an event has no field 'patch'", id="patch"),
    pytest.param(leaf("eq", 1, "$event.trigger_depth"), "condition.path: an event has no field", id="snake-case"),
    pytest.param(leaf("eq", 1, "$event.seq.x"), "condition.path: there is nothing below 'seq'", id="below-scalar"),
    pytest.param(leaf("eq", 1, "$event.params.a.b"), "condition.path: there is nothing below 'a'", id="below-param"),
    pytest.param(leaf("eq", 1, "$state.a//b"), "condition.path: segment '' of the $state path is empty", id="segment"),
    pytest.param(leaf("eq", 1, "$state./a"), "condition.path: segment ''", id="state-absolute"),
    pytest.param(leaf("eq", 1, "$state.a/*"), "condition.path: segment '*'", id="H1-state-wildcard"),
    pytest.param(leaf("eq", 1, "$state.a/x-{id}"), "condition.path: segment 'x-{id}'", id="partial-capture"),
    pytest.param(leaf("eq", 1, ["$state", "a/.."]), "condition.path: segment '..'", id="state-upwards"),
    pytest.param(leaf("eq", 1, ["$state", "/".join("a" * 31)]), "condition.path: no path has more", id="state-long"),
    pytest.param(leaf("eq", 1, None), "condition.path: a path is text, or a list of text", id="path-null"),
    pytest.param(leaf("eq", 1, []), "condition.path: a path is text, or a list of text", id="path-empty-list"),
    pytest.param(leaf("eq", 1, ["$event", 1]), "condition.path: a path is text, or a list", id="path-list-number"),
    pytest.param(leaf("eq", 1, ["$event", "value", "\ud800"]), "condition.path: ", id="path-surrogate"),
    pytest.param(nested(17), "condition: it is nested deeper than 16 clauses", id="depth-17"),
    pytest.param(nested(5_000), "condition: it is nested deeper than 16 clauses", id="depth-5000"),
    pytest.param(CYCLE, "condition: it is nested deeper than 16 clauses", id="cycle"),
    pytest.param({"all": [YES] * 256}, "condition: it has more than 256 clauses", id="257-clauses"),
    pytest.param({"all": [{"any": [YES] * 100}] * 3}, "condition: it has more than 256 clauses", id="304-clauses"),
]


@pytest.mark.parametrize(("condition", "problem"), MALFORMED)
def test_g4_a_malformed_condition_is_refused_naming_the_clause(condition: Any, problem: str) -> None:
    with pytest.raises(InvalidConditionError) as refused:
        Condition.parse(condition)
    assert len(refused.value.problems) == 1
    assert refused.value.problems[0].startswith(problem)
    assert isinstance(refused.value, StateLayerError)


def test_g4_every_problem_is_told() -> None:
    condition = {
        "all": [
            YES,
            leaf("like", 1, "$env.x"),
            {"not": {"any": [leaf("in", 5), {"all": []}]}},
        ]
    }
    with pytest.raises(InvalidConditionError) as refused:
        Condition.parse(condition)
    assert [problem.partition(": ")[0] for problem in refused.value.problems] == [
        "condition.all[1].path",
        "condition.all[1].op",
        "condition.all[2].not.any[0].value",
        "condition.all[2].not.any[1].all",
    ]
    assert all(problem in str(refused.value) for problem in refused.value.problems)


def test_the_largest_condition_is_taken() -> None:
    assert holds(nested(16), {"x": 2})
    assert holds({"all": [YES] * 255}, {"x": 1})


# --- keeping ----------------------------------------------------------------------------------------------------------


def test_a_condition_is_kept_as_given_in_canonical_values() -> None:
    source = {
        "all": [
            leaf("eq", NOON.replace(microsecond=1_500).astimezone(timezone(timedelta(hours=8)))),
            {"any": [{"path": ["$event", "value", "a.b"], "op": "exists"}]},
            {"not": leaf("in", [1, Int64(2)])},
        ]
    }
    kept = Condition.parse(source).document
    assert kept == {
        "all": [
            leaf("eq", NOON.replace(microsecond=1_000)),
            {"any": [leaf("exists", True, ["$event", "value", "a.b"])]},
            {"not": leaf("in", [1, 2])},
        ]
    }
    assert Condition.parse(kept).document == kept
    assert Condition.parse(None).document is None


def test_f10_nobody_else_holds_what_a_condition_compares_with() -> None:
    expected = {"a": [1]}
    condition = Condition.parse(leaf("eq", expected))
    expected["a"].append(2)
    condition.document["value"]["a"].append(3)  # type: ignore[index]
    assert condition.evaluate(Facts({"value": {"x": {"a": [1]}}}))


# --- explaining -------------------------------------------------------------------------------------------------------


def test_an_explanation_tells_every_leaf_also_those_that_no_longer_decide() -> None:
    condition = Condition.parse(
        {"all": [leaf("eq", "set", "$event.op"), {"not": leaf("gt", 10)}, leaf("exists", True, "$state.stage.ok")]}
    )
    told = condition.explain(Facts({"op": "merge", "value": {"x": 11}}))
    assert (told.clause, told.op, told.holds) == ("condition", "all", False)
    assert [(part.clause, part.op, part.holds) for part in told.parts] == [
        ("condition.all[0]", "eq", False),
        ("condition.all[1]", "not", False),
        ("condition.all[2]", "exists", False),
    ]
    assert [(part.clause, part.path, part.expected, part.actual, part.holds) for part in told.leaves()] == [
        ("condition.all[0]", "$event.op", "set", "merge", False),
        ("condition.all[1].not", "$event.value.x", 10, 11, True),
        ("condition.all[2]", "$state.stage.ok", True, MISSING, False),
    ]


def test_no_condition_explains_itself_as_always() -> None:
    told = Condition.parse(None).explain(Facts({}))
    assert (told.op, told.holds, list(told.leaves())) == ("always", True, [])
    assert repr(MISSING) == "missing"


# --- whatever the facts hold ------------------------------------------------------------------------------------------

numbers = (
    st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.sampled_from(["NaN", "sNaN", "-Infinity", "1E+6144", "1E-6176", "0.1", "-0"]).map(Decimal128)
    | st.decimals(allow_nan=False, allow_infinity=False, places=3, min_value=-(10**9), max_value=10**9).map(Decimal128)
)
scalars = (
    numbers
    | st.none()
    | st.booleans()
    | st.text(max_size=5)
    | st.binary(max_size=3)
    | st.uuids()
    | st.datetimes(timezones=st.just(UTC))
    | st.binary(min_size=12, max_size=12).map(ObjectId)
)
valid = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner), max_leaves=6)
broken = (
    valid
    | st.datetimes()
    | st.integers()
    | st.fractions()
    | st.sampled_from([object(), MaxKey(), Regex("("), Timestamp(1, 1), Binary(b"x", 128), deep_list(900)])
)


def storable(value: Any) -> bool:
    try:
        Condition.parse(leaf("eq", value))
    except InvalidConditionError:
        return False
    return True


@given(broken, st.sampled_from(OPERATORS), valid.filter(storable), st.booleans())
def test_evaluation_never_raises_and_explains_what_it_says(actual: Any, op: str, value: Any, exists: bool) -> None:
    expected = {"exists": exists, "in": [value]}.get(op, value)
    condition = Condition.parse(leaf(op, expected))
    facts = Facts({"value": {"x": actual}})
    assert condition.evaluate(facts) is condition.explain(facts).holds


@given(valid.filter(storable), valid.filter(storable))
def test_equality_is_reflexive_and_symmetric_and_ne_its_negation(left: Any, right: Any) -> None:
    assert compare(Condition.parse(leaf("eq", left)).document["value"], "eq", left)  # type: ignore[index]
    assert compare(left, "eq", right) is compare(right, "eq", left)
    assert compare(left, "ne", right) is not compare(left, "eq", right)


@given(numbers, numbers)
def test_numbers_are_below_equal_or_above_unless_one_is_nan(left: Any, right: Any) -> None:
    below, same, above = (compare(left, op, right) for op in ("lt", "eq", "gt"))
    nan = any(str(number).lower().endswith("nan") for number in (left, right))
    assert below + same + above == 1 or (nan and not below and not above)
    assert compare(left, "lte", right) is (below or (same and not nan))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.sampled_from(["$event.op", "eq", "$state.x", ""]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["all", "any", "not", "path", "op", "value"]), inner, max_size=3)
        ),
    )
)
def test_g4_any_json_is_a_condition_or_refused(source: Any) -> None:
    try:
        condition = Condition.parse(source)
    except InvalidConditionError as refused:
        problems = refused.problems
    else:
        problems = ()
        assert condition.evaluate(Facts({"op": "eq"})) in {True, False}
        assert Condition.parse(condition.document) == condition
    assert all(problem.startswith("condition") for problem in problems)
