"""Transactions of the service: its own documents and events, together or not at all (DESIGN §6)."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from pymongo.errors import DuplicateKeyError

from statelayer import Settings, StateLayer
from statelayer.errors import (
    ContentionError,
    InvalidPathError,
    InvalidWriteError,
    OutcomeUnknownError,
    VersionConflictError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from statelayer.journal import JournalTransaction

pytestmark = pytest.mark.anyio

USER = "user:U7"
PATH = "/tasks/T1/status"


async def test_a_service_document_and_an_event_are_committed_together(database: Any, layer: StateLayer) -> None:
    await database.create_collection("orders")

    async def body(tx: JournalTransaction) -> str:
        await database["orders"].insert_one({"_id": "O1"}, session=tx.session)
        event = await tx.set(PATH, "ordered", actor=USER)
        return event.id

    event_id = await layer.transact(body, "/tasks/T1")
    assert await layer.event(event_id) is not None
    assert await database["orders"].count_documents({}) == 1


async def test_what_the_body_raises_leaves_nothing_behind(database: Any, layer: StateLayer) -> None:
    await database.create_collection("orders")

    async def body(tx: JournalTransaction) -> None:
        await database["orders"].insert_one({"_id": "O1"}, session=tx.session)
        await tx.set(PATH, "ordered", actor=USER)
        raise RuntimeError("no stock")

    with pytest.raises(RuntimeError, match="no stock"):
        await layer.transact(body, "/tasks/T1")
    assert await layer.get(PATH) is None
    assert await database["orders"].count_documents({}) == 0
    assert (await layer.set(PATH, 1, actor=USER)).seq == 1


async def test_a_plain_append_inside_the_block_joins_it(layer: StateLayer) -> None:
    async with layer.transaction("/tasks/T1") as tx:
        first = await layer.set(PATH, 1, actor=USER)
        second = await tx.set(PATH, 2, actor=USER)
        assert await layer.get(PATH) is None
    assert (first.seq, second.seq, second.version) == (1, 2, 2)
    entry = await layer.get(PATH)
    assert entry is not None
    assert entry.value == 2


async def test_a_refused_write_leaves_the_block_usable(layer: StateLayer) -> None:
    async with layer.transaction("/tasks/T1") as tx:
        with pytest.raises(VersionConflictError):
            await tx.set(PATH, 1, actor=USER, expected_version=4)
        await tx.set(PATH, 1, actor=USER, expected_version=0)
    assert [event.seq async for event in layer.events("/tasks/T1")] == [1]


async def test_a_namespace_that_was_not_named_is_refused(layer: StateLayer) -> None:
    async with layer.transaction("/tasks/T1") as tx:
        with pytest.raises(InvalidWriteError, match="/tasks/T2"):
            await tx.set("/tasks/T2/x", 1, actor=USER)


async def test_a_transaction_names_namespaces(layer: StateLayer) -> None:
    with pytest.raises(InvalidWriteError, match="names the namespaces"):
        async with layer.transaction():
            pass
    with pytest.raises(InvalidPathError):
        async with layer.transaction("/tasks/T1/status"):
            pass


async def test_a_transaction_that_has_ended_is_refused(layer: StateLayer) -> None:
    async with layer.transaction("/tasks/T1") as tx:
        pass
    with pytest.raises(InvalidWriteError, match="ended"):
        await tx.set(PATH, 1, actor=USER)


async def test_a_transaction_inside_another_is_refused(layer: StateLayer) -> None:
    async with layer.transaction("/tasks/T1"):
        with pytest.raises(InvalidWriteError, match="open"):
            async with layer.transaction("/tasks/T2"):
                pass


async def test_one_try_loses_to_another_process_and_says_so(
    database: Any, layer: StateLayer, other: StateLayer
) -> None:
    await layer.set(PATH, 0, actor=USER)

    async def block() -> None:
        async with layer.transaction("/tasks/T1") as tx:
            await database["entries"].find_one({}, session=tx.session)
            await other.set(PATH, 1, actor=USER)
            await tx.set("/tasks/T1/mine", 1, actor=USER)

    with pytest.raises(ContentionError, match="run the block again"):
        await block()
    assert await layer.get("/tasks/T1/mine") is None


async def test_the_retried_form_goes_again_until_it_wins(database: Any, layer: StateLayer, other: StateLayer) -> None:
    await layer.set(PATH, 0, actor=USER)
    runs = 0

    async def body(tx: JournalTransaction) -> int:
        nonlocal runs
        runs += 1
        await database["entries"].find_one({}, session=tx.session)
        if runs == 1:
            await other.set(PATH, 1, actor=USER)
        return (await tx.set("/tasks/T1/mine", runs, actor=USER)).seq

    assert await layer.transact(body, "/tasks/T1") == 3
    assert runs == 2


async def test_transact_beside_busy_writers_of_its_namespace_succeeds_at_once(layer: StateLayer) -> None:
    runs = 0

    async def body(tx: JournalTransaction) -> None:
        nonlocal runs
        runs += 1
        await tx.set("/tasks/T1/mine", runs, actor=USER)

    async def write(number: int) -> None:
        for n in range(10):
            await layer.set(f"/tasks/T1/w/{number}", n, actor=USER)

    busy = asyncio.gather(*(write(number) for number in range(8)))
    for _ in range(5):
        await layer.transact(body, "/tasks/T1")
    await busy
    assert runs == 5
    assert [event.seq async for event in layer.events("/tasks/T1")] == list(range(1, 86))


# --- many at a time


async def test_c1_many_transactions_on_one_namespace_all_succeed(layer: StateLayer, others: list[StateLayer]) -> None:
    await layer.set(PATH, 0, actor=USER)

    async def count(number: int) -> None:
        async def body(tx: JournalTransaction) -> None:
            await tx.set(f"/tasks/T1/w/{number}", number, actor=USER)

        for _ in range(3):
            await (layer, *others)[number % 4].transact(body, "/tasks/T1")

    await asyncio.gather(*(count(number) for number in range(8)))
    assert [event.seq async for event in layer.events("/tasks/T1")] == list(range(1, 26))
    assert (await layer.verify("/tasks/T1")).ok


async def test_c4_first_transactions_on_a_new_namespace_all_succeed(
    layer: StateLayer, others: list[StateLayer]
) -> None:
    async def body(tx: JournalTransaction) -> int:
        return (await tx.set(PATH, 1, actor=USER)).version

    versions = await asyncio.gather(*((layer, *others)[n % 4].transact(body, "/tasks/T1") for n in range(20)))
    assert sorted(versions) == list(range(1, 21))


@pytest.mark.parametrize("theirs", [PATH, "/tasks/T1/other"])
async def test_c4_a_namespace_that_somebody_else_began_meanwhile_costs_one_more_try(
    database: Any, layer: StateLayer, other: StateLayer, theirs: str
) -> None:
    """Its head is there by now, which the transaction's snapshot does not see."""
    runs = 0

    async def body(tx: JournalTransaction) -> int:
        nonlocal runs
        runs += 1
        await database["entries"].find_one({}, session=tx.session)
        if runs == 1:
            await other.set(theirs, "theirs", actor=USER)
        return (await tx.set(PATH, "mine", actor=USER)).seq

    assert await layer.transact(body, "/tasks/T1") == 2
    assert runs == 2


