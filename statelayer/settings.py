"""What a service may tune. Defaults are for production."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from statelayer.paths import DEFAULT_ROOTS, check_segment

Root = Annotated[str, AfterValidator(check_segment)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

MEBIBYTE = 1024 * 1024


class Settings(BaseModel):
    """Settings of one layer. Times are in seconds, sizes in bytes.

    Building one with an unknown name or a value out of bounds raises pydantic's ``ValidationError``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix: str = Field(default="", pattern=r"^[A-Za-z0-9_]{0,32}$")
    """Put before the name of every collection."""

    roots: tuple[Root, ...] = Field(default=DEFAULT_ROOTS, min_length=1)
    """First segments that a path may have."""

    partitions: int = Field(default=64, ge=1, le=1024)
    """In how many shares instances divide the namespaces. Fixed by the first ``setup()``."""

    max_value_bytes: int = Field(default=MEBIBYTE, ge=1024, le=4 * MEBIBYTE)
    """Largest value of one event."""

    max_append_writes: int = Field(default=1000, ge=1, le=10_000)
    """Most writes in one atomic append."""

    max_append_bytes: int = Field(default=8 * MEBIBYTE, ge=1024, le=32 * MEBIBYTE)
    """Largest sum of the values in one atomic append."""

    max_queued_writes: int = Field(default=20_000, ge=1)
    """Most writes that are accepted and not yet committed, in one process; callers beyond that wait."""

    max_queued_bytes: int = Field(default=64 * MEBIBYTE, ge=1024)
    """Largest sum of the values that are accepted and not yet committed, in one process."""

    append_timeout: Seconds = 30.0
    """How long one append may be retried before it fails with ``ContentionError`` or ``OutcomeUnknownError``."""

    lease: Seconds = 30.0
    """How long a worker owns an execution without renewing it."""

    heartbeat: Seconds = 10.0
    """How often leases are renewed and the instance reports itself. Must be shorter than ``lease``."""

    poll: Seconds = 1.0
    """How often a worker looks for executions that nobody announced, and a stream reports its position when idle."""

    concurrency: int = Field(default=32, ge=1, le=10_000)
    """Most executions that one process runs at a time."""

    drain_timeout: Seconds = 30.0
    """How long a stopping worker waits for what it runs."""

    page_size: int = Field(default=1000, ge=1, le=100_000)
    """How many events one read of the log fetches."""

    @model_validator(mode="after")
    def _check_heartbeat(self) -> Self:
        if self.heartbeat >= self.lease:
            raise ValueError(f"heartbeat ({self.heartbeat} s) must be shorter than lease ({self.lease} s)")
        return self
