"""Whether, and when, a failed attempt is followed by another one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable  # noqa: TC003 - a field's type, read by dataclass tools
from dataclasses import dataclass

from statelayer.errors import InvalidExecutorError

DEFAULT_ATTEMPTS = 3


def spread(wait: float) -> float:
    """Return between half of ``wait`` and all of it, so that what failed together does not return together."""
    return random.uniform(wait / 2, wait)


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Attempts in all, and the wait between them in seconds: ``wait``, then ``factor`` times longer, at most ``cap``.

    ``jitter`` makes the wait that is used of the wait that was computed.
    """

    max_attempts: int = DEFAULT_ATTEMPTS
    wait: float = 1.0
    factor: float = 2.0
    cap: float = 300.0
    jitter: Callable[[float], float] = spread

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise InvalidExecutorError(f"An executor is attempted at least once, not {self.max_attempts} times.")
        finite = all(map(math.isfinite, (self.wait, self.factor, self.cap)))
        if not finite or self.wait < 0 or self.factor < 1 or self.cap < 0:
            raise InvalidExecutorError("A retry waits 0 seconds or more, and its factor is 1 or more.")

    def wait_after(self, attempts: int) -> float:
        """Return the seconds to wait after so many attempts."""
        # Far beyond any cap the power would overflow.
        grown = self.wait * self.factor ** min(attempts - 1, 64)
        return max(0.0, self.jitter(min(self.cap, grown)))
