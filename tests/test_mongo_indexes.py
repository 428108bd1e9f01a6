from __future__ import annotations

import json
import subprocess
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest
from bson import Decimal128, Int64, Timestamp
from plans import plan_of_aggregate, plan_of_find, plan_of_update, winning_index
from pymongo import AsyncMongoClient, MongoClient

from statelayer.drivers import Database
from statelayer.embedded import Node, find_mongod
from statelayer.errors import (
    DatabaseError,
    DuplicateKeyError,
    FormatMismatchError,
    IndexConflictError,
    InvalidSettingsError,
    PrivilegeRequiredError,
    ReplicaSetRequiredError,
    SetupError,
    SetupRequiredError,
    UnsupportedServerError,
)
from statelayer.events import Entry, Event
from statelayer.mongo_indexes import (
    CHECKPOINTS,
    COLLECTIONS,
    CURSORS,
    ENTRIES,
    EVENTS,
    EXECUTIONS,
    INSTANCES,
    META,
    NAMESPACES,
    SUBSCRIPTIONS,
    SetupReport,
    Zone,
    check_ready,
    setup,
    sharding_script,
)
from statelayer.settings import Settings
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
    from pathlib import Path

pytestmark = pytest.mark.anyio

SETTINGS = Settings()
NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
ID = "0123456789abcdef01234567"
UNIQUE_IN_EVENTS = ["namespace_seq", "namespace_path_version", "namespace_idempotencyKey"]


@pytest.fixture
def ours(database: Any) -> Database:
    return Database(database)


def event(n: int = 1, **fields: Any) -> dict[str, Any]:
    document = {
        "_id": f"{n:024x}",
        "namespace": "/tasks/T1",
        "seq": Int64(n),
        "path": "/tasks/T1/status",
        "version": Int64(n),
        "op": "set",
        "value": "open",
        "actor": "user:U7",
        "source": "api",
        "triggerDepth": 0,
        "batchId": ID,
        "subscriptionsRev": Int64(0),
        "partition": 0,
        "committedAt": NOW,
        "schemaVersion": 1,
    }
    return document | fields


def execution(**fields: Any) -> dict[str, Any]:
    return {
        "_id": f"agent:{ID}:facade-hs-code",
        "namespace": "/tasks/T1",
        "eventId": ID,
        "rootEventId": ID,
        "subscription": {"name": "intake", "version": 1},
        "action": {"type": "execute_agent", "agentId": "facade-hs-code"},
        "target": "facade-hs-code",
        "state": "queued",
        "reason": None,
        "attempts": 0,
        "maxAttempts": 1,
        "availableAt": NOW,
        "createdAt": NOW,
    } | fields


async def index_names(ours: Database, collection: str) -> set[str]:
    return {index["name"] for index in await ours.collection(collection).list_indexes()}


async def replace_index(ours: Database, collection: str, old: str, keys: Sequence[str], **options: Any) -> None:
    await ours.collection(collection).drop_index(old)
    await ours.collection(collection).create_index([(key, 1) for key in keys], **({"name": old} | options))


# --- what is declared -------------------------------------------------------------------------------------------------


def test_every_collection_is_declared_once() -> None:
    names = [spec.name for spec in COLLECTIONS]
    declared = {EVENTS, ENTRIES, NAMESPACES, SUBSCRIPTIONS, EXECUTIONS, CURSORS, CHECKPOINTS, INSTANCES, META}
    assert len(names) == len(set(names))
    assert set(names) == declared


def test_what_grows_can_be_sharded_by_namespace() -> None:
    growing = [spec for spec in COLLECTIONS if spec.grows]
    assert {spec.name for spec in growing} == {EVENTS, ENTRIES, NAMESPACES, EXECUTIONS, CURSORS}
    for spec in growing:
        assert spec.shard_key in ("namespace", "_id")
        assert all(index.keys[0] == "namespace" for index in spec.indexes if index.unique), spec.name
        # The server shards a collection only by a key that some whole index begins with.
        assert spec.shard_key == "_id" or any(
            index.keys[0] == spec.shard_key and index.partial is None for index in spec.indexes
        ), spec.name


