"""What an executor is handed, and what became of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statelayer.events import Event
    from statelayer.executors.models import Execution, Reason
    from statelayer.layer import StateLayer
    from statelayer.subscriptions import StoredSubscription


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One attempt, as its executor sees it.

    ``input`` is the event's value at its time, never the current one; ``params`` is what the pattern captured.
    ``layer`` is bound: what is written through it is caused by the event, one level deeper, signed by the executor.
    Everything is this attempt's own copy.
    """

    event: Event
    execution: Execution
    subscription: StoredSubscription
    params: Mapping[str, str]
    input: Any
    layer: StateLayer

    @classmethod
    def of(cls, event: Event, execution: Execution, subscription: StoredSubscription, layer: StateLayer) -> Run:
        """Make a run that shares nothing with another one."""
        return cls(
            event=event.model_copy(deep=True),
            execution=execution.model_copy(deep=True),
            subscription=subscription.model_copy(deep=True),
            params=dict(execution.params),
            input=copy.deepcopy(event.value),
            layer=layer,
        )

    @property
    def attempt(self) -> int:
        """1 for the first attempt."""
        return self.execution.attempts


@dataclass(frozen=True, slots=True)
class Success:
    """The code returned; its output is in canonical form."""

    output: Any
    usage: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """The attempt failed. ``may_pass`` says that another one may go better, ``at_once`` that it need not wait."""

    reason: Reason
    error: BaseException
    may_pass: bool = False
    at_once: bool = False


Conclusion: TypeAlias = Success | Failure
