"""Goods described in everyday words, to one heading of the Harmonized System: scored text matching, no model.

A heading is known by its terms ("coffee mug", "leather wallet"). A description is scored against every term that shares
a word with it: how much of the term is said, and how much of the description the heading accounts for. Rare words weigh
more than common ones, and a word that names goods ("chain") weighs more than one that only qualifies them ("black").
Misspelt words are mapped to the table's words by rapidfuzz. Within a phrase neither word order nor case takes part.
When two headings tie, what stands before "with", "in" or "for" decides: a drill with two batteries is a drill.

What names no goods, or two kinds of goods equally well, or other goods than the heading knows (a tea strainer is no
tea), is refused: a wrong code costs more than a question.
"""

from __future__ import annotations

import csv
import math
import re
import unicodedata
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple, Self

from rapidfuzz import process
from rapidfuzz.distance import OSA

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

ACCEPTED_SCORE = 70.0
"""A best heading below this is a guess, and guesses are refused."""

CLEAR_MARGIN = 16.0
"""Two headings, each wholly named, are a tie when their scores are nearer than this, unless one says strictly more."""

RUNNERS_UP = 3

_WORTH_NAMING = 40.0  # a weaker candidate would puzzle the reader of a refusal
_WHOLLY_NAMED = 0.9  # the share of a term that is said, misspelt words counting a little less
_SPELLING_SIMILARITY = 0.83  # one slip in a word of six letters, two in twelve
_SHORTEST_MISSPELT = 5
_RELATED_WORD_CREDIT = 0.6  # for a word that the heading knows from another of its terms
_UNKNOWN_WORD_WEIGHT = 0.4
_FREQUENT = 8  # terms that end with a word, for it to be a noun whatever stands before it
_MOSTLY_LAST = 0.5
_QUALIFIER_SHARE = 0.1  # of the weight of a word that never names goods
_SHOWN_CHARACTERS = 100

_FILLERS = frozenset({
    "a", "an", "and", "or", "of", "for", "with", "without", "in", "on", "at", "to", "from", "by", "the", "incl",
    "including", "containing", "per", "each", "made", "new", "other", "various", "assorted", "misc", "miscellaneous",
    "brand", "genuine", "quality", "premium", "deluxe", "approx", "about", "total", "pc", "pcs", "piece", "pair",
    "pack", "packed", "packet", "unit", "qty", "quantity", "dozen", "lot", "ea", "size", "small", "medium", "large",
    "xl", "xxl", "kg", "g", "mg", "gram", "lb", "oz", "ml", "cl", "l", "litre", "liter", "cm", "mm", "m", "metre",
    "inch", "ft", "w", "v", "mah", "gb", "tb",
})  # fmt: skip
_AMOUNT = re.compile(r"\d+(?!d$)[a-z]*")  # 200, 500ml, 12x; "3d" is a word
_WORD = re.compile(r"[a-z0-9]+")
_POSSESSIVE = re.compile(r"(?<=[a-z])['’`](?:s\b)?")
_DETAIL = re.compile(r"\b(?:with|without|including|incl|in|for)\b", re.IGNORECASE)
_CLAUSE = re.compile(r"[,;:(]")
_LETTER_COMPOUND = re.compile(r"\b([a-z])-(?=[a-z])")  # t-shirt, e-bike, u-lock

_ACCESSORIES = frozenset({
    "accessory", "board", "chemical", "cleaner", "cooler", "cover", "dipper", "dish", "dispenser", "fountain", "grater",
    "holder", "maker", "opener", "pad", "paper", "part", "rack", "repair", "replacement", "ring", "spare", "stand",
    "strainer", "strap", "trainer", "warmer", "wipe",
})  # fmt: skip
"""What stands for other goods than the word before it: a cheese grater is no cheese."""

