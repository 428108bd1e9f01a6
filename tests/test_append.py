"""Appending: versions, keys, causes, atomicity, refusals (DESIGN §6; P1, P3, P10)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest
from bson import Decimal128, Int64, ObjectId
from pydantic import BaseModel

from statelayer import Settings, StateLayer, Write
from statelayer.errors import (
    CausationNotFoundError,
    ClosedError,
    IdempotencyConflictError,
    IntegrityError,
    InvalidActorError,
    InvalidInputError,
    InvalidPathError,
    InvalidValueError,
    InvalidWriteError,
    NotFoundError,
    ReservedPathError,
    SetupRequiredError,
    VersionConflictError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.anyio

USER = "user:U7"
PATH = "/tasks/T1/status"


async def seqs(layer: StateLayer, namespace: str) -> list[int]:
    return [event.seq async for event in layer.events(namespace)]


# --- what a write does


async def test_versions_count_writes_of_a_path_and_seqs_count_events_of_a_namespace(layer: StateLayer) -> None:
    first = await layer.set(PATH, "new", actor=USER)
    other = await layer.set("/tasks/T1/owner", "U7", actor=USER)
    second = await layer.set(PATH, "done", actor=USER)
    elsewhere = await layer.set("/tasks/T2/status", "new", actor=USER)
    assert [(e.seq, e.version) for e in (first, other, second, elsewhere)] == [(1, 1), (2, 1), (3, 2), (1, 1)]


async def test_the_event_says_what_who_and_from_where(layer: StateLayer) -> None:
    event = await layer.set(PATH, {"a": 1}, actor=USER)
    assert (event.op, event.value, event.actor, event.source, event.trigger_depth) == ("set", {"a": 1}, USER, "api", 0)
    assert event.root_event_id == event.id
    assert event.caused_by_event_id is None
    assert await layer.event(event.id) == event


async def test_merge_replaces_given_fields_and_keeps_the_rest(layer: StateLayer) -> None:
    await layer.set(PATH, {"a": 1, "b": {"x": 1}}, actor=USER)
    event = await layer.merge(PATH, {"b": {"y": 2}, "c": None}, actor=USER)
    assert event.value == {"a": 1, "b": {"y": 2}, "c": None}
    assert event.patch == {"b": {"y": 2}, "c": None}
    assert event.op == "merge"


@pytest.mark.parametrize("before", ["absent", "deleted", "text"])
async def test_merge_on_what_is_no_object_behaves_as_set(layer: StateLayer, before: str) -> None:
    if before != "absent":
        await layer.set(PATH, "text", actor=USER)
    if before == "deleted":
        await layer.delete(PATH, actor=USER)
    event = await layer.merge(PATH, {"a": 1}, actor=USER)
    assert (event.op, event.value, event.patch) == ("merge", {"a": 1}, {"a": 1})


async def test_delete_goes_on_counting_versions(layer: StateLayer) -> None:
    await layer.set(PATH, 1, actor=USER)
    deleted = await layer.delete(PATH, actor=USER)
    assert (deleted.op, deleted.version) == ("delete", 2)
    assert await layer.get(PATH) is None
    again = await layer.set(PATH, 2, actor=USER, expected_version=2)
    assert again.version == 3


async def test_deleting_what_is_not_there_is_an_error(layer: StateLayer) -> None:
    with pytest.raises(NotFoundError, match="nothing to delete"):
        await layer.delete(PATH, actor=USER)
    await layer.set(PATH, 1, actor=USER)
    await layer.delete(PATH, actor=USER)
    with pytest.raises(NotFoundError):
        await layer.delete(PATH, actor=USER)
    assert await seqs(layer, "/tasks/T1") == [1, 2]


async def test_null_is_a_value(layer: StateLayer) -> None:
    await layer.set(PATH, None, actor=USER)
    entry = await layer.get(PATH)
    assert entry is not None
    assert entry.value is None


async def test_expected_version_decides_and_tells_what_is_there(layer: StateLayer) -> None:
    await layer.set(PATH, 1, actor=USER, expected_version=0)
    with pytest.raises(VersionConflictError) as caught:
        await layer.set(PATH, 2, actor=USER, expected_version=0)
    assert (caught.value.path, caught.value.expected, caught.value.actual) == (PATH, 0, 1)
    await layer.set(PATH, 2, actor=USER, expected_version=1)


async def test_a_batch_is_wholly_written_or_not_at_all(layer: StateLayer) -> None:
    good = Write(path="/tasks/T1/a", value=1, actor=USER)
    with pytest.raises(VersionConflictError):
        await layer.append([good, Write(path="/tasks/T2/b", value=1, actor=USER, expected_version=5)])
    assert await layer.get("/tasks/T1/a") is None
    events = await layer.append([good, Write(path="/tasks/T2/b", value=1, actor=USER), good])
    assert [(e.namespace, e.seq, e.version) for e in events] == [
        ("/tasks/T1", 1, 1),
        ("/tasks/T2", 1, 1),
        ("/tasks/T1", 2, 2),
    ]
    assert {e.batch_id for e in events} == {events[0].id}


# --- idempotency


async def test_the_same_key_with_the_same_content_returns_the_first_event(layer: StateLayer) -> None:
    first = await layer.set(PATH, {"n": 1}, actor=USER, idempotency_key="k")
    await layer.set(PATH, {"n": 2}, actor=USER)
    again = await layer.set(PATH, {"n": 1}, actor=USER, idempotency_key="k", expected_version=0)
    assert again == first
    assert await seqs(layer, "/tasks/T1") == [1, 2]


@pytest.mark.parametrize(
    "changed",
    [
        Write(path=PATH, value={"n": 1.0}, actor=USER),
        Write(path=PATH, value={"n": 1}, actor="user:U8"),
        Write(path="/tasks/T1/other", value={"n": 1}, actor=USER),
        Write(path=PATH, value={"n": 1}, actor=USER, op="merge"),
    ],
)
async def test_the_same_key_with_other_content_is_a_conflict(layer: StateLayer, changed: Write) -> None:
    first = await layer.set(PATH, {"n": 1}, actor=USER, idempotency_key="k")
    with pytest.raises(IdempotencyConflictError) as caught:
        await layer.append([changed], idempotency_key="k")
    assert caught.value.event_id == first.id


async def test_a_key_covers_a_whole_batch_over_namespaces(layer: StateLayer) -> None:
    writes = [Write(path=f"/tasks/T{n % 2}/a/{n}", value=n, actor=USER) for n in range(4)]
    first = await layer.append(writes, idempotency_key="k")
    assert await layer.append(writes, idempotency_key="k") == first
    for part in (writes[:1], writes[:3], [*writes, writes[0]], list(reversed(writes))):
        with pytest.raises(IdempotencyConflictError):
            await layer.append(part, idempotency_key="k")


async def test_c2_two_callers_with_one_key_make_one_event(layer: StateLayer, others: list[StateLayer]) -> None:
    asked = [one.set(PATH, "x", actor=USER, idempotency_key="k") for one in (layer, layer, *others) for _ in range(3)]
    events = await asyncio.gather(*asked)
    assert len({event.id for event in events}) == 1
    assert await seqs(layer, "/tasks/T1") == [1]


# --- causes


async def test_depth_and_root_follow_the_cause_also_across_namespaces(layer: StateLayer) -> None:
    root = await layer.set("/tasks/T1/a", 1, actor=USER)
    child = await layer.set("/tasks/T2/b", 1, actor=USER, caused_by=root.id)
    grandchild = await layer.set("/tasks/T1/c", 1, actor=USER, caused_by=child.id)
    assert [(e.trigger_depth, e.root_event_id) for e in (root, child, grandchild)] == [
        (0, root.id),
        (1, root.id),
        (2, root.id),
    ]


async def test_a_cause_must_be_in_the_log(layer: StateLayer) -> None:
    with pytest.raises(CausationNotFoundError):
        await layer.set(PATH, 1, actor=USER, caused_by="0" * 24)
    assert await seqs(layer, "/tasks/T1") == []


# --- bad input (P10)


@pytest.mark.parametrize(
    ("write", "error"),
    [
        (Write(path="/tasks/T1", value=1, actor=USER), InvalidPathError),
        (Write(path="/tasks/*/x", value=1, actor=USER), InvalidPathError),
        (Write(path="/other/T1/x", value=1, actor=USER), InvalidPathError),
        (Write(path="/tasks//x", value=1, actor=USER), InvalidPathError),
        (Write(path=PATH, value=1), InvalidActorError),
        (Write(path=PATH, value=1, actor="U7"), InvalidActorError),
        (Write(path=PATH, value=1, actor="user:"), InvalidActorError),
        (Write(path=PATH, value=1, actor="user:\n"), InvalidActorError),
        (Write(path=PATH, value=1, actor=USER, op="upsert"), InvalidWriteError),  # type: ignore[arg-type]
        (Write(path=PATH, value=1, actor=USER, op="delete"), InvalidWriteError),
        (Write(path=PATH, value=[1], actor=USER, op="merge"), InvalidValueError),
        (Write(path=PATH, value=1, actor=USER, source="web"), InvalidWriteError),  # type: ignore[arg-type]
        (Write(path=PATH, value=1, actor=USER, expected_version=-1), InvalidWriteError),
        (Write(path=PATH, value=1, actor=USER, expected_version=True), InvalidWriteError),
        (Write(path=PATH, value=1, actor=USER, caused_by=7), InvalidWriteError),  # type: ignore[arg-type]
        (Write(path=PATH, value={1, 2}, actor=USER), InvalidValueError),
        (Write(path=PATH, value=Decimal("1.10"), actor=USER), InvalidValueError),
        (Write(path=PATH, value=datetime(2026, 1, 1), actor=USER), InvalidValueError),  # noqa: DTZ001
        (Write(path=PATH, value="x" * (1024 * 1024 + 1), actor=USER), InvalidValueError),
    ],
)
async def test_f2_bad_input_is_refused_before_a_seq_is_used(layer: StateLayer, write: Write, error: type) -> None:
    with pytest.raises(error):
        await layer.append([Write(path=PATH, value="good", actor=USER), write])
    event = await layer.set(PATH, 1, actor=USER)
    assert (event.seq, event.version) == (1, 1)


@pytest.mark.parametrize("writes", [[], [{"path": PATH}], [Write(path=PATH, value=1, actor=USER)] * 1001])
async def test_an_append_that_is_none_is_refused(layer: StateLayer, writes: Any) -> None:
    with pytest.raises(InvalidWriteError):
        await layer.append(writes)


@pytest.mark.parametrize("key", ["", "a\nb", 7, "x" * 513])
async def test_a_key_that_cannot_serve_is_refused(layer: StateLayer, key: Any) -> None:
    with pytest.raises(InvalidWriteError, match="idempotency key"):
        await layer.set(PATH, 1, actor=USER, idempotency_key=key)


@pytest.mark.parametrize(
    "path",
    ["/tasks/T1/agents/a/results/E", "/tasks/T1/workflows/w/errors/E", "/tasks/T1/executors/x/y/results/E"],
)
async def test_only_owners_write_results_and_errors(layer: StateLayer, path: str) -> None:
    with pytest.raises(ReservedPathError):
        await layer.set(path, 1, actor=USER)


async def test_limits_of_an_append_are_settings(database: Any, layer: StateLayer) -> None:
    small = StateLayer(database, settings=Settings(max_append_writes=2, max_append_bytes=2048, max_value_bytes=1500))
    write = Write(path=PATH, value="x" * 1000, actor=USER)
    with pytest.raises(InvalidWriteError, match="at most 2 writes"):
        await small.append([write] * 3)
    await small.append([write] * 2)
    with pytest.raises(InvalidValueError, match="1500"):
        await small.set(PATH, "x" * 1501, actor=USER)
    await small.set(PATH, {"a": "x" * 1000}, actor=USER)
    with pytest.raises(InvalidValueError, match="merged"):
        await small.merge(PATH, {"b": "x" * 1000}, actor=USER)
    smaller = StateLayer(database, settings=Settings(max_append_bytes=1024))
    with pytest.raises(InvalidWriteError, match="1024 bytes"):
        await smaller.append([write] * 2)
    await small.aclose()
    await smaller.aclose()


async def test_roots_are_a_setting(database: Any, layer: StateLayer) -> None:
    orders = StateLayer(database, settings=Settings(roots=("orders",)))
    await orders.set("/orders/O1/x", 1, actor=USER)
    with pytest.raises(InvalidPathError):
        await orders.set(PATH, 1, actor=USER)
    await orders.aclose()


# --- values come back as they went in


async def test_f1_f6_f7_d5_values_come_back_as_they_went_in(layer: StateLayer) -> None:
    value = {
        "a.b": 1,
        "$set": {"$x": "$secret", "": None},
        "a": {"b": 2},
        "when": datetime(2026, 3, 1, 9, 30, 15, 123456, tzinfo=timezone(timedelta(hours=8))),
        "id": UUID("12345678123456781234567812345678"),
        "oid": ObjectId("0" * 24),
        "big": 2**60,
        "money": Decimal128("1.10"),
        "raw": b"\x00\xff",
        "nul": "x\0y",
        "list": [1, 1.0, True, "1"],
        "ref": {"$ref": "x", "$id": 1},
    }
    event = await layer.set(PATH, value, actor=USER)
    entry = await layer.get(PATH)
    assert entry is not None
    assert event.value["when"] == datetime(2026, 3, 1, 1, 30, 15, 123000, tzinfo=UTC)
    for stored in (entry.value, (await layer.read_version(PATH, 1)).value, (await layer.event(event.id)).value):  # type: ignore[union-attr]
        assert stored == event.value
        assert [type(item) for item in stored["list"]] == [int, float, bool, str]
        assert type(stored["big"]) is int
        assert type(stored["ref"]) is dict


async def test_f1_a_second_write_leaves_only_what_it_wrote(layer: StateLayer) -> None:
    await layer.set(PATH, {"x": 1}, actor=USER)
    await layer.set(PATH, {"y": 2}, actor=USER)
    entry = await layer.get(PATH)
    assert entry is not None
    assert entry.value == {"y": 2}


async def test_f10_nobody_holds_what_another_sees(layer: StateLayer) -> None:
    given = {"items": [1]}
    first = await layer.set(PATH, given, actor=USER, idempotency_key="k")
    given["items"].append(2)
    first.value["items"].append(3)
    again = await layer.set(PATH, {"items": [1]}, actor=USER, idempotency_key="k")
    assert again.value == {"items": [1]}
    assert "_id" not in given


ODD_KEYS = {"a.b": 1, "$set": {"$x": 1}, "": 0, "a": {"b": 2}}


async def test_f1_d5_a_merge_replaces_odd_keys_and_no_nested_ones(layer: StateLayer) -> None:
    await layer.set(PATH, {"a": {"b": 1, "c": 1}, "a.b": 0, "kept": "$a"}, actor=USER)
    event = await layer.merge(PATH, ODD_KEYS, actor=USER)
    entry = await layer.get(PATH)
    assert entry is not None
    assert event.value == entry.value == {"kept": "$a", **ODD_KEYS}
    assert event.patch == ODD_KEYS
    assert (await layer.verify("/tasks/T1")).ok


TEXTS: dict[str, dict[str, Any]] = {
    "NUL in a path": {"path": "/tasks/T1/a\0b"},
    "surrogate in a path": {"path": "/tasks/T1/\ud800"},
    "NUL in a key": {"value": {"deep": [{"a\0b": 1}]}},
    "key that is a number": {"value": {1: 1}},
    "key that is None": {"value": {None: 1}},
    "surrogate": {"value": {"deep": ["\ud800"]}},
    "surrogate in a patch": {"op": "merge", "value": {"\ud800": 1}},
    "NUL in a patch": {"op": "merge", "value": {"a\0b": 1}},
    "surrogate in an actor": {"actor": "user:\ud800"},
    "NUL in an actor": {"actor": "user:\0"},
}


@pytest.mark.parametrize("text", TEXTS)
async def test_f2_text_that_cannot_be_stored_is_refused_and_uses_no_seq(layer: StateLayer, text: str) -> None:
    good = Write(path=PATH, value="good", actor=USER)
    with pytest.raises(InvalidInputError) as caught:
        await layer.append([good, Write(**{"path": PATH, "value": "x", "actor": USER} | TEXTS[text])])
    assert str(caught.value).encode()  # it can be printed
    assert await seqs(layer, "/tasks/T1") == []
    assert (await layer.set(PATH, 1, actor=USER)).seq == 1


@pytest.mark.parametrize("key", ["\ud800", "a\0b"])
async def test_f2_a_key_that_cannot_be_stored_is_refused_and_uses_no_seq(layer: StateLayer, key: str) -> None:
    with pytest.raises(InvalidInputError):
        await layer.set(PATH, 1, actor=USER, idempotency_key=key)
    assert await seqs(layer, "/tasks/T1") == []


MEBIBYTE = 1024 * 1024


async def test_f9_what_is_too_large_uses_no_seq_and_leaves_nothing_half_written(
    database: Any, layer: StateLayer
) -> None:
    """Alone, in a batch, and grown by a merge; each beside something that fits."""
    await layer.set(PATH, {"a": "x" * (MEBIBYTE - 100)}, actor=USER)
    good = Write(path="/tasks/T1/good", value=1, actor=USER)
    for large in (
        Write(path="/tasks/T1/large", value="x" * MEBIBYTE, actor=USER),
        Write(path=PATH, op="merge", value={"b": "x" * 200}, actor=USER),
    ):
        with pytest.raises(InvalidValueError, match="bytes"):
            await layer.append([good, large], idempotency_key="k")
    assert await seqs(layer, "/tasks/T1") == [1]
    assert await database["entries"].distinct("_id") == [PATH]
    event = await layer.set(PATH, {"a": "x" * (MEBIBYTE - 100), "b": 1}, actor=USER, idempotency_key="k")
    assert (event.seq, event.version) == (2, 2)


async def test_k7_one_append_of_27_mebibytes_is_refused_and_27_appends_go_in_several_transactions(
    layer: StateLayer,
) -> None:
    """The server would commit them in one; the cap is ours."""
    value = "x" * (MEBIBYTE - 100)
    writes = [Write(path=f"/tasks/T1/n/{n}", value=value, actor=USER) for n in range(27)]
    with pytest.raises(InvalidWriteError, match="at most 8388608 bytes"):
        await layer.append(writes)
    assert await seqs(layer, "/tasks/T1") == []
    await asyncio.gather(*(layer.append([write]) for write in writes))
    assert await seqs(layer, "/tasks/T1") == list(range(1, 28))
    assert layer.statistics.journal.batches >= 4
    assert layer.statistics.journal.largest_batch <= 8


async def test_f4_digits_survive_and_what_has_no_exact_form_is_refused(layer: StateLayer) -> None:
    class Price(BaseModel):
        amount: Decimal

    event = await layer.set(PATH, {"amount": Decimal128("1.10")}, actor=USER)
    entry = await layer.get(PATH)
    assert entry is not None
    for value in (event.value, entry.value, (await layer.state_at("/tasks/T1", 1))[PATH]):
        assert type(value["amount"]) is Decimal128
        assert str(value["amount"]) == "1.10"
    inexact = Decimal("8204491.822422388")
    for refused in (Decimal("1.10"), Decimal("0.1"), inexact, Price(amount=Decimal("1.10"))):
        with pytest.raises(InvalidValueError, match="Decimal128"):
            await layer.set(PATH, refused, actor=USER)
    assert await seqs(layer, "/tasks/T1") == [1]


async def test_f6_what_is_returned_is_what_is_read_and_compared(layer: StateLayer) -> None:
    now = datetime.now(UTC).replace(microsecond=123_456)
    event = await layer.set(PATH, {"at": now, "there": now.astimezone(timezone(timedelta(hours=8)))}, actor=USER)
    kept = now.replace(microsecond=123_000)
    entry = await layer.get(PATH)
    assert entry is not None
    for value in (event.value, entry.value, (await layer.state_at("/tasks/T1", 1))[PATH]):
        assert value == {"at": kept, "there": kept}
        assert {at.utcoffset() for at in value.values()} == {timedelta(0)}
    assert (await layer.set(PATH, event.value, actor=USER)).value == event.value
    for naive in (now.replace(tzinfo=None), {"deep": [now.replace(tzinfo=None)]}):
        with pytest.raises(InvalidValueError, match="time zone"):
            await layer.set(PATH, naive, actor=USER)
    assert await seqs(layer, "/tasks/T1") == [1, 2]
    assert (await layer.verify("/tasks/T1")).ok


# --- the log contradicts itself


async def _in_a_transaction(layer: StateLayer) -> None:
    async with layer.transaction("/tasks/T1") as tx:
        await tx.set(PATH, 1, actor=USER)


async def _running(layer: StateLayer) -> None:
    async with layer.running():
        raise AssertionError("it started")


SUBSCRIPTION = {"name": "s", "pattern": "/tasks/**", "action": {"type": "execute_workflow", "workflowId": "w"}}
FIRST_CALLS: dict[str, Callable[[StateLayer], Awaitable[object]]] = {
    "set": lambda layer: layer.set(PATH, 1, actor=USER),
    "submit": lambda layer: layer.submit(PATH, 1, actor=USER),
    "transact": lambda layer: layer.transact(lambda tx: tx.set(PATH, 1, actor=USER), "/tasks/T1"),
    "transaction": _in_a_transaction,
    "publish": lambda layer: layer.subscriptions.publish(SUBSCRIPTION),
    "running": _running,
    "get": lambda layer: layer.get(PATH),
}


@pytest.mark.parametrize("call", FIRST_CALLS)
async def test_c6_without_setup_the_first_call_says_so_and_creates_nothing(database: Any, call: str) -> None:
    layer = StateLayer(database)
    with pytest.raises(SetupRequiredError, match="setup"):
        await FIRST_CALLS[call](layer)
    assert await database.list_collection_names() == []
    await layer.setup()
    assert (await layer.set(PATH, 1, actor=USER)).seq == 1
    await layer.aclose()


async def plant(database: Any, collection: str, id: str, **fields: object) -> None:
    """Change a document by hand, past the validator."""
    update = {"q": {"_id": id}, "u": {"$set": fields}}
    reply = await database.command({"update": collection, "updates": [update], "bypassDocumentValidation": True})
    assert reply["nModified"] == 1


@pytest.mark.parametrize(
    "head", [1.0, 2.0**53, float("nan"), float("inf"), "1", True, None, Decimal128("1"), Int64(-1)]
)
async def test_k1_a_head_that_is_no_whole_number_is_reported(
    database: Any, layer: StateLayer, others: list[StateLayer], head: object
) -> None:
    await layer.set(PATH, 1, actor=USER)
    await plant(database, "namespaces", "/tasks/T1", seq=head)
    for write in (
        others[0].set(PATH, 2, actor=USER),  # which remembers nothing
        others[1].transact(lambda tx: tx.set(PATH, 2, actor=USER), "/tasks/T1"),
    ):
        with pytest.raises(IntegrityError, match="/tasks/T1"):
            await write
    assert others[0].statistics.journal.retries == 0
    assert await seqs(layer, "/tasks/T1") == [1]
    assert [problem.kind for problem in (await layer.verify("/tasks/T1")).problems] == ["head"]


@pytest.mark.parametrize("version", [1.0, 2.0**53, float("nan"), "1", True, Int64(2**63 - 1)])
async def test_k1_k4_a_version_from_which_nothing_counts_on_is_reported(
    database: Any, layer: StateLayer, others: list[StateLayer], version: object
) -> None:
    await layer.set(PATH, 1, actor=USER)
    await plant(database, "entries", PATH, version=version)
    with pytest.raises(IntegrityError, match="replay"):
        await others[0].set(PATH, 2, actor=USER)
    assert others[0].statistics.journal.retries == 0
    await layer.replay("/tasks/T1")
    assert (await others[0].set(PATH, 2, actor=USER)).version == 2


# --- duplicate keys


def meanwhile(layer: StateLayer, act: Callable[[], Awaitable[object]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Act once, when the layer's next append has read what it decides on and has not written yet."""
    batches = layer._journal._committer._batches
    write = batches.write

    async def act_and_write(*arguments: Any) -> None:
        monkeypatch.setattr(batches, "write", write)
        await act()
        await write(*arguments)

    monkeypatch.setattr(batches, "write", act_and_write)


