"""The demo: what a run writes, wakes and reports (the shipped file, files of one's own, a database used before)."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from anyio.lowlevel import checkpoint
from rich.console import Console

from statelayer.demo.lanes import in_lanes
from statelayer.demo.progress import progress_on
from statelayer.demo.report import Goods, Hop, Report, Stop, Woken
from statelayer.demo.session import Session, UnreadableInputError
from statelayer.demo.summary import SHOWN, print_summary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from statelayer import StateLayer
    from statelayer.testing.plugin import Database

pytestmark = pytest.mark.anyio

# What a report makes of a file does not depend on the driver.
one_driver = pytest.mark.parametrize("driver", ["pymongo"], indirect=True)


def declaration(request: str, *, task: str = "T-1", **fields: Any) -> str:
    given = {"user": "U7", "origin": "IT", "value": 890, "currency": "EUR", "status": "confirmed"}
    given |= {"requestId": request, "taskId": task, "description": "Silk neckties"}
    return json.dumps(given | fields)


@pytest.fixture
def desk(layer: StateLayer) -> Session:
    return Session(layer)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two requests of one task: one that is classified, one that is not."""
    return written(tmp_path, declaration("S-1"), declaration("S-2", description="Assorted gifts"))


def written(directory: Path, *lines: str) -> Path:
    path = directory / "declarations.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def printed(report: Report, width: int = 80) -> str:
    text = io.StringIO()
    print_summary(Console(file=text, width=width), report)
    return text.getvalue()


# --- the shipped file


async def test_the_shipped_declarations_are_written_woken_and_verified(desk: Session) -> None:
    report = await desk.run()
    assert (report.tasks, report.requests, len(report.drafts)) == (8, 41, 5)
    assert [line.number for line in report.broken] == [11, 16, 22, 26, 34]
    assert report.woken == [
        Woken("agent", "facade-hs-code", "failed", "handler_error", 3),
        Woken("agent", "facade-hs-code", "succeeded", None, 33),
        Woken("workflow", "finalize", "succeeded", None, 8),
        Woken("workflow", "review", "succeeded", None, 8),
        Woken("workflow", "settle", "succeeded", None, 8),
        Woken("subscription", "archive-finalized-tasks", "skipped", "max_depth", 8),
    ]
    assert [refused.goods.name for refused in report.refused] == ["T-2041/S-004", "T-2043/S-006", "T-2047/S-005"]
    assert len(report.classified) == 33
    assert report.classified[0].code == "6109"
    # 41 requests, 36 results and errors, and of each task its status, three stages and three results.
    assert report.events == 41 + 36 + 8 * 7 == sum(verified.events for verified in report.verified)
    assert report.executions == 60
    assert report.ok
    assert len(report.verified) == 8


async def test_the_chain_and_the_single_delivery_come_out_as_they_were_asked_for(
    desk: Session, layer: StateLayer
) -> None:
    report = await desk.run()
    assert report.chain is not None
    assert list(report.chain.hops) == [
        Hop(1, "/tasks/T-2041/status", "api", 0, None),
        Hop(2, "/tasks/T-2041/stage/reviewed", "workflow_node", 1, 1),
        Hop(3, "/tasks/T-2041/stage/settled", "workflow_node", 2, 2),
        Hop(4, "/tasks/T-2041/stage/finalized", "workflow_node", 3, 3),
    ]
    assert list(report.chain.stops) == [Stop(4, "archive-finalized-tasks", "max_depth")]
    assert await layer.get("/tasks/T-2041/stage/archived") is None

    request = await layer.get("/tasks/T-2041/requests/S-001")
    assert request is not None
    result = await layer.read_version(f"/tasks/T-2041/agents/facade-hs-code/results/{request.event_id}", 1)
    assert result is not None
    assert (result.source, result.actor, result.trigger_depth) == ("agent_callback", "agent:facade-hs-code", 1)
    assert result.caused_by_event_id == request.event_id
    event = await layer.event(request.event_id)
    assert event is not None
    assert (event.source, event.actor, event.trigger_depth, event.caused_by_event_id) == ("api", "user:U7", 0, None)


@one_driver
async def test_a_tree_of_each_kind_is_traced(desk: Session, file: Path) -> None:
    report = await desk.run(file)
    assert [tree.kind for tree in report.trees] == ["classified", "refused", "chain"]
    classified, refused, chain = (tree.root for tree in report.trees)
    assert [fact.path for fact in classified.children] == [
        f"/tasks/T-1/agents/facade-hs-code/results/{classified.event_id}"
    ]
    assert [fact.path for fact in refused.children] == [f"/tasks/T-1/agents/facade-hs-code/errors/{refused.event_id}"]
    assert {fact.path for fact in chain.children} == {
        "/tasks/T-1/stage/reviewed",
        f"/tasks/T-1/workflows/review/results/{chain.event_id}",
    }


# --- files of one's own


@one_driver
async def test_broken_lines_are_reported_and_the_rest_goes_on(desk: Session, tmp_path: Path) -> None:
    report = await desk.run(written(tmp_path, "{", declaration("S-1"), "[]", declaration("S-2", status="draft")))
    assert [line.number for line in report.broken] == [1, 3]
    assert (report.requests, [goods.name for goods in report.drafts]) == (2, ["T-1/S-2"])
    assert [found.goods.description for found in report.classified] == ["Silk neckties"]


@one_driver
async def test_what_the_library_does_not_accept_is_reported_and_the_rest_goes_on(desk: Session, tmp_path: Path) -> None:
    too_large = declaration("S-1", description="silk " * 300_000)
    report = await desk.run(written(tmp_path, too_large, declaration("S-2")))
    assert [rejected.path for rejected in report.rejected] == ["/tasks/T-1/requests/S-1"]
    assert report.requests == len(report.classified) == 1


