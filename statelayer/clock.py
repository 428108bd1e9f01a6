"""The seam for time and identity: tests put their own ``Clock`` here."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from bson import ObjectId


class Clock:
    """Wall time for people, monotonic time for deadlines, and new identities."""

    def now(self) -> datetime:
        """Return the time in UTC, to the millisecond, as BSON keeps it."""
        now = datetime.now(UTC)
        return now.replace(microsecond=now.microsecond // 1000 * 1000)

    def monotonic(self) -> float:
        """Return seconds on a clock that never goes back."""
        return time.monotonic()

    def new_id(self) -> str:
        """Return a new identity: 24 hex characters, increasing in time."""
        return str(ObjectId())
