"""Writing the requests of a file, and then submitting their tasks: all that the demo does by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from statelayer.demo.report import Rejected
from statelayer.demo.requests import BrokenLine, Request
from statelayer.errors import InvalidInputError

if TYPE_CHECKING:
    from statelayer import StateLayer
    from statelayer.events import Event

SUBMITTED = "submitted"


@dataclass(slots=True)
class Task:
    """A task of this run. ``head`` is the seq that its log had before."""

    namespace: str
    actor: str
    head: int
    submission: Event | None = None

    def saw(self, event: Event) -> None:
        self.head = min(self.head, event.seq - 1)


class Intake:
    """What was written, and what could not be."""

    def __init__(self, layer: StateLayer) -> None:
        self._layer = layer
        self.tasks: dict[str, Task] = {}
        self.roots: set[str] = set()
        self.requests = 0
        self.broken: list[BrokenLine] = []
        self.rejected: list[Rejected] = []

    async def take(self, item: Request | BrokenLine) -> None:
        """Write a request; report a line that holds none, and what the library refuses to write."""
        if isinstance(item, BrokenLine):
            self.broken.append(item)
            return
        try:
            event = await self._layer.set(item.path, item.fact(), actor=item.actor)
        except InvalidInputError as error:
            self.rejected.append(Rejected(item.path, str(error)))
            return
        self.requests += 1
        self._note(event).saw(event)

    async def submit(self, task: Task) -> None:
        """Say for the task's user that its requests are complete."""
        event = await self._layer.set(f"{task.namespace}/status", SUBMITTED, actor=task.actor)
        self._note(event).submission = event

    def _note(self, event: Event) -> Task:
        self.roots.add(event.id)
        return self.tasks.setdefault(event.namespace, Task(event.namespace, event.actor, event.seq - 1))
