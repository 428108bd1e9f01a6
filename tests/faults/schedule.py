"""Which faults befall a run, and when: drawn from a seed, or written down for what one mutation does wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass

INSTANCES = 3
WRITERS = 2

BETWEEN = 1.2
"""Seconds between two faults, on average."""

WEIGHTS = {
    "kill_instance": 4,
    "freeze_instance": 3,
    "kill_writer": 3,
    "step_down": 2,
    "kill_primary": 1,
    "cut": 5,
    "delay": 3,
    "silence": 2,
    "lose_positions": 3,
    "publish": 4,
    "disable": 2,
    "enable": 2,
}


@dataclass(frozen=True, slots=True)
class Step:
    """A fault, ``at`` seconds after the start. ``luck`` (0 to 1) settles whom it hits and how hard."""

    at: float
    fault: str
    luck: float = 0.0


def drawn(seed: int, seconds: float) -> list[Step]:
    """Draw the faults of a run of so many seconds; the same for the same seed, and longer runs begin alike."""
    dice = random.Random(seed)
    steps: list[Step] = []
    at = dice.expovariate(1 / BETWEEN)
    while at < seconds:
        [fault] = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))
        steps.append(Step(at, fault, dice.random()))
        at += dice.expovariate(1 / BETWEEN)
    return steps


DIRECTED: dict[str, list[Step]] = {
    "cursor_before_recording": [Step(1 + n, "kill_instance", n % 3 / 3) for n in range(5)],
    "position_before_evaluating": [Step(1 + n, "kill_instance", n % 3 / 3) for n in range(5)],
    "now_when_history_is_lost": [Step(1.5, "restart_without_positions"), Step(4.5, "restart_without_positions")],
    "fence_ignored": [Step(1 + 1.5 * n, "freeze_instance", n % 3 / 3) for n in range(4)],
    "revision_outside_the_transaction": [Step(1 + n / 4, ("publish", "disable")[n % 2]) for n in range(16)],
}
"""For each mutation, a short run that shows it."""
