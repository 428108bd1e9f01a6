"""The indexes that are there against the indexes that must be there.

They are compared by what they do, never by name alone: an index of ours under another name serves, an index under our
name that does something else does not. Nothing is dropped that does not bear our name, and no unique index at all.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from statelayer.errors import DatabaseError, DuplicateKeyError, IndexConflictError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statelayer.drivers import Collection, Document
    from statelayer.mongo_indexes.collections import Index
    from statelayer.mongo_indexes.report import SetupReport

IRRELEVANT_OPTIONS = frozenset({"v", "ns", "key", "name", "background"})

INDEX_NOT_FOUND = 27
OTHER_OPTIONS = 85
OTHER_KEYS = 86

SHOWN_DUPLICATES = 10


async def ensure_indexes(collection: Collection, wanted: Sequence[Index], report: SetupReport) -> None:
    """Create what is missing, repair what may be repaired, and raise ``IndexConflictError`` for the rest."""
    stored = await collection.list_indexes()
    for index in wanted:
        await _ensure(collection, index, stored, report)
    _warn_of_strangers(collection, wanted, stored, report)


def check_unique(collection: Collection, wanted: Sequence[Index], stored: Sequence[Document]) -> None:
    """Raise ``IndexConflictError`` unless every unique index is there and does what it must."""
    for index in wanted:
        if index.unique and not any(_serves(document, index) for document in stored):
            raise _conflict(collection, index, _obstacle(index, stored))


def shell(collection: str) -> str:
    """How a collection is named in mongosh."""
    return f"db.{collection}" if collection.isidentifier() else f"db.getCollection({json.dumps(collection)})"


async def _ensure(collection: Collection, index: Index, stored: Sequence[Document], report: SetupReport) -> None:
    obstacle = _obstacle(index, stored)
    if names := [document["name"] for document in stored if _serves(document, index)]:
        await _keep(collection, index, names, report)
    elif obstacle is None:
        await _create(collection, index, report.created, "Created", report)
    elif index.unique:
        raise _conflict(collection, index, obstacle)
    else:
        await _drop(collection, index.name)
        await _create(collection, index, report.repaired, "Replaced", report)


async def _keep(collection: Collection, index: Index, names: Sequence[str], report: SetupReport) -> None:
    if index.name not in names:
        report.warnings.append(f"Index {names[0]} on {collection.name} serves as {index.name}.")
    elif index.unique:
        # What another process is still building is listed as well, and may yet fail: this waits for its outcome.
        await _build(collection, index)


def _serves(stored: Document, index: Index) -> bool:
    return list(stored["key"].items()) == index.pattern and _options(stored) == index.options


def _options(stored: Document) -> dict[str, Any]:
    return {name: value for name, value in stored.items() if name not in IRRELEVANT_OPTIONS and value is not False}


def _obstacle(index: Index, stored: Sequence[Document]) -> str | None:
    """Name what must go first: another index under this one's name, or one without uniqueness on its keys.

    The server would build a unique index beside a plain one on the same keys, or not, depending on its version and on
    the other options; so it is always refused.
    """
    for document in stored:
        same_keys = list(document["key"].items()) == index.pattern
        if document["name"] == index.name or (index.unique and same_keys and not document.get("unique")):
            return str(document["name"])
    return None


async def _drop(collection: Collection, name: str) -> None:
    try:
        await collection.drop_index(name)
    except DatabaseError as error:
        if error.server_code != INDEX_NOT_FOUND:  # else another process is repairing it too
            raise


async def _create(collection: Collection, index: Index, done: list[str], verb: str, report: SetupReport) -> None:
    try:
        await _build(collection, index)
    except DatabaseError as error:
        if error.server_code not in (OTHER_OPTIONS, OTHER_KEYS):
            raise
        await _give_way(collection, index, report, error)
    else:
        done.append(f"{verb} index {index.name} on {collection.name}.")


async def _build(collection: Collection, index: Index) -> None:
    try:
        await collection.create_index(index.pattern, name=index.name, **index.options)
    except DuplicateKeyError as error:
        raise await _over_duplicates(collection, index) from error


async def _give_way(collection: Collection, index: Index, report: SetupReport, cause: DatabaseError) -> None:
    """Let an index that the server takes for the same stand in for a plain one of ours."""
    keys = dict(index.pattern)
    names = [document["name"] for document in await collection.list_indexes() if document["key"] == keys]
    if index.unique:
        raise _conflict(collection, index, names[0] if names else index.name) from cause
    report.warnings.append(
        f"Index {', '.join(names)} on {collection.name} stands in for {index.name}, with other options. "
        f"If reads become slow, drop it and run setup again."
    )


def _conflict(collection: Collection, index: Index, obstacle: str | None) -> IndexConflictError:
    mend = "Run `await layer.setup()` (or `statelayer setup`)."
    problem = f"Collection {collection.name} lacks {_described(index)}, which the log depends on"
    if obstacle is not None:
        problem += f"; index {obstacle} stands in its place and does something else"
        mend = (
            f"In mongosh run `{shell(collection.name)}.dropIndex({json.dumps(obstacle)})`, then `layer.setup()` again."
        )
    return IndexConflictError(f"{problem}. {mend}", collection=collection.name, index=index.name)


async def _over_duplicates(collection: Collection, index: Index) -> IndexConflictError:
    duplicates = await _duplicates(collection, index)
    shown = ", ".join(json.dumps(keys, default=str, ensure_ascii=False) for keys in duplicates)
    return IndexConflictError(
        f"Collection {collection.name} cannot have {_described(index)}, which the log depends on: several documents "
        f"share {shown}. Keep one document of each (in mongosh: `{shell(collection.name)}.find({{ … }})`), "
        "then run `layer.setup()` again.",
        collection=collection.name,
        index=index.name,
        duplicates=duplicates,
    )


async def _duplicates(collection: Collection, index: Index) -> list[Mapping[str, Any]]:
    """Return up to ten key values that several documents share. To a unique index, absent and null are one value."""
    keys = {key: {"$ifNull": [f"${key}", None]} for key in index.keys}
    groups = await collection.aggregate(
        [
            {"$match": dict(index.partial or {})},
            {"$group": {"_id": keys, "documents": {"$sum": 1}}},
            {"$match": {"documents": {"$gt": 1}}},
            {"$sort": {"_id": 1}},
            {"$limit": SHOWN_DUPLICATES},
        ],
        allowDiskUse=True,
    )
    return [dict(group["_id"]) for group in groups]


def _described(index: Index) -> str:
    return f"{'the unique index' if index.unique else 'the index'} {index.name} ({', '.join(index.keys)})"


def _warn_of_strangers(
    collection: Collection, wanted: Sequence[Index], stored: Sequence[Document], report: SetupReport
) -> None:
    for document in stored:
        if any(document["name"] == index.name or _serves(document, index) for index in wanted):
            continue
        if document.get("unique"):
            report.warnings.append(f"Unique index {document['name']} on {collection.name} may refuse what is written.")
        if "expireAfterSeconds" in document:
            report.warnings.append(f"Index {document['name']} on {collection.name} makes the server delete documents.")
