"""Reading entries and the log (DESIGN §6, "Reading"; P10)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
from bson import Int64
from plans import plan_of_find
from pydantic import BaseModel

from statelayer.clock import Clock
from statelayer.drivers import Database
from statelayer.errors import ClosedError, IntegrityError, InvalidInputError, InvalidPathError, InvalidValueError
from statelayer.events import Event, Write
from statelayer.history import History
from statelayer.journal import Journal
from statelayer.mongo_indexes import setup
from statelayer.settings import Settings
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from pymongo.asynchronous.collection import AsyncCollection

pytestmark = pytest.mark.anyio

USER = "user:U7"
BLANK: list[Any] = ["", " ", None, True, 7, "/", "/tasks", "/tasks/", "/tasks//a", "/tasks/ /a", "tasks/T1", {"$ne": 1}]
"""What is no namespace (H5)."""


@dataclass
class Book:
    """A journal to write with and a history to read with."""

    database: Database
    journal: Journal
    history: History

    async def set(self, path: str, value: Any = None, **fields: Any) -> Event:
        [event] = await self.journal.append([Write(path=path, value=value, actor=USER, **fields)])
        return event

    async def delete(self, path: str) -> Event:
        [event] = await self.journal.append([Write(path=path, op="delete", actor=USER)])
        return event

    async def seqs(self, namespace: str, after: int = 0) -> list[int]:
        return [event.seq async for event in self.history.events(namespace, after)]

    def raw(self, collection: str) -> AsyncCollection[dict[str, Any]]:
        return self.database.handle[collection]


@pytest.fixture
async def book(database: Any) -> AsyncIterator[Book]:
    settings, clock = Settings(page_size=3), Clock()
    ours = Database(database)
    await setup(ours, settings)
    history = History(ours, settings, clock)
    yield Book(ours, Journal(ours, settings, clock), history)
    await history.aclose()


# --- entries


async def test_an_entry_is_read_as_it_was_written(book: Book) -> None:
    value = {"n": Int64(5_000_000_000), "ref": {"$ref": "orders", "$id": 7}, "half": 0.5, "null": None}
    event = await book.set("/tasks/T1/status", value)
    entry = await book.history.get("/tasks/T1/status")
    assert entry is not None
    assert (entry.path, entry.version, entry.seq, entry.event_id, entry.actor) == (event.path, 1, 1, event.id, USER)
    assert entry.value == value
    assert type(entry.value["n"]) is int


async def test_a_path_that_was_never_written_or_is_deleted_has_no_entry(book: Book) -> None:
    await book.set("/tasks/T1/status", "new")
    await book.delete("/tasks/T1/status")
    assert await book.history.get("/tasks/T1/status") is None
    assert await book.history.get("/tasks/T1/other") is None


async def test_null_is_a_value(book: Book) -> None:
    await book.set("/tasks/T1/status", None)
    entry = await book.history.get("/tasks/T1/status")
    assert entry is not None
    assert entry.value is None


class Customer(BaseModel):
    name: str
    age: int


class Order(BaseModel):
    customer: Customer


async def test_a_model_is_filled_with_the_value(book: Book) -> None:
    order = Order(customer=Customer(name="Ada", age=36))
    await book.set("/tasks/T1/order", order)
    entry = await book.history.get("/tasks/T1/order", Order)
    assert entry is not None
    assert (entry.value, entry.version) == (order, 1)


async def test_a_value_that_does_not_fit_the_model_is_named_by_path_and_field(book: Book) -> None:
    await book.set("/tasks/T1/order", {"customer": {"name": "Ada", "age": "old"}})
    with pytest.raises(InvalidValueError, match=r"/tasks/T1/order \(version 1\), value\.customer\.age"):
        await book.history.get("/tasks/T1/order", Order)


async def test_a_prefix_takes_whole_segments_and_leaves_out_what_is_deleted(book: Book) -> None:
    paths = ["/tasks/T1/a", "/tasks/T1/a/b", "/tasks/T1/a/b/c", "/tasks/T1/a-b/c", "/tasks/T1/ab", "/tasks/T1/a0/x"]
    for path in [*paths, "/tasks/T1/a/gone", "/tasks/T10/a", "/tasks/T1-x/a"]:
        await book.set(path, path)
    await book.delete("/tasks/T1/a/gone")
    below = await book.history.entries("/tasks/T1/a")
    whole = await book.history.entries("/tasks/T1")
    assert [entry.path for entry in below] == ["/tasks/T1/a", "/tasks/T1/a/b", "/tasks/T1/a/b/c"]
    assert [entry.path for entry in whole] == sorted(paths)
    assert await book.history.entries("/tasks/T9") == []


async def test_a_prefix_is_read_by_its_range_of_ids(book: Book) -> None:
    for n in range(30):
        await book.set(f"/tasks/T1/n/{n}", n)
    await book.set("/tasks/T1/a/b", 1)
    wanted = {
        "namespace": "/tasks/T1",
        "$or": [{"_id": "/tasks/T1/a"}, {"_id": {"$gt": "/tasks/T1/a/", "$lt": "/tasks/T1/a0"}}],
    }
    plan = await plan_of_find(book.database, "entries", wanted, {"_id": 1})
    assert plan.index == "_id_"
    assert plan.docs_examined == 1


async def test_entries_are_of_one_instant(book: Book) -> None:
    """P3: two paths that are always written together never differ in a read of both."""

    async def write(n: int) -> None:
        await book.journal.append([Write(path=f"/tasks/T1/{name}", value=n, actor=USER) for name in "ab"])

    await write(0)
    writing = asyncio.ensure_future(_one_by_one(write, 40))
    reads = 0
    while not writing.done():
        first, second = await book.history.entries("/tasks/T1")
        assert first.value == second.value
        reads += 1
    await writing
    assert reads


async def _one_by_one(write: Callable[[int], Any], count: int) -> None:
    for n in range(1, count + 1):
        await write(n)


# --- events


async def test_an_event_is_found_by_its_id(book: Book) -> None:
    cause = await book.set("/tasks/T1/status", {"a": [1]})
    effect = await book.set("/tasks/T1/next", 2, caused_by=cause.id)
    found = await book.history.event(effect.id)
    assert found is not None
    assert found.model_dump() == effect.model_dump()
    assert await book.history.event("0" * 24) is None


async def test_an_event_id_that_is_no_text_is_refused(book: Book) -> None:
    blanks: list[Any] = ["", None, True, 7, {"$ne": None}]
    for blank in blanks:
        with pytest.raises(InvalidInputError):
            await book.history.event(blank)


async def test_events_come_in_seq_order_over_many_pages(book: Book) -> None:
    for n in range(10):
        await book.set(f"/tasks/T1/n/{9 - n}", n)
    await book.set("/tasks/T2/n", 0)
    assert await book.seqs("/tasks/T1") == list(range(1, 11))
    assert await book.seqs("/tasks/T1", after=7) == [8, 9, 10]
    assert await book.seqs("/tasks/T1", after=10) == []
    assert await book.seqs("/tasks/T3") == []


async def test_an_event_is_the_same_read_by_page_and_by_id(book: Book) -> None:
    value = {"n": Int64(5_000_000_000), "ref": {"$ref": "orders", "$id": 7}}
    written = await book.set("/tasks/T1/status", value)
    [read] = [event async for event in book.history.events("/tasks/T1")]
    assert read.model_dump() == written.model_dump()
    assert type(read.value["n"]) is int


async def test_a_slow_consumer_holds_no_cursor_open(book: Book) -> None:
    """I9: between two pages there is nothing that the server could lose, and what is written meanwhile is seen."""
    for n in range(7):
        await book.set("/tasks/T1/n", n)
    events = book.history.events("/tasks/T1")
    first = await anext(events)
    assert await _open_cursors(book) == 0
    late = await book.set("/tasks/T1/n", "late")
    rest = [event.seq async for event in events]
    assert [first.seq, *rest] == list(range(1, late.seq + 1))


async def test_a_page_of_large_values_ends_with_one_reply(book: Book) -> None:
    large = "x" * (1024 * 1024 - 64)
    for n in range(20):
        await book.set(f"/tasks/T1/n/{n}", large)
    history = History(book.database, Settings(), Clock())
    events = history.events("/tasks/T1")
    first = await anext(events)
    assert await _open_cursors(book) == 0
    assert [first.seq, *[event.seq async for event in events]] == list(range(1, 21))


async def _open_cursors(book: Book) -> int:
    reply = await book.database.handle.client["admin"].command(
        {
            "aggregate": 1,
            "pipeline": [
                {"$currentOp": {"idleCursors": True}},
                {"$match": {"type": "idleCursor", "ns": {"$regex": f"^{book.database.name}\\."}}},
            ],
            "cursor": {},
        }
    )
    return len(reply["cursor"]["firstBatch"])


async def test_a_page_survives_one_failure_of_the_server(book: Book) -> None:
    await book.set("/tasks/T1/n", 1)
    fail = {"failCommands": ["find"], "errorCode": 91, "namespace": f"{book.database.name}.events"}
    await book.database.admin_command({"configureFailPoint": "failCommand", "mode": {"times": 1}, "data": fail})
    assert await book.seqs("/tasks/T1") == [1]


async def test_a_seq_that_is_no_whole_number_is_refused_before_anything_is_read(book: Book) -> None:
    numbers: list[Any] = [-1, True, None, 1.0, "1", 2**63]
    for number in numbers:
        with pytest.raises(InvalidInputError, match="after"):
            book.history.events("/tasks/T1", number)
        with pytest.raises(InvalidInputError, match="seq"):
            await book.history.state_at("/tasks/T1", number)
        with pytest.raises(InvalidInputError, match="version"):
            await book.history.read_version("/tasks/T1/a", number)


async def test_a_version_of_a_path_is_found(book: Book) -> None:
    events = [await book.set("/tasks/T1/a", n) for n in range(3)]
    gone = await book.delete("/tasks/T1/a")
    second, fourth = [await book.history.read_version("/tasks/T1/a", n) for n in (2, 4)]
    assert second is not None
    assert (second.id, second.value) == (events[1].id, 1)
    assert fourth is not None
    assert (fourth.id, fourth.op) == (gone.id, "delete")
    assert await book.history.read_version("/tasks/T1/a", 5) is None
    assert await book.history.read_version("/tasks/T1/a", 0) is None


async def test_the_state_at_a_seq_is_what_the_entries_were_then(book: Book) -> None:
    await book.set("/tasks/T1/b", 1)
    await book.set("/tasks/T1/a", None)
    await book.set("/tasks/T1/b", {"x": 1})
    await book.set("/tasks/T1/b", {"y": 2}, op="merge")
    await book.delete("/tasks/T1/a")
    await book.set("/tasks/T2/b", 9)
    history = book.history
    assert await history.state_at("/tasks/T1", 0) == {}
    assert await history.state_at("/tasks/T1", 2) == {"/tasks/T1/a": None, "/tasks/T1/b": 1}
    assert list(await history.state_at("/tasks/T1", 2)) == ["/tasks/T1/a", "/tasks/T1/b"]
    assert await history.state_at("/tasks/T1", 3) == {"/tasks/T1/a": None, "/tasks/T1/b": {"x": 1}}
    assert await history.state_at("/tasks/T1", 4) == {"/tasks/T1/a": None, "/tasks/T1/b": {"x": 1, "y": 2}}
    assert await history.state_at("/tasks/T1", 5) == {"/tasks/T1/b": {"x": 1, "y": 2}}
    assert await history.state_at("/tasks/T1", 99) == {"/tasks/T1/b": {"x": 1, "y": 2}}


async def test_a_state_of_many_paths_is_read_in_pages(book: Book) -> None:
    await book.journal.append([Write(path=f"/tasks/T1/n/{n}", value=n, actor=USER) for n in range(10)])
    assert await book.history.state_at("/tasks/T1", 10) == {f"/tasks/T1/n/{n}": n for n in range(10)}


# --- what holds for all of them


async def test_h5_a_blank_scope_is_refused_everywhere(book: Book) -> None:
    history = book.history
    calls: list[Callable[[Any], Any]] = [
        history.entries,
        history.events,
        lambda blank: history.state_at(blank, 1),
        history.get,
        lambda blank: history.read_version(blank, 1),
        lambda blank: history.wait_for(blank, timeout=1),
        lambda blank: history.watch(blank, lambda _: True),
    ]
    for call, blank in product(calls[:-1], BLANK):
        await _refused(call, blank)
    for blank in filter(None, BLANK):  # no namespace means every namespace
        await _refused(calls[-1], blank)


async def _refused(call: Callable[[Any], Any], blank: Any) -> None:
    with pytest.raises(InvalidPathError):
        await call(blank)


async def test_f10_what_was_returned_belongs_to_the_caller(book: Book) -> None:
    value = {"list": [1]}
    written = await book.set("/tasks/T1/a", value)
    entry = await book.history.get("/tasks/T1/a")
    event = await book.history.event(written.id)
    assert entry is not None
    assert event is not None
    for held in (value, written.value, entry.value, event.value):
        held["list"].append(2)
    after = await book.history.get("/tasks/T1/a")
    assert after is not None
    assert after.value == {"list": [1]}
    assert await book.history.state_at("/tasks/T1", 1) == {"/tasks/T1/a": {"list": [1]}}


async def test_a_document_broken_by_hand_is_named(book: Book) -> None:
    event = await book.set("/tasks/T1/a", 1)
    broken = {"$unset": {"actor": ""}}
    await book.raw("events").update_one({"_id": event.id}, broken, bypass_document_validation=True)
    await book.raw("entries").update_one({}, broken, bypass_document_validation=True)
    with pytest.raises(IntegrityError, match=rf"event {event.id} of /tasks/T1 \(seq 1\) .*actor"):
        await book.history.event(event.id)
    with pytest.raises(IntegrityError, match=r"entry /tasks/T1/a .*actor"):
        await book.history.get("/tasks/T1/a")


# --- waiting


async def test_waiting_ends_when_the_path_gets_a_value(book: Book) -> None:
    waiting = asyncio.ensure_future(book.history.wait_for("/tasks/T1/a", timeout=20))
    await book.set("/tasks/T1/b", 1)
    await book.set("/tasks/T1/a", 2)
    entry = await waiting
    assert (entry.path, entry.value) == ("/tasks/T1/a", 2)
    assert (await book.history.wait_for("/tasks/T1/a", timeout=0)).value == 2
    assert (await book.history.wait_for("/tasks/T1/a")).value == 2


async def test_waiting_looks_past_a_delete(book: Book) -> None:
    await book.set("/tasks/T1/a", 1)
    await book.delete("/tasks/T1/a")
    waiting = asyncio.ensure_future(book.history.wait_for("/tasks/T1/a", timeout=20))
    await book.set("/tasks/T1/a", 3)
    assert (await waiting).value == 3


async def test_a_wait_in_vain_names_the_path(book: Book) -> None:
    with pytest.raises(TimeoutError, match=r"/tasks/T1/a had no value within 0\.05 seconds"):
        await book.history.wait_for("/tasks/T1/a", timeout=0.05)
    assert book.history.reader.statistics.watchers == 0


async def test_closing_ends_a_wait(book: Book) -> None:
    waiting = asyncio.ensure_future(book.history.wait_for("/tasks/T1/a"))
    await wait_until(lambda: book.history.reader.statistics.is_open)
    await book.history.aclose()
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await book.history.wait_for("/tasks/T1/a")