def test_validators_explain_every_field_and_stay_open_to_new_ones() -> None:
    for spec in COLLECTIONS:
        assert spec.validator["title"]
        assert spec.validator["description"]
        assert "additionalProperties" not in spec.validator
        assert all(field["description"] for field in spec.validator["properties"].values()), spec.name


# --- setup ------------------------------------------------------------------------------------------------------------


async def test_setup_creates_everything_once(ours: Database) -> None:
    first = await setup(ours, SETTINGS)
    assert "Created collection events." in first.created
    assert "Created index namespace_seq on events." in first.created
    assert first.repaired == first.warnings == []
    assert await setup(ours, SETTINGS) == SetupReport()
    for spec in COLLECTIONS:
        assert await index_names(ours, spec.name) == {"_id_"} | {index.name for index in spec.indexes}
    await check_ready(ours, SETTINGS)


async def test_two_setups_at_once_are_one(ours: Database) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(setup, ours, SETTINGS)
    assert await setup(ours, SETTINGS) == SetupReport()


async def test_a_prefix_keeps_two_layers_in_one_database_apart(database: Any) -> None:
    left, right = Database(database, "left_"), Database(database, "2right_")
    await setup(left, SETTINGS)
    assert set(await left.collection_names()) == {f"left_{spec.name}" for spec in COLLECTIONS}
    with pytest.raises(SetupRequiredError):
        await check_ready(right, SETTINGS)
    await setup(right, Settings(partitions=8))
    await check_ready(left, SETTINGS)


async def test_the_mending_line_fits_a_name_that_is_no_identifier(database: Any) -> None:
    ours = Database(database, "2right_")
    await ours.collection(EVENTS).create_index([("namespace", 1), ("seq", 1)], name="mine")
    with pytest.raises(IndexConflictError, match=r'`db\.getCollection\("2right_events"\)\.dropIndex\("mine"\)`'):
        await setup(ours, SETTINGS)


async def test_meta_says_what_holds_for_the_whole_database(ours: Database) -> None:
    await setup(ours, SETTINGS)
    documents = {document.pop("_id"): document for document in await ours.collection(META).find({})}
    assert documents == {
        "format": {"version": 1, "partitions": 64},
        "subscriptions": {"revision": 0},
        "dispatch": {"state": "on"},
    }
    assert await ours.collection(META).count({"revision": {"$type": "long"}}) == 1


async def test_setup_leaves_meta_as_it_is(ours: Database) -> None:
    await setup(ours, SETTINGS)
    meta = ours.collection(META)
    await meta.update_one({"_id": "subscriptions"}, {"$inc": {"revision": 3}})
    await meta.update_one({"_id": "dispatch"}, {"$set": {"state": "paused"}})
    assert await setup(ours, SETTINGS) == SetupReport()
    assert (await meta.find_one({"_id": "subscriptions"}) or {})["revision"] == 3
    assert (await meta.find_one({"_id": "dispatch"}) or {})["state"] == "paused"


async def test_a_changed_validator_is_put_back(ours: Database) -> None:
    await setup(ours, SETTINGS)
    await ours.command({"collMod": EVENTS, "validator": {}})
    await ours.command({"collMod": ENTRIES, "validationAction": "warn"})
    report = await setup(ours, SETTINGS)
    assert report.repaired == [
        "Replaced the validator of collection events.",
        "Replaced the validator of collection entries.",
    ]
    assert await setup(ours, SETTINGS) == SetupReport()
    with pytest.raises(DatabaseError):
        await ours.collection(EVENTS).insert_one({"_id": ID})


# --- indexes that differ ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["namespace_seq", "mine"])
async def test_a_plain_index_in_place_of_a_unique_one_is_refused(ours: Database, name: str) -> None:
    events = ours.collection(EVENTS)
    await events.create_index([("namespace", 1), ("seq", 1)], name=name)
    with pytest.raises(IndexConflictError) as caught:
        await setup(ours, SETTINGS)
    assert (caught.value.collection, caught.value.index) == ("events", "namespace_seq")
    assert f'`db.events.dropIndex("{name}")`, then `layer.setup()` again' in str(caught.value)
    with pytest.raises(SetupRequiredError):
        await check_ready(ours, SETTINGS)

    await events.drop_index(name)
    await setup(ours, SETTINGS)
    await check_ready(ours, SETTINGS)
    await events.insert_one(event())
    with pytest.raises(DuplicateKeyError) as duplicate:
        await events.insert_one(event() | {"_id": ID, "version": Int64(2)})
    assert duplicate.value.keys == ("namespace", "seq")


