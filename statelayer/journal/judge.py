"""Deciding appends in memory, over what one snapshot of the database said. No I/O here.

A ``Ledger`` starts as that snapshot and moves on with each append that is judged good, so that the next one of the
same batch sees it. An append that is refused leaves no trace in it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

from statelayer import values
from statelayer.errors import (
    CausationNotFoundError,
    IdempotencyConflictError,
    IntegrityError,
    InvalidValueError,
    NotFoundError,
    VersionConflictError,
)
from statelayer.events import Entry, Event

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from statelayer.drivers import Document
    from statelayer.events import CheckedWrite
    from statelayer.journal.append import Append, Companion
    from statelayer.settings import Settings


@dataclass(frozen=True, slots=True)
class Head:
    """Where a namespace's log ends. ``repairs`` counts replays, so that what was remembered before one is dropped."""

    seq: int = 0
    repairs: int = 0


@dataclass(frozen=True, slots=True)
class CauseFacts:
    """What an effect needs to know of its cause."""

    id: str
    root: str
    depth: int


@dataclass(slots=True)
class Ledger:
    """What is true now, as far as this batch can tell."""

    heads: dict[str, Head]
    entries: dict[str, Document]
    keyed: dict[tuple[str, str], list[Event]]
    causes: dict[str, CauseFacts]
    committed: dict[str, Event]
    companions: dict[tuple[str, Any], Document]
    revision: int
    now: datetime
    events: list[Event] = field(default_factory=list)
    operations: list[tuple[Companion, Sequence[Event]]] = field(default_factory=list)
    remembers: bool = False
    """Whether a part of it was remembered instead of read."""
    _heads_read: dict[str, Head] = field(init=False)
    _versions_read: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._heads_read = dict(self.heads)
        self._versions_read = {path: document.get("version") for path, document in self.entries.items()}

    def head_read(self, namespace: str) -> Head | None:
        """Return the head that the snapshot had, or ``None`` for a namespace that was never written."""
        return self._heads_read.get(namespace)

    @property
    def heads_read(self) -> dict[str, Head | None]:
        """The heads that the snapshot had."""
        return {namespace: self._heads_read.get(namespace) for namespace in self.heads.keys() | self._heads_read.keys()}

    def version_read(self, path: str) -> Any:
        """Return the version that the snapshot had, or ``None`` for a path that was never written."""
        return self._versions_read.get(path)


def judge(append: Append, ledger: Ledger, settings: Settings) -> list[Event]:
    """Return the events of this append, moving the ledger on, or raise the reason why it must not happen.

    An append that was committed before (its ids are in the log, or its idempotency key with the same content) returns
    the events of then, before anything else is looked at.
    """
    earlier = _committed_before(append, ledger) or _same_key(append, ledger)
    if earlier is not None:
        return earlier
    for companion in append.companions:
        refusal = companion.judge(ledger.companions.get((companion.collection, companion.id)))
        if refusal is not None:
            raise refusal
    draft = _Draft(append, ledger, settings)
    events = [draft.event(index) for index in range(len(append.writes))]
    draft.accept(events)
    return events


def _committed_before(append: Append, ledger: Ledger) -> list[Event] | None:
    if append.event_ids[0] not in ledger.committed:
        return None
    return [ledger.committed[event_id] for event_id in append.event_ids]


def _same_key(append: Append, ledger: Ledger) -> list[Event] | None:
    if append.key is None:
        return None
    found = {namespace: ledger.keyed.get((namespace, append.key), []) for namespace in append.namespaces}
    first = next((events[0] for events in found.values() if events), None)
    if first is None:
        return None
    earlier = _in_order_of_writes(append, found)
    if earlier is None or first.batch_size != len(append.writes):
        raise IdempotencyConflictError(append.key, namespace=first.namespace, event_id=first.id)
    return [event.model_copy(deep=True) for event in earlier]


def _in_order_of_writes(append: Append, found: dict[str, list[Event]]) -> list[Event] | None:
    """Pair each write with the event that it once became; ``None`` when the contents differ."""
    rest = {namespace: iter(events) for namespace, events in found.items()}
    paired = [next(rest[write.path.namespace], None) for write in append.writes]
    same = all(
        event is not None and _same_content(write, event) for write, event in zip(append.writes, paired, strict=True)
    )
    return [event for event in paired if event is not None] if same else None


def _same_content(write: CheckedWrite, event: Event) -> bool:
    stored = event.patch if event.op == "merge" else event.value
    return ((write.path.text, write.op, write.actor) == (event.path, event.op, event.actor)) and values.identical(
        write.value, stored
    )


