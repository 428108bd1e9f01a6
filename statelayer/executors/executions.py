"""The executions of a database, as people and services see them."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from statelayer import mongo_indexes as names
from statelayer.errors import ExecutionStateError, NotFoundError
from statelayer.events import check_actor, check_id
from statelayer.executors import moves
from statelayer.executors.models import Execution

if TYPE_CHECKING:
    from collections.abc import Callable

    from statelayer.drivers import Database
    from statelayer.executors.models import Reason, State
    from statelayer.executors.moves import Move


class Whichever(Enum):
    """The default of a search: this does not matter."""

    ANY = "any"


class Executions:
    """Looks executions up, and moves them by hand."""

    def __init__(self, database: Database) -> None:
        self._executions = database.collection(names.EXECUTIONS)
        self._listeners: list[Callable[[], None]] = []

    async def get(self, job_id: str) -> Execution:
        """Return an execution by its job id; ``NotFoundError`` when there is none."""
        document = await self._executions.find_one({"_id": check_id("execution", job_id)})
        if document is None:
            raise NotFoundError("execution", job_id)
        return Execution.from_document(document)

    async def find(
        self,
        *,
        state: State | Whichever = Whichever.ANY,
        event_id: str | Whichever = Whichever.ANY,
        namespace: str | Whichever = Whichever.ANY,
        target: str | Whichever = Whichever.ANY,
        reason: Reason | Whichever = Whichever.ANY,
        limit: int = 1000,
    ) -> list[Execution]:
        """Return at most ``limit`` executions that meet everything given, the oldest of them first.

        What is given must be text: a scope that is blank or ``None`` is refused, not taken for "any".
        """
        wanted = {"state": state, "eventId": event_id, "namespace": namespace, "target": target, "reason": reason}
        given = {key: check_id(key, value) for key, value in wanted.items() if value is not Whichever.ANY}
        found = await self._executions.find(given, sort=[("createdAt", 1), ("_id", 1)], limit=limit)
        return [Execution.from_document(document) for document in found]

    async def requeue(self, job_id: str) -> Execution:
        """Give a failed execution one fresh attempt. Its earlier error fact stays.

        Raises ``NotFoundError``, and ``ExecutionStateError`` from any other state.
        """
        return await self._moved(job_id, moves.requeued(), "requeued")

    async def cancel(self, job_id: str, *, actor: str | None = None) -> Execution:
        """End an execution that has not ended. A running one is fenced off: its result will be refused.

        ``actor`` is kept as ``cancelled_by``. Raises ``NotFoundError``, and ``ExecutionStateError`` when it has ended.
        """
        by = None if actor is None else check_actor(actor)
        return await self._moved(job_id, moves.cancelled(by), "cancelled")

    def on_move(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after each move that is made here; return what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    async def _moved(self, job_id: str, move: Move, wanted: str) -> Execution:
        checked = check_id("execution", job_id)
        document = await self._executions.find_one_and_update(move.filter(_id=checked), move.update)
        if document is None:
            raise ExecutionStateError(job_id, state=(await self.get(job_id)).state, wanted=wanted)
        for listener in list(self._listeners):
            listener()
        return Execution.from_document(document)