@pytest.mark.parametrize(
    "options", [{"sparse": True}, {"hidden": True}, {"partialFilterExpression": {"seq": {"$gt": 9}}}]
)
async def test_a_unique_index_with_other_options_under_our_name_is_refused(
    ours: Database, options: dict[str, Any]
) -> None:
    await setup(ours, SETTINGS)
    await replace_index(ours, EVENTS, "namespace_seq", ["namespace", "seq"], unique=True, **options)
    for check in (setup, check_ready):
        with pytest.raises(IndexConflictError, match=r'db\.events\.dropIndex\("namespace_seq"\)'):
            await check(ours, SETTINGS)


@pytest.mark.parametrize("name", UNIQUE_IN_EVENTS)
async def test_nothing_is_appended_without_the_uniqueness_of_the_log(ours: Database, name: str) -> None:
    await setup(ours, SETTINGS)
    await ours.collection(EVENTS).drop_index(name)
    with pytest.raises(IndexConflictError, match=r"lacks the unique index .* Run `await layer\.setup\(\)`") as caught:
        await check_ready(ours, SETTINGS)
    assert caught.value.index == name
    assert (await setup(ours, SETTINGS)).created == [f"Created index {name} on events."]
    await check_ready(ours, SETTINGS)


async def test_the_same_index_under_another_name_serves(ours: Database) -> None:
    await setup(ours, SETTINGS)
    await replace_index(ours, EVENTS, "namespace_seq", ["namespace", "seq"], name="mine", unique=True)
    report = await setup(ours, SETTINGS)
    assert report == SetupReport(warnings=["Index mine on events serves as namespace_seq."])
    await check_ready(ours, SETTINGS)


async def test_a_plain_index_of_ours_that_differs_is_replaced(ours: Database) -> None:
    await setup(ours, SETTINGS)
    await replace_index(ours, EXECUTIONS, "claim", ["state"])
    await replace_index(ours, EXECUTIONS, "eventId", ["eventId"], hidden=True)
    report = await setup(ours, SETTINGS)
    assert report == SetupReport(
        repaired=["Replaced index claim on executions.", "Replaced index eventId on executions."]
    )
    assert await setup(ours, SETTINGS) == SetupReport()


async def test_a_plain_index_of_theirs_on_our_keys_stands_in_and_stays(ours: Database) -> None:
    await setup(ours, SETTINGS)
    await replace_index(ours, EXECUTIONS, "eventId", ["eventId"], name="theirs", expireAfterSeconds=3600)
    report = await setup(ours, SETTINGS)
    assert report.created == report.repaired == []
    assert any("theirs on executions stands in for eventId" in warning for warning in report.warnings)
    assert any("theirs on executions makes the server delete documents" in warning for warning in report.warnings)
    assert "theirs" in await index_names(ours, EXECUTIONS)


async def test_indexes_of_theirs_stay_and_dangerous_ones_are_named(ours: Database) -> None:
    await setup(ours, SETTINGS)
    events = ours.collection(EVENTS)
    await events.create_index([("value.status", 1)], name="by_status")
    await events.create_index([("actor", 1)], name="one_each", unique=True)
    report = await setup(ours, SETTINGS)
    assert report == SetupReport(warnings=["Unique index one_each on events may refuse what is written."])
    assert {"by_status", "one_each"} < await index_names(ours, EVENTS)


# --- duplicates -------------------------------------------------------------------------------------------------------