# --- seqs and commits


async def test_b1_a_seq_is_given_in_the_order_of_commits(layer: StateLayer, other: StateLayer) -> None:
    await layer.set(PATH, 0, actor=USER)
    async with layer.transaction("/tasks/T1") as tx:
        early = await tx.set(PATH, "early", actor=USER)
        late = asyncio.create_task(other.set(PATH, "late", actor=USER))
        await asyncio.wait([late], timeout=0.2)
        assert not late.done()
        assert [event.seq async for event in layer.events("/tasks/T1")] == [1]
    assert (await late).seq == early.seq + 1


async def test_c3_a_body_that_swallows_a_failed_statement_ends_at_its_deadline(
    database: Any, layer: StateLayer
) -> None:
    hasty = StateLayer(database, settings=Settings(append_timeout=1.0))
    await database["orders"].insert_one({"_id": "O1"})
    runs = 0

    async def body(tx: JournalTransaction) -> None:
        nonlocal runs
        runs += 1
        with suppress(DuplicateKeyError):
            await database["orders"].insert_one({"_id": "O1"}, session=tx.session)
        await tx.set(PATH, 1, actor=USER)

    with pytest.raises(ContentionError):
        await hasty.transact(body, "/tasks/T1")
    assert 1 <= runs < 100
    assert await layer.get(PATH) is None
    await hasty.aclose()


