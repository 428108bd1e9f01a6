"""A short share of what ``make faults`` runs for as long as one likes, and the proof that it can fail."""

from __future__ import annotations

import pytest

from faults import mutations
from faults.run import run
from faults.schedule import DIRECTED, drawn

pytestmark = [pytest.mark.anyio, pytest.mark.fault]

SEED = 20261207
SECONDS = 40


@pytest.mark.timeout(300)
async def test_p1_to_p9_hold_through_every_fault_that_we_can_make() -> None:
    verdict = await run(drawn(SEED, SECONDS))
    assert verdict.violations == []
    assert verdict.events > 100
    assert verdict.faults > SECONDS / 4


SYMPTOMS = {
    "cursor_before_recording": "a subscription in force was not evaluated",
    "position_before_evaluating": "a subscription in force was not evaluated",
    "now_when_history_is_lost": "a subscription in force was not evaluated",
    "fence_ignored": "not exactly one result or error",
    "revision_outside_the_transaction": "the revision is not that of its transaction",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mutation", mutations.BY_NAME)
async def test_a_system_that_does_it_wrong_is_caught(mutation: str) -> None:
    verdict = await run(DIRECTED[mutation], nodes=1, mutation=mutation, patience=6)
    assert any(violation.startswith(SYMPTOMS[mutation]) for violation in verdict.violations), verdict


@pytest.mark.timeout(120)
async def test_the_same_faults_find_nothing_wrong_with_a_system_that_does_it_right() -> None:
    """All of the directed schedules at once, on one node as theirs."""
    steps = sorted((step for directed in DIRECTED.values() for step in directed), key=lambda step: step.at)
    verdict = await run(steps, nodes=1)
    assert verdict.violations == []