async def test_i2_duplicates_under_a_unique_index_are_listed(ours: Database) -> None:
    rows = [{"namespace": "/tasks/T1", "seq": Int64(n // 2)} for n in range(30)]
    await ours.collection(EVENTS).insert_many(rows)
    with pytest.raises(IndexConflictError) as caught:
        await setup(ours, SETTINGS)
    assert [dict(keys) for keys in caught.value.duplicates] == [{"namespace": "/tasks/T1", "seq": n} for n in range(10)]
    assert '{"namespace": "/tasks/T1", "seq": 3}' in str(caught.value)
    assert not isinstance(caught.value, DuplicateKeyError)
    with pytest.raises(SetupRequiredError):
        await check_ready(ours, SETTINGS)


async def test_i2_duplicates_refuse_two_processes_that_start_together(ours: Database) -> None:
    await setup(ours, SETTINGS)
    events = ours.collection(EVENTS)
    await events.drop_index("namespace_idempotencyKey")
    await events.insert_many([event(n, idempotencyKey="K") for n in (1, 2)] + [event(3)])
    refused = []

    async def start() -> None:
        with pytest.raises(IndexConflictError) as caught:
            await setup(ours, SETTINGS)
        refused.append(caught.value.duplicates)

    async def building() -> bool:
        return "namespace_idempotencyKey" in await index_names(ours, EVENTS)

    async def both_wait() -> bool:
        command = {"command.createIndexes": EVENTS, "command.indexes.name": "namespace_idempotencyKey"}
        waiting = {"currentOp": 1, "connectionId": {"$exists": True}, "command.$db": ours.name, **command}
        return len((await ours.admin_command(waiting))["inprog"]) == 2

    # The second one finds the index listed that the first one is building in vain.
    async with anyio.create_task_group() as group, hanging_index_builds(ours):
        group.start_soon(start)
        await wait_until(building)
        group.start_soon(start)
        await wait_until(both_wait)
    assert refused == [({"namespace": "/tasks/T1", "idempotencyKey": "K"},)] * 2


@asynccontextmanager
async def hanging_index_builds(ours: Database) -> AsyncGenerator[None]:
    point = {"configureFailPoint": "hangAfterStartingIndexBuild"}
    await ours.admin_command({**point, "mode": "alwaysOn"})
    try:
        yield
    finally:
        await ours.admin_command({**point, "mode": "off"})


# --- readiness and format ---------------------------------------------------------------------------------------------


async def test_an_empty_database_asks_for_setup(ours: Database) -> None:
    with pytest.raises(SetupRequiredError, match=r"Run `await layer\.setup\(\)` once"):
        await check_ready(ours, SETTINGS)


async def test_another_number_of_partitions_is_refused(ours: Database) -> None:
    await setup(ours, SETTINGS)
    for check in (setup, check_ready):
        with pytest.raises(FormatMismatchError, match=r"use Settings\(partitions=64\)"):
            await check(ours, Settings(partitions=8))


async def test_another_format_is_refused(ours: Database) -> None:
    await setup(ours, SETTINGS)
    await ours.collection(META).update_one({"_id": "format"}, {"$set": {"version": 2}})
    for check in (setup, check_ready):
        with pytest.raises(FormatMismatchError, match=r"holds format 2; this release of statelayer reads format 1"):
            await check(ours, SETTINGS)


async def test_a_collection_of_the_service_is_never_taken_over(ours: Database) -> None:
    await ours.collection(EVENTS).insert_one({"_id": 1, "kind": "click"})
    with pytest.raises(FormatMismatchError, match=r"documents that are not of this library.*Settings\(prefix=…\)"):
        await setup(ours, SETTINGS)
    assert await ours.collection_names() == [EVENTS]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"viewOn": "other"}, "is a view"),
        ({"capped": True, "size": 4096}, "is capped"),
        ({"collation": {"locale": "en", "strength": 1}}, "has a collation"),
    ],
)
async def test_a_collection_that_cannot_hold_the_log_is_refused(
    ours: Database, options: dict[str, Any], problem: str
) -> None:
    await ours.command({"create": EVENTS, **options})
    with pytest.raises(FormatMismatchError, match=problem):
        await setup(ours, SETTINGS)
    assert await index_names(ours, ENTRIES) == set()


# --- validators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq", [1.0, float("nan"), Decimal128("1"), True, "1", None, Int64(-1)])
async def test_a_seq_is_an_int64(ours: Database, seq: object) -> None:
    await setup(ours, SETTINGS)
    with pytest.raises(DatabaseError, match="failed validation"):
        await ours.collection(EVENTS).insert_one(event(seq=seq))
    head = {"_id": "/tasks/T1", "seq": seq, "repairs": Int64(0), "partition": 3}
    with pytest.raises(DatabaseError, match="failed validation"):
        await ours.collection(NAMESPACES).insert_one(head)