_IRREGULAR = {
    "men": "man", "mens": "man", "gents": "man", "gentleman": "man", "gentlemen": "man", "male": "man", "boys": "man",
    "boy": "man", "women": "woman", "womens": "woman", "ladies": "woman", "lady": "woman", "female": "woman",
    "girl": "woman", "girls": "woman", "children": "child", "childrens": "child", "kid": "child", "kids": "child",
    "babies": "baby", "infant": "baby", "knives": "knife", "shelves": "shelf", "scarves": "scarf", "loaves": "loaf",
    "leaves": "leaf", "mice": "mouse", "teeth": "tooth", "feet": "foot", "tomatoes": "tomato", "potatoes": "potato",
    "mangoes": "mango", "lenses": "lens", "lens": "lens", "buses": "bus", "gas": "gas", "christmas": "christmas",
    "clothes": "clothing", "wooden": "wood", "woollen": "wool", "woolen": "wool", "golden": "gold", "knit": "knitted",
    "aluminum": "aluminium", "jewelry": "jewellery", "jewelery": "jewellery", "tire": "tyre", "tires": "tyre",
    "color": "colour", "coloured": "colour", "colored": "colour", "fiber": "fibre", "yoghurt": "yogurt",
    "whiskey": "whisky", "pajama": "pyjama", "pajamas": "pyjama", "moisturizer": "moisturiser",
    "moisturizing": "moisturiser", "moisturising": "moisturiser", "sanitizer": "sanitiser", "organizer": "organiser",
    "synthesizer": "synthesiser", "atomizer": "atomiser", "fertilizer": "fertiliser", "chili": "chilli",
    "gray": "grey", "plow": "plough", "mold": "mould", "cycle": "bicycle", "cycles": "bicycle",
}  # fmt: skip


class RunnerUp(NamedTuple):
    """A heading that also matched, with its score from 0 to 100."""

    code: str
    score: float


@dataclass(frozen=True, slots=True)
class Heading:
    """One four-digit heading: its code, what it covers, and the everyday names of goods that fall there."""

    code: str
    description: str
    terms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Classification:
    """The heading a description belongs to. ``score`` is 0 to 100; ``runners_up`` are the next best, best first."""

    code: str
    heading: str
    score: float
    runners_up: tuple[RunnerUp, ...]


class UnclassifiableError(ValueError):
    """The description fits no heading of the table, or several equally well."""

    def __init__(self, message: str, description: str, candidates: Sequence[RunnerUp]) -> None:
        super().__init__(message)
        self.description = description
        self.candidates = tuple(candidates)


class _Term(NamedTuple):
    code: str
    words: frozenset[str]


class _Match(NamedTuple):
    score: float
    code: str
    coverage: float
    explained: frozenset[str]

    @property
    def rank(self) -> tuple[float, list[str]]:
        """Total, so that the order in which terms are tried decides nothing."""
        return self.score, sorted(self.explained)

    def rivalled_by(self, other: _Match) -> bool:
        named = other.coverage >= _WHOLLY_NAMED
        return named and self.score - other.score < CLEAR_MARGIN and not other.explained < self.explained


@dataclass(frozen=True, slots=True)
class _Query:
    """A description's words that the table knows, how surely each was read (0 to 1), and the rest."""

    words: Mapping[str, float]
    unknown: int


