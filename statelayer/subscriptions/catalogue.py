"""All subscriptions as of a revision, ready to be matched: a pure structure over stored documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statelayer.errors import InvalidPathError, InvalidSubscriptionError
from statelayer.subscriptions.models import StoredSubscription
from statelayer.subscriptions.patterns import Pattern
from statelayer.subscriptions.trie import PatternTrie

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A document that was broken by hand: it cannot fire, and it must not stop the others."""

    id: str
    name: str
    version: int
    pattern: Pattern | None
    problems: tuple[str, ...]


class Catalogue:
    """The subscriptions of one moment, disabled ones too: their past revisions still decide about past events."""

    def __init__(self, documents: Iterable[Mapping[str, Any]], *, revision: int) -> None:
        self.revision = revision
        self.subscriptions: list[StoredSubscription] = []
        self.quarantined: list[Quarantined] = []
        self._sound: PatternTrie[StoredSubscription] = PatternTrie()
        self._broken: PatternTrie[Quarantined] = PatternTrie()
        for document in documents:
            self._add(document)

    def candidates(self, segments: Sequence[str]) -> list[StoredSubscription]:
        """Return the subscriptions whose pattern matches, by name and version."""
        return sorted(self._sound.candidates(segments), key=lambda found: (found.name, found.version))

    def broken(self, segments: Sequence[str]) -> list[Quarantined]:
        """Return the quarantined documents whose pattern could still be read and matches, by name and version."""
        return sorted(self._broken.candidates(segments), key=lambda found: (found.name, found.version))

    def _add(self, document: Mapping[str, Any]) -> None:
        try:
            subscription = StoredSubscription.from_document(document)
        except InvalidSubscriptionError as error:
            self._quarantine(document, error.problems)
        else:
            self.subscriptions.append(subscription)
            self._sound.insert(subscription.parsed_pattern, subscription)

    def _quarantine(self, document: Mapping[str, Any], problems: Sequence[str]) -> None:
        broken = Quarantined(
            id=str(document.get("_id")),
            name=_name_of(document),
            version=version if isinstance(version := document.get("version"), int) else 0,
            pattern=_pattern_of(document),
            problems=tuple(problems),
        )
        self.quarantined.append(broken)
        if broken.pattern is not None:
            self._broken.insert(broken.pattern, broken)


def _name_of(document: Mapping[str, Any]) -> str:
    name = document.get("name")
    return name if isinstance(name, str) and name else str(document.get("_id"))


def _pattern_of(document: Mapping[str, Any]) -> Pattern | None:
    try:
        return Pattern.parse(document.get("pattern"))  # type: ignore[arg-type]  # a broken document may hold anything
    except InvalidPathError:
        return None
