"""Preparing the database once, and checking cheaply that it is prepared."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from bson.int64 import Int64

from statelayer.errors import (
    DatabaseError,
    DuplicateKeyError,
    FormatMismatchError,
    PrivilegeRequiredError,
    SetupRequiredError,
)
from statelayer.mongo_indexes.collections import COLLECTIONS, EVENTS, META, CollectionSpec
from statelayer.mongo_indexes.indexes import check_unique, ensure_indexes, shell
from statelayer.mongo_indexes.report import SetupReport
from statelayer.mongo_indexes.server import check_server

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statelayer.drivers import Database
    from statelayer.settings import Settings

FORMAT_VERSION: Final = 1

DURABLE = {"w": "majority"}
NAMESPACE_EXISTS = 48


async def setup(database: Database, settings: Settings) -> SetupReport:
    """Create what is missing and repair harmless drift. May be run again, and by several processes at once.

    Raises the ``SetupError`` that names what it will not do by itself: a standalone or old server, a missing
    privilege, a database of another format, an index in the way of one that the log depends on.
    """
    await check_server(database)
    await _check_ownership(database, settings)
    report = SetupReport()
    await _ensure_collections(database, report)
    for spec in COLLECTIONS:
        await ensure_indexes(database.collection(spec.name), spec.indexes, report)
    await _ensure_meta(database, settings, report)
    return report


async def check_ready(database: Database, settings: Settings) -> None:
    """Raise unless ``setup`` has been run, for this format, and the uniqueness of the log still stands.

    Raises ``SetupRequiredError``, ``FormatMismatchError`` or ``IndexConflictError``. Costs two reads.
    """
    stored = await _stored_format(database)
    if stored is None:
        raise SetupRequiredError(database.name)
    _check_format(stored, settings)
    events = database.collection(EVENTS)
    check_unique(events, _spec(EVENTS).indexes, await events.list_indexes())


def _spec(name: str) -> CollectionSpec:
    return next(spec for spec in COLLECTIONS if spec.name == name)


# --- whose database it is ---------------------------------------------------------------------------------------------


async def _check_ownership(database: Database, settings: Settings) -> None:
    stored = await _stored_format(database)
    if stored is not None:
        _check_format(stored, settings)
        return
    for spec in COLLECTIONS:
        await _refuse_foreign(database, spec)


async def _stored_format(database: Database) -> dict[str, Any] | None:
    return await database.collection(META).find_one({"_id": "format"})


def _check_format(stored: Mapping[str, Any], settings: Settings) -> None:
    version, partitions = stored.get("version"), stored.get("partitions")
    if version != FORMAT_VERSION:
        raise FormatMismatchError(
            f"The database holds format {version}; this release of statelayer reads format {FORMAT_VERSION}. "
            "Run the release that wrote it, or one whose changelog says that it converts this format."
        )
    if partitions != settings.partitions:
        raise FormatMismatchError(
            f"The database was set up with {partitions} partitions, and this process was started with "
            f"{settings.partitions}. The number is fixed by the first setup: use Settings(partitions={partitions})."
        )


async def _refuse_foreign(database: Database, spec: CollectionSpec) -> None:
    collection = database.collection(spec.name)
    unmarked = [{mark: {"$exists": False}} for mark in spec.marks]
    if unmarked and await collection.find_one({"$or": unmarked}, projection={"_id": 1}):
        raise _foreign(database, collection.name, "holds documents that are not of this library")


def _foreign(database: Database, collection: str, problem: str) -> FormatMismatchError:
    return FormatMismatchError(
        f"Collection {collection} of database {database.name} {problem}. "
        "Nothing was changed. Choose another name with Settings(prefix=…), or another database."
    )


# --- collections ------------------------------------------------------------------------------------------------------


async def _ensure_collections(database: Database, report: SetupReport) -> None:
    stored = await _stored_collections(database)
    for spec in COLLECTIONS:
        if spec.name not in stored:
            await _create(database, spec, report)
    # Read again: what another process created meanwhile may be that of another release.
    stored = await _stored_collections(database)
    for spec in COLLECTIONS:
        await _ensure_validator(database, spec, stored[spec.name], report)


async def _stored_collections(database: Database) -> dict[str, Mapping[str, Any]]:
    names = {database.prefix + spec.name: spec.name for spec in COLLECTIONS}
    reply = await database.command({"listCollections": 1, "filter": {"name": {"$in": list(names)}}})
    stored = {names[document["name"]]: document for document in reply["cursor"]["firstBatch"]}
    for name, document in stored.items():
        _check_kind(database, database.prefix + name, document)
    return stored


def _check_kind(database: Database, name: str, stored: Mapping[str, Any]) -> None:
    if stored["type"] != "collection":
        raise _foreign(database, name, f"is a {stored['type']}")
    for option, problem in (
        ("capped", "is capped: it would forget"),
        ("collation", "has a collation: it would confuse"),
    ):
        if stored["options"].get(option):
            raise _foreign(database, name, f"{problem} what it holds")


async def _create(database: Database, spec: CollectionSpec, report: SetupReport) -> None:
    name = database.prefix + spec.name
    try:
        await database.command({"create": name, "validator": _validator(spec), "writeConcern": DURABLE})
    except DatabaseError as error:
        if error.server_code != NAMESPACE_EXISTS:  # else another process was faster
            raise
    else:
        report.created.append(f"Created collection {name}.")


async def _ensure_validator(
    database: Database, spec: CollectionSpec, stored: Mapping[str, Any], report: SetupReport
) -> None:
    options = stored["options"]
    strict = (
        options.get("validationLevel", "strict") == "strict" and options.get("validationAction", "error") == "error"
    )
    if strict and options.get("validator") == _validator(spec):
        return
    name = database.prefix + spec.name
    command = {"collMod": name, "validator": _validator(spec), "validationLevel": "strict", "validationAction": "error"}
    try:
        await database.command({**command, "writeConcern": DURABLE})
    except PrivilegeRequiredError:
        report.warnings.append(
            f"Collection {name} has another validator, and this user may not replace it. Run setup once as a user "
            f"with the role dbAdmin. (To see it: `{shell(name)}.options()` in mongosh.)"
        )
    else:
        report.repaired.append(f"Replaced the validator of collection {name}.")


def _validator(spec: CollectionSpec) -> dict[str, Any]:
    return {"$jsonSchema": dict(spec.validator)}


# --- meta -------------------------------------------------------------------------------------------------------------


async def _ensure_meta(database: Database, settings: Settings, report: SetupReport) -> None:
    """Write the format last: where it stands, everything else does."""
    await _insert_once(database, "subscriptions", {"revision": Int64(0)}, report)
    await _insert_once(database, "dispatch", {"state": "on"}, report)
    await _insert_once(database, "format", {"version": FORMAT_VERSION, "partitions": settings.partitions}, report)
    stored = await _stored_format(database)
    assert stored is not None
    _check_format(stored, settings)


async def _insert_once(database: Database, id: str, fields: Mapping[str, Any], report: SetupReport) -> None:
    meta = database.collection(META)
    with suppress(DuplicateKeyError):  # another process was faster
        counts = await meta.update_one({"_id": id}, {"$setOnInsert": fields}, upsert=True)
        if counts.upserted:
            report.created.append(f"Created document {id} in {meta.name}.")