@dataclass(frozen=True, slots=True)
class _Lexicon:
    """What the table as a whole says about its words."""

    weights: Mapping[str, float]
    naming: Mapping[str, float]
    """The share of the terms holding the word that end with it: 1 for what names goods, 0 for a mere qualifier."""
    terms_by_word: Mapping[str, Sequence[_Term]]
    words_by_code: Mapping[str, frozenset[str]]
    nouns: frozenset[str]
    """Words that name goods whatever stands before them: shoe, jacket, holder."""

    @classmethod
    def of(cls, headings: Collection[Heading]) -> Self:
        terms_by_word: dict[str, list[_Term]] = defaultdict(list)
        last_words: Counter[str] = Counter()
        words_by_code: dict[str, frozenset[str]] = {}
        for heading in headings:
            split = [words_of(term) for term in heading.terms]
            last_words.update(words[-1] for words in split)
            words_by_code[heading.code] = frozenset().union(*split)
            for words in split:
                term = _Term(heading.code, frozenset(words))
                for word in term.words:
                    terms_by_word[word].append(term)
        naming = {word: last_words[word] / len(terms) for word, terms in terms_by_word.items()}
        frequent = {word for word, count in last_words.items() if count >= _FREQUENT and naming[word] >= _MOSTLY_LAST}
        headings_by_word = Counter(word for words in words_by_code.values() for word in words)
        return cls(
            weights={word: math.log(1 + len(headings) / count) for word, count in headings_by_word.items()},
            naming=naming,
            terms_by_word=terms_by_word,
            words_by_code=words_by_code,
            nouns=_ACCESSORIES | frequent,
        )

    def read(self, description: str) -> _Query:
        read: dict[str, float] = {}
        unknown = 0
        for word in sorted(set(words_of(description))):
            known, similarity = (word, 1.0) if word in self.weights else self._corrected(word)
            if known is None:
                unknown += 1
            else:
                read[known] = max(similarity, read.get(known, 0.0))
        return _Query(dict(sorted(read.items())), unknown)

    def _corrected(self, word: str) -> tuple[str | None, float]:
        if len(word) < _SHORTEST_MISSPELT:
            return None, 0.0
        candidates = [known for known in self.weights if known[0] == word[0]]  # slips rarely hit the first letter
        found = process.extractOne(
            word, candidates, scorer=OSA.normalized_similarity, processor=None, score_cutoff=_SPELLING_SIMILARITY
        )
        return (found[0], found[1]) if found else (None, 0.0)

    def match(self, query: _Query, term: _Term) -> _Match:
        said = sum(self.weights[word] * query.words.get(word, 0.0) for word in sorted(term.words))
        coverage = said / sum(self.weights[word] for word in sorted(term.words))
        related = self.words_by_code[term.code]
        accounted = 0.0
        total = query.unknown * _UNKNOWN_WORD_WEIGHT
        for word in query.words:
            weight = self.weights[word]
            if word in term.words:
                accounted += weight
            else:
                weight *= max(self.naming[word], _QUALIFIER_SHARE)
                accounted += weight * _RELATED_WORD_CREDIT if word in related else 0.0
            total += weight
        score = 100 * coverage**2 * (0.5 + 0.5 * accounted / total)
        return _Match(score, term.code, coverage, term.words & query.words.keys())


