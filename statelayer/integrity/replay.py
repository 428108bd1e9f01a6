"""Rebuilding entries from the log, while others write."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from bson.int64 import Int64
from pydantic import ValidationError
from pymongo import ReplaceOne, UpdateOne

from statelayer import mongo_indexes as names
from statelayer.drivers import UpdateCounts
from statelayer.errors import DuplicateKeyError, IntegrityError, OutcomeUnknownError
from statelayer.integrity.report import ReplayReport
from statelayer.integrity.verify import differences, entry_after
from statelayer.transactions import CommitUnknown, Deadline, retried

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Document, Session
    from statelayer.drivers.database import Operation
    from statelayer.integrity.scans import Scans
    from statelayer.settings import Settings


class Replay:
    """One run over one namespace.

    What is missing or says too little is written under the condition that nobody wrote meanwhile. What says too much
    cannot be told from a write that is newer than what was read, so it is decided again under the namespace's head.
    """

    def __init__(self, database: Database, settings: Settings, clock: Clock, scans: Scans, namespace: str) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._scans = scans
        self._namespace = namespace
        self._events = database.collection(names.EVENTS)
        self._entries = database.collection(names.ENTRIES)
        self._heads = database.collection(names.NAMESPACES)
        self._report = ReplayReport(namespace)

    async def run(self) -> ReplayReport:
        await self._mend_entries()
        await self._add_missing()
        return self._report

    async def _mend_entries(self) -> None:
        async for page in self._scans.entries():
            replacements: list[Operation] = []
            for row in page:
                entry = row["entry"]
                expected = self._entry_after(row["newest"]) if "newest" in row else None
                if expected is None or _claims_too_much(entry, expected):
                    await self._decide_under_head(entry["_id"])
                elif differences(entry, expected):
                    guard = {"_id": entry["_id"], "version": entry["version"]}
                    replacements.append(ReplaceOne(guard, expected))
            counts = await self._entries.bulk_write(replacements, ordered=False)
            self._report.entries_written += counts.modified

    async def _add_missing(self) -> None:
        async for page in self._scans.written_paths():
            self._report.events += sum(fold["count"] for fold in page)
            missing = [fold["newest"] for fold in page if "hasEntry" not in fold and fold["newest"] is not None]
            async for events in self._scans.events(missing):
                await self._add([self._entry_after(event) for event in events])

    async def _add(self, entries: Sequence[Document]) -> None:
        try:
            await self._entries.insert_many(entries, ordered=False)
        except DuplicateKeyError:  # another replay is at work on the same entries
            counts = await self._entries.bulk_write([_unless_there(entry) for entry in entries], ordered=False)
            self._report.entries_written += counts.upserted
        else:
            self._report.entries_written += len(entries)

    # --- what only the head can decide

    async def _decide_under_head(self, path: str) -> None:
        deadline = Deadline(self._clock, self._settings.append_timeout)
        try:
            repaired = await retried(
                self._database, partial(self._repair, path), deadline=deadline, what=f"The repair of {path}"
            )
        except CommitUnknown as doubt:
            raise OutcomeUnknownError(
                f"The repair of {path} was sent and its outcome is unknown. Run `replay` again.", event_ids=()
            ) from doubt
        self._report.entries_written += repaired.matched
        self._report.entries_removed += repaired.deleted

    async def _repair(self, path: str, session: Session) -> UpdateCounts:
        """Write or remove the entry if that is still called for. Writers that remember its version start anew."""
        head = await self._heads.find_one({"_id": self._namespace}, session=session)
        newest = await self._events.find_one(
            {"namespace": self._namespace, "path": path, "seq": {"$gte": 1}}, sort=[("seq", -1)], session=session
        )
        entry = await self._entries.find_one({"_id": path}, session=session)
        expected = self._entry_after(newest) if newest else None
        if entry is None or (expected is not None and not differences(entry, expected)):
            return UpdateCounts()
        if head is not None:
            guard = {"_id": self._namespace, "seq": head.get("seq"), "repairs": head.get("repairs")}
            await self._heads.update_one(guard, {"$inc": {"repairs": Int64(1)}}, session=session)
        if expected is None:
            return await self._entries.delete_one({"_id": path}, session=session)
        return await self._entries.replace_one({"_id": path}, expected, session=session)

    def _entry_after(self, event: Document) -> Document:
        try:
            return entry_after(event)
        except ValidationError as error:
            raise IntegrityError(
                f"The event {event['_id']} (seq {event['seq']}) cannot be read, so {event['path']} cannot be rebuilt. "
                "`verify` says what is wrong with it; mend it by hand, then run `replay` again.",
                namespace=self._namespace,
                path=event["path"],
            ) from error


def _claims_too_much(entry: Document, expected: Document) -> bool:
    version = entry.get("version")
    return type(version) is not int or version > expected["version"]


def _unless_there(expected: Document) -> Operation:
    is_new = {"$eq": [{"$type": "$version"}, "missing"]}
    only_if_new = {"$replaceWith": {"$cond": [is_new, {"$literal": expected}, "$$ROOT"]}}
    key = {"_id": expected["_id"], "namespace": expected["namespace"]}
    return UpdateOne(key, [only_if_new], upsert=True)
