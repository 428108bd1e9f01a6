"""The state that a condition sees: values as of the event's seq, whoever evaluates it and whenever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statelayer import mongo_indexes as names

if TYPE_CHECKING:
    from collections.abc import Iterable

    from statelayer.drivers import Database, Document

Wanted = tuple[str, str, int]
"""Namespace, path, and the seq as of which its value is asked for."""


class StateReader:
    """Reads values as of a seq: the entry if it is not later, else the newest event of that path up to the seq."""

    def __init__(self, database: Database) -> None:
        self._entries = database.collection(names.ENTRIES)
        self._events = database.collection(names.EVENTS)

    async def read(self, wanted: Iterable[Wanted]) -> dict[Wanted, Any]:
        """Return the values that were there; a path that held none is left out."""
        wanted = set(wanted)
        if not wanted:
            return {}
        found = await self._entries.find({"_id": {"$in": sorted({path for _, path, _ in wanted})}})
        entries = {entry["_id"]: entry for entry in found}
        values: dict[Wanted, Any] = {}
        for want in wanted:
            document = await self._as_of(want, entries.get(want[1]))
            if document is not None and not _is_delete(document):
                values[want] = document.get("value")
        return values

    async def _as_of(self, want: Wanted, entry: Document | None) -> Document | None:
        namespace, path, seq = want
        if entry is not None and entry["seq"] <= seq:
            return entry
        if entry is None:
            return None
        earlier = {"namespace": namespace, "path": path, "seq": {"$lte": seq}}
        # Sorted by seq alone, the planner takes the index of the whole namespace and reads all that came since.
        return await self._events.find_one(earlier, sort=[("path", -1), ("seq", -1)])


def _is_delete(document: Document) -> bool:
    return bool(document.get("deleted")) or document.get("op") == "delete"
