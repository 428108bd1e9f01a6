"""Starting at once what is recorded here: one write records an execution and its first attempt.

Through the queue an idle system would need three more writes, and four reads, before the code runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from statelayer import mongo_indexes as names
from statelayer.executors import moves
from statelayer.executors.models import Execution, job_id
from statelayer.executors.staff import Material

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Document
    from statelayer.executors.staff import Reservation, Staff
    from statelayer.subscriptions.decisions import Decision

MAX_DOUBTFUL = 1000


@dataclass(frozen=True, slots=True)
class _Grant:
    reservation: Reservation
    material: Material
    token: str


class DirectStarts:
    """Hands new work to whoever of the staff is free for it."""

    def __init__(self, database: Database, clock: Clock, staff: Staff) -> None:
        self._executions = database.collection(names.EXECUTIONS)
        self._clock = clock
        self._staff = staff
        self._doubtful: dict[str, str] = {}

    async def take(self, decisions: Sequence[Decision], documents: dict[str, Document], now: datetime) -> None:
        """Record as running, and begin, what somebody here is free for; take it out of the documents."""
        grants = self._grants(decisions)
        if not grants:
            return
        started: dict[str, Execution] = {}
        try:
            started = await self._recorded(grants, {job: documents[job] for job in grants}, now)
        except BaseException:
            self._doubtful |= {job: grant.token for job, grant in grants.items()}
            raise
        finally:
            for job, grant in grants.items():
                if job in started:
                    grant.reservation.begin(started[job], grant.material)
                else:
                    grant.reservation.release()
        for job in grants:
            del documents[job]

    def _grants(self, decisions: Sequence[Decision]) -> dict[str, _Grant]:
        """Reserve slots. Where nobody heard whether it was recorded, the token of that try is the token of this one."""
        if len(self._doubtful) > MAX_DOUBTFUL:
            self._doubtful.clear()  # somebody else evaluates these now
        grants: dict[str, _Grant] = {}
        for decision in decisions:
            for wakeup in decision.wakeups:
                kind, target = wakeup.subscription.action.type, wakeup.subscription.target
                job = job_id(kind, decision.event.id, target)
                if job not in grants and (reservation := self._staff.reserve(kind, target)) is not None:
                    token = self._doubtful.pop(job, None) or self._clock.new_id()
                    grants[job] = _Grant(reservation, Material(decision.event, wakeup.subscription), token)
        return grants

    async def _recorded(
        self, grants: Mapping[str, _Grant], documents: Mapping[str, Document], now: datetime
    ) -> dict[str, Execution]:
        """Store them; return those that are ours to begin, and leave out what was there before."""
        new = {job: document | {"state": "running", "attempts": 1, "startedAt": now} for job, document in documents.items()}
        counts = await self._executions.bulk_write(
            [
                moves.recorded_and_started(
                    new[job], owner=grant.reservation.owner, token=grant.token, lease=grant.reservation.lease
                )
                for job, grant in grants.items()
            ],
            ordered=False,
        )
        if counts.upserted < len(new):
            tokens = sorted({grant.token for grant in grants.values()})
            mine = {"_id": {"$in": list(new)}, "state": "running", "lease.token": {"$in": tokens}}
            found = {document["_id"] for document in await self._executions.find(mine, projection={"_id": 1})}
            new = {job: document for job, document in new.items() if job in found}
        return {job: Execution.from_document(_leased(document, grants[job], now)) for job, document in new.items()}


def _leased(document: Document, grant: _Grant, now: datetime) -> Document:
    """Return the document with its lease; when that ends is the server's matter, and only its token is asked for."""
    return document | {"lease": {"owner": grant.reservation.owner, "token": grant.token, "until": now}}
