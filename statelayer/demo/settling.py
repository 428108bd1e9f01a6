"""Waiting until nothing goes on any more, by following each task's log to its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statelayer.demo.report import Unfinished
from statelayer.demo.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statelayer import StateLayer
    from statelayer.demo.intake import Intake, Task
    from statelayer.demo.progress import Advance
    from statelayer.events import Event
    from statelayer.executors import Execution

LITTLE_PATIENCE = 1.0
"""Seconds that an event is waited for after another one's outcome never came."""


class Settling:
    """Follows the logs of a run's tasks and tallies what it finds there.

    An event is settled when it was evaluated and every execution that it woke has ended: then what they wrote is in
    the log behind it, and when the log ends, nothing more will come. ``patience`` is in seconds without anything
    settling anywhere; ``written_settled`` is called for each event that was written by hand.
    """

    def __init__(self, layer: StateLayer, intake: Intake, *, patience: float, written_settled: Advance) -> None:
        self._layer = layer
        self._roots = intake.roots
        self._patience = patience
        self._written_settled = written_settled
        self.tally = Tally()
        self.unfinished: list[Unfinished] = []

    async def follow(self, task: Task) -> None:
        """Settle every event of a task that this run wrote or caused."""
        async for event in self._layer.events(task.namespace, after=task.head):
            if event.root_event_id in self._roots:
                self.tally.add(event, await self._settled(event))
                if event.id in self._roots:
                    self._written_settled()

    async def _settled(self, event: Event) -> Sequence[Execution]:
        while True:
            before = self.tally.events
            patience = LITTLE_PATIENCE if self.unfinished else self._patience
            try:
                return (await self._layer.outcome(event.id, timeout=min(patience, self._patience))).executions
            except TimeoutError as error:
                if self.tally.events == before:
                    self.unfinished.append(Unfinished(event.path, str(error)))
                    return await self._layer.executions.find(event_id=event.id)