async def test_a_statement_of_the_body_that_the_deadline_cuts_short_is_contention(
    database: Any, layer: StateLayer
) -> None:
    hasty = StateLayer(database, settings=Settings(append_timeout=0.5))

    async def body(tx: JournalTransaction) -> None:
        await asyncio.sleep(0.6)
        await database["orders"].insert_one({"_id": "O1"}, session=tx.session)

    with pytest.raises(ContentionError):
        await hasty.transact(body, "/tasks/T1")
    with pytest.raises(ContentionError):
        async with hasty.transaction("/tasks/T1") as tx:
            await body(tx)
    assert await database["orders"].count_documents({}) == 0
    await hasty.aclose()


async def test_c3_a_driver_error_that_leaves_the_body_is_the_callers(database: Any, layer: StateLayer) -> None:
    await database["orders"].insert_one({"_id": "O1"})

    async def body(tx: JournalTransaction) -> None:
        await tx.set(PATH, 1, actor=USER)
        await database["orders"].insert_one({"_id": "O1"}, session=tx.session)

    with pytest.raises(DuplicateKeyError):
        await layer.transact(body, "/tasks/T1")
    assert await layer.get(PATH) is None


async def test_c7_a_cancelled_block_leaves_no_lock(layer: StateLayer, other: StateLayer) -> None:
    entered = asyncio.Event()

    async def block() -> None:
        async with layer.transaction("/tasks/T1") as tx:
            await tx.set(PATH, 1, actor=USER)
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        assert (await other.set(PATH, 2, actor=USER)).seq == 1


async def fail_commits(database: Any, times: int, **data: object) -> None:
    mode = {"times": times} if times else "alwaysOn"
    await database.client["admin"].command(
        {"configureFailPoint": "failCommand", "mode": mode, "data": {"failCommands": ["commitTransaction"], **data}}
    )


@pytest.fixture
async def commits_fail(database: Any) -> AsyncIterator[None]:
    yield
    await database.client["admin"].command({"configureFailPoint": "failCommand", "mode": "off"})


async def test_c2_a_commit_whose_reply_is_lost_makes_one_event(
    database: Any, layer: StateLayer, commits_fail: None
) -> None:
    await fail_commits(database, 4, writeConcernError={"code": 91, "errmsg": "shutting down"})
    event = await layer.set(PATH, 1, actor=USER)
    assert [(e.id, e.seq) async for e in layer.events("/tasks/T1")] == [(event.id, 1)]


async def test_c2_a_transaction_whose_reply_is_lost_runs_its_body_once(
    database: Any, layer: StateLayer, commits_fail: None
) -> None:
    runs = 0

    async def body(tx: JournalTransaction) -> str:
        nonlocal runs
        runs += 1
        return (await tx.set(PATH, runs, actor=USER)).id

    await fail_commits(database, 4, writeConcernError={"code": 91, "errmsg": "shutting down"})
    event_id = await layer.transact(body, "/tasks/T1")
    assert [event.id async for event in layer.events("/tasks/T1")] == [event_id]
    assert runs == 1


async def test_c2_an_outcome_that_cannot_be_learned_is_its_own_error(
    database: Any, layer: StateLayer, commits_fail: None
) -> None:
    hasty = StateLayer(database, settings=Settings(append_timeout=0.5))
    await hasty.set("/tasks/T1/first", 0, actor=USER)
    await fail_commits(database, 0, errorCode=189, errorLabels=["UnknownTransactionCommitResult"])
    with pytest.raises(OutcomeUnknownError) as caught:
        await hasty.set(PATH, 1, actor=USER)
    assert len(caught.value.event_ids) == 1
    await database.client["admin"].command({"configureFailPoint": "failCommand", "mode": "off"})
    await hasty.aclose()
