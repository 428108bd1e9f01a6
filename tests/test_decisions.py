"""Decision records and guarantees stay true: the tests that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
GUARANTEES = REPOSITORY / "docs" / "guarantees.md"
RECORDS = sorted((REPOSITORY / "docs" / "decisions").glob("[0-9]*.md"))
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_records_are_numbered_in_order() -> None:
    assert [int(record.name[:4]) for record in RECORDS] == list(range(1, len(RECORDS) + 1))


@pytest.mark.parametrize("record", RECORDS[1:], ids=lambda record: record.stem)
def test_a_record_names_tests_that_exist(record: Path) -> None:
    refuse_missing_tests(record.read_text().partition("## Held by")[2])


def test_each_guarantee_names_tests_that_exist() -> None:
    _, *promises = re.split(r"^## P", GUARANTEES.read_text(), flags=re.MULTILINE)
    assert [int(promise.split()[0]) for promise in promises] == list(range(1, 11))
    for promise in promises:
        refuse_missing_tests(promise)


def refuse_missing_tests(text: str) -> None:
    named = NAMED.findall(text)
    assert named
    for file, test in named:
        source = (REPOSITORY / file).read_text()
        assert not test or re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{file} has no {test}"


@pytest.mark.parametrize("promise", range(1, 11))
def test_every_promise_but_the_explained_one_has_a_record(promise: int) -> None:
    titles = [record.read_text().splitlines()[0] for record in RECORDS]
    assert promise == 9 or any(f" P{promise}: " in title for title in titles)
