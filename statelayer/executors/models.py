"""One execution as it is stored, and the moves that it can make."""

from __future__ import annotations

from datetime import datetime  # noqa: TC003 - pydantic reads the annotations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from pydantic import Field

from statelayer.events import StoredModel

if TYPE_CHECKING:
    from collections.abc import Mapping

State = Literal[
    "queued",
    "claimed",
    "running",
    "succeeded",
    "failed",
    "interrupted",
    "waiting_external",
    "cancelled",
    "skipped",
]
Reason = Literal[
    "handler_error",
    "timeout",
    "lease_lost",
    "invalid_input",
    "invalid_output",
    "budget_exceeded",
    "no_executor",
    "rendering_failed",
    "superseded",
    "deadline",
    "cancelled",
    "max_depth",
    "quarantined",
]

MOVES: Final[Mapping[State, frozenset[State]]] = MappingProxyType(
    {
        "queued": frozenset({"claimed", "cancelled"}),
        "claimed": frozenset({"running", "queued", "cancelled"}),
        "running": frozenset({"succeeded", "failed", "interrupted", "waiting_external", "queued", "cancelled"}),
        "interrupted": frozenset({"queued", "cancelled"}),
        "waiting_external": frozenset({"succeeded", "failed", "interrupted", "cancelled"}),
        "failed": frozenset({"queued"}),
        "succeeded": frozenset(),
        "cancelled": frozenset(),
        "skipped": frozenset(),
    }
)
"""From each state, where an execution can go. ``failed → queued`` happens by hand only."""

ENDED: Final[frozenset[State]] = frozenset({"succeeded", "failed", "cancelled", "skipped"})
SETTLED: Final[frozenset[State]] = ENDED | {"interrupted", "waiting_external"}
"""Nothing happens to these until somebody outside acts."""

JOB_KINDS: Final[Mapping[str, str]] = MappingProxyType({"execute_agent": "agent", "execute_workflow": "workflow"})
"""What the ids of their jobs begin with; a registered type begins with its own name."""


def job_id(action_type: str, event_id: str, target: str) -> str:
    """Return the identity of an execution: there is one for each event and target."""
    return f"{JOB_KINDS.get(action_type, action_type)}:{event_id}:{target}"


def skip_id(event_id: str, subscription: str) -> str:
    """Return the identity of the record that a subscription matched and did not fire."""
    return f"skip:{event_id}:{subscription}"


class SubscriptionRef(StoredModel):
    """The version of a subscription that asked for an execution."""

    name: str
    version: int

    @property
    def id(self) -> str:
        """Where that version is stored."""
        return f"{self.name}@v{self.version}"


class Lease(StoredModel):
    """Who runs an execution, under which token, and until when (the server's clock) without renewing."""

    owner: str
    token: str
    until: datetime


class Execution(StoredModel):
    """One run of one action's target for one event: the durable job.

    Times are the server's, except ``created_at``. ``trigger_depth`` is the depth of the waking event, ``params`` what
    the subscription's pattern captured. A skip has no action and no target.
    """

    id: str = Field(alias="_id")
    namespace: str
    event_id: str
    root_event_id: str
    trigger_depth: int
    subscription: SubscriptionRef
    also_matched: tuple[str, ...] = ()
    params: dict[str, str] = Field(default_factory=dict)
    action: dict[str, Any] = Field(default_factory=dict)
    target: str = ""
    state: State
    reason: Reason | None = None
    attempts: int = 0
    max_attempts: int = 1
    available_at: datetime | None = None
    lease: Lease | None = None
    reads: tuple[dict[str, Any], ...] = ()
    warnings: tuple[dict[str, Any], ...] = ()
    result_event_id: str | None = None
    cancelled_by: str | None = None
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Read a document of the ``executions`` collection; a field that holds null counts as absent."""
        return cls.model_validate({key: value for key, value in document.items() if value is not None})

    @property
    def action_type(self) -> str:
        """What kind of executor runs it; empty for a skip."""
        return str(self.action.get("type", ""))

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_settled(self) -> bool:
        """Whether it ended, or waits for somebody outside."""
        return self.state in SETTLED

    @property
    def may_retry(self) -> bool:
        """Whether a failed attempt may be followed by another one. An agent is attempted once."""
        return self.action_type != "execute_agent" and self.attempts < self.max_attempts
