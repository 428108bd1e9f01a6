"""How results and errors look, where they are written, and who signs them. No I/O here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from statelayer.errors import InvalidPathError, ReservedPathError
from statelayer.executors.models import JOB_KINDS
from statelayer.journal import Origin
from statelayer.paths import reserved

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime

    from statelayer.events import Source
    from statelayer.executors.models import Execution, Reason
    from statelayer.subscriptions import Output

MAX_MESSAGE: Final = 2000
"""Characters of an error's message that are kept."""

_SOURCES: Final[Mapping[str, Source]] = {"execute_agent": "agent_callback", "execute_workflow": "workflow_node"}


@dataclass(frozen=True, slots=True)
class ResultPlace:
    """Where a result is written. On a ``shared`` path several events' results follow each other."""

    path: str
    shared: bool = False


def origin_of(execution: Execution) -> Origin:
    """Return what everything that an execution writes is bound to."""
    kind = JOB_KINDS.get(execution.action_type)
    return Origin(
        event_id=execution.event_id,
        root_event_id=execution.root_event_id,
        depth=execution.trigger_depth,
        source=_SOURCES.get(execution.action_type, "subscription"),
        actor=f"{kind}:{execution.target}" if kind else f"system:{execution.action_type}",
    )


def home(execution: Execution) -> str:
    """Return the place that belongs to an executor's target in a namespace."""
    kind = JOB_KINDS.get(execution.action_type)
    place = f"{kind}s" if kind else f"executors/{execution.action_type}"
    return f"{execution.namespace}/{place}/{execution.target}"


def error_path(execution: Execution) -> str:
    """Return where an execution's failure is told."""
    return f"{home(execution)}/errors/{execution.event_id}"


def result_place(execution: Execution, output: Output | None) -> ResultPlace:
    """Return where an execution's result goes: by the subscription's template, else at the executor's own place.

    Raises ``InvalidPathError`` when the template cannot be rendered, or leads out of the namespace.
    """
    if output is None:
        return ResultPlace(f"{home(execution)}/results/{execution.event_id}")
    path = output.template.render(template_values(execution))
    if path.namespace != execution.namespace:
        raise InvalidPathError(output.path, f"it leads out of {execution.namespace}, to {path}")
    if reserved(path) and not path.text.startswith(f"{home(execution)}/results/"):
        raise ReservedPathError(path.text, "a result cannot be written where only its owner writes")
    return ResultPlace(path.text, shared="eventId" not in output.template.names)


def template_values(execution: Execution) -> dict[str, str]:
    """Return what an output path may name. The fixed names hide captures, which are always there as ``params.…``."""
    owner = execution.namespace.rpartition("/")[2]
    return {
        **execution.params,
        **{f"params.{name}": value for name, value in execution.params.items()},
        "taskId": owner,
        "threadId": owner,
        "eventId": execution.event_id,
        "agentId": execution.target,
        "workflowId": execution.target,
    }


def success(
    execution: Execution, output: Any, *, finished_at: datetime, usage: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the value of a result fact."""
    used = {} if usage is None else {"usage": dict(usage)}
    return {"status": "succeeded", "output": output, **_about(execution, finished_at), **used}


def failure(execution: Execution, reason: Reason, error: BaseException, *, finished_at: datetime) -> dict[str, Any]:
    """Return the value of an error fact."""
    return {"status": "failed", "reason": reason, "error": describe(error), **_about(execution, finished_at)}


def describe(error: BaseException) -> dict[str, Any]:
    """Return what is told of an error, in a form that can be stored whatever the error holds.

    ``code`` is the stable code of an error of this library, null for any other.
    """
    code = getattr(error, "code", None)
    return {
        "type": storable(type(error).__qualname__),
        "message": storable(_message(error)),
        "code": storable(code) if isinstance(code, str) else None,
    }


def storable(text: str) -> str:
    """Return the text without lone surrogates, cut to ``MAX_MESSAGE`` characters."""
    clean = str.__str__(text).encode("utf-8", "replace").decode()
    return clean if len(clean) <= MAX_MESSAGE else clean[: MAX_MESSAGE - 1] + "…"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the code of whoever wrote the error
        return "(its message could not be made)"


def _about(execution: Execution, finished_at: datetime) -> dict[str, Any]:
    return {
        "target": execution.target,
        "eventId": execution.event_id,
        "subscription": {"name": execution.subscription.name, "version": execution.subscription.version},
        "startedAt": execution.started_at,
        "finishedAt": finished_at,
    }
