"""``verify`` finds what is planted and nothing else, ``replay`` mends it, both beside writers (DESIGN §6; P2)."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from bson import Decimal128, Int64
from pymongo.errors import DuplicateKeyError, WriteError

from statelayer.clock import Clock
from statelayer.drivers import Database
from statelayer.errors import IntegrityError, InvalidPathError
from statelayer.events import Entry, Event, Write
from statelayer.integrity import MAX_PROBLEMS, Integrity, ReplayReport, VerifyReport
from statelayer.integrity.replay import Replay
from statelayer.integrity.report import MISSING
from statelayer.integrity.scans import Scans
from statelayer.journal import Journal
from statelayer.mongo_indexes import setup
from statelayer.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Plant = Callable[["Archive"], Awaitable[None]]

pytestmark = pytest.mark.anyio

USER = "user:U7"
T1 = "/tasks/T1"


@dataclass
class Archive:
    """A small log with everything in it, and hands that can break it."""

    database: Database
    settings: Settings
    journal: Journal
    integrity: Integrity

    async def set(self, path: str, value: Any = None, **fields: Any) -> Event:
        [event] = await self.journal.append([Write(path=path, value=value, actor=USER, **fields)])
        return event

    async def delete(self, path: str) -> Event:
        [event] = await self.journal.append([Write(path=path, op="delete", actor=USER)])
        return event

    async def verify(self) -> VerifyReport:
        return await self.integrity.verify(T1)

    async def replay(self) -> ReplayReport:
        return await self.integrity.replay(T1)

    async def plant(self, collection: str, filter: dict[str, Any], update: dict[str, Any]) -> None:
        """Change a document by hand, as nothing of ours would."""
        result = await self.database.handle[collection].update_one(filter, update, bypass_document_validation=True)
        assert result.modified_count == 1

    async def insert(self, collection: str, document: dict[str, Any]) -> None:
        await self.database.handle[collection].insert_one(document, bypass_document_validation=True)

    async def remove(self, collection: str, filter: dict[str, Any]) -> None:
        assert (await self.database.handle[collection].delete_one(filter)).deleted_count == 1

    async def documents(self, collection: str) -> list[dict[str, Any]]:
        return await self.database.collection(collection).find({}, sort=[("_id", 1)])


@pytest.fixture
async def archive(database: Any) -> Archive:
    """Seven events in pages of two: /a three times, /b merged, /c deleted, and an effect of the first."""
    settings, clock = Settings(page_size=2), Clock()
    ours = Database(database)
    await setup(ours, settings)
    archive = Archive(ours, settings, Journal(ours, settings, clock), Integrity(ours, settings, clock))
    first = await archive.set(f"{T1}/a", {"n": 1, "list": [1, {"x": 2}]})
    await archive.set(f"{T1}/b", {"n": Int64(5_000_000_000), "$k.v": {"$ref": "orders", "$id": 7}})
    await archive.set(f"{T1}/a", 1)
    await archive.set(f"{T1}/b", {"null": None}, op="merge")
    await archive.set(f"{T1}/c", 1)
    await archive.delete(f"{T1}/c")
    await archive.set(f"{T1}/a", {"n": 1, "list": [1, {"x": 2}]}, caused_by=first.id)
    await archive.set("/tasks/T10/a", 1)
    return archive


def seq(n: int) -> dict[str, Any]:
    return {"namespace": T1, "seq": n}


def field(name: str, value: Any) -> dict[str, Any]:
    return {"$set": {name: value}}


# --- verify


async def test_what_the_journal_wrote_is_in_order(archive: Archive) -> None:
    report = await archive.verify()
    assert report.problems == []
    assert (report.ok, report.events, report.entries, report.truncated) == (True, 7, 3, False)


async def test_a_namespace_that_was_never_written_is_in_order(archive: Archive) -> None:
    report = await archive.integrity.verify("/tasks/T9")
    assert (report.ok, report.events, report.entries) == (True, 0, 0)
    assert await archive.integrity.replay("/tasks/T9") == ReplayReport("/tasks/T9")


A, B, C = {"_id": f"{T1}/a"}, {"_id": f"{T1}/b"}, {"_id": f"{T1}/c"}
VALUE = {"n": 1, "list": [1, {"x": 2}]}

ENTRIES: dict[str, tuple[dict[str, Any], str, Any, tuple[str, str, int, Any, Any]]] = {
    "another value": (A, "value", 7, ("entry_value", f"{T1}/a", 7, VALUE, 7)),
    "1 made 1.0": (A, "value.n", 1.0, ("entry_value", f"{T1}/a", 7, VALUE, {**VALUE, "n": 1.0})),
    "1 made 1.0 deep down": (
        A,
        "value.list.1.x",
        2.0,
        ("entry_value", f"{T1}/a", 7, VALUE, {"n": 1, "list": [1, {"x": 2.0}]}),
    ),
    "1 made true": (A, "value.n", True, ("entry_value", f"{T1}/a", 7, VALUE, {**VALUE, "n": True})),
    "a lower version": (A, "version", Int64(2), ("entry_version", f"{T1}/a", 7, 3, 2)),
    "a higher version": (A, "version", Int64(9), ("entry_version", f"{T1}/a", 7, 3, 9)),
    "a version that is a float": (A, "version", 3.0, ("entry_version", f"{T1}/a", 7, 3, 3.0)),
    "another seq": (A, "seq", Int64(3), ("entry_seq", f"{T1}/a", 7, 7, 3)),
    "another actor": (B, "actor", "user:U8", ("entry_actor", f"{T1}/b", 4, USER, "user:U8")),
    "another namespace": (B, "namespace", "/tasks/T2", ("entry_namespace", f"{T1}/b", 4, T1, "/tasks/T2")),
    "deleted": (B, "deleted", True, ("entry_deleted", f"{T1}/b", 4, False, True)),
    "not deleted": (C, "deleted", False, ("entry_deleted", f"{T1}/c", 6, True, False)),
    "a value though deleted": (C, "value", None, ("entry_value", f"{T1}/c", 6, MISSING, None)),
}


def told(report: VerifyReport) -> list[tuple[Any, ...]]:
    return [(p.kind, p.path, p.seq, p.expected, p.actual) for p in report.problems]


def exactly(facts: list[tuple[Any, ...]]) -> str:
    return repr(facts)  # 1 == 1.0 == True, but they do not look alike


@pytest.mark.parametrize("case", ENTRIES)
async def test_a_changed_entry_is_found_and_mended(archive: Archive, case: str) -> None:
    entry, name, value, problem = ENTRIES[case]
    before = await archive.documents("entries")
    await archive.plant("entries", entry, field(name, value))
    report = await archive.verify()
    assert exactly(told(report)) == exactly([problem])
    replayed = await archive.replay()
    assert (replayed.events, replayed.entries_written, replayed.entries_removed) == (7, 1, 0)
    assert exactly([tuple(await archive.documents("entries"))]) == exactly([tuple(before)])
    assert (await archive.verify()).ok
    assert (await archive.replay()).entries_written == 0


async def test_a_changed_event_id_and_time_of_an_entry_are_found(archive: Archive) -> None:
    [first, *_] = await archive.documents("entries")
    await archive.plant("entries", A, {"$set": {"eventId": "0" * 24}, "$unset": {"updatedAt": ""}})
    assert told(await archive.verify()) == [
        ("entry_event_id", f"{T1}/a", 7, first["eventId"], "0" * 24),
        ("entry_updated_at", f"{T1}/a", 7, first["updatedAt"], MISSING),
    ]


async def test_a_field_that_a_later_version_adds_is_no_problem(archive: Archive) -> None:
    await archive.plant("entries", A, field("tags", ["new"]))
    assert (await archive.verify()).ok
    assert (await archive.replay()).entries_written == 0


async def test_a_missing_entry_is_found_and_rebuilt(archive: Archive) -> None:
    before = await archive.documents("entries")
    await archive.remove("entries", B)
    report = await archive.verify()
    assert told(report) == [("missing_entry", f"{T1}/b", 4, 2, MISSING)]
    assert report.entries == 2
    assert (await archive.replay()).entries_written == 1
    assert await archive.documents("entries") == before


async def test_an_entry_without_events_is_found_and_removed(archive: Archive) -> None:
    [first, *_] = await archive.documents("entries")
    await archive.insert("entries", first | {"_id": f"{T1}/ghost", "version": Int64(1)})
    assert told(await archive.verify()) == [("entry_without_events", f"{T1}/ghost", 7, MISSING, 1)]
    replayed = await archive.replay()
    assert (replayed.entries_written, replayed.entries_removed) == (0, 1)
    assert (await archive.verify()).ok


async def no_actor(archive: Archive) -> None:
    await archive.plant("events", seq(3), {"$unset": {"actor": ""}})


async def no_kind(archive: Archive) -> None:
    await archive.plant("events", seq(3), field("actor", "U7"))


async def an_actor_in_a_list(archive: Archive) -> None:
    await archive.plant("events", seq(3), field("actor", ["user:U7"]))


async def a_depth_in_a_list(archive: Archive) -> None:
    await archive.plant("events", seq(3), field("triggerDepth", [0]))


async def a_depth_that_is_a_float(archive: Archive) -> None:
    await archive.plant("events", seq(3), field("triggerDepth", 0.0))


async def depth_without_cause(archive: Archive) -> None:
    await archive.plant("events", seq(3), field("triggerDepth", 1))


async def depth_too_small(archive: Archive) -> None:
    await archive.plant("events", seq(7), field("triggerDepth", 0))


async def depth_too_large(archive: Archive) -> None:
    await archive.plant("events", seq(7), field("triggerDepth", 33))


async def depth_of_a_wrong_type(archive: Archive) -> None:
    await archive.plant("events", seq(7), field("triggerDepth", "1"))


async def cause_that_does_not_exist(archive: Archive) -> None:
    await archive.plant("events", seq(7), field("causedByEventId", "0" * 24))


async def another_root(archive: Archive) -> None:
    await archive.plant("events", seq(7), field("rootEventId", "0" * 24))


async def no_root(archive: Archive) -> None:
    await archive.plant("events", seq(7), {"$unset": {"rootEventId": ""}})


async def another_path(archive: Archive) -> None:
    await archive.plant("events", seq(1), field("path", "/tasks/T2/x"))
    await archive.plant("events", seq(3), field("version", Int64(1)))
    await archive.plant("events", seq(7), field("version", Int64(2)))
    await archive.plant("entries", A, field("version", Int64(2)))


async def a_version_that_is_a_float(archive: Archive) -> None:
    await archive.plant("events", seq(3), field("version", 2.0))


async def a_version_gap(archive: Archive) -> None:
    await archive.plant("events", seq(3), field("version", Int64(5)))
    await archive.plant("events", seq(7), field("version", Int64(6)))
    await archive.plant("entries", A, field("version", Int64(6)))


async def versions_out_of_order(archive: Archive) -> None:
    for n, version in ((3, 9), (7, 2), (3, 3)):
        await archive.plant("events", seq(n), field("version", Int64(version)))
    await archive.plant("entries", A, field("version", Int64(2)))


async def a_seq_gap(archive: Archive) -> None:
    for n in (7, 6):
        await archive.plant("events", seq(n), field("seq", Int64(n + 1)))
    await archive.plant("entries", A, field("seq", Int64(8)))
    await archive.plant("entries", C, field("seq", Int64(7)))
    await archive.plant("namespaces", {"_id": T1}, field("seq", Int64(8)))


async def a_seq_that_is_a_float(archive: Archive) -> None:
    await archive.plant("events", seq(3), field("seq", 3.0))


async def a_seq_that_is_a_decimal(archive: Archive) -> None:
    await archive.plant("events", seq(3), field("seq", Decimal128("3")))


async def a_head_behind(archive: Archive) -> None:
    await archive.plant("namespaces", {"_id": T1}, field("seq", Int64(6)))


async def a_head_ahead(archive: Archive) -> None:
    await archive.plant("namespaces", {"_id": T1}, field("seq", Int64(8)))


async def a_head_that_is_a_float(archive: Archive) -> None:
    await archive.plant("namespaces", {"_id": T1}, field("seq", 7.0))


async def no_head(archive: Archive) -> None:
    await archive.remove("namespaces", {"_id": T1})


LOGS: list[tuple[Plant, list[tuple[Any, ...]]]] = [
    (no_actor, [("actor", f"{T1}/a", 3, "kind:id", MISSING)]),
    (no_kind, [("actor", f"{T1}/a", 3, "kind:id", "U7")]),
    (an_actor_in_a_list, [("actor", f"{T1}/a", 3, "kind:id", ["user:U7"])]),
    (a_depth_in_a_list, [("depth", f"{T1}/a", 3, 0, [0])]),
    (a_depth_that_is_a_float, [("depth", f"{T1}/a", 3, 0, 0.0)]),
    (depth_without_cause, [("depth", f"{T1}/a", 3, 0, 1)]),
    (depth_too_small, [("depth", f"{T1}/a", 7, 1, 0)]),
    (depth_too_large, [("depth", f"{T1}/a", 7, 1, 33)]),
    (depth_of_a_wrong_type, [("depth", f"{T1}/a", 7, 1, "1")]),
    (cause_that_does_not_exist, [("dangling_cause", f"{T1}/a", 7, "an event of the log", "0" * 24)]),
    (another_path, [("path", "/tasks/T2/x", 1, "a path in /tasks/T1", "/tasks/T2/x")]),
    (a_version_that_is_a_float, [("version", f"{T1}/a", 3, "an int64", 2.0)]),
    (a_version_gap, [("version_gap", f"{T1}/a", 3, 2, 5)]),
    (versions_out_of_order, [("version_order", f"{T1}/a", 7, 7, 3)]),
    (a_seq_gap, [("seq_gap", f"{T1}/c", 7, 6, 7)]),
    (a_seq_that_is_a_float, [("seq", f"{T1}/a", 3.0, "an int64", 3.0)]),
    (a_head_behind, [("head", None, None, 7, 6)]),
    (a_head_ahead, [("head", None, None, 7, 8)]),
    (a_head_that_is_a_float, [("head", None, None, 7, 7.0)]),
    (no_head, [("head", None, None, 7, MISSING)]),
]


@pytest.mark.parametrize(("plant", "problems"), LOGS, ids=[plant.__name__ for plant, _ in LOGS])
async def test_what_is_wrong_with_the_log_is_found(
    archive: Archive, plant: Plant, problems: list[tuple[Any, ...]]
) -> None:
    await plant(archive)
    report = await archive.verify()
    assert exactly(told(report)) == exactly(problems)
    assert report.events == 7
    assert not report.ok


@pytest.mark.parametrize("plant", [another_root, no_root], ids=lambda plant: plant.__name__)
async def test_a_wrong_root_is_found(archive: Archive, plant: Plant) -> None:
    await plant(archive)
    [problem] = (await archive.verify()).problems
    first = await archive.database.collection("events").find_one(seq(1))
    assert first is not None
    assert (problem.kind, problem.seq, problem.expected) == ("root", 7, first["_id"])


async def test_a_cause_in_another_namespace_counts(archive: Archive) -> None:
    there = await archive.set("/tasks/T2/a", caused_by=(await archive.set("/tasks/T2/b")).id)
    here = await archive.set(f"{T1}/a", caused_by=there.id)
    assert (await archive.verify()).ok
    await archive.plant("events", {"_id": here.id}, field("triggerDepth", 1))
    assert told(await archive.verify()) == [("depth", f"{T1}/a", 8, 2, 1)]


async def test_an_effect_may_be_as_deep_as_the_execution_that_wrote_it(archive: Archive) -> None:
    await archive.plant("events", seq(7), field("triggerDepth", 5))
    assert (await archive.verify()).ok


async def test_an_event_that_cannot_be_read_is_found(archive: Archive) -> None:
    await archive.plant("events", seq(7), field("source", "elsewhere"))
    [problem] = (await archive.verify()).problems
    assert (problem.kind, problem.path, problem.seq, problem.actual) == ("event", f"{T1}/a", 7, "source")


async def test_k2_k3_events_without_a_place_in_the_log_are_found(archive: Archive) -> None:
    """A unique index takes each of these for a new seq."""
    sound = await archive.database.collection("events").find_one(seq(1))
    assert sound is not None
    absent = {"seq"}
    for n, number in enumerate([None, True, "1", float("nan"), absent], 1):
        lost = sound | {"_id": f"{n:024x}", "path": f"{T1}/lost", "version": Int64(n), "seq": number}
        if number is absent:
            del lost["seq"]
            await archive.remove("events", {"_id": f"{1:024x}"})  # null, which it collides with
        await archive.insert("events", lost)
    report = await archive.verify()
    found = sorted(repr(p.actual) for p in report.problems if p.kind == "seq")
    assert found == sorted([repr(True), repr("1"), repr(float("nan")), repr(MISSING)])
    assert report.events == 7 + 4
    assert {p.path for p in report.problems} == {f"{T1}/lost"}


async def test_k3_an_event_without_a_seq_is_flagged_and_stops_nobody(archive: Archive) -> None:
    """The unique index takes one such event in each namespace; the validator takes none from a plain insert."""
    lost = await archive.database.collection("events").find_one(seq(1))
    assert lost is not None
    lost |= {"_id": "f" * 24, "path": f"{T1}/lost", "version": Int64(1)}
    del lost["seq"]
    with pytest.raises(WriteError, match="Document failed validation"):
        await archive.database.handle["events"].insert_one(dict(lost))
    await archive.insert("events", lost)
    report = await archive.verify()
    assert not report.ok
    assert told(report) == [("seq", f"{T1}/lost", None, "an int64", MISSING)]
    assert (await archive.set(f"{T1}/next", 1)).seq == 8
    assert [(p.kind, p.path) for p in (await archive.verify()).problems] == [("seq", f"{T1}/lost")]


@pytest.mark.parametrize("number", [True, "1", Decimal128("8.5"), 8.5])
async def test_k2_a_seq_of_another_type_is_flagged_and_stops_nobody(archive: Archive, number: Any) -> None:
    """As a tool that imports events might write it."""
    lost = await archive.database.collection("events").find_one(seq(1))
    assert lost is not None
    lost |= {"_id": "f" * 24, "path": f"{T1}/lost", "version": Int64(1), "seq": number}
    with pytest.raises(WriteError, match="Document failed validation"):
        await archive.database.handle["events"].insert_one(dict(lost))
    await archive.insert("events", lost)
    found = [
        exactly([p.actual]) for p in (await archive.verify()).problems if (p.kind, p.path) == ("seq", f"{T1}/lost")
    ]
    assert found == [exactly([number])]
    assert [(await archive.set(f"{T1}/next", n)).seq for n in range(3)] == [8, 9, 10]


@pytest.mark.parametrize("number", [7.0, Decimal128("7")])
async def test_k2_a_seq_that_is_there_collides_whatever_its_type(archive: Archive, number: Any) -> None:
    sound = await archive.database.collection("events").find_one(seq(7))
    assert sound is not None
    again = sound | {"_id": "f" * 24, "path": f"{T1}/again", "version": Int64(1), "seq": number}
    with pytest.raises(DuplicateKeyError) as caught:
        await archive.insert("events", again)
    assert caught.value.details is not None
    assert list(caught.value.details["keyPattern"]) == ["namespace", "seq"]
    assert (await archive.verify()).ok


async def test_d5_what_begins_with_a_dollar_is_verified_and_replayed_as_it_is(archive: Archive) -> None:
    """Both run in the server, where such texts and keys could be taken for fields and operators."""
    odd = {
        "value": "$value",
        "$x": "$$NOW",
        "a.b": {"$literal": 1, "": "$"},
        "$set": {"$a.b": ["$_id", {"$add": [1, 2]}]},
        "$ref": "$secret",
        "$id": 1,
    }
    event = await archive.set(f"{T1}/odd", odd)
    [text] = await archive.journal.append([Write(path=f"{T1}/text", value="$secret", actor="user:$owner")])
    await archive.set(f"{T1}/merged", {"$kept": "$$ROOT"})
    [merged] = await archive.journal.append(
        [Write(path=f"{T1}/merged", value=odd, op="merge", actor="user:$owner")], idempotency_key="$key"
    )
    assert merged.value == {"$kept": "$$ROOT", **odd}
    assert (event.value, text.value, merged.patch) == (odd, "$secret", odd)
    before = await archive.documents("entries")
    assert (await archive.verify()).problems == []
    await archive.database.handle["entries"].delete_many({"namespace": T1})
    assert (await archive.replay()).entries_written == 6
    assert exactly([tuple(await archive.documents("entries"))]) == exactly([tuple(before)])
    await archive.plant("entries", {"_id": f"{T1}/text"}, field("value", "$another"))
    assert told(await archive.verify()) == [("entry_value", f"{T1}/text", 9, "$secret", "$another")]


async def test_k1_k2_numbers_that_are_no_int64_are_found(archive: Archive) -> None:
    await a_seq_that_is_a_decimal(archive)
    report = await archive.verify()
    assert ("seq", f"{T1}/a", Decimal128("3"), "an int64", Decimal128("3")) in told(report)


async def test_b2_every_hole_is_named(archive: Archive) -> None:
    for n in (2, 5):
        await archive.remove("events", seq(n))
    assert [fact for fact in told(await archive.verify()) if fact[0] == "seq_gap"] == [
        ("seq_gap", f"{T1}/a", 3, 2, 3),
        ("seq_gap", f"{T1}/c", 6, 5, 6),
    ]


async def test_a_log_of_several_stretches_is_read_whole(archive: Archive) -> None:
    """With pages of one row a stretch has twenty keys: one path is longer, and a hole lies in the middle of one."""
    for n in range(45):
        await archive.set(f"{T1}/long" if n % 3 else f"{T1}/n/{n:02}", n)
    integrity = Integrity(archive.database, Settings(page_size=1), Clock())
    report = await integrity.verify(T1)
    assert (report.problems, report.events, report.entries) == ([], 7 + 45, 3 + 1 + 15)
    await archive.database.handle["entries"].delete_many({"_id": {"$gt": f"{T1}/long"}})
    assert (await integrity.replay(T1)).entries_written == 15
    await archive.remove("events", seq(30))
    assert told(await integrity.verify(T1)) == [
        ("seq_gap", f"{T1}/long", 31, 30, 31),
        ("version_gap", f"{T1}/long", 31, 15, 16),
    ]


async def test_an_actor_of_any_script_is_in_order(archive: Archive) -> None:
    await archive.journal.append([Write(path=f"{T1}/a", value=1, actor="user:Łukasz Müller")])
    assert (await archive.verify()).ok


async def test_a_report_is_bounded(archive: Archive) -> None:
    [first, *_] = await archive.documents("entries")
    ghosts = [first | {"_id": f"{T1}/ghost/{n}"} for n in range(MAX_PROBLEMS + 1)]
    await archive.database.handle["entries"].insert_many(ghosts, bypass_document_validation=True)
    report = await Integrity(archive.database, Settings(), Clock()).verify(T1)
    assert (len(report.problems), report.truncated, report.entries) == (MAX_PROBLEMS, True, MAX_PROBLEMS + 4)


async def test_h5_a_blank_scope_is_refused(archive: Archive) -> None:
    blanks: list[Any] = ["", None, True, "/tasks", "/tasks/", "/tasks/ ", f"{T1}/a", {"$ne": 1}]
    for blank in blanks:
        with pytest.raises(InvalidPathError):
            await archive.integrity.verify(blank)
        with pytest.raises(InvalidPathError):
            await archive.integrity.replay(blank)


# --- replay


async def test_entries_are_rebuilt_from_nothing(archive: Archive) -> None:
    before = await archive.documents("entries")
    await archive.database.handle["entries"].delete_many({})
    replayed = await archive.replay()
    assert (replayed.events, replayed.entries_written) == (7, 3)
    after = await archive.documents("entries")
    assert exactly([tuple(after)]) == exactly([tuple(entry for entry in before if entry["namespace"] == T1)])
    assert await archive.replay() == ReplayReport(T1, events=7)
    assert (await archive.verify()).ok


async def test_a_rebuilt_entry_is_what_its_event_gives(archive: Archive) -> None:
    event = await archive.set(f"{T1}/k", {"a.b": {"$set": 1, "$literal": {"c": Decimal128("1.00")}}, "": "$x"})
    await archive.remove("entries", {"_id": f"{T1}/k"})
    await archive.replay()
    [stored] = await archive.database.collection("entries").find({"_id": f"{T1}/k"})
    assert exactly([(stored,)]) == exactly([({**Entry.document_of(event), "version": 1, "seq": 8},)])


async def test_replay_leaves_other_namespaces_alone(archive: Archive) -> None:
    await archive.plant("entries", {"_id": "/tasks/T10/a"}, field("value", "spoilt"))
    assert (await archive.replay()).entries_written == 0
    assert not (await archive.integrity.verify("/tasks/T10")).ok


async def test_an_entry_that_claims_too_much_is_repaired_under_the_head(archive: Archive) -> None:
    await archive.plant("entries", A, field("version", Int64(9)))
    await archive.plant("entries", B, field("value", "spoilt"))
    assert (await archive.replay()).entries_written == 2
    head = await archive.database.collection("namespaces").find_one({"_id": T1})
    assert head is not None
    assert (head["seq"], head["repairs"]) == (7, 1)
    event = await archive.set(f"{T1}/a", "next")
    assert (event.version, event.seq) == (4, 8)


async def test_replay_stops_at_an_event_that_cannot_be_read(archive: Archive) -> None:
    await archive.plant("events", seq(7), {"$unset": {"actor": ""}})
    with pytest.raises(IntegrityError, match=rf"\(seq 7\) cannot be read, so {T1}/a cannot be rebuilt"):
        await archive.replay()


# --- while others write


@asynccontextmanager
async def written_by(count: int, write: Callable[[int, int], Awaitable[Any]]) -> AsyncIterator[list[int]]:
    """Let writers repeat ``write(writer, round)`` until the block ends; the list counts their rounds."""
    rounds = [0] * count
    done = asyncio.Event()

    async def repeat(writer: int) -> None:
        while not done.is_set():
            rounds[writer] += 1
            await write(writer, rounds[writer])

    async with asyncio.TaskGroup() as group:
        for writer in range(count):
            group.create_task(repeat(writer))
        try:
            yield rounds
        finally:
            done.set()


async def test_e3_verify_and_replay_beside_writers(archive: Archive) -> None:
    """No false alarm, nothing newer overwritten; and what is planted meanwhile is found and mended."""
    integrity = Integrity(archive.database, Settings(page_size=25), Clock())

    async def write(writer: int, n: int) -> None:
        await archive.set(f"{T1}/w/{writer}", {"n": n})
        await archive.set(f"{T1}/w/shared", writer)
        if n % 5 == 0:
            await archive.delete(f"{T1}/w/{writer}")

    async with written_by(4, write) as rounds:
        for n in range(5):
            assert (await integrity.verify(T1)).problems == []
            replayed = await integrity.replay(T1)
            assert (replayed.entries_written, replayed.entries_removed) == (0, 0)
            await archive.plant("entries", B, field("value", n))
            await archive.plant("entries", C, field("version", Int64(50 + n)))
            assert [p.kind for p in (await integrity.verify(T1)).problems] == ["entry_value", "entry_version"]
            assert (await integrity.replay(T1)).entries_written == 2
    assert min(rounds) > 5
    assert (await integrity.verify(T1)).problems == []
    for writer, n in enumerate(rounds):
        entry = await archive.database.collection("entries").find_one({"_id": f"{T1}/w/{writer}"})
        assert entry is not None
        assert (entry["version"], entry["deleted"]) == (n + n // 5, n % 5 == 0)


async def test_e3_entries_that_vanish_beside_writers_come_back(archive: Archive) -> None:
    """Two replays at once do not mind each other either."""
    integrity = Integrity(archive.database, Settings(page_size=25), Clock())

    async def write(writer: int, n: int) -> None:
        await archive.set(f"{T1}/w/{writer}", n)

    async with written_by(2, write):
        for _ in range(5):
            await archive.database.handle["entries"].delete_many({"_id": {"$in": [f"{T1}/{name}" for name in "abc"]}})
            reports = await asyncio.gather(integrity.replay(T1), integrity.replay(T1))
            assert 1 <= sum(report.entries_written for report in reports) <= 3
            assert (await integrity.verify(T1)).problems == []


class Interrupted(Scans):
    """Lets something happen between the reading of a page and what is done about it."""

    async def entries(self) -> AsyncIterator[list[dict[str, Any]]]:
        async for page in super().entries():
            await self.meanwhile("entries")
            yield page

    async def written_paths(self) -> AsyncIterator[list[dict[str, Any]]]:
        async for page in super().written_paths():
            await self.meanwhile("written_paths")
            yield page

    async def meanwhile(self, scan: str) -> None:
        raise NotImplementedError


async def replay_while(
    archive: Archive, meanwhile: Callable[[], Awaitable[Any]], scan: str = "entries"
) -> ReplayReport:
    async def interrupt(running: str) -> None:
        if running == scan:
            await meanwhile()

    scans = Interrupted(archive.database, Settings(), T1)
    scans.meanwhile = interrupt  # type: ignore[method-assign]
    return await Replay(archive.database, archive.settings, Clock(), scans, T1).run()


@pytest.mark.parametrize(("name", "value"), [("value", "spoilt"), ("seq", Int64(99)), ("actor", "user:U8")])
async def test_e3_a_newer_entry_is_never_overwritten(archive: Archive, name: str, value: Any) -> None:
    await archive.plant("entries", A, field(name, value))
    newer: list[Event] = []

    async def write() -> None:
        newer.append(await archive.set(f"{T1}/a", "newer"))

    assert (await replay_while(archive, write)).entries_written == 0
    [entry, *_] = await archive.documents("entries")
    assert (entry["value"], entry["version"], entry["eventId"]) == ("newer", newer[-1].version, newer[-1].id)
    assert (await archive.verify()).ok


async def test_e3_an_entry_that_came_back_meanwhile_is_left_alone(archive: Archive) -> None:
    await archive.remove("entries", A)

    async def come_back_and_be_written() -> None:
        await archive.replay()
        await archive.set(f"{T1}/a", "newer")

    await replay_while(archive, come_back_and_be_written, "written_paths")
    [entry, *_] = await archive.documents("entries")
    assert (entry["value"], entry["version"]) == ("newer", 4)
    assert (await archive.verify()).ok


async def test_e3_what_claimed_too_much_is_decided_by_what_is_there_now(archive: Archive) -> None:
    await archive.plant("entries", A, field("version", Int64(9)))
    assert (await replay_while(archive, archive.replay)).entries_written == 0
    head = await archive.database.collection("namespaces").find_one({"_id": T1})
    assert head is not None
    assert head["repairs"] == 1
    assert (await archive.verify()).ok


async def test_i9_no_cursor_is_left_behind_between_pages(archive: Archive) -> None:
    """What holds none cannot lose one: each page is a whole read by itself."""
    await archive.verify()
    await archive.replay()
    pipeline = [
        {"$currentOp": {"idleCursors": True}},
        {"$match": {"type": "idleCursor", "ns": {"$regex": f"^{archive.database.name}\\."}}},
    ]
    reply = await archive.database.admin_command({"aggregate": 1, "pipeline": pipeline, "cursor": {}})
    assert reply["cursor"]["firstBatch"] == []


async def test_a_page_of_large_values_is_cut_and_nothing_is_skipped(archive: Archive) -> None:
    """A page is one reply of the server, which ends at 16 MiB however many rows were asked for."""
    large = "x" * (1024 * 1024 - 64)
    for n in range(24):
        await archive.set(f"{T1}/large/{n:02}", large)
    integrity = Integrity(archive.database, Settings(), Clock())
    report = await integrity.verify(T1)
    assert (report.problems, report.events, report.entries) == ([], 7 + 24, 3 + 24)
    await archive.database.handle["entries"].delete_many({"_id": {"$gt": f"{T1}/large", "$lt": f"{T1}/m"}})
    assert (await integrity.replay(T1)).entries_written == 24
    assert (await integrity.verify(T1)).ok
