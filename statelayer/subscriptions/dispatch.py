"""The one switch for everything that events set off: ``meta.dispatch``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from statelayer import mongo_indexes as names
from statelayer.errors import LogLostError, SetupRequiredError

if TYPE_CHECKING:
    from statelayer.drivers import Database

DispatchState = Literal["on", "paused", "log_lost"]


class Dispatch:
    """Whether events are evaluated and executions claimed, on every instance. Edits by hand are honoured."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._meta = database.collection(names.META)

    async def state(self) -> DispatchState:
        """Return the switch as it stands; anything that is not ``on`` stops everything."""
        document = await self._meta.find_one({"_id": "dispatch"})
        if document is None:
            raise SetupRequiredError(self._database.name)
        return cast("DispatchState", document["state"])

    async def pause(self) -> None:
        """Stop evaluating and claiming everywhere; appends go on and are evaluated after ``unpause``."""
        await self._turn("paused")

    async def unpause(self) -> None:
        """Go on. Raises ``LogLostError`` when the log was lost, which an operator has to decide about."""
        await self._turn("on")

    async def mark_log_lost(self) -> None:
        """Stop everything until an operator has decided."""
        await self._meta.update_one({"_id": "dispatch"}, {"$set": {"state": "log_lost"}}, upsert=True)

    async def _turn(self, state: DispatchState) -> None:
        counts = await self._meta.update_one(
            {"_id": "dispatch", "state": {"$ne": "log_lost"}}, {"$set": {"state": state}}
        )
        if not counts.matched:
            await self.state()
            raise LogLostError("The event log was lost. Decide what to do with it, then set `meta.dispatch` to 'on'.")
