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

STRETCH = 20
"""How many keys of an index are folded for each row that a page may have."""

NO_NUMBER = {"$not": {"$gte": float("-inf")}}
"""Matches a seq that stands nowhere in the log; NaN is one. Said like this, the index skips all the others."""

NEWEST = {"$max": {"$cond": [{"$isNumber": "$seq"}, "$seq", None]}}
"""The highest seq of a path; one that is no number stands nowhere."""

PLAIN_ACTOR = r"^[a-z][a-z0-9_-]*:[!-~]{1,200}$"
"""An actor that is in order without a doubt."""


class Scans:
    """Pages through the log and the entries of one namespace."""

    def __init__(self, database: Database, settings: Settings, namespace: str) -> None:
        self._database = database
        self._size = min(settings.page_size, LARGEST_PAGE)
        self._stretch = STRETCH * self._size
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
        wanted = {"namespace": self._namespace, "seq": NO_NUMBER}
        return await self._events.find(wanted, limit=limit, projection={"value": 0, "patch": 0})

    async def unversioned(self, path: str, limit: int) -> list[Document]:
        """Return events of a path whose version is no int64."""
        wanted = {"namespace": self._namespace, "path": path, "version": {"$not": {"$type": "long"}}}
        return await self._events.find(wanted, limit=limit, projection={"value": 0, "patch": 0})

    async def stretches(self, head: int) -> AsyncIterator[Document]:
        """Fold the seqs up to this one, stretch by stretch of the log: ``count``, ``first``, ``last`` and ``types``."""
        after: Any = {"$gte": float("-inf")}
        while True:
            fold = {
                "_id": None,
                "count": {"$sum": 1},
                "first": {"$min": "$seq"},
                "last": {"$max": "$seq"},
                "types": {"$addToSet": {"$type": "$seq"}},
            }
            pipeline = [*self._log({**after, "$lte": head}), {"$limit": self._stretch}, {"$group": fold}]
            if not (page := await self._page(self._events, pipeline)):
                return
            yield page[0]
            after = {"$gt": page[0]["last"]}

    async def seqs(self, first: Any, last: Any) -> AsyncIterator[list[Document]]:
        """Read path, seq and ``seqType`` of the events from one seq to another."""
        projection: list[dict[str, Any]] = [{"$project": {"path": 1, "seq": 1, "seqType": {"$type": "$seq"}}}]
        async for page in self._log_pages({"$gte": first}, last, projection):
            yield page

    async def suspects(self, head: int) -> AsyncIterator[list[Document]]:
        """Read the events up to this seq that the server alone cannot tell to be in order, without their values.

        These are all that were caused, each with ``cause``: what is known of it, and whatever is unusual about a root.
        """
        suspicious: list[dict[str, Any]] = [
            {"$match": {"$or": self._suspicions()}},
            {"$project": dict.fromkeys(("path", "seq", "actor", "triggerDepth", "causedByEventId", "rootEventId"), 1)},
        ]
        async for page in self._log_pages({"$gte": float("-inf")}, head, suspicious):
            causes = await self._causes(page)
            yield [event | {"cause": causes.get(event.get("causedByEventId"))} for event in page]

    async def written_paths(self) -> AsyncIterator[list[Document]]:
        """Fold the log by path, from an index alone: ``count`` of events, the ``newest`` seq, and ``hasEntry``."""
        async for page in self._folds("seq", {"newest": NEWEST}):
            yield page

    async def versions(self) -> AsyncIterator[list[Document]]:
        """Fold the log by path, with ``lowest`` and ``highest`` version and their ``types`` as well.

        ``last`` is the seq of the highest version.
        """
        versions = {
            "lowest": {"$min": "$version"},
            "highest": {"$max": "$version"},
            "types": {"$addToSet": {"$type": "$version"}},
            "last": {"$last": "$seq"},
            "newest": NEWEST,
        }
        async for page in self._folds("version", versions):
            yield page

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

    def _log(self, seqs: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"$match": {"namespace": self._namespace, "seq": seqs}}, {"$sort": {"seq": 1}}]

    async def _log_pages(
        self, after: Mapping[str, Any], last: Any, stages: Sequence[dict[str, Any]]
    ) -> AsyncIterator[list[Document]]:
        while page := await self._page(
            self._events, [*self._log({**after, "$lte": last}), *stages, {"$limit": self._size}]
        ):
            yield page
            after = {"$gt": page[-1]["seq"]}

    def _suspicions(self) -> list[dict[str, Any]]:
        """Say what makes an event worth a look; a condition on a field holds for an array if it does for an element."""
        return [
            {"causedByEventId": {"$exists": True}},
            {"rootEventId": {"$exists": True}},
            {"triggerDepth": {"$ne": 0}},
            {"triggerDepth": {"$not": {"$type": ["int", "long"]}}},
            {"path": {"$not": self._below(self._namespace + "/")}},
            {"actor": {"$not": {"$regex": PLAIN_ACTOR}}},
            *({field: {"$type": "array"}} for field in ("triggerDepth", "path", "actor")),
        ]

    async def _causes(self, page: Sequence[Document]) -> dict[Any, Document]:
        """Read them apart from their effects: a cause is there before its effect, and neither changes."""
        ids = {event["causedByEventId"]: None for event in page if isinstance(event.get("causedByEventId"), str)}
        if not ids:
            return {}
        causes = await self._events.find({"_id": {"$in": list(ids)}}, projection={"triggerDepth": 1, "rootEventId": 1})
        return {cause["_id"]: cause for cause in causes}

    def _below(self, after: str) -> dict[str, str]:
        """The paths of the namespace behind this one."""
        return {"$gt": after, "$lt": self._namespace + "0"}  # "0" follows "/"

    async def _folds(self, order: str, fields: Mapping[str, Any]) -> AsyncIterator[list[Document]]:
        """Fold the events of each path in this order, and say which paths have an entry. A path is never divided."""
        after = self._namespace + "/"
        while True:
            span = self._below(after)
            if (last := await self._end_of_stretch(span, order)) is not None:
                span["$lte"] = last
            if not (page := await self._page(self._events, self._fold(span, order, fields))):
                return
            yield page
            after = page[-1]["_id"]

    async def _end_of_stretch(self, span: Mapping[str, str], order: str) -> str | None:
        """Return the path that a stretch of these ends in, ``None`` when there are fewer."""
        pipeline = [*self._by_path(span, order), {"$skip": self._stretch}, {"$limit": 1}, {"$project": {"path": 1}}]
        rows = await self._page(self._events, pipeline)
        return rows[0]["path"] if rows else None

    def _fold(self, span: Mapping[str, str], order: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        entry = [{"$match": {"_id": span}}, {"$project": {"hasEntry": {"$literal": True}}}]
        return [
            *self._by_path(span, order),
            {"$group": {"_id": "$path", "count": {"$sum": 1}, **fields}},
            {"$unionWith": {"coll": self._entries.name, "pipeline": entry}},
            {"$group": {"_id": "$_id", "row": {"$mergeObjects": "$$ROOT"}}},
            {"$replaceWith": "$row"},
            {"$match": {"count": {"$exists": True}}},
            {"$sort": {"_id": 1}},
        ]

    def _by_path(self, span: Mapping[str, str], order: str) -> list[dict[str, Any]]:
        return [{"$match": {"namespace": self._namespace, "path": span}}, {"$sort": {"path": 1, order: 1}}]

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
