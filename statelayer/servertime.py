"""The server's clock, by which everything that instances agree on is timed: leases, heartbeats, availability.

Pipeline updates know it as ``NOW``. In a pipeline a string that begins with ``$`` is a field reference, so that
everything that comes from outside goes in as a ``literal``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from datetime import datetime

    from statelayer.clock import Clock
    from statelayer.drivers import Database

NOW: Final = "$$NOW"

MEASURE_EVERY = 60.0


def literal(value: object) -> dict[str, Any]:
    """Return an expression whose value is exactly this."""
    return {"$literal": value}


def in_seconds(seconds: float) -> dict[str, Any]:
    """Return an expression for that moment of the server's clock."""
    return {"$add": [NOW, round(seconds * 1000)]}


class ServerTime:
    """Tells the server's time, for what cannot be written with ``NOW``, from our own clock and a measured offset.

    The offset is measured once a minute. The time is late by the way of the answer at most, never early: what is made
    available at that time is available at once.
    """

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._offset = timedelta()
        self._measured_until = float("-inf")

    async def now(self) -> datetime:
        """Return the time on the server, in UTC."""
        if self._clock.monotonic() >= self._measured_until:
            await self._measure()
        return self._clock.now() + self._offset

    async def _measure(self) -> None:
        there = (await self._database.command({"hello": 1}))["localTime"]
        # A clock that is truncated to milliseconds reads up to one early; the offset must not make up for that.
        self._offset = there - self._clock.now() - timedelta(milliseconds=1)
        self._measured_until = self._clock.monotonic() + MEASURE_EVERY
