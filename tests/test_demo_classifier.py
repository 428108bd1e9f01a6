"""The demo's classifier: the right heading, or an honest refusal."""

from __future__ import annotations

import csv
import re
from importlib import resources
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statelayer.demo.classifier import (
    ACCEPTED_SCORE,
    Classification,
    HeadingTable,
    RunnerUp,
    UnclassifiableError,
    classify,
    words_of,
)

if TYPE_CHECKING:
    from random import Random

TABLE = HeadingTable.load()
TERMS = [(heading.code, term) for heading in TABLE.headings.values() for term in heading.terms]


def outcome(description: str) -> Classification | tuple[RunnerUp, ...]:
    try:
        return classify(description)
    except UnclassifiableError as error:
        return error.candidates


def test_the_table_holds_real_looking_headings_and_enough_of_them() -> None:
    assert len(TABLE.headings) >= 150
    for code, heading in TABLE.headings.items():
        assert re.fullmatch(r"\d{4}", code)
        assert 1 <= int(code[:2]) <= 97
        assert code[:2] != "77", "chapter 77 is reserved and has no headings"
        assert code[2:] != "00"
        assert heading.code == code
        assert heading.description
        assert all(words_of(term) for term in heading.terms)


def test_no_code_and_no_term_stands_twice_in_the_table() -> None:
    table = resources.files("statelayer.demo").joinpath("hs_headings.csv").read_text(encoding="utf-8")
    codes = [row["code"] for row in csv.DictReader(table.splitlines())]
    assert len(codes) == len(set(codes)) == len(TABLE.headings)
    terms = [term for _, term in TERMS]
    assert len(terms) == len(set(terms))


def test_no_term_of_the_table_leads_to_another_heading() -> None:
    found = {term: (code, outcome(term)) for code, term in TERMS}
    refused = {term for term, (_, got) in found.items() if isinstance(got, tuple)}
    assert [term for term, (code, got) in found.items() if isinstance(got, Classification) and got.code != code] == []
    # An oil lamp and lamp oil are the same words; nothing else may be in doubt.
    assert refused == {
        *("pipe tobacco", "tobacco pipe", "lamp oil", "oil lamp", "safety glass", "safety glasses"),
        *("camera film", "film camera", "35mm film camera"),
    }


@pytest.mark.parametrize(
    ("description", "code"),
    [
        ("men’s cotton t-shirts, 200 pcs", "6109"),
        ("Ladies' handbag, brown cowhide leather, with shoulder strap", "4202"),
        ("LEATHER WALLET, black, with coin pocket", "4202"),
        ("Electric kettle 1.7 l, stainless steel, 2200 W", "8516"),
        ("Porcelain dinner plates with blue floral pattern", "6911"),
        ("Electric bicycle with 250 W motor and lithium battery", "8711"),
        ("Bicycle locks, folding, hardened steel", "8301"),
        ("bicycle chains, 11-speed", "7315"),
        ("Single malt Scotch whiskey, 12 years, 70 cl", "2208"),
        ("Moisturizing face cream", "3304"),
        ("Scented soy candles in glass jars", "3406"),
        ("Solid wood coffee table", "9403"),
        ("ground coffee, 500 g", "0901"),
        ("instant coffee, 200g jar", "2101"),
        ("Laptop computer 14 inch, 16 GB RAM, 512 GB SSD", "8471"),
        ("Power bank 20000 mAh", "8507"),
        ("Leather watch straps 20 mm", "9113"),
        ("Polarised sunglasses with case", "9004"),
        ("Gold plated necklace with pendant, fashion", "7117"),
        ("Men's denim jeans, slim fit", "6203"),
        ("women's jeans", "6204"),
        ("Two-person camping tent, 2.1 kg", "6306"),
        ("Cordless drill 18 V with two batteries", "8467"),
        ("Carbon fishing rod and reel", "9507"),
        ("Dry dog food, chicken and rice, 15 kg", "2309"),
        ("Silicone phone cases", "3926"),
        ("3D printers", "8485"),
        ("Camera drone with three batteries", "8806"),
        ("wireless headphnes", "8518"),
        ("Original oil painting on canvas, framed", "9701"),
        ("aluminum ladder", "7616"),
        ("pâté de foie gras", "1602"),
        ("Baby diapers size 4, 120 pcs", "9619"),
        ("Red lentils, dried", "0713"),
    ],
)
def test_goods_in_everyday_words_find_their_heading(description: str, code: str) -> None:
    found = classify(description)
    assert found.code == code
    assert found.heading == TABLE.headings[code].description
    assert 0 < found.score <= 100
    assert code not in {runner_up.code for runner_up in found.runners_up}


@pytest.mark.parametrize(
    "description",
    [
        *("assorted gifts", "samples", "personal effects", "spare parts misc", "Various household goods", "documents"),
        *("see attached packing list", "clothing", "electronics", "accessories", "12345", "…", "", "leather goods"),
        *("machine parts", "replacement part", "kitchen stuff", "used items", "office supplies"),
    ],
)
def test_what_names_no_goods_is_refused(description: str) -> None:
    with pytest.raises(UnclassifiableError, match="say what the goods are") as caught:
        classify(description)
    assert caught.value.description == description
    assert all(candidate.score < ACCEPTED_SCORE for candidate in caught.value.candidates)


@pytest.mark.parametrize(
    ("description", "codes"),
    [
        ("bicycle and guitar", {"8712", "9202"}),
        ("hand cream and soap", {"3304", "3401"}),
        ("safety glasses", {"7007", "9004"}),
    ],
)
def test_two_kinds_of_goods_are_refused_with_both_named(description: str, codes: set[str]) -> None:
    with pytest.raises(UnclassifiableError, match="about equally; say which") as caught:
        classify(description)
    assert codes <= {candidate.code for candidate in caught.value.candidates}
    assert all(code in str(caught.value) for code in codes)


@pytest.mark.parametrize(
    ("description", "noun"),
    [("tea strainer", "strainer"), ("swimming pool chemicals", "chemical"), ("shoes and shirts", "shoe")],
)
def test_goods_that_only_share_a_word_with_a_heading_are_refused(description: str, noun: str) -> None:
    with pytest.raises(UnclassifiableError, match=f'knows no "{noun}"'):
        classify(description)


def test_a_detail_does_not_outweigh_the_goods() -> None:
    assert classify("Acoustic guitar with bag").code == "9202"
    assert classify("Scented candle in a glass jar").code == "3406"
    with pytest.raises(UnclassifiableError, match=r"fits 4202 .* and 9004 .* say which"):
        classify("Sunglasses in a leather case")


def test_a_long_description_does_not_fill_the_message() -> None:
    with pytest.raises(UnclassifiableError) as caught:
        classify("thing " * 10_000)
    assert len(str(caught.value)) < 300


@given(
    st.sampled_from(TERMS), st.lists(st.sampled_from(["blue", "deluxe", "200", "pcs", "steel", "men"])), st.randoms()
)
def test_neither_word_order_nor_case_decides(known: tuple[str, str], extra: list[str], randomness: Random) -> None:
    words = [word for word in known[1].split() if word not in {"with", "in", "for"}] + extra
    expected = outcome(" ".join(words))
    randomness.shuffle(words)
    shuffled = " ".join(words)
    assert outcome(shuffled) == expected
    assert outcome(shuffled.upper()) == expected
    assert outcome(shuffled.title()) == expected


@given(st.text(max_size=200))
def test_any_text_is_classified_or_refused(text: str) -> None:
    assert isinstance(outcome(text), Classification | tuple)