@dataclass(frozen=True, slots=True)
class HeadingTable:
    """The headings that ship with the demo, ready to be matched against."""

    headings: Mapping[str, Heading]
    _lexicon: _Lexicon = field(repr=False)

    @classmethod
    @cache
    def load(cls) -> Self:
        """Read the table that is part of the package; later calls return the same one."""
        text = resources.files(__package__).joinpath("hs_headings.csv").read_text(encoding="utf-8")
        headings = {
            row["code"]: Heading(row["code"], row["description"], tuple(row["terms"].split("; ")))
            for row in csv.DictReader(text.splitlines())
        }
        return cls(headings, _Lexicon.of(headings.values()))

    def classify(self, description: str) -> Classification:
        """The heading that ``description`` belongs to; ``UnclassifiableError`` when that is not clear."""
        matches = self._ranked(description)
        candidates = tuple(RunnerUp(match.code, round(match.score, 1)) for match in matches[: RUNNERS_UP + 1])
        decision = self._decide(description, matches)
        if isinstance(decision, str):
            raise UnclassifiableError(f"{_quoted(description)} {decision}", description, candidates)
        others = tuple(candidate for candidate in candidates if candidate.code != decision.code)[:RUNNERS_UP]
        return Classification(decision.code, self._covers(decision), round(decision.score, 1), others)

    def _decide(self, description: str, matches: Sequence[_Match]) -> _Match | str:
        """The match to trust, or what to say of the description instead."""
        if not matches or matches[0].score < _WORTH_NAMING:
            return "names no goods that the table knows; say what the goods are"
        best = matches[0]
        if best.score < ACCEPTED_SCORE:
            return (
                f"is too vague: the nearest heading is {self._named(best)}, at {best.score:.0f} of 100 "
                f"where {ACCEPTED_SCORE:.0f} are needed; say what the goods are"
            )
        rivals = [match for match in matches[1:] if best.rivalled_by(match)]
        if code := self._code_of_what_comes_first(description):
            settled = next((match for match in [best, *rivals] if match.code == code), None)
            rivals = rivals or [match for match in matches if match.code == code]
        else:
            settled = None if rivals else best
        if settled is None:
            return f"fits {self._named(best)} and {self._named(rivals[0])} about equally; say which"
        if strange := self._noun_of_other_goods(description, settled):
            return f'resembles {self._named(settled)}, which knows no "{strange}"; say what the goods are'
        return settled

    def _ranked(self, description: str) -> list[_Match]:
        """The best match of each heading that shares a word with the description, best first."""
        query = self._lexicon.read(description)
        best: dict[str, _Match] = {}
        for term in {term for word in query.words for term in self._lexicon.terms_by_word[word]}:
            match = self._lexicon.match(query, term)
            held = best.get(term.code)
            if held is None or match.rank > held.rank:
                best[term.code] = match
        return sorted(best.values(), key=lambda match: (-match.score, match.code))

    def _code_of_what_comes_first(self, description: str) -> str | None:
        goods, *details = _DETAIL.split(description, maxsplit=1)
        decision = self._decide(goods, self._ranked(goods)) if details else ""
        return None if isinstance(decision, str) else decision.code

    def _noun_of_other_goods(self, description: str, best: _Match) -> str | None:
        """A noun among the goods, not their details, that the heading does not account for."""
        goods = _CLAUSE.split(_DETAIL.split(description, maxsplit=1)[0], maxsplit=1)[0]
        strange = set(words_of(goods)) & self._lexicon.nouns - self._lexicon.words_by_code[best.code]
        return min(strange, default=None)

    def _named(self, match: _Match) -> str:
        return f"{match.code} ({self._covers(match)})"

    def _covers(self, match: _Match) -> str:
        return self.headings[match.code].description


def classify(description: str) -> Classification:
    """The HS heading of goods described in everyday words; ``UnclassifiableError`` when that is not clear.

    >>> classify("Men's T-shirts, cotton, 200 pcs").code
    '6109'
    """
    return HeadingTable.load().classify(description)


def words_of(text: str) -> list[str]:
    """The words of ``text`` that can name goods: without accents, case, plural, amounts and fillers."""
    plain = "".join(char for char in unicodedata.normalize("NFKD", text.casefold()) if not unicodedata.combining(char))
    joined = _LETTER_COMPOUND.sub(r"\1", _POSSESSIVE.sub("", plain))
    words = (word for word in _WORD.findall(joined) if not _AMOUNT.fullmatch(word))
    return [word for word in map(_singular, words) if word not in _FILLERS and (len(word) > 1 or word == "t")]


def _quoted(description: str) -> str:
    shown = " ".join(description.split())
    return f'"{shown}"' if len(shown) <= _SHOWN_CHARACTERS else f'"{shown[: _SHOWN_CHARACTERS - 1]}…"'


def _singular(word: str) -> str:
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) <= 3 or word.endswith(("ss", "us", "is")):
        return word
    if word.endswith(("sses", "xes", "ches", "shes", "zzes")):
        word = word[:-2]
    elif word.endswith("s"):
        word = word[:-1]
    if word.endswith("ie") and len(word) > 4:  # cookies, berries: both forms of the ending meet in "y"
        word = word[:-2] + "y"
    return _IRREGULAR.get(word, word)
