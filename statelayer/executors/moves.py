"""Each move of an execution as one conditional update, judged and timed by the server's clock. No I/O here.

These are pipeline updates, because only those know ``$$NOW``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pymongo import UpdateOne

from statelayer.executors.models import ENDED, MOVES
from statelayer.servertime import NOW, in_seconds, literal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statelayer.drivers import Document
    from statelayer.executors.models import Execution, Reason, State

MAX_WARNINGS: Final = 20

AVAILABLE: Final = {"$expr": {"$lte": ["$availableAt", NOW]}}
EXPIRED: Final = {"$expr": {"$lt": ["$lease.until", NOW]}}


@dataclass(frozen=True, slots=True)
class Move:
    """From which states it starts, where it leads, and the update that makes it."""

    before: tuple[State, ...]
    after: State
    update: list[Document]

    def filter(self, **conditions: Any) -> Document:
        """Return the filter of documents that may make the move."""
        return {**conditions, "state": {"$in": list(self.before)}}

    def under(self, fence: Fence) -> Document:
        """Return the filter of the document that may make the move under a fence."""
        return self.filter(**fence.conditions)


@dataclass(frozen=True, slots=True)
class Fence:
    """What must still be true of an execution for its worker, or its reaper, to say how it went on.

    ``until`` is set by a reaper: the lease must not have been renewed since it was seen expired.
    """

    job_id: str
    token: str
    until: Any = None

    @property
    def conditions(self) -> Document:
        seen = {} if self.until is None else {"lease.until": self.until}
        return {"_id": self.job_id, "lease.token": self.token, **seen}

    def holds(self, document: Mapping[str, Any] | None) -> bool:
        """Say whether the stored execution is still running under this fence."""
        lease = (document or {}).get("lease") or {}
        same = lease.get("token") == self.token and self.until in (None, lease.get("until"))
        return document is not None and document["state"] == "running" and same


def claimed(*, owner: str, token: str, lease: float) -> Move:
    """Take a queued execution for ``lease`` seconds."""
    taken = {"owner": literal(owner), "token": literal(token), "until": in_seconds(lease)}
    return _move(("queued",), "claimed", {"lease": taken}, drop=("reason",))


def recorded_and_started(document: Document, *, owner: str, token: str, lease: float) -> UpdateOne:
    """Return an upsert that records a new execution as already running; one that is there stays as it is."""
    leased = {"lease": {"owner": literal(owner), "token": literal(token), "until": in_seconds(lease)}}
    is_new = {"$eq": [{"$type": "$state"}, "missing"]}
    new = {"$mergeObjects": [literal(document), leased]}
    return UpdateOne(
        {"_id": document["_id"]}, [{"$replaceWith": {"$cond": [is_new, new, "$$ROOT"]}}], upsert=True
    )


def started(*, lease: float) -> Move:
    """Count the attempt, before its code runs."""
    attempts = {"$add": ["$attempts", 1]}
    return _move(("claimed",), "running", {"attempts": attempts, "startedAt": NOW, "lease.until": in_seconds(lease)})


def given_back() -> Move:
    """Return a claim whose code never ran; it does not count as an attempt."""
    return _move(("claimed",), "queued", {}, drop=("lease",))


def retried(*, wait: float, reason: Reason, warning: Document) -> Move:
    """Queue an execution again whose attempt failed, ``wait`` seconds from now."""
    fields = {"availableAt": in_seconds(wait), "reason": literal(reason), "warnings": _with_warning(warning)}
    return _move(("running",), "queued", fields, drop=("lease",))


def ended(
    state: State, *, reason: Reason | None = None, result_event_id: str | None = None, warning: Document | None = None
) -> Move:
    """End a running execution."""
    fields: Document = {"finishedAt": NOW}
    if reason is not None:
        fields["reason"] = literal(reason)
    if result_event_id is not None:
        fields["resultEventId"] = literal(result_event_id)
    if warning is not None:
        fields["warnings"] = _with_warning(warning)
    return _move(("running",), state, fields, drop=("lease",) if reason else ("lease", "reason"))


def cancelled(actor: str | None) -> Move:
    """End an execution that has not ended."""
    by = {} if actor is None else {"cancelledBy": literal(actor)}
    before = tuple(state for state in MOVES if state not in ENDED)
    return _move(before, "cancelled", {"reason": literal("cancelled"), "finishedAt": NOW, **by}, drop=("lease",))


def requeued() -> Move:
    """Give a failed execution one fresh attempt."""
    fields = {"availableAt": NOW, "maxAttempts": {"$add": ["$attempts", 1]}}
    return _move(("failed",), "queued", fields, drop=("lease", "reason", "finishedAt", "resultEventId"))


def renewal(lease: float) -> list[Document]:
    """Return the update that keeps leases for ``lease`` seconds more; it moves nothing."""
    return [{"$set": {"lease.until": in_seconds(lease)}}]


def fence_of(execution: Execution, *, seen: bool = False) -> Fence:
    """Return the fence of a leased execution; ``seen`` also holds its lease to what was read."""
    if execution.lease is None:
        raise ValueError(f"{execution.id} has no lease")
    return Fence(execution.id, execution.lease.token, execution.lease.until if seen else None)


def operation(fence: Fence, move: Move) -> UpdateOne:
    """Return the move as a write that can go with an append."""
    return UpdateOne(move.under(fence), move.update)


def _move(before: Sequence[State], after: State, fields: Document, drop: Sequence[str] = ()) -> Move:
    update: list[Document] = [{"$set": {**fields, "state": literal(after)}}]
    return Move(tuple(before), after, update + ([{"$unset": list(drop)}] if drop else []))


def _with_warning(warning: Document) -> Document:
    warnings = {"$concatArrays": [{"$ifNull": ["$warnings", []]}, [literal(warning)]]}
    return {"$slice": [warnings, -MAX_WARNINGS]}
