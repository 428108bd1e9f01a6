"""What long-running tasks have in common: waiting to be signalled, and taking a step again while that may help."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from statelayer.drivers import is_transient
from statelayer.errors import StateLayerError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = structlog.get_logger("statelayer.loops")

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0


async def signalled(signal: asyncio.Event, seconds: float) -> bool:
    """Wait for a signal, this long at most, and say whether it came."""
    try:
        async with asyncio.timeout(seconds):
            await signal.wait()
    except TimeoutError:
        return False
    return True


async def insisted(name: str, step: Callable[[], Awaitable[object]], stopping: asyncio.Event) -> None:
    """Take a step, again and less and less often while it fails transiently and nobody stops us."""
    pause = FIRST_PAUSE
    while True:
        try:
            await step()
        except StateLayerError as error:
            if not is_transient(error):
                raise
            log.warning("step_failed", step=name, error=error.code, pause=pause)
        else:
            return
        if stopping.is_set() or await signalled(stopping, pause):
            return
        pause = min(LONGEST_PAUSE, 2 * pause)


def first_of(faults: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first fault in a group, however deep the groups are nested."""
    first = faults.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first