@pytest.mark.parametrize("field", ["namespace", "seq", "path", "version", "op", "actor", "batchId", "subscriptionsRev"])
async def test_an_event_lacks_nothing_that_the_log_depends_on(ours: Database, field: str) -> None:
    await setup(ours, SETTINGS)
    document = event()
    del document[field]
    with pytest.raises(DatabaseError, match="failed validation"):
        await ours.collection(EVENTS).insert_one(document)


@pytest.mark.parametrize(
    "wrong",
    [
        {"_id": "E1"},
        {"seq": 1},
        {"seq": Int64(0)},
        {"version": 1},
        {"subscriptionsRev": 0},
        {"partition": Int64(0)},
        {"op": "upsert"},
        {"source": "cron"},
        {"actor": "U7"},
        {"namespace": "/tasks"},
        {"path": "/tasks/T1"},
        {"causedByEventId": None},
        {"committedAt": "2026-03-01"},
    ],
)
async def test_a_malformed_event_is_refused(ours: Database, wrong: dict[str, Any]) -> None:
    await setup(ours, SETTINGS)
    with pytest.raises(DatabaseError, match="failed validation"):
        await ours.collection(EVENTS).insert_one(event(**wrong))


async def test_documents_of_the_library_pass(ours: Database) -> None:
    await setup(ours, SETTINGS)
    merge = event(2, op="merge", patch={"a": None}, causedByEventId=ID, rootEventId=ID, batchSize=2, idempotencyKey="K")
    delete = event(3, op="delete", traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    del delete["value"]
    await ours.collection(EVENTS).insert_many([event(), merge, delete])
    await ours.collection(ENTRIES).insert_one(Entry.document_of(Event.from_document(delete)))
    at = {"seq": Int64(3), "eventId": ID}
    await ours.collection(CURSORS).insert_one({"_id": "/tasks/T1", "at": at})
    await ours.collection(CHECKPOINTS).insert_one({"_id": 3, "clusterTime": Timestamp(1, 1)})
    skip = execution(_id=f"skip:{ID}:intake", state="skipped", reason="max_depth")
    for absent in ("action", "target", "attempts", "maxAttempts", "availableAt"):
        del skip[absent]
    running = {"state": "running", "lease": {"owner": "i1", "token": "t", "until": NOW}, "startedAt": NOW}
    await ours.collection(EXECUTIONS).insert_many(
        [execution(), execution(_id=f"workflow:{ID}:review", **running), skip]
    )
    instance = {"_id": "i1", "host": "h", "pid": 7, "startedAt": NOW, "heartbeatAt": NOW}
    executors = [{"type": "execute_agent", "target": "facade-hs-code"}]
    await ours.collection(INSTANCES).insert_one({**instance, "executors": executors})


@pytest.mark.parametrize(
    "wrong",
    [{"state": "done"}, {"reason": "bored"}, {"attempts": 1.0}, {"_id": "agent"}, {"action": {}}, {"target": None}],
)
async def test_a_malformed_execution_is_refused(ours: Database, wrong: dict[str, Any]) -> None:
    await setup(ours, SETTINGS)
    with pytest.raises(DatabaseError, match="failed validation"):
        await ours.collection(EXECUTIONS).insert_one(execution(**wrong))


@pytest.mark.parametrize(
    ("id", "change"),
    [
        ("dispatch", {"state": "off"}),
        ("subscriptions", {"revision": 1.0}),
        ("subscriptions", {"revision": "1"}),
        ("format", {"partitions": 0}),
    ],
)
async def test_a_slip_in_meta_is_refused(ours: Database, id: str, change: dict[str, Any]) -> None:
    await setup(ours, SETTINGS)
    with pytest.raises(DatabaseError, match="failed validation"):
        await ours.collection(META).update_one({"_id": id}, {"$set": change})


async def test_one_version_of_a_subscription_is_enabled(ours: Database) -> None:
    await setup(ours, SETTINGS)
    subscriptions = ours.collection(SUBSCRIPTIONS)
    common = {"name": "intake", "activeRevs": [[Int64(1), None]], "pattern": "/tasks/*/requests/*"}
    common |= {"action": {"type": "execute_agent", "agentId": "a"}}
    await subscriptions.insert_one({**common, "version": 1, "enabled": True})
    await subscriptions.insert_one({**common, "version": 2, "enabled": False})
    with pytest.raises(DuplicateKeyError) as enabled:
        await subscriptions.insert_one({**common, "version": 3, "enabled": True})
    with pytest.raises(DuplicateKeyError) as version:
        await subscriptions.insert_one({**common, "version": 2, "enabled": False})
    assert (enabled.value.keys, version.value.keys) == (("name",), ("name", "version"))


async def test_validators_accept_fields_of_a_newer_release(ours: Database) -> None:
    await setup(ours, SETTINGS)
    newer = {"addedLater": {"anything": 1}}
    await ours.collection(EVENTS).insert_one(event(**newer))
    await ours.collection(ENTRIES).insert_one(Entry.document_of(Event.from_document(event())) | newer)
    await ours.collection(EXECUTIONS).insert_one(execution(**newer))
    await ours.collection(META).insert_one({"_id": "addedLater", **newer})


# --- the server and the user ------------------------------------------------------------------------------------------


@pytest.fixture
def standalone(tmp_path: Path) -> Generator[Node]:
    node = Node(tmp_path, [str(find_mongod()), *MONGOD_OPTIONS], scratch=None)
    node.launch()
    try:
        node.settle_on_port()
        yield node
    finally:
        node.stop()


MONGOD_OPTIONS = ["--bind_ip", "127.0.0.1", "--nounixsocket", "--quiet", "--wiredTigerCacheSizeGB", "0.25"]
MONGOD_OPTIONS += ["--setParameter", "shutdownTimeoutMillisForSignaledShutdown=0"]


async def test_i3_a_standalone_server_is_refused_at_once(standalone: Node) -> None:
    async with AsyncMongoClient[dict[str, Any]](f"mongodb://{standalone.address}") as client:
        with anyio.fail_after(5), pytest.raises(ReplicaSetRequiredError, match=r"--replSet rs0.*rs\.initiate\(\)"):
            await setup(Database(client["orders"]), SETTINGS)
        assert await client["orders"].list_collection_names() == []


@pytest.mark.parametrize(
    ("hello", "error", "advice"),
    [
        ({"maxWireVersion": 13, "setName": "rs0"}, UnsupportedServerError, r"Upgrade it to 6\.0"),
        ({"maxWireVersion": 21, "isreplicaset": True}, ReplicaSetRequiredError, r"Run `rs\.initiate\(\)`"),
        ({"maxWireVersion": 21}, ReplicaSetRequiredError, "--replSet"),
    ],
)
async def test_what_the_server_lacks_is_said(
    ours: Database,
    monkeypatch: pytest.MonkeyPatch,
    hello: Mapping[str, Any],
    error: type[SetupError],
    advice: str,
) -> None:
    async def answer(command: Mapping[str, Any]) -> Mapping[str, Any]:
        return hello

    monkeypatch.setattr(ours, "admin_command", answer)
    with pytest.raises(error, match=advice):
        await setup(ours, SETTINGS)
    assert await ours.collection_names() == []


@pytest.fixture(scope="module")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Node]:
    """A replica set that asks for a password."""
    home = tmp_path_factory.mktemp("guarded")
    key = home / "key"
    key.write_text("statelayer" * 10)
    key.chmod(0o400)
    node = Node(home, [str(find_mongod()), *MONGOD_OPTIONS, "--replSet", "rs0", "--keyFile", str(key)], scratch=None)
    node.launch()
    try:
        anyio.run(_open_guarded_server, node)
        yield node
    finally:
        node.stop()