async def test_c5_c3_a_duplicate_key_of_ones_own_event_means_that_it_was_written(
    database: Any, layer: StateLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a commit that nobody heard of: what it wrote is there, by the id that was given it first."""
    first = await layer.set(PATH, 1, actor=USER)
    mine = "f" * 24
    monkeypatch.setattr(layer._clock, "new_id", lambda: mine)
    written = await database["events"].find_one({"_id": first.id})
    written |= {"_id": mine, "batchId": mine, "namespace": "/tasks/T2", "path": "/tasks/T2/x", "seq": Int64(1)}
    meanwhile(layer, lambda: database["events"].insert_one(written), monkeypatch)
    event = await layer.set("/tasks/T2/x", 1, actor=USER)
    assert event.id == mine
    assert await database["events"].count_documents({"namespace": "/tasks/T2"}) == 1


@pytest.mark.parametrize("theirs", [PATH, "/tasks/T1/other"], ids=["path", "seq"])
@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
async def test_c5_c4_a_seq_or_an_entry_that_is_taken_meanwhile_costs_one_more_try(
    layer: StateLayer, others: list[StateLayer], monkeypatch: pytest.MonkeyPatch, theirs: str, *, known: bool
) -> None:
    before = [await layer.set("/tasks/T1/first", 0, actor=USER)] if known else []
    meanwhile(layer, lambda: others[0].set(theirs, "theirs", actor=USER), monkeypatch)
    event = await layer.set(PATH, "mine", actor=USER)
    assert (event.seq, event.version) == (len(before) + 2, 2 if theirs == PATH else 1)
    assert await seqs(layer, "/tasks/T1") == list(range(1, event.seq + 1))


async def test_c5_an_entry_that_is_taken_meanwhile_is_a_version_conflict_for_who_expected_none(
    layer: StateLayer, others: list[StateLayer], monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(layer, lambda: others[0].set(PATH, "theirs", actor=USER), monkeypatch)
    with pytest.raises(VersionConflictError) as caught:
        await layer.set(PATH, "mine", actor=USER, expected_version=0)
    assert (caught.value.expected, caught.value.actual) == (0, 1)


@pytest.mark.parametrize("content", ["same", "other"])
async def test_c5_c3_a_key_that_is_used_meanwhile_is_resolved_by_its_content(
    layer: StateLayer, others: list[StateLayer], monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    first: list[Any] = []

    async def use() -> None:
        first.append(await others[0].set(PATH, "same", actor=USER, idempotency_key="k"))

    meanwhile(layer, use, monkeypatch)
    asked = layer.set(PATH, content, actor=USER, idempotency_key="k")
    if content == "same":
        assert await asked == first[0]
    else:
        with pytest.raises(IdempotencyConflictError) as caught:
            await asked
        assert caught.value.event_id == first[0].id
    assert await seqs(layer, "/tasks/T1") == [1]
    assert layer.statistics.journal.conflicts <= 2


async def test_c5_a_head_behind_its_log_is_reported_not_retried(database: Any, layer: StateLayer) -> None:
    for n in range(3):
        await layer.set(PATH, n, actor=USER)
    await database["namespaces"].update_one({"_id": "/tasks/T1"}, {"$set": {"seq": Int64(1)}})
    with pytest.raises(IntegrityError, match="goes on to 3"):
        await layer.set(PATH, 9, actor=USER)


async def test_c5_an_entry_behind_its_log_is_reported_and_mended_by_replay(database: Any, layer: StateLayer) -> None:
    for n in range(3):
        await layer.set(PATH, n, actor=USER)
    await database["entries"].update_one({"_id": PATH}, {"$set": {"version": Int64(1)}})
    with pytest.raises(IntegrityError, match="replay"):
        await layer.set(PATH, 9, actor=USER)
    await layer.replay("/tasks/T1")
    assert (await layer.set(PATH, 9, actor=USER)).version == 4


async def test_one_bad_append_among_many_fails_alone(database: Any, layer: StateLayer) -> None:
    await layer.set("/tasks/T1/broken", 1, actor=USER)
    await layer.set("/tasks/T1/broken", 2, actor=USER)
    await database["entries"].update_one({"_id": "/tasks/T1/broken"}, {"$set": {"version": Int64(1)}})
    asked = [layer.set(f"/tasks/T1/n/{n}", n, actor=USER) for n in range(50)]
    asked.insert(20, layer.set("/tasks/T1/broken", 3, actor=USER))
    asked.insert(30, layer.set("/tasks/T1/n/0", 3, actor=USER, expected_version=7))
    results = await asyncio.gather(*asked, return_exceptions=True)
    failed = [type(result) for result in results if isinstance(result, BaseException)]
    assert sorted(error.__name__ for error in failed) == ["IntegrityError", "VersionConflictError"]
    assert await seqs(layer, "/tasks/T1") == list(range(1, 53))


# --- many writers


async def test_c1_many_writers_of_one_namespace_all_succeed(layer: StateLayer, others: list[StateLayer]) -> None:
    async def writer(number: int) -> None:
        one = (layer, *others)[number % 4]
        for n in range(20):
            await one.set(f"/tasks/T1/w/{number}", n, actor=USER)

    await asyncio.gather(*(writer(number) for number in range(16)))
    assert await seqs(layer, "/tasks/T1") == list(range(1, 321))
    assert (await layer.verify("/tasks/T1")).ok


async def test_c4_first_writers_of_a_new_namespace_all_succeed(layer: StateLayer, others: list[StateLayer]) -> None:
    events = await asyncio.gather(*((layer, *others)[n % 4].set(PATH, n, actor=USER) for n in range(20)))
    assert sorted(event.version for event in events) == list(range(1, 21))


async def test_expected_version_lets_exactly_one_of_many_win(layer: StateLayer, others: list[StateLayer]) -> None:
    tried = [(layer, *others)[n % 4].set(PATH, n, actor=USER, expected_version=0) for n in range(12)]
    results = await asyncio.gather(*tried, return_exceptions=True)
    assert sum(not isinstance(result, BaseException) for result in results) == 1
    assert all(isinstance(r, VersionConflictError) for r in results if isinstance(r, BaseException))


async def test_p3_a_reader_never_sees_half_a_batch(layer: StateLayer) -> None:
    async def write() -> None:
        for n in range(60):
            await layer.append([Write(path=f"/tasks/T1/part/{part}", value=n, actor=USER) for part in range(5)])

    writing = asyncio.create_task(write())
    looks = 0
    while not writing.done():
        entries = await layer.entries("/tasks/T1/part")
        assert len({entry.value for entry in entries}) <= 1
        looks += 1
    await writing
    assert looks > 5


async def test_a_caller_cancelled_before_his_batch_starts_withdraws_his_append(layer: StateLayer) -> None:
    running = asyncio.create_task(layer.set("/tasks/T1/a", 1, actor=USER))
    waiting = asyncio.create_task(layer.set("/tasks/T1/b", 1, actor=USER))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    await running
    last = await layer.set("/tasks/T1/c", 1, actor=USER)
    assert last.seq in (2, 3)
    assert (await layer.get("/tasks/T1/b") is None) == (last.seq == 2)


async def test_closing_commits_what_was_accepted_and_refuses_the_rest(database: Any, layer: StateLayer) -> None:
    closing = StateLayer(database)
    await closing.set(PATH, 0, actor=USER)
    accepted = [asyncio.create_task(closing.set(PATH, n, actor=USER)) for n in range(10)]
    await asyncio.sleep(0)
    await closing.aclose()
    assert [event.seq for event in await asyncio.gather(*accepted)] == list(range(2, 12))
    with pytest.raises(ClosedError):
        await closing.set(PATH, 1, actor=USER)