class _Draft:
    """One append on its way: its own view of heads and entries, which the ledger takes over only as a whole."""

    def __init__(self, append: Append, ledger: Ledger, settings: Settings) -> None:
        self._append = append
        self._ledger = ledger
        self._settings = settings
        self._heads: dict[str, Head] = {}
        self._entries: dict[str, Document] = {}

    def event(self, index: int) -> Event:
        """Judge one write and return the event that it becomes."""
        write = self._append.writes[index]
        path, namespace = write.path.text, write.path.namespace
        entry = self._entries.get(path) or self._ledger.entries.get(path)
        version = _version_of(entry)
        if write.expected_version is not None and write.expected_version != version:
            raise VersionConflictError(path, expected=write.expected_version, actual=version)
        event_id = self._append.event_ids[index]
        cause, root, depth = self._causation(write)
        event = Event.model_construct(
            id=event_id,
            namespace=namespace,
            seq=self._next_seq(namespace),
            path=path,
            version=version + 1,
            op=write.op,
            value=self._value(write, entry),
            patch=copy.deepcopy(write.value) if write.op == "merge" else None,
            actor=write.actor,
            source=write.source,
            trigger_depth=depth,
            caused_by_event_id=cause,
            root_event_id=root or event_id,
            batch_id=self._append.event_ids[0],
            **self._key_fields(index, namespace),
            subscriptions_rev=self._ledger.revision,
            partition=partition_of(namespace, self._settings.partitions),
            committed_at=self._ledger.now,
        )
        self._entries[path] = Entry.document_of(event)
        return event

    def accept(self, events: list[Event]) -> None:
        """Let the ledger take over what this append changed."""
        ledger = self._ledger
        ledger.heads.update(self._heads)
        ledger.entries.update(self._entries)
        ledger.events.extend(events)
        ledger.operations.extend((companion, events) for companion in self._append.companions)
        if self._append.key is not None:
            for namespace in self._append.namespaces:
                mine = [event for event in events if event.namespace == namespace]
                ledger.keyed[namespace, self._append.key] = mine

    def _next_seq(self, namespace: str) -> int:
        head = self._heads.get(namespace) or self._ledger.heads.get(namespace) or Head()
        self._heads[namespace] = Head(head.seq + 1, head.repairs)
        return head.seq + 1

    def _key_fields(self, index: int, namespace: str) -> dict[str, Any]:
        """A key is borne by the first event of each namespace; the batch's size tells a part of it from the whole."""
        earlier = (write.path.namespace for write in self._append.writes[:index])
        if self._append.key is None or namespace in earlier:
            return {}
        return {"idempotency_key": self._append.key, "batch_size": len(self._append.writes)}

    def _causation(self, write: CheckedWrite) -> tuple[str | None, str | None, int]:
        origin = self._append.origin
        if write.caused_by is None:
            return (origin.event_id, origin.root_event_id, origin.depth + 1) if origin else (None, None, 0)
        cause = self._ledger.causes.get(write.caused_by)
        if cause is None:
            raise CausationNotFoundError(write.caused_by)
        return cause.id, cause.root, max(cause.depth, origin.depth if origin else 0) + 1

    def _value(self, write: CheckedWrite, entry: Document | None) -> Any:
        current = None if entry is None or entry["deleted"] else entry.get("value")
        if write.op == "delete":
            if entry is None or entry["deleted"]:
                raise NotFoundError("entry", write.path.text, "There is nothing to delete.")
            return None
        if write.op == "merge" and isinstance(current, dict):
            return self._within_limit({**copy.deepcopy(current), **write.value})
        return write.value

    def _within_limit(self, merged: dict[str, Any]) -> dict[str, Any]:
        size = values.size(merged)
        if size > self._settings.max_value_bytes:
            raise InvalidValueError(
                "value", f"merged, it takes {size} bytes, more than {self._settings.max_value_bytes}", "Split it."
            )
        return merged


def _version_of(entry: Document | None) -> int:
    if entry is None:
        return 0
    version = entry.get("version")
    if not isinstance(version, int) or isinstance(version, bool):
        raise IntegrityError(
            f"The entry {entry['_id']} claims version {version!r}, not a whole number. Run `replay` to mend it.",
            namespace=entry["namespace"],
            path=entry["_id"],
        )
    return version


def partition_of(namespace: str, partitions: int) -> int:
    """Return the share of the namespaces that this one belongs to."""
    return crc32(namespace.encode()) % partitions


def head_of(document: Document) -> Head:
    """Read a document of ``namespaces``; a head that is not a whole number is reported, never counted on from."""
    seq, repairs = document.get("seq"), document.get("repairs", 0)
    if type(seq) is not int or type(repairs) is not int or seq < 0:
        raise IntegrityError(
            f"The head of {document['_id']} is {seq!r}, not a whole number. Set `namespaces.seq` to the largest seq of "
            "its events (as a long) and run `verify`.",
            namespace=document["_id"],
        )
    return Head(seq, repairs)


def causes_of(documents: Iterable[Document]) -> dict[str, CauseFacts]:
    """Read what effects need to know from events that are named as causes."""
    return {
        document["_id"]: CauseFacts(
            document["_id"], document.get("rootEventId") or document["_id"], document.get("triggerDepth", 0)
        )
        for document in documents
    }
