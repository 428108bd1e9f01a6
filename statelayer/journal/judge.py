"""Deciding appends in memory, over what one snapshot of the database said. No I/O here.

A ``Ledger`` starts as that snapshot and moves on with each append that is judged good, so that the next one of the
same batch sees it. An append that is refused leaves no trace in it.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard
from zlib import crc32

from bson.int64 import Int64

from statelayer import values
from statelayer.errors import (
    CausationNotFoundError,
    IdempotencyConflictError,
    IntegrityError,
    InvalidValueError,
    NotFoundError,
    VersionConflictError,
)
from statelayer.events import SCHEMA_VERSION, Event

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from datetime import datetime

    from statelayer.drivers import Document
    from statelayer.events import CheckedWrite
    from statelayer.journal.append import Append, Companion
    from statelayer.paths import Path
    from statelayer.settings import Settings


@dataclass(frozen=True, slots=True)
class Head:
    """Where a namespace's log ends. ``repairs`` counts replays, so that what was remembered before one is dropped."""

    seq: int = 0
    repairs: int = 0


class PathState(NamedTuple):
    """What the next write of a path rests on. ``version`` is as it was stored, a whole number or not."""

    version: Any
    deleted: bool
    value: Any = None

    @classmethod
    def of(cls, entry: Document) -> PathState:
        """Read a document of ``entries``."""
        return cls(entry.get("version"), bool(entry.get("deleted")), entry.get("value"))


UNWRITTEN = PathState(version=0, deleted=True)


@dataclass(slots=True)
class _End:
    """Where a namespace's log ends, as the draft of an append moves it on."""

    seq: int
    repairs: int
    partition: int


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
    states: dict[str, PathState]
    keyed: dict[tuple[str, str], list[Event]]
    causes: dict[str, CauseFacts]
    committed: dict[str, Event]
    companions: dict[tuple[str, Any], Document]
    revision: int
    now: datetime
    documents: list[Document] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    operations: list[tuple[Companion, Sequence[Event]]] = field(default_factory=list)
    remembers: bool = False
    """Whether a part of it was remembered instead of read."""
    _heads_read: dict[str, Head] = field(init=False)
    _versions_read: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self._heads_read = dict(self.heads)
        self._versions_read = {path: state.version for path, state in self.states.items()}

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
    documents = [draft.document(index) for index in range(len(append.writes))]
    events = [Event.from_document(document) for document in documents]
    draft.accept(documents, events)
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
    """One append on its way: its own view of heads and paths, which the ledger takes over only as a whole."""

    def __init__(self, append: Append, ledger: Ledger, settings: Settings) -> None:
        self._append = append
        self._ledger = ledger
        self._settings = settings
        self._ends = {namespace: self._end(namespace) for namespace in append.namespaces}
        self._states: dict[str, PathState] = {}
        self._revision = Int64(ledger.revision)
        self._unkeyed = set(append.namespaces) if append.key is not None else set()

    def _end(self, namespace: str) -> _End:
        head = self._ledger.heads.get(namespace) or Head()
        return _End(head.seq, head.repairs, partition_of(namespace, self._settings.partitions))

    def document(self, index: int) -> Document:
        """Judge one write and return the ``events`` document that it becomes; what does not apply is left out."""
        write = self._append.writes[index]
        path, namespace = write.path.text, write.path.namespace
        state = self._states.get(path) or self._ledger.states.get(path, UNWRITTEN)
        version = _whole_version(state, write.path)
        if write.expected_version is not None and write.expected_version != version:
            raise VersionConflictError(path, expected=write.expected_version, actual=version)
        value = self._value(write, state)
        cause, root, depth = self._causation(write)
        end = self._ends[namespace]
        end.seq += 1
        self._states[path] = PathState(version + 1, write.op == "delete", value)
        document: Document = {
            "_id": self._append.event_ids[index],
            "namespace": namespace,
            "seq": Int64(end.seq),
            "path": path,
            "version": Int64(version + 1),
            "op": write.op,
            "actor": write.actor,
            "source": write.source,
            "triggerDepth": depth,
            "batchId": self._append.event_ids[0],
            "subscriptionsRev": self._revision,
            "partition": end.partition,
            "committedAt": self._ledger.now,
            "schemaVersion": SCHEMA_VERSION,
        }
        if write.op != "delete":
            document["value"] = value
        if write.op == "merge":
            document["patch"] = copy.deepcopy(write.value)
        if cause is not None:
            document["causedByEventId"] = cause
            document["rootEventId"] = root
        if namespace in self._unkeyed:
            # Borne by the first event of each namespace; the batch's size tells a part of it from the whole.
            document["idempotencyKey"] = self._append.key
            document["batchSize"] = len(self._append.writes)
            self._unkeyed.remove(namespace)
        return document

    def accept(self, documents: list[Document], events: list[Event]) -> None:
        """Let the ledger take over what this append changed."""
        ledger = self._ledger
        ledger.heads.update({namespace: Head(end.seq, end.repairs) for namespace, end in self._ends.items()})
        ledger.states.update(self._states)
        ledger.documents.extend(documents)
        ledger.events.extend(events)
        ledger.operations.extend((companion, events) for companion in self._append.companions)
        if self._append.key is not None:
            for namespace in self._append.namespaces:
                mine = [event for event in events if event.namespace == namespace]
                ledger.keyed[namespace, self._append.key] = mine

    def _causation(self, write: CheckedWrite) -> tuple[str | None, str | None, int]:
        origin = self._append.origin
        if write.caused_by is None:
            return (origin.event_id, origin.root_event_id, origin.depth + 1) if origin else (None, None, 0)
        cause = self._ledger.causes.get(write.caused_by)
        if cause is None:
            raise CausationNotFoundError(write.caused_by)
        return cause.id, cause.root, max(cause.depth, origin.depth if origin else 0) + 1

    def _value(self, write: CheckedWrite, state: PathState) -> Any:
        if write.op == "delete" and state.deleted:
            raise NotFoundError("entry", write.path.text, "There is nothing to delete.")
        if write.op == "merge" and not state.deleted and isinstance(state.value, dict):
            return self._within_limit({**copy.deepcopy(state.value), **write.value})
        return write.value

    def _within_limit(self, merged: dict[str, Any]) -> dict[str, Any]:
        size = values.size(merged)
        if size > self._settings.max_value_bytes:
            raise InvalidValueError(
                "value", f"merged, it takes {size} bytes, more than {self._settings.max_value_bytes}", "Split it."
            )
        return merged


def _whole_version(state: PathState, path: Path) -> int:
    version = state.version
    if not _counts_on(version):
        raise IntegrityError(
            f"The entry {path} claims version {version!r}, from which nothing counts on. Run `replay` to mend it.",
            namespace=path.namespace,
            path=path.text,
        )
    return version


def _counts_on(number: object) -> TypeGuard[int]:
    return type(number) is int and 0 <= number < values.MAX_INT


def partition_of(namespace: str, partitions: int) -> int:
    """Return the share of the namespaces that this one belongs to."""
    return crc32(namespace.encode()) % partitions


def head_of(document: Document) -> Head:
    """Read a document of ``namespaces``; a head that is no whole number, or the last one, is reported."""
    seq, repairs = document.get("seq"), document.get("repairs", 0)
    if not (_counts_on(seq) and _counts_on(repairs)):
        raise IntegrityError(
            f"The head of {document['_id']} is {seq!r} (repairs {repairs!r}), from which nothing counts on. Set "
            "`namespaces.seq` to the largest seq of its events (as a long) and run `verify`.",
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
