"""Decision records stay true: the tests that they name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
RECORDS = sorted((REPOSITORY / "docs" / "decisions").glob("[0-9]*.md"))
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_records_are_numbered_in_order() -> None:
    assert [int(record.name[:4]) for record in RECORDS] == list(range(1, len(RECORDS) + 1))


@pytest.mark.parametrize("record", RECORDS[1:], ids=lambda record: record.stem)
def test_a_record_names_tests_that_exist(record: Path) -> None:
    held_by = record.read_text().partition("## Held by")[2]
    named = NAMED.findall(held_by)
    assert named
    for file, test in named:
        source = (REPOSITORY / file).read_text()
        assert not test or re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), f"{file} has no {test}"


@pytest.mark.parametrize("promise", range(1, 11))
def test_every_promise_but_the_explained_one_has_a_record(promise: int) -> None:
    titles = [record.read_text().splitlines()[0] for record in RECORDS]
    assert promise == 9 or any(f" P{promise}: " in title for title in titles)
