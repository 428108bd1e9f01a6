"""What any worker does for all of them: take over what the dead left, and show what waits for nobody."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from statelayer import mongo_indexes as names
from statelayer.errors import ContentionError, LeaseLostError, OutcomeUnknownError, TransientDatabaseError
from statelayer.executors.leases import queued_for, queued_for_nobody
from statelayer.executors.moves import fence_of
from statelayer.executors.results import Tenure
from statelayer.executors.run import Failure

if TYPE_CHECKING:
    from collections.abc import Collection

    from statelayer.drivers import Database, Document
    from statelayer.instances import Instances
    from statelayer.executors.leases import Leases
    from statelayer.executors.models import Execution
    from statelayer.executors.registry import Registry
    from statelayer.instances import Offer
    from statelayer.executors.results import Results

log = structlog.get_logger("statelayer.executors")

REAP_AT_ONCE = 100
MARK_AT_ONCE = 1000


class Reaper:
    """Ends or requeues executions whose lease has run out, whether this process has their executor or not."""

    def __init__(self, leases: Leases, results: Results) -> None:
        self._leases = leases
        self._results = results

    async def reap(self, mine: Collection[str]) -> int:
        """Take over what has expired, except ``mine``, which this process still runs. Return how many it were."""
        expired = [execution for execution in await self._leases.expired(REAP_AT_ONCE) if execution.id not in mine]
        claims = [execution.id for execution in expired if execution.state == "claimed"]
        dead = [execution for execution in expired if execution.state == "running"]
        taken = await self._leases.take_back(claims)
        if taken:
            log.warning("claims_taken_back", count=taken)
        async with asyncio.TaskGroup() as group:
            burials = [group.create_task(self._bury(execution)) for execution in dead]
        return taken + sum(burial.result() for burial in burials)

    async def _bury(self, execution: Execution) -> bool:
        fence = fence_of(execution, seen=True)
        failure = Failure("lease_lost", LeaseLostError(execution.id), may_pass=True)
        try:
            await self._results.fail(Tenure(execution, fence, is_lasting=lambda: False), failure)
        except LeaseLostError:
            return False  # its worker is back, or somebody was faster
        except (ContentionError, OutcomeUnknownError, TransientDatabaseError) as error:
            log.warning("reaping_delayed", job=execution.id, error=error.code)
            return False
        return True


class Waiting:
    """Keeps the reason ``no_executor`` on queued executions true: set when nobody alive offers them."""

    def __init__(self, database: Database, registry: Registry, instances: Instances) -> None:
        self._executions = database.collection(names.EXECUTIONS)
        self._registry = registry
        self._instances = instances
        self._seen: frozenset[Offer] | None = None

    async def mark(self, *, anyway: bool = False) -> None:
        """Set and clear the reason where the offers have changed since last time, or ``anyway``."""
        offers = frozenset(self._registry.offers() | await self._instances.offers())
        if offers == self._seen and not anyway:
            return
        lacking = {"reason": {"$ne": "no_executor"}}
        complete = await self._change(queued_for_nobody(offers), lacking, {"$set": {"reason": "no_executor"}})
        for queued in queued_for(offers - (self._seen or frozenset())):
            cleared = {"$unset": {"reason": ""}}
            complete &= await self._change([queued], {"reason": "no_executor"}, cleared)
        if complete:
            self._seen = offers

    async def _change(self, filters: list[Document], condition: Document, update: Document) -> bool:
        """Change a bounded number of executions; ``False`` when there may be more."""
        found = await self._executions.find(
            {"$or": [{**queued, **condition} for queued in filters]}, limit=MARK_AT_ONCE, projection={"_id": 1}
        )
        ids = [document["_id"] for document in found]
        if ids:
            await self._executions.update_many({"_id": {"$in": ids}, "state": "queued", **condition}, update)
        return len(ids) < MARK_AT_ONCE
