"""Which event caused which (DESIGN §6, ``trace_causation``; P7)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import plan_of_find

from statelayer.causation import Causation, CausationTree
from statelayer.clock import Clock
from statelayer.drivers import Database
from statelayer.errors import IntegrityError, InvalidInputError, InvalidPathError, NotFoundError
from statelayer.events import Event, Write
from statelayer.journal import Journal
from statelayer.mongo_indexes import setup
from statelayer.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

USER = "user:U7"


def event(n: int, cause: int | None = None, depth: int = 0) -> Event:
    return Event(
        id=f"e{n}",
        namespace="/tasks/T1",
        seq=n,
        path=f"/tasks/T1/n/{n}",
        version=1,
        op="set",
        actor=USER,
        source="api",
        trigger_depth=depth,
        caused_by_event_id=None if cause is None else f"e{cause}",
        root_event_id="e1",
        batch_id=f"e{n}",
        committed_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def ids(nodes: Iterable[Any]) -> list[str]:
    return [node.event.id for node in nodes]


# --- trees, without a database


def test_events_stand_under_their_causes_in_the_order_of_the_log() -> None:
    tree = CausationTree.of([event(1), event(2, 1), event(3), event(4, 1), event(5, 2), event(6, 3)])
    assert ids(tree.roots) == ["e1", "e3"]
    assert ids(tree.roots[0].children) == ["e2", "e4"]
    assert ids(tree) == ["e1", "e2", "e5", "e4", "e3", "e6"]
    assert (len(tree), tree.links_resolved, tree.dangling_caused_by) == (6, True, [])


def test_a_cause_outside_the_answer_is_named_and_makes_a_root() -> None:
    tree = CausationTree.of([event(1), event(2, 9), event(3, 2), event(4, 9), event(5, 8)])
    assert ids(tree.roots) == ["e1", "e2", "e4", "e5"]
    assert tree.dangling_caused_by == ["e9", "e8"]
    assert not tree.links_resolved


def test_a_node_is_found_by_the_id_of_its_event() -> None:
    tree = CausationTree.of([event(1), event(2, 1)])
    found = tree.find("e2")
    assert found is tree.roots[0].children[0]
    assert tree.find("e9") is None


def test_a_tree_is_printed_one_event_a_line() -> None:
    tree = CausationTree.of([event(1), event(2, 1, 1), event(3, 2, 2), event(4, 1, 1), event(5, 9, 1)])
    assert str(tree) == (
        "/tasks/T1/n/1  api  user:U7  depth 0  e1\n"
        "├─ /tasks/T1/n/2  api  user:U7  depth 1  e2\n"
        "│  └─ /tasks/T1/n/3  api  user:U7  depth 2  e3\n"
        "└─ /tasks/T1/n/4  api  user:U7  depth 1  e4\n"
        "/tasks/T1/n/5  api  user:U7  depth 1  e5  (caused by e9, outside this answer)"
    )
    assert tree.render() == str(tree)
    assert str(CausationTree.of([])) == ""


def test_a_chain_of_ten_thousand_is_no_deeper_than_the_stack() -> None:
    tree = CausationTree.of([event(1), *(event(n, n - 1, n - 1) for n in range(2, 10_001))])
    assert ids(tree) == [f"e{n}" for n in range(1, 10_001)]
    text = str(tree)
    assert text.count("\n") == 9_999
    assert len(text) < 10_000 * 200
    assert "e10000" in text.rpartition("\n")[2]
    assert "10000 events" in repr(tree)


def test_causes_that_go_in_a_circle_invent_nothing() -> None:
    """Only by hand: an event can be caused by an earlier one alone."""
    tree = CausationTree.of([event(1, 2), event(2, 1), event(3, 3)])
    assert ids(tree) == ["e1", "e2", "e3"]
    assert tree.dangling_caused_by == ["e2", "e3"]


@given(st.lists(st.integers(min_value=0, max_value=30), max_size=30))
def test_every_event_stands_in_the_tree_once(causes: list[int]) -> None:
    events = [event(n, cause or None) for n, cause in enumerate(causes, 1)]
    tree = CausationTree.of(events)
    assert sorted(ids(tree)) == sorted(e.id for e in events)
    assert len(str(tree).splitlines()) == len(events)
    for node in tree:
        assert all(child.event.caused_by_event_id == node.event.id for child in node.children)


# --- what is read


@dataclass
class Court:
    """A journal to write with and a causation to trace with."""

    database: Database
    journal: Journal
    causation: Causation

    async def set(self, path: str, cause: Event | None = None) -> Event:
        write = Write(path=path, value=path, actor=USER, caused_by=cause and cause.id)
        [event] = await self.journal.append([write])
        return event


@pytest.fixture
async def court(database: Any) -> Court:
    settings, clock = Settings(page_size=3), Clock()
    ours = Database(database)
    await setup(ours, settings)
    return Court(ours, Journal(ours, settings, clock), Causation(ours, settings, clock))


@pytest.mark.anyio
async def test_any_event_of_a_tree_leads_to_the_whole_of_it(court: Court) -> None:
    root = await court.set("/tasks/T1/status")
    await court.set("/tasks/T1/unrelated")
    left = await court.set("/tasks/T1/left", root)
    right = await court.set("/tasks/T1/right", root)
    leaf = await court.set("/tasks/T1/leaf", left)
    for member in (root, left, right, leaf):
        tree = await court.causation.trace(event_id=member.id)
        assert ids(tree) == [root.id, left.id, leaf.id, right.id]
        assert tree.links_resolved
    assert [node.event.trigger_depth for node in tree] == [0, 1, 2, 1]
    assert tree.roots[0].event.model_dump() == root.model_dump()


@pytest.mark.anyio
async def test_a_task_has_all_its_trees(court: Court) -> None:
    first = await court.set("/tasks/T1/a")
    second = await court.set("/tasks/T1/b")
    effects = [await court.set(f"/tasks/T1/n/{n}", first) for n in range(5)]
    await court.set("/tasks/T10/a")
    tree = await court.causation.trace(task_id="T1")
    assert ids(tree.roots) == [first.id, second.id]
    assert ids(tree.roots[0].children) == [effect.id for effect in effects]
    assert len(await court.causation.trace(task_id="T9")) == 0


@pytest.mark.anyio
async def test_h5_a_cause_in_another_namespace_is_named_and_never_read(court: Court) -> None:
    there = await court.set("/tasks/T2/secret")
    here = await court.set("/tasks/T1/here", there)
    below = await court.set("/tasks/T1/below", here)
    back = await court.set("/tasks/T2/back", below)
    again = await court.set("/tasks/T1/again", back)
    for tree in (await court.causation.trace(event_id=below.id), await court.causation.trace(task_id="T1")):
        assert ids(tree.roots) == [here.id, again.id]
        assert ids(tree) == [here.id, below.id, again.id]
        assert tree.dangling_caused_by == [there.id, back.id]
        assert not tree.links_resolved
        assert "secret" not in str(tree)
    theirs = await court.causation.trace(event_id=there.id)
    assert ids(theirs) == [there.id, back.id]
    assert theirs.dangling_caused_by == [below.id]


@pytest.mark.anyio
async def test_a_thread_is_traced_by_its_events(court: Court) -> None:
    root = await court.set("/threads/X/a")
    effect = await court.set("/threads/X/b", root)
    assert ids(await court.causation.trace(event_id=effect.id)) == [root.id, effect.id]


@pytest.mark.anyio
async def test_exactly_one_question_is_answered(court: Court) -> None:
    with pytest.raises(InvalidInputError, match="exactly one"):
        await court.causation.trace()
    with pytest.raises(InvalidInputError, match="exactly one"):
        await court.causation.trace(event_id="0" * 24, task_id="T1")
    with pytest.raises(NotFoundError):
        await court.causation.trace(event_id="0" * 24)


@pytest.mark.anyio
async def test_h5_a_blank_scope_is_refused(court: Court) -> None:
    blanks: list[Any] = ["", " ", True, 7, "a/b", "..", "*", {"$ne": None}]
    for blank in blanks:
        with pytest.raises(InvalidPathError):
            await court.causation.trace(task_id=blank)
    events: list[Any] = ["", True, 7, {"$ne": None}]
    for blank in events:
        with pytest.raises(InvalidInputError):
            await court.causation.trace(event_id=blank)


@pytest.mark.anyio
async def test_an_event_broken_by_hand_is_named(court: Court) -> None:
    event = await court.set("/tasks/T1/a")
    await court.database.handle["events"].update_one({}, {"$unset": {"actor": ""}}, bypass_document_validation=True)
    with pytest.raises(IntegrityError, match=event.id):
        await court.causation.trace(event_id=event.id)


@pytest.mark.anyio
async def test_a_tree_is_read_by_its_root(court: Court) -> None:
    root = await court.set("/tasks/T1/a")
    for n in range(3):
        await court.set(f"/tasks/T1/n/{n}", root)
    for n in range(30):
        await court.set(f"/tasks/T1/other/{n}")
    wanted = [{"_id": root.id, "namespace": "/tasks/T1"}, {"namespace": "/tasks/T1", "rootEventId": root.id}]
    plan = await plan_of_find(court.database, "events", {"$or": wanted}, {"seq": 1})
    assert plan.keys_examined == plan.returned == 4
