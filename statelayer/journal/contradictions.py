"""Telling a log that contradicts itself from a race: a duplicate key that the next try would only meet again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statelayer import mongo_indexes as names
from statelayer.errors import IntegrityError

if TYPE_CHECKING:
    from statelayer.drivers import Database
    from statelayer.errors import DuplicateKeyError
    from statelayer.journal.append import Append


class Contradictions:
    """Compares the heads and entries that a duplicate key points at with the log."""

    def __init__(self, database: Database) -> None:
        self._events = database.collection(names.EVENTS)
        self._entries = database.collection(names.ENTRIES)
        self._heads = database.collection(names.NAMESPACES)

    async def of(self, error: DuplicateKeyError, append: Append) -> IntegrityError | None:
        """Return what this append must be told, or ``None`` when the next try can mend it."""
        if error.keys == ("_id",):
            return await self._entry_without_head(error.values["_id"], append)
        namespace = error.values.get("namespace")
        if namespace not in append.namespaces:
            return None
        if error.keys == ("namespace", "seq"):
            return await self._head_behind_log(namespace)
        if error.keys == ("namespace", "path", "version"):
            return await self._entry_behind_log(namespace, error.values["path"], append)
        return None

    async def _entry_without_head(self, path: Any, append: Append) -> IntegrityError | None:
        """A namespace without a head was never written, so that none of its entries was looked for."""
        namespace = next((write.path.namespace for write in append.writes if write.path.text == path), None)
        if namespace is None or await self._heads.find_one({"_id": namespace}) is not None:
            return None
        return IntegrityError(
            f"The entry {path} is there, but {namespace} has no head. Run `verify` on it; if that expects a head, "
            "insert it into `namespaces`, and run `replay`.",
            namespace=namespace,
            path=path,
        )

    async def _head_behind_log(self, namespace: str) -> IntegrityError | None:
        newest = await self._events.find_one({"namespace": namespace, "seq": {"$gte": 1}}, sort=[("seq", -1)])
        head = await self._heads.find_one({"_id": namespace})
        if newest is None or (head is not None and newest["seq"] <= head["seq"]):
            return None
        says = f"says {head['seq']}" if head is not None else "is missing"
        return IntegrityError(
            f"The head of {namespace} {says}, its log goes on to {newest['seq']}. Set `namespaces.seq` to "
            f"{newest['seq']} (as a long) and run `verify`.",
            namespace=namespace,
        )

    async def _entry_behind_log(self, namespace: str, path: str, append: Append) -> IntegrityError | None:
        if path not in {write.path.text for write in append.writes}:
            return None
        written = {"namespace": namespace, "path": path, "version": {"$gte": 1}}
        newest = await self._events.find_one(written, sort=[("version", -1)])
        entry = await self._entries.find_one({"_id": path})
        if newest is None or (entry is not None and newest["version"] <= entry["version"]):
            return None
        return IntegrityError(
            f"The entry {path} is behind its log, which has version {newest['version']}. Run `replay` on {namespace}.",
            namespace=namespace,
            path=path,
        )