@one_driver
@pytest.mark.parametrize("lines", [[], ["", "{", "nonsense"]], ids=["empty", "all broken"])
async def test_a_file_without_requests_is_reported_too(desk: Session, tmp_path: Path, lines: Sequence[str]) -> None:
    report = await desk.run(written(tmp_path, *lines))
    assert report.ok
    assert (report.requests, report.events, report.chain, report.woken) == (0, 0, None, [])
    assert "Nothing: no confirmed request" in printed(report)


@one_driver
async def test_a_file_that_cannot_be_read_is_refused(desk: Session, tmp_path: Path) -> None:
    with pytest.raises(UnreadableInputError, match=r"declarations\.jsonl cannot be read: No such file"):
        await desk.run(tmp_path / "declarations.jsonl")


# --- a database that was used before


async def test_a_second_run_counts_only_itself(desk: Session, layer: StateLayer, file: Path) -> None:
    first = await desk.run(file)
    await layer.set("/tasks/T-1/requests/S-9", json.loads(declaration("S-9")), actor="user:U1")
    second = await desk.run(file)
    assert first.events == second.events == 2 + 2 + 7
    assert first.woken == second.woken
    assert second.chain is not None
    assert [hop.caused_by for hop in second.chain.hops] == [None, 1, 2, 3]
    assert second.classified[0].goods.event_id != first.classified[0].goods.event_id
    # Twice a run, and what somebody else wrote there with its result.
    assert second.verified[0].events == 2 * 11 + 2


@one_driver
async def test_what_never_ends_is_said(layer: StateLayer, file: Path) -> None:
    await layer.pause()
    report = await Session(layer, patience=0.2).run(file)
    assert not report.ok
    assert {event.path for event in report.unfinished} == {
        "/tasks/T-1/requests/S-1",
        "/tasks/T-1/requests/S-2",
        "/tasks/T-1/status",
    }
    assert "it has not been evaluated" in printed(report)


@one_driver
async def test_a_workflow_that_fails_is_said(desk: Session, layer: StateLayer, file: Path) -> None:
    await layer.set("/tasks/T-1/requests/S-9", {"status": "confirmed", "description": "Wine"}, actor="user:U1")
    report = await desk.run(file)
    (failed,) = report.failed
    assert failed.path.startswith("/tasks/T-1/workflows/settle/errors/")
    assert (failed.reason, failed.message) == ("handler_error", "'currency'")
    assert report.chain is not None
    assert [hop.path for hop in report.chain.hops] == ["/tasks/T-1/status", "/tasks/T-1/stage/reviewed"]


@one_driver
async def test_what_verify_finds_is_said(desk: Session, database: Database, file: Path) -> None:
    first = await desk.run(file)
    result = first.trees[0].root.children[0].path
    await database["entries"].update_one({"_id": result}, {"$set": {"value": "forged"}})
    report = await desk.run(file)
    assert not report.ok
    assert "entry_value" in report.verified[0].problems[0]
    assert "/tasks/T-1  broken" in printed(report)


# --- how it is told


@one_driver
async def test_the_summary_has_every_part_and_fits(desk: Session) -> None:
    report = await desk.run()
    for width in (80, 140):
        text = printed(report, width)
        titles = ("Written", "Woken", "Classified", "Refused, and why", "The chain", "What caused what", "Verified")
        assert [title for title in (*titles, "Took") if f"{title} ─" not in text] == []
        assert max(map(len, text.splitlines())) <= width
        assert all(path in text for path in ("/tasks/T-2041/stage/finalized  ", "/tasks/T-2048  ok"))
        assert "stop: archive-finalized-tasks matches 4, and does not fire: max_depth" in text
        assert "\x1b" not in text
    assert f"… and {33 - SHOWN} more" in text


def test_nothing_in_a_file_controls_the_terminal() -> None:
    goods = Goods("/tasks/T/requests/S", "e", "\x1b[2J\x9b[bold]gone[/bold]\r")
    text = printed(_report(drafts=[goods], requests=1))
    assert "�[2J�[bold]gone[/bold]�" in text


def test_a_report_on_the_wire_is_camel_case() -> None:
    document = _report(drafts=[Goods("/tasks/T/requests/S", "e", "Wine")]).document()
    assert document["drafts"] == [{"path": "/tasks/T/requests/S", "eventId": "e", "description": "Wine"}]
    assert document["ok"] is True
    assert document == json.loads(json.dumps(document))


async def test_progress_is_bars_on_a_terminal_and_lines_elsewhere() -> None:
    for is_terminal, expected in ((True, "2/2"), (False, "Writing (2) …\n")):
        text = io.StringIO()
        console = Console(file=text, force_terminal=is_terminal, width=80)
        with progress_on(console) as progress, progress.phase("Writing", 2) as advance:
            advance()
            advance()
        assert expected in text.getvalue()


async def test_lanes_take_an_endless_source_as_they_go_and_raise_the_first_error_bare() -> None:
    taken: list[int] = []

    async def work(number: int) -> None:
        taken.append(number)
        await checkpoint()
        if number == 100:
            raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        await in_lanes(range(10**9), work)
    assert taken[:3] == [0, 1, 2]
    assert len(taken) < 200


def _report(**fields: Any) -> Report:
    lists = ("drafts", "broken", "rejected", "woken", "classified", "refused", "failed", "unfinished", "trees")
    empty: dict[str, Any] = dict.fromkeys((*lists, "verified"), ())
    numbers = {"tasks": 0, "requests": 0, "events": 0, "seconds": 0.1}
    return Report(**{**empty, **numbers, "source": "f", "chain": None, **fields})
