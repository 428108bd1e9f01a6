"""One run from its start to its verdict."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from faults.checks import Findings
from faults.world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from faults.schedule import Step


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run saw."""

    events: int
    executions: int
    faults: int
    violations: list[str]

    def __str__(self) -> str:
        counts = f"{self.events:,} events, {self.executions:,} executions, {self.faults} faults"
        return f"{counts}, {len(self.violations)} violations"


async def run(steps: Sequence[Step], *, nodes: int = 3, mutation: str = "", patience: float = 60.0) -> Verdict:
    """Let the steps befall real processes on a set of so many nodes, and judge what is left.

    ``patience`` is how many seconds the processes get to finish what they have, once nothing is broken any more.
    """
    with tempfile.TemporaryDirectory(prefix="statelayer-faults-") as directory:
        async with World(Path(directory), nodes=nodes, mutation=mutation) as world:
            await world.suffer(steps)
            await world.come_to_rest(patience)
            findings = await Findings.of(world)
            violations = await findings.violations()
        return Verdict(len(findings.events), len(findings.executions), world.faults, violations)
