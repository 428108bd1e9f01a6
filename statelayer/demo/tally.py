"""Counting what happened, event by event in the order of each task's log. No I/O here."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statelayer.demo.report import Classified, Failed, Goods, Refused, Woken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from statelayer.events import Event
    from statelayer.executors import Execution

    Ending = tuple[str, str, str, str | None]


@dataclass(slots=True)
class Tally:
    """What the events so far were, and what became of the executions that they woke."""

    events: int = 0
    drafts: list[Goods] = field(default_factory=list)
    classified: list[Classified] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    _goods: dict[str, Goods] = field(default_factory=dict)
    _endings: Counter[Ending] = field(default_factory=Counter)

    def add(self, event: Event, executions: Iterable[Execution]) -> None:
        """Count an event and what it woke. A cause comes before its effects."""
        self.events += 1
        self._endings.update(_ending(execution) for execution in executions)
        match event.path.split("/")[3:]:
            case ["requests", _]:
                self._add_request(event)
            case ["agents", _, "results", _]:
                self._add_result(event)
            case ["agents" | "workflows", _, "errors", _]:
                self._add_error(event)

    @property
    def woken(self) -> list[Woken]:
        """The executions by target and state, what was skipped last."""
        rows = [Woken(*ending, count) for ending, count in self._endings.items()]
        return sorted(rows, key=lambda row: (row.state == "skipped", row.kind, row.target, row.state, row.reason or ""))

    def _add_request(self, event: Event) -> None:
        goods = Goods(event.path, event.id, event.value["description"])
        self._goods[event.id] = goods
        if event.value["status"] == "draft":
            self.drafts.append(goods)

    def _add_result(self, event: Event) -> None:
        if goods := self._goods.get(event.value["eventId"]):
            output = event.value["output"]
            self.classified.append(Classified(goods, output["code"], output["heading"], output["score"]))

    def _add_error(self, event: Event) -> None:
        reason, message = event.value["reason"], event.value["error"]["message"]
        if goods := self._goods.get(event.value["eventId"]):
            self.refused.append(Refused(goods, reason, message))
        else:
            self.failed.append(Failed(event.path, reason, message))


def _ending(execution: Execution) -> Ending:
    if execution.state == "skipped":
        return "subscription", execution.subscription.name, execution.state, execution.reason
    kind = execution.action_type.removeprefix("execute_")
    return kind, execution.target, execution.state, execution.reason
