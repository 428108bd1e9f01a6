"""Saying how far a run has come: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Display

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    Advance = Callable[[], None]


class Progress(Protocol):
    """Told of each phase of a run, one after the other."""

    def phase(self, title: str, total: int | None = None) -> AbstractContextManager[Advance]:
        """Begin a phase of ``total`` steps (``None``: not known); the block calls what it gets after each step."""


class Silence:
    """Says nothing."""

    @contextmanager
    def phase(self, title: str, total: int | None = None) -> Iterator[Advance]:  # noqa: ARG002 - nobody hears them
        yield lambda: None


class Lines:
    """A line when a phase begins."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def phase(self, title: str, total: int | None = None) -> Iterator[Advance]:
        amount = f" ({total})" if total is not None else ""
        self._console.print(f"{title}{amount} …", highlight=False, markup=False)
        yield lambda: None


class Bars:
    """A bar for each phase."""

    def __init__(self, display: Display) -> None:
        self._display = display

    @contextmanager
    def phase(self, title: str, total: int | None = None) -> Iterator[Advance]:
        task = self._display.add_task(title, total=total, steps="")

        def advance() -> None:
            done = f"{self._display.tasks[task].completed + 1:,.0f}"
            self._display.update(task, advance=1, steps=done if total is None else f"{done}/{total:,}")

        yield advance
        completed = self._display.tasks[task].completed or 1
        self._display.update(task, total=completed, completed=completed)


@contextmanager
def progress_on(console: Console) -> Iterator[Progress]:
    """Show progress on a console for as long as the block lasts."""
    if not console.is_terminal:
        yield Lines(console)
        return
    columns = (
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.fields[steps]}"),
    )
    with Display(*columns, console=console) as display:
        yield Bars(display)