async def _open_guarded_server(node: Node) -> None:
    await wait_until(node.hello, timeout=60)
    node.command("replSetInitiate", {"_id": "rs0", "members": [{"_id": 0, "host": node.address}]})
    await wait_until(lambda: node.hello().get("isWritablePrimary"), timeout=60)
    node.command("createUser", "root", pwd="s3cret", roles=["root"])
    with MongoClient[dict[str, Any]](_uri(node, "root")) as client:
        collection_roles = [
            {"resource": {"db": "orders", "collection": spec.name}, "actions": ["find", "insert", "update", "remove"]}
            for spec in COLLECTIONS
        ]
        client.admin.command("createRole", "narrow", privileges=collection_roles, roles=[])
        for user, role in (("writer", "readWrite"), ("reader", "read"), ("stranger", "readWrite")):
            database = "elsewhere" if user == "stranger" else "orders"
            client.admin.command("createUser", user, pwd="s3cret", roles=[{"role": role, "db": database}])
        client.admin.command("createUser", "narrow", pwd="s3cret", roles=["narrow"])


def _uri(node: Node, user: str) -> str:
    return f"mongodb://{user}:s3cret@{node.address}/?directConnection=true"


@asynccontextmanager
async def as_user(node: Node, user: str) -> AsyncGenerator[Database]:
    async with AsyncMongoClient[dict[str, Any]](_uri(node, user)) as client:
        yield Database(client["orders"])


