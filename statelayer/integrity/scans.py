"""Reading a namespace page by page, joined and folded in the server.

Every page is one aggregation under read concern snapshot: what it says about events and entries was true at one
instant, so that writers cannot make it contradict itself. It is also one reply, which bounds it in bytes (16 MiB), and
keeps no cursor: nothing can be lost or outlive the server's snapshots between two pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statelayer import mongo_indexes as names
from statelayer.errors import TransientDatabaseError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from statelayer.drivers import Collection, Database, Document
    from statelayer.settings import Settings

LARGEST_PAGE = 5000
"""Rows of one page; as many folds of the longest paths still fit into one reply."""

NOT_A_NUMBER = [{"seq": {"$not": {"$type": "number"}}}, {"seq": float("nan")}]


class Scans:
    """Pages through the log and the entries of one namespace."""

    def __init__(self, database: Database, settings: Settings, namespace: str) -> None:
        self._database = database
        self._size = min(settings.page_size, LARGEST_PAGE)
        self._namespace = namespace
        self._events = database.collection(names.EVENTS)
        self._entries = database.collection(names.ENTRIES)
        self._heads = database.collection(names.NAMESPACES)

    async def heads(self) -> tuple[Document | None, int]:
        """Return the stored head and the newest seq of the log, of one instant."""
        newest = [*self._newest(), {"$project": {"newest": "$seq"}}]
        pipeline: list[dict[str, Any]] = [
            {"$match": {"_id": self._namespace}},
            {"$unionWith": {"coll": self._events.name, "pipeline": newest}},
        ]
        head, seq = None, 0
        for row in await self._page(self._heads, pipeline):
            head, seq = (head, row["newest"]) if "newest" in row else (row, seq)
        return head, seq

    async def unnumbered(self, limit: int) -> list[Document]:
        """Return events whose seq is no number, and which therefore stand nowhere in the log."""
        wanted = {"namespace": self._namespace, "$or": NOT_A_NUMBER}
        return await self._events.find(wanted, limit=limit, projection={"value": 0, "patch": 0})

    async def unversioned(self, path: str, limit: int) -> list[Document]:
        """Return events of a path whose version is no int64."""
        wanted = {"namespace": self._namespace, "path": path, "version": {"$not": {"$type": "long"}}}
        return await self._events.find(wanted, limit=limit, projection={"value": 0, "patch": 0})

    async def log(self, head: int) -> AsyncIterator[list[Document]]:
        """Read the events up to this seq, without their values and with ``cause``: what is known of their cause."""
        after: Any = {"$gte": float("-inf")}
        while True:
            pipeline: list[dict[str, Any]] = [
                {"$match": {"namespace": self._namespace, "seq": {**after, "$lte": head}}},
                {"$sort": {"seq": 1}},
                {"$limit": self._size},
                {"$project": {"value": 0, "patch": 0}},
                {"$set": {"seqType": {"$type": "$seq"}}},
            ]
            if not (page := await self._page(self._events, pipeline)):
                return
            causes = await self._causes(page)
            yield [event | {"cause": causes.get(event.get("causedByEventId"))} for event in page]
            after = {"$gt": page[-1]["seq"]}

    async def paths(self) -> AsyncIterator[list[Document]]:
        """Fold the events of each path: ``count``, ``lowest`` and ``highest`` version and their ``types``.

        ``last`` is the seq of the highest version, ``newest`` the highest seq; ``hasEntry`` is there if an entry is.
        """
        after: str | None = self._namespace + "/"
        while after is not None:
            span = self._below(after)
            last = await self._last_of_page(span)
            if last is not None:
                span["$lte"] = last
            yield await self._page(self._events, self._fold(span))
            after = last

    async def entries(self) -> AsyncIterator[list[Document]]:
        """Read the entries, each as ``entry`` beside the ``newest`` event of its path, if there is one."""
        after = self._namespace + "/"
        while True:
            pipeline: list[dict[str, Any]] = [
                {"$match": {"_id": self._below(after)}},
                {"$sort": {"_id": 1}},
                {"$limit": self._size},
                {"$project": {"entry": "$$ROOT"}},
                {
                    "$lookup": {
                        "from": self._events.name,
                        "localField": "_id",
                        "foreignField": "path",
                        "pipeline": self._newest(),
                        "as": "newest",
                    }
                },
                {"$unwind": {"path": "$newest", "preserveNullAndEmptyArrays": True}},
            ]
            if not (page := await self._page(self._entries, pipeline)):
                return
            yield page
            after = page[-1]["_id"]

    async def events(self, seqs: Sequence[int]) -> AsyncIterator[list[Document]]:
        """Read the events of these seqs, whole."""
        after = -1
        while True:
            wanted = {"namespace": self._namespace, "seq": {"$in": list(seqs), "$gt": after}}
            if not (page := await self._page(self._events, [{"$match": wanted}, {"$sort": {"seq": 1}}])):
                return
            yield page
            after = page[-1]["seq"]

    async def versions_of(self, path: str) -> AsyncIterator[list[Document]]:
        """Read seq and version of each event of a path, in the order of the versions."""
        after: Any = {"$gte": float("-inf")}
        while True:
            wanted = {"namespace": self._namespace, "path": path, "version": after}
            projection = {"path": 1, "seq": 1, "version": 1}
            page = await self._events.find(wanted, sort=[("version", 1)], limit=self._size, projection=projection)
            if not page:
                return
            yield page
            after = {"$gt": page[-1]["version"]}

    # --- parts of these

    async def _causes(self, page: Sequence[Document]) -> dict[Any, Document]:
        """Read them apart from their effects: a cause is there before its effect, and neither changes."""
        ids = [event["causedByEventId"] for event in page if "causedByEventId" in event]
        if not ids:
            return {}
        causes = await self._events.find({"_id": {"$in": ids}}, projection={"triggerDepth": 1, "rootEventId": 1})
        return {cause["_id"]: cause for cause in causes}

    def _below(self, after: str) -> dict[str, str]:
        """The paths of the namespace behind this one."""
        return {"$gt": after, "$lt": self._namespace + "0"}  # "0" follows "/"

    async def _last_of_page(self, span: Mapping[str, str]) -> str | None:
        """Return the path that the first page of these ends with, ``None`` when it is the last page."""
        pipeline: list[dict[str, Any]] = [
            {"$match": {"namespace": self._namespace, "path": span}},
            {"$sort": {"path": 1, "version": 1}},
            {"$skip": self._size},
            {"$limit": 1},
            {"$project": {"path": 1}},
        ]
        rows = await self._page(self._events, pipeline)
        return rows[0]["path"] if rows else None

    def _fold(self, span: Mapping[str, Any]) -> list[dict[str, Any]]:
        entry = [{"$match": {"_id": span}}, {"$project": {"hasEntry": {"$literal": True}}}]
        return [
            {"$match": {"namespace": self._namespace, "path": span}},
            {"$sort": {"path": 1, "version": 1}},
            {
                "$group": {
                    "_id": "$path",
                    "count": {"$sum": 1},
                    "lowest": {"$min": "$version"},
                    "highest": {"$max": "$version"},
                    "types": {"$addToSet": {"$type": "$version"}},
                    "last": {"$last": "$seq"},
                    "newest": {"$max": {"$cond": [{"$isNumber": "$seq"}, "$seq", None]}},
                }
            },
            {"$unionWith": {"coll": self._entries.name, "pipeline": entry}},
            {"$group": {"_id": "$_id", "row": {"$mergeObjects": "$$ROOT"}}},
            {"$replaceWith": "$row"},
            {"$match": {"count": {"$exists": True}}},
            {"$sort": {"_id": 1}},
        ]

    def _newest(self) -> list[dict[str, Any]]:
        """Pick the last event in the order of the log; one whose seq is no number stands nowhere in it."""
        return [{"$match": {"namespace": self._namespace, "seq": {"$gte": 1}}}, {"$sort": {"seq": -1}}, {"$limit": 1}]

    async def _page(self, collection: Collection, pipeline: Sequence[Mapping[str, Any]]) -> list[Document]:
        try:
            return await self._one_reply(collection, pipeline)
        except TransientDatabaseError:  # once more, as the drivers do for the reads that they send themselves
            return await self._one_reply(collection, pipeline)

    async def _one_reply(self, collection: Collection, pipeline: Sequence[Mapping[str, Any]]) -> list[Document]:
        aggregate = {
            "aggregate": collection.name,
            "pipeline": list(pipeline),
            "cursor": {"batchSize": self._size + 1},
            "readConcern": {"level": "snapshot"},
        }
        async with self._database.session() as session:
            cursor = (await self._database.command(aggregate, session=session))["cursor"]
            if cursor["id"]:
                kill = {"killCursors": collection.name, "cursors": [cursor["id"]]}
                await self._database.command(kill, session=session)
        return list(cursor["firstBatch"])
