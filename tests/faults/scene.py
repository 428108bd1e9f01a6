"""What the processes of a run have in common: the subscriptions, the settings, and the call log of each."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from statelayer import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

USER = "user:U7"
DATABASE = "faults"
DRIVERS = ("pymongo", "motor")
"""Every other process has the other driver."""

SETTINGS = Settings(lease=1.5, heartbeat=0.4, poll=0.2, concurrency=8, drain_timeout=10, partitions=16)
FROZEN = 2.5
"""Seconds after which the lease of a process that was stopped has run out, and others have noticed."""

REQUESTS = "/tasks/*/requests/*"
PAID = {"path": "$event.value.kind", "op": "eq", "value": "paid"}
SETTLE = {
    "name": "settle",
    "pattern": REQUESTS,
    "condition": None,
    "action": {"type": "execute_workflow", "workflowId": "settle"},
}
CLASSIFY = {
    "name": "classify",
    "pattern": REQUESTS,
    "condition": PAID,
    "action": {"type": "execute_agent", "agentId": "classify"},
}
FOLLOW = {
    "name": "follow",
    "pattern": "/tasks/*/workflows/settle/results/*",
    "condition": None,
    "action": {"type": "execute_workflow", "workflowId": "follow"},
    "maxTriggerDepth": 2,
}
STANDING = (SETTLE, CLASSIFY, FOLLOW)
"""In force from before the first event to after the last."""


def changing(version: int) -> dict[str, Any]:
    """Return the subscription that is published again and again, and differs each time."""
    return {
        "name": "extra",
        "pattern": REQUESTS,
        "condition": {"path": "$event.value.n", "op": "gte", "value": version % 3},
        "action": {"type": "execute_workflow", "workflowId": "extra"},
    }


def value(n: int) -> dict[str, Any]:
    """Return what the n-th write of a lane says."""
    return {"n": n, "kind": "paid" if n % 3 else "free"}


def path(writer: int, lane: int, n: int) -> str:
    """Every other write goes to a namespace that all writers share, the others to some that soon fall silent.

    The later events of a namespace would make up for what is lost of the earlier ones.
    """
    task = f"hot{n // 2 % 3}" if n % 2 else f"W{writer}L{lane}P{n // 6}"
    return f"/tasks/{task}/requests/W{writer}L{lane}N{n}"


class CallLog:
    """What one process called and what it was told, line by line; it outlives the process."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def note(self, **facts: Any) -> None:
        """Add a line, which is whole and there even if the process is killed the next moment."""
        with self.file.open("ab", buffering=0) as file:
            file.write(json.dumps(facts).encode() + b"\n")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.file.exists():
            yield from map(json.loads, self.file.read_text().splitlines())