async def test_the_role_read_write_is_enough(guarded_server: Node) -> None:
    async with as_user(guarded_server, "writer") as ours:
        await setup(ours, SETTINGS)
        assert await setup(ours, SETTINGS) == SetupReport()
        await check_ready(ours, SETTINGS)


async def test_a_validator_that_the_user_may_not_replace_is_a_warning(guarded_server: Node) -> None:
    async with as_user(guarded_server, "root") as root, as_user(guarded_server, "writer") as ours:
        await setup(root, SETTINGS)
        await root.command({"collMod": ENTRIES, "validator": {}})
        report = await setup(ours, SETTINGS)
        assert report.repaired == []
        assert len(report.warnings) == 1
        assert "Run setup once as a user with the role dbAdmin" in report.warnings[0]
        assert (await setup(root, SETTINGS)).repaired == ["Replaced the validator of collection entries."]


@pytest.mark.parametrize(
    ("user", "missing"),
    [
        ("reader", "createCollection, createIndex, insert, remove, update"),
        ("narrow", "changeStream, createCollection, createIndex, listCollections, listIndexes"),
        (
            "stranger",
            "changeStream, createCollection, createIndex, find, insert, listCollections, listIndexes, remove, update",
        ),
    ],
)
async def test_missing_privileges_are_named_with_the_command_that_grants_them(
    guarded_server: Node, user: str, missing: str
) -> None:
    async with as_user(guarded_server, user) as ours:
        with pytest.raises(PrivilegeRequiredError) as caught:
            await setup(ours, SETTINGS)
    assert caught.value.action == missing
    grant = f'db.getSiblingDB("admin").grantRolesToUser("{user}", [{{ role: "readWrite", db: "orders" }}])'
    assert grant in str(caught.value)
    assert "s3cret" not in str(caught.value)


async def test_a_client_without_a_user_is_told_so(guarded_server: Node) -> None:
    uri = f"mongodb://{guarded_server.address}/?directConnection=true"
    async with AsyncMongoClient[dict[str, Any]](uri) as client:
        with pytest.raises(PrivilegeRequiredError, match="requires authentication"):
            await setup(Database(client["orders"]), SETTINGS)


# --- sharding ---------------------------------------------------------------------------------------------------------

RECORDER = """
const MinKey = () => "min", MaxKey = () => "max", calls = [];
const sh = new Proxy({}, { get: (_, name) => (...given) => calls.push([name, ...given]) });
%s
console.log(JSON.stringify(calls));
"""


def run(script: str) -> list[Any]:
    finished = subprocess.run(
        ["node", "--eval", RECORDER % script], capture_output=True, text=True, timeout=30, check=True
    )
    calls: list[Any] = json.loads(finished.stdout)
    return calls


