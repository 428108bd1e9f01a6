"""Does the log contradict itself, and do the entries say what it says?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bson.int64 import Int64
from pydantic import ValidationError

from statelayer import values
from statelayer.errors import InvalidActorError
from statelayer.events import Entry, Event, check_actor
from statelayer.integrity.report import MAX_PROBLEMS, MISSING, VerifyReport

if TYPE_CHECKING:
    from statelayer.drivers import Document
    from statelayer.integrity.report import ProblemKind
    from statelayer.integrity.scans import Scans

DEEPEST_EXECUTION: Final = 32
"""No event of this depth or more wakes anything, whatever the subscription says (DESIGN, P7)."""

ENTRY_KINDS: Final[dict[str, ProblemKind]] = {
    "namespace": "entry_namespace",
    "value": "entry_value",
    "version": "entry_version",
    "seq": "entry_seq",
    "eventId": "entry_event_id",
    "actor": "entry_actor",
    "deleted": "entry_deleted",
    "updatedAt": "entry_updated_at",
}


class Verification:
    """One run over one namespace."""

    def __init__(self, scans: Scans, namespace: str) -> None:
        self._scans = scans
        self._namespace = namespace
        self._report = VerifyReport(namespace)

    async def run(self) -> VerifyReport:
        head = await self._check_head()
        await self._check_unnumbered()
        await self._check_seqs(head)
        await self._check_events(head)
        await self._check_paths()
        await self._check_entries()
        return self._report

    # --- the log by itself

    async def _check_head(self) -> int:
        """Compare the stored head with the log, and return where the log ends now: what comes later is not judged."""
        stored, newest = await self._scans.heads()
        actual = MISSING if stored is None else stored.get("seq", MISSING)
        if not values.identical(newest, actual) and (stored is not None or newest):
            self._report.add("head", expected=newest, actual=actual)
        return newest

    async def _check_unnumbered(self) -> None:
        for event in await self._scans.unnumbered(MAX_PROBLEMS + 1):
            self._report.events += 1
            self._report.add(
                "seq", expected="an int64", actual=event.get("seq", MISSING), path=_text(event.get("path"))
            )

    async def _check_seqs(self, head: int) -> None:
        """Look at each seq only where a stretch of the log is not whole; seqs are unique by their index."""
        expected = 1
        async for stretch in self._scans.stretches(head):
            self._report.events += stretch["count"]
            first, last = stretch["first"], stretch["last"]
            if stretch["types"] == ["long"] and first == expected and last - first + 1 == stretch["count"]:
                expected = last + 1
                continue
            async for page in self._scans.seqs(first, last):
                for event in page:
                    expected = self._check_seq(event, expected)

    def _check_seq(self, event: Document, expected: int) -> int:
        """Return the seq that the next event must have."""
        seq = event["seq"]
        if event["seqType"] != "long":
            self._add(event, "seq", expected="an int64", actual=seq)
        elif seq != expected:
            self._add(event, "seq_gap", expected=expected, actual=seq)
        return seq + 1 if type(seq) is int else expected + (seq == expected)

    async def _check_events(self, head: int) -> None:
        async for page in self._scans.suspects(head):
            for event in page:
                self._check_event(event)

    def _check_event(self, event: Document) -> None:
        path = event.get("path")
        if not isinstance(path, str) or not path.startswith(self._namespace + "/"):
            self._add(event, "path", expected=f"a path in {self._namespace}", actual=event.get("path", MISSING))
        try:
            check_actor(event.get("actor"))
        except InvalidActorError:
            self._add(event, "actor", expected="kind:id", actual=event.get("actor", MISSING))
        if "causedByEventId" in event:
            self._check_effect(event)
        else:
            self._check_root(event)

    def _check_root(self, event: Document) -> None:
        if not values.identical(event.get("triggerDepth"), 0):
            self._add(event, "depth", expected=0, actual=event.get("triggerDepth", MISSING))
        if event.get("rootEventId", event["_id"]) != event["_id"]:
            self._add(event, "root", expected=event["_id"], actual=event["rootEventId"])

    def _check_effect(self, event: Document) -> None:
        cause = event["cause"]
        if cause is None:
            self._add(event, "dangling_cause", expected="an event of the log", actual=event["causedByEventId"])
            return
        root = cause.get("rootEventId", cause["_id"])
        if event.get("rootEventId") != root:
            self._add(event, "root", expected=root, actual=event.get("rootEventId", MISSING))
        depth, lowest = event.get("triggerDepth"), cause.get("triggerDepth")
        if type(lowest) is int and not _follows(depth, lowest + 1):
            self._add(event, "depth", expected=lowest + 1, actual=event.get("triggerDepth", MISSING))

    # --- path by path

    async def _check_paths(self) -> None:
        async for page in self._scans.versions():
            for fold in page:
                self._check_has_entry(fold)
                await self._check_versions(fold)

    def _check_has_entry(self, fold: Document) -> None:
        if fold["newest"] is not None and "hasEntry" not in fold:
            self._report.add(
                "missing_entry", expected=fold["highest"], actual=MISSING, path=fold["_id"], seq=fold["newest"]
            )

    async def _check_versions(self, fold: Document) -> None:
        if fold["types"] != ["long"]:
            await self._find_bad_versions(fold["_id"])
        elif (fold["lowest"], fold["highest"]) != (1, fold["count"]):
            await self._find_version_gaps(fold["_id"])
        elif type(fold["last"]) is int and fold["newest"] != fold["last"]:
            self._report.add(
                "version_order", expected=fold["newest"], actual=fold["last"], path=fold["_id"], seq=fold["newest"]
            )

    async def _find_bad_versions(self, path: str) -> None:
        for event in await self._scans.unversioned(path, MAX_PROBLEMS + 1):
            self._add(event, "version", expected="an int64", actual=event.get("version", MISSING))

    async def _find_version_gaps(self, path: str) -> None:
        expected = 1
        async for page in self._scans.versions_of(path):
            for event in page:
                if event["version"] != expected:
                    self._add(event, "version_gap", expected=expected, actual=event["version"])
                expected = event["version"] + 1

    async def _check_entries(self) -> None:
        async for page in self._scans.entries():
            self._report.entries += len(page)
            for row in page:
                self._check_entry(row["entry"], row.get("newest"))

    def _check_entry(self, entry: Document, newest: Document | None) -> None:
        if newest is None:
            actual, seq = entry.get("version", MISSING), entry.get("seq")
            self._report.add("entry_without_events", expected=MISSING, actual=actual, path=entry["_id"], seq=seq)
            return
        try:
            expected = entry_after(newest)
        except ValidationError as error:
            self._check_unreadable(newest, error)
        else:
            self._compare(entry, expected)

    def _compare(self, entry: Document, expected: Document) -> None:
        for field in differences(entry, expected):
            self._report.add(
                ENTRY_KINDS[field],
                expected=expected.get(field, MISSING),
                actual=entry.get(field, MISSING),
                path=entry["_id"],
                seq=expected["seq"],
            )

    def _check_unreadable(self, event: Document, error: ValidationError) -> None:
        """Report an event that cannot be read, unless what is wrong with it was reported already."""
        if all(problem.seq != event["seq"] for problem in self._report.problems):
            first = error.errors(include_url=False, include_input=False)[0]
            self._add(event, "event", expected=first["msg"], actual=".".join(map(str, first["loc"])))

    def _add(self, event: Document, kind: ProblemKind, *, expected: Any, actual: Any) -> None:
        self._report.add(kind, expected=expected, actual=actual, path=_text(event.get("path")), seq=event.get("seq"))


def entry_after(event: Document) -> Document:
    """Return the entry that this event leaves. Raises pydantic's ``ValidationError`` for one that cannot be read."""
    return Entry.document_of(Event.from_document(event))


def differences(entry: Document, expected: Document) -> list[str]:
    """Return the fields that differ in type or in value. A field that is not ours is none of our business."""
    return [
        field
        for field in ENTRY_KINDS
        if (field in entry) != (field in expected) or not values.identical(entry.get(field), _read(expected.get(field)))
    ]


def _read(value: object) -> object:
    return int(value) if isinstance(value, Int64) else value


def _follows(depth: object, lowest: int) -> bool:
    """Whether an effect may have this depth: an execution adds its own to the cause's, up to the highest limit."""
    return type(depth) is int and lowest <= depth <= max(lowest, DEEPEST_EXECUTION)


def _text(path: object) -> str | None:
    return path if isinstance(path, str) else None
