"""A report for people, laid out for 80 columns and wider."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Branches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console, RenderableType

    from statelayer.demo.report import Chain, Classified, Fact, Report, Tree, Verified, Woken

    Rows = Iterator[RenderableType]

T = TypeVar("T")

SHOWN = 20
"""Items of a list that are shown."""

NOTHING = "–"

TREES = {
    "classified": "A request that was classified:",
    "refused": "A request that was refused:",
    "chain": "A task that was submitted:",
}


def print_summary(console: Console, report: Report) -> None:
    """Print a report, without the spaces that fill its lines up."""
    with console.capture() as printed:
        console.print(_summary(report))
    for line in printed.get().splitlines():
        console.file.write(line.rstrip() + "\n")
    console.file.flush()


def _summary(report: Report) -> RenderableType:
    sections = [
        ("Written", _written(report)),
        ("Woken", _woken(report.woken)),
        ("Classified", _classified(report.classified)),
        ("Refused, and why", _refused(report)),
        ("Never ended", _listed(report.unfinished, lambda event: (event.path, event.reason))),
        ("The chain", _chain(report.chain)),
        ("What caused what", _trees(report.trees)),
        ("Verified", _verified(report.verified)),
        ("Took", _took(report)),
    ]
    return Group(*(_section(title, body) for title, rows in sections if (body := list(rows))))


def _section(title: str, body: Sequence[RenderableType]) -> RenderableType:
    heading = Rule(Text(title, style="bold"), align="left", style="dim")
    return Group(heading, *body, Text())


def _written(report: Report) -> Rows:
    requests, tasks = _count(report.requests, "request"), _count(report.tasks, "task")
    yield _text(f"{requests} in {tasks}, from {report.source}")
    confirmed = report.requests - len(report.drafts)
    yield _text(f"{confirmed:,} confirmed, {_count(len(report.drafts), 'draft')}")
    if not_written := len(report.broken) + len(report.rejected):
        yield _text(f"{_count(not_written, 'line')} not written (see below)")


def _woken(woken: Sequence[Woken]) -> Rows:
    if not woken:
        yield _text("Nothing: no confirmed request and no task was there to wake anybody.")
        return
    table = _table("by", "target", "ended")
    table.add_column("count", justify="right")
    for row in woken:
        state = f"{row.state} ({row.reason})" if row.reason else row.state
        table.add_row(_text(row.kind), _text(row.target), Text(state, style=_style(row.state)), f"{row.count:,}")
    yield table


def _classified(classified: Sequence[Classified]) -> Rows:
    if not classified:
        return
    table = _table()
    table.add_column("request", no_wrap=True)
    table.add_column("description")
    table.add_column("code", no_wrap=True)
    table.add_column("heading")
    table.add_column("score", no_wrap=True, justify="right")
    for found in classified[:SHOWN]:
        goods, score = found.goods, f"{found.score:.1f}"
        table.add_row(_text(goods.name), _cut(goods.description), _text(found.code), _cut(found.heading), score)
    yield table
    yield from _more(classified)


def _refused(report: Report) -> Rows:
    skipped = [row for row in report.woken if row.state == "skipped"]
    groups = [
        ("By the classifier", _listed(report.refused, lambda refused: (refused.goods.name, refused.message))),
        ("Failed", _listed(report.failed, lambda fact: (fact.path, f"{fact.reason}: {fact.message}"))),
        ("Broken lines", _listed(report.broken, lambda line: (f"line {line.number:,}", line.reason))),
        ("Not accepted by the library", _listed(report.rejected, lambda item: (item.path, item.reason))),
        ("Drafts: written, and nobody woken", _listed(report.drafts, lambda item: (item.name, item.description))),
        ("Subscriptions that matched, and did not fire", _listed(skipped, lambda row: (row.target, _skipped(row)))),
    ]
    filled = [(title, body) for title, rows in groups if (body := list(rows))]
    for number, (title, body) in enumerate(filled):
        yield _text(f"\n{title}" if number else title)
        yield Padding(Group(*body), (0, 0, 0, 2))


def _chain(chain: Chain | None) -> Rows:
    if chain is None:
        return
    table = _table("hop", "path", "source", "depth", "caused by")
    for hop in chain.hops:
        cause = NOTHING if hop.caused_by is None else str(hop.caused_by)
        table.add_row(str(hop.number), _text(hop.path), hop.source, str(hop.depth), cause)
    for stop in chain.stops:
        # In two lines, so that the paths stay whole at 80 columns.
        table.add_row("stop", NOTHING, NOTHING, NOTHING, f"{stop.hop} wakes nothing\n({stop.reason})")
    yield table
    for stop in chain.stops:
        yield _text(f"stop: {stop.subscription} matches {stop.hop}, and does not fire: {stop.reason}")


def _trees(trees: Sequence[Tree]) -> Rows:
    for number, tree in enumerate(trees):
        yield _text(f"\n{TREES[tree.kind]}" if number else TREES[tree.kind])
        branches = Branches(_fact(tree.root), guide_style="dim")
        _grow(branches, tree.root)
        yield branches


def _grow(branches: Branches, fact: Fact) -> None:
    for child in fact.children:
        _grow(branches.add(_fact(child)), child)


def _fact(fact: Fact) -> Text:
    about = f"{fact.source}, {_printable(fact.actor)}, depth {fact.depth}, {fact.event_id}"
    return _text(fact.path).append("\n").append(about, style="dim")


def _verified(verified: Sequence[Verified]) -> Rows:
    bad = [report for report in verified if not report.ok]
    good = [report for report in verified if report.ok]
    for report in [*bad, *good][:SHOWN]:
        size = f"{_count(report.events, 'event')}, {_count(report.entries, 'entry', 'entries')}"
        state = Text("ok", style="green") if report.ok else Text("broken", style="red")
        yield Text.assemble(_printable(report.namespace), "  ", state, "  ", size)
        problems = [_text(problem) for problem in report.problems[:SHOWN]]
        yield from (Padding(row, (0, 0, 0, 2)) for row in (*problems, *_more(report.problems)))
    yield from _more(verified)


def _took(report: Report) -> Rows:
    events, executions = _count(report.events, "event"), _count(report.executions, "execution")
    yield _text(f"{report.seconds:.1f} seconds for {events} and {executions}")


# --- pieces


def _listed(items: Sequence[T], told: Callable[[T], tuple[str, str]]) -> Rows:
    """List whom something happened to, and why."""
    if not items:
        return
    grid = Table.grid(padding=(0, 2))
    for who, why in map(told, items[:SHOWN]):
        grid.add_row(_text(who), _text(why))
    yield grid
    yield from _more(items)


def _more(items: Sequence[object]) -> Rows:
    if len(items) > SHOWN:
        yield Text(f"… and {len(items) - SHOWN:,} more", style="dim")


def _table(*columns: str) -> Table:
    return Table(*columns, box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, show_edge=False, header_style="dim")


def _skipped(row: Woken) -> str:
    times = "once" if row.count == 1 else f"{row.count:,} times"
    return f"{row.reason}, {times}"


def _style(state: str) -> str:
    return {"succeeded": "green", "failed": "red"}.get(state, "")


def _count(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _text(text: str) -> Text:
    return Text(_printable(text), overflow="fold")


def _cut(text: str) -> Text:
    return Text(_printable(text), overflow="ellipsis", no_wrap=True)


def _printable(text: str) -> str:
    """Leave no character that would move a terminal's cursor or change its colours."""
    return "".join(character if character.isprintable() or character == "\n" else "�" for character in text)
