"""Reading declarations: a broken line is reported with its number, and the rest goes on."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelayer.demo.classifier import UnclassifiableError, classify
from statelayer.demo.requests import BrokenLine, Request, read_file, read_requests

REPOSITORY = Path(__file__).parent.parent
SHIPPED = REPOSITORY / "statelayer" / "demo" / "requests.jsonl"

EXPECTED_CODES = {
    "T-2041": {"S-001": "6109", "S-002": "4202", "S-003": "6505", "S-005": "6215"},
    "T-2042": {"S-001": "6912", "S-002": "7323", "S-003": "8211", "S-004": "9617", "S-005": "4419"},
    "T-2043": {"S-001": "8517", "S-002": "8518", "S-003": "8504", "S-004": "8528"},
    "T-2044": {"S-001": "0901", "S-002": "1509", "S-003": "2204", "S-004": "0409", "S-006": "0902"},
    "T-2045": {"S-001": "8712", "S-002": "6506", "S-004": "8512", "S-005": "8711"},
    "T-2046": {"S-001": "9503", "S-002": "9503", "S-003": "9504", "S-004": "4903", "S-005": "9202"},
    "T-2047": {"S-001": "9401", "S-002": "9403", "S-003": "9405", "S-004": "5702", "S-006": "6302"},
    "T-2048": {"S-001": "3303", "S-002": "3304", "S-003": "9603", "S-004": "7113", "S-005": "9102", "S-006": "9018"},
}


def line(**changes: Any) -> str:
    fields: dict[str, Any] = {
        "requestId": "S-1",
        "taskId": "T-1",
        "user": "U7",
        "description": "Wall clock",
        "origin": "DE",
        "value": 12.5,
        "currency": "EUR",
        "status": "confirmed",
    }
    fields.update(changes)
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


def only(*lines: str | bytes) -> Request | BrokenLine:
    (found,) = read_requests(lines)
    return found


def reason(*lines: str | bytes) -> str:
    found = only(*lines)
    assert isinstance(found, BrokenLine)
    return found.reason


def test_a_line_becomes_a_request() -> None:
    request = only(line(quantity=3, unit="pcs"))
    assert isinstance(request, Request)
    assert request.path == "/tasks/T-1/requests/S-1"
    assert request.actor == "user:U7"
    assert request.fact() == json.loads(line(quantity=3, unit="pcs"))
    assert "unit" not in Request.model_validate_json(line()).fact()


def test_a_whole_number_stays_one() -> None:
    request = only(line(value=12))
    assert isinstance(request, Request)
    assert json.dumps(request.fact()["value"]) == "12"


def test_broken_lines_are_numbered_and_the_rest_goes_on() -> None:
    found = list(read_requests([line(), "\n", "{", line(requestId="S-2"), "[]", line(requestId="S-3")]))
    assert [item.number if isinstance(item, BrokenLine) else item.request_id for item in found] == [
        *("S-1", 3, "S-2", 5, "S-3"),
    ]


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_a_byte_order_mark_and_any_line_ending_are_tolerated(ending: str) -> None:
    assert isinstance(only("\ufeff" + line() + ending), Request)
    assert isinstance(only(b"\xef\xbb\xbf" + (line() + ending).encode()), Request)
    assert isinstance(only("\ufeff" + ending, line() + ending), Request)


def test_a_byte_order_mark_inside_the_file_is_no_json() -> None:
    _, second = read_requests([line(), "\ufeff" + line(requestId="S-2")])
    assert isinstance(second, BrokenLine)


def test_a_request_appears_once_in_its_task() -> None:
    found = list(read_requests([line(), line(taskId="T-2"), "", line(description="Another clock")]))
    assert [type(item) for item in found] == [Request, Request, BrokenLine]
    assert found[2] == BrokenLine(
        4, "request S-1 of task T-1 appears again, first on line 1", line(description="Another clock")
    )


def test_a_broken_line_does_not_occupy_the_id() -> None:
    _, second = read_requests([line(value=-1), line()])
    assert isinstance(second, Request)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (line(description=...), "description is missing"),
        (line(description=" "), "description must not be blank"),
        (line(description=5), "description must be text, not a number"),
        (line(value=-3), "value must be greater than 0, not -3"),
        (line(value=0), "value must be greater than 0, not 0"),
        (line(value="1,200"), 'value must be a number, not the text "1,200"'),
        (line(value=True), "value must be a number, not true or false"),
        (line(value=10**30), f"value must be at most 1,000,000,000,000,000, not {10**30}"),
        (line().replace("12.5", "NaN"), "the line is not JSON: NaN is no JSON number"),
        (line(requestId="INV/1"), "requestId must be one path segment, but \"INV/1\" holds '/'"),
        (line(taskId=""), 'taskId must be one path segment, but "" is empty'),
        (line(user=None), "user must be text, not null"),
        (line(origin="Germany"), 'origin must be a two-letter country code such as "DE", not "Germany"'),
        (line(currency="eur"), 'currency must be a three-letter currency code such as "EUR", not "eur"'),
        (line(status="done"), 'status must be "confirmed" or "draft", not the text "done"'),
        (line(colour="red"), "colour is not a known field"),
        (line(origin=..., currency=...), "origin is missing; currency is missing"),
        ('{"a": 1, "a": 2}', '"a" stands twice in one object'),
        ("[1]", "the line holds a list where a JSON object is expected"),
        ('{"a" 1}', "the line is not JSON: expecting ':' delimiter at character 6"),
        (line(description="\ud800"), "the line holds half of a surrogate pair, which is no character"),
        (b"\xff{}", "the line is not UTF-8 text: byte 1 cannot be read"),
        ("[" * 100_000, "the line is not JSON that can be read: it is too large or too deeply nested"),
        (
            '{"value": ' + "9" * 5000 + "}",
            "the line is not JSON that can be read: it is too large or too deeply nested",
        ),
    ],
    ids=lambda value: value[:60] if isinstance(value, str) and not value.startswith(("{", "[")) else "",
)
def test_the_reason_says_what_is_wrong(text: str | bytes, expected: str) -> None:
    assert reason(text) == expected


def test_a_reason_stays_short() -> None:
    assert len(reason(line(origin="x" * 10_000))) < 150


@given(st.lists(st.text() | st.binary(), max_size=5))
def test_no_line_stops_the_reading(lines: list[str | bytes]) -> None:
    for found in read_requests(lines):
        assert isinstance(found, BrokenLine)
        assert found.reason
        assert "http" not in found.reason


def test_the_example_of_the_issue_is_the_file_that_ships() -> None:
    example = REPOSITORY / "examples" / "customs" / "requests.jsonl"
    assert example.samefile(SHIPPED)
    assert resources.files("statelayer.demo").joinpath("requests.jsonl").read_bytes() == SHIPPED.read_bytes()


def test_the_shipped_file_is_broken_where_it_means_to_be() -> None:
    broken = [item for item in read_file(SHIPPED) if isinstance(item, BrokenLine)]
    assert [(item.number, item.reason) for item in broken] == [
        (11, "the line is not JSON: expecting ',' delimiter at character 110"),
        (16, "description is missing"),
        (22, 'value must be a number, not the text "1,240.00"'),
        (26, "requestId must be one path segment, but \"INV/2045-3\" holds '/'"),
        (34, "value must be greater than 0, not -85"),
    ]


def test_the_shipped_requests_are_classified_but_for_three() -> None:
    requests = [item for item in read_file(SHIPPED) if isinstance(item, Request)]
    codes: dict[str, dict[str, str]] = {task: {} for task in EXPECTED_CODES}
    refused = []
    for request in requests:
        try:
            codes[request.task_id][request.request_id] = classify(request.description).code
        except UnclassifiableError:
            refused.append((request.description, request.status))
    assert codes == EXPECTED_CODES
    assert refused == [
        *(("Assorted gifts", "confirmed"), ("Spare parts, misc.", "confirmed"), ("Personal effects", "confirmed")),
    ]
    assert {request.status for request in requests} == {"confirmed", "draft"}