def test_the_script_shards_what_grows_in_identical_zones() -> None:
    calls = run(sharding_script("orders", "x_", [Zone("a", "/tasks/M"), Zone("b")]))
    assert calls[:2] == [["addShardToZone", "a", "statelayer-a"], ["addShardToZone", "b", "statelayer-b"]]
    expected = []
    for name, key in [
        ("events", "namespace"),
        ("entries", "namespace"),
        ("namespaces", "_id"),
        ("executions", "namespace"),
        ("cursors", "_id"),
    ]:
        expected += [
            ["updateZoneKeyRange", f"orders.x_{name}", {key: "min"}, {key: "/tasks/M"}, "statelayer-a"],
            ["updateZoneKeyRange", f"orders.x_{name}", {key: "/tasks/M"}, {key: "max"}, "statelayer-b"],
            ["shardCollection", f"orders.x_{name}", {key: 1}],
        ]
    assert calls[2:] == expected


def test_the_script_quotes_what_it_is_given() -> None:
    calls = run(sharding_script('o"\\rders${1}', zones=[Zone('s"1')]))
    assert calls[0] == ["addShardToZone", 's"1', 'statelayer-s"1']
    assert calls[-1] == ["shardCollection", 'o"\\rders${1}.cursors', {"_id": 1}]


def test_without_zones_the_script_names_the_keys_only() -> None:
    script = sharding_script("orders")
    assert "const zones = [];" in script
    assert '"name": "events"' in script


@pytest.mark.parametrize(
    "zones",
    [
        [Zone("a", "/tasks/M")],
        [Zone("a"), Zone("b")],
        [Zone("a", "/tasks/T"), Zone("b", "/tasks/M"), Zone("c")],
        [Zone("a", "/tasks/M"), Zone("b", "/tasks/M"), Zone("c")],
    ],
)
def test_zones_that_leave_a_gap_or_overlap_are_refused(zones: list[Zone]) -> None:
    with pytest.raises(InvalidSettingsError, match="only the last one has none"):
        sharding_script("orders", zones=zones)


# --- plans ------------------------------------------------------------------------------------------------------------


async def test_a_path_as_of_a_seq_costs_one_key(ours: Database) -> None:
    await setup(ours, SETTINGS)
    busy = [event(n, path="/tasks/T1/log") for n in range(2, 101)]
    await ours.collection(EVENTS).insert_many([event(1), *busy])
    as_of = {"namespace": "/tasks/T1", "seq": {"$lte": Int64(50)}}
    # With the path in the sort, no other index can give the order, whatever the planner has remembered.
    for path in ("/tasks/T1/status", "/tasks/T1/log"):
        plan = await plan_of_find(ours, EVENTS, {**as_of, "path": path}, {"path": -1, "seq": -1}, limit=1)
        assert (plan.index, plan.keys_examined, plan.docs_examined) == ("namespace_path_seq", 1, 1)
        assert not plan.sorts_in_memory


async def test_dead_leases_are_found_by_the_clock_of_the_server(ours: Database) -> None:
    await setup(ours, SETTINGS)
    lease = {"owner": "i1", "token": "t", "until": NOW}
    await ours.collection(EXECUTIONS).insert_many(
        [
            execution(_id=f"agent:{n:024x}:a", state=state, lease=lease)
            for n, state in enumerate(["running", "failed"] * 9)
        ]
    )
    dead = {"state": {"$in": ["claimed", "running"]}, "$expr": {"$lt": ["$lease.until", "$$NOW"]}}
    plan = await plan_of_find(ours, EXECUTIONS, dead)
    assert (plan.index, plan.docs_examined, plan.returned) == ("reap", 9, 9)


async def test_plans_tell_reads_by_id_and_scans_apart(database: Any) -> None:
    collection = database["things"]
    await collection.insert_one({"_id": 1, "n": 1})
    assert await winning_index(database, "things", {"_id": 1}) == "_id_"
    assert await winning_index(database, "things", {"_id": {"$gte": 1}}) == "_id_"
    assert await winning_index(database, "things", {"n": 1}, {"n": 1}) == "COLLSCAN"
    assert (await plan_of_find(database, "things", {}, {"n": 1})).sorts_in_memory
    await collection.create_index([("n", 1)], name="by_n")
    assert await winning_index(database, "things", {"n": 1}) == "by_n"
    assert (await plan_of_update(database, "things", {"n": 1}, {"$set": {"m": 1}})).index == "by_n"
    assert (await plan_of_aggregate(database, "things", [{"$match": {"n": 1}}, {"$count": "all"}])).index == "by_n"
