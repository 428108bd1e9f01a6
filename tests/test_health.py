"""What ``layer.health()`` tells an operator: who listens, what waits, and since when (DESIGN §12)."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from listening import REQUESTS, confirm, evaluated
from structlog.testing import capture_logs

from statelayer import Settings, StateLayer
from statelayer.subscriptions import listener as listener_module
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from statelayer.health import Health

pytestmark = pytest.mark.anyio

USER = "user:U7"


async def waits(layer: StateLayer) -> list[tuple[int, int]]:
    """Return how many events of which partition wait to be evaluated."""
    lags = (await layer.health()).lags
    assert lags is not None
    return [(lag.partition, lag.events) for lag in lags]


async def partition_of(database: Any, namespace: str) -> int:
    return (await database["namespaces"].find_one({"_id": namespace}))["partition"]


async def test_where_all_is_well_there_is_nothing_to_say(layer: StateLayer) -> None:
    async with layer.running():
        health = await layer.health()
    assert health.ok
    assert (health.dispatch, health.lags, health.queues) == ("on", (), ())
    assert (health.unevaluated, health.oldest_unevaluated, health.queued, health.oldest_queued) == (0, None, 0, None)
    [listener] = health.listeners
    assert len(listener.partitions) == layer.settings.partitions
    assert health.listening is not None
    assert len(health.listening) == 1


async def test_where_nobody_listens_it_says_so_and_counts_what_waits(database: Any, layer: StateLayer) -> None:
    written = {f"T{n}": n for n in range(1, 5)}
    for task, count in written.items():
        for n in range(count):
            await confirm(layer, task, f"R{n}")
    expected: dict[int, int] = {}
    for task, count in written.items():
        partition = await partition_of(database, f"/tasks/{task}")
        expected[partition] = expected.get(partition, 0) + count
    health = await layer.health()
    assert health.problems == ("No instance listens: what is written wakes nobody until one does.",)
    assert await waits(layer) == sorted(expected.items())
    assert health.unevaluated == 10
    assert health.oldest_unevaluated is not None
    assert health.oldest_unevaluated >= 0


async def test_only_what_comes_after_the_cursor_waits(database: Any, layer: StateLayer) -> None:
    async with layer.running(work=False):
        await evaluated(database, await confirm(layer, "T1", "R1"))
        assert await waits(layer) == []
    first = await confirm(layer, "T1", "R2")
    await confirm(layer, "T1", "R3")
    assert await waits(layer) == [(await partition_of(database, "/tasks/T1"), 2)]
    health = await layer.health()
    clock = (await database.command("hello"))["localTime"].replace(tzinfo=first.committed_at.tzinfo)
    assert health.oldest_unevaluated is not None
    assert health.oldest_unevaluated <= (clock - first.committed_at).total_seconds()


async def test_a_next_event_that_is_gone_has_no_age(database: Any, layer: StateLayer) -> None:
    event = await confirm(layer, "T1", "R1")
    await database["events"].delete_one({"_id": event.id})
    health = await layer.health()
    assert (health.unevaluated, health.oldest_unevaluated) == (1, None)


async def test_a_pause_is_told_and_is_no_problem(layer: StateLayer) -> None:
    await layer.pause()
    health = await layer.health()
    assert (health.ok, health.dispatch) == (True, "paused")


async def test_what_nobody_offers_is_a_problem_until_somebody_does(layer: StateLayer, other: StateLayer) -> None:
    await layer.subscriptions.publish(REQUESTS)

    async def intake(run: Any) -> None:
        await asyncio.Event().wait()

    async def queued() -> Health | None:
        health = await layer.health()
        return health if health.queued == 2 else None

    async def settled() -> bool:
        return (await layer.health()).ok

    async with layer.running():
        for n in range(2):
            await confirm(layer, "T1", f"R{n}")
        health = await wait_until(queued)
        assert health is not None
        assert health.problems == (
            "Queued executions of execute_workflow 'intake' (2) wait for an instance that offers it.",
        )
        assert health.queues is not None
        [queue] = health.queues
        assert (queue.action_type, queue.target, queue.executions) == ("execute_workflow", "intake", 2)
        assert health.oldest_queued == queue.oldest >= 0
        other.workflow("intake", concurrency=1)(intake)
        running = asyncio.create_task(other.run(listen=False))
        await wait_until(settled)
        assert (await layer.health()).queued == 1
        [job] = (await other.health()).running
        assert job.startswith("workflow:")
        assert (await layer.health()).running == ()
        running.cancel()
        await asyncio.wait([running])


async def test_a_count_that_takes_too_long_is_left_out(database: Any, layer: StateLayer) -> None:
    """A probe must not become a burden, nor a service unhealthy because there is much to count."""
    admin = database.client["admin"]
    data = {"failCommands": ["aggregate"], "errorCode": 50, "namespace": f"{database.name}.namespaces"}
    await admin.command({"configureFailPoint": "failCommand", "mode": "alwaysOn", "data": data})
    try:
        async with layer.running():
            health = await layer.health()
    finally:
        await admin.command({"configureFailPoint": "failCommand", "mode": "off"})
    assert (health.ok, health.lags, health.unevaluated, health.queued) == (True, None, None, 0)


@pytest.fixture
async def quick(database: Any, layer: StateLayer) -> AsyncIterator[StateLayer]:
    async with StateLayer(database, settings=Settings(page_size=3)) as quick:
        yield quick


async def test_a_catch_up_shows_how_far_it_is(
    database: Any, quick: StateLayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the log, and in the cursors, also in the middle of one long namespace."""
    monkeypatch.setattr(listener_module, "FLUSH_INTERVAL", 0)
    monkeypatch.setattr(listener_module, "PROGRESS_INTERVAL", 0)
    for n in range(9):
        last = await confirm(quick, "T1", f"R{n}")
    with capture_logs() as logs:
        async with quick.running(work=False):
            await evaluated(database, last)
    told = [line["evaluated"] for line in logs if line["event"] == "catch_up_progress"]
    assert told == [3, 6, 9]
