"""Faults between the journal and the server: never two events for one append, none lost that was acknowledged (C2)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
from bson import Int64
from pymongo.monitoring import CommandListener

from statelayer import Settings, StateLayer, Write
from statelayer.errors import ContentionError, DatabaseError, IntegrityError, OutcomeUnknownError, StateLayerError
from statelayer.testing import Proxy, wait_until
from statelayer.testing.plugin import connected

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pymongo.monitoring import CommandFailedEvent, CommandStartedEvent, CommandSucceededEvent

    from statelayer.events import Event
    from statelayer.executors import Run
    from statelayer.journal import JournalTransaction
    from statelayer.testing.plugin import Driver

pytestmark = pytest.mark.anyio

USER = "user:U7"
T1 = "/tasks/T1"

COMMANDS = ["find", "update", "insert", "commitTransaction"]
CODES = {
    "ShutdownInProgress": 91,
    "WriteConflict": 112,
    "PrimarySteppedDown": 189,
    "InterruptedDueToReplStateChange": 11602,
}
FAULTS: dict[str, dict[str, Any]] = {name: {"errorCode": code} for name, code in CODES.items()}
FAULTS["network"] = {"closeConnection": True}


@asynccontextmanager
async def failing(database: Any, *commands: str, times: int | None = 1, **fault: Any) -> AsyncIterator[None]:
    """Let the server fail these commands, so many times or always."""
    admin = database.client["admin"]
    mode = "alwaysOn" if times is None else {"times": times}
    await admin.command(
        {"configureFailPoint": "failCommand", "mode": mode, "data": {"failCommands": list(commands), **fault}}
    )
    try:
        yield
    finally:
        await admin.command({"configureFailPoint": "failCommand", "mode": "off"})


async def stored(layer: StateLayer, namespace: str) -> list[Event]:
    return [event async for event in layer.events(namespace)]


async def write_all(layer: StateLayer) -> list[Event]:
    """Some appends at a time, over two namespaces, one of them new."""
    plain = [layer.set(f"{T1}/n/{n}", n, actor=USER) for n in range(5)]
    keyed = [layer.set(f"/tasks/T2/n/{n}", n, actor=USER, idempotency_key=f"k{n}") for n in range(3)]
    [*events] = await asyncio.gather(*plain, *keyed)
    pair = await layer.append([Write(path=f"{namespace}/pair", value=1, actor=USER) for namespace in (T1, "/tasks/T2")])
    return [*events, *pair]


async def agrees(layer: StateLayer, acknowledged: list[Event]) -> None:
    """What is stored is what was acknowledged, without a gap."""
    found = [event for namespace in (T1, "/tasks/T2") for event in await stored(layer, namespace)]
    assert {event.id: event for event in found} == {event.id: event for event in acknowledged}
    assert len(found) == len(acknowledged)
    for namespace in (T1, "/tasks/T2"):
        report = await layer.verify(namespace)
        assert report.ok, report.problems


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("command", COMMANDS)
async def test_c2_whatever_fails_each_append_becomes_one_event(
    database: Any, layer: StateLayer, command: str, fault: dict[str, Any], times: int
) -> None:
    first = await layer.set(f"{T1}/first", 0, actor=USER)
    async with failing(database, command, times=times, **fault):
        events = await write_all(layer)
    await agrees(layer, [first, *events])


@pytest.mark.parametrize("times", [1, 4, 11])
@pytest.mark.parametrize("code", [64, 91, 189, 50])
async def test_c2_a_commit_whose_reply_is_lost_makes_one_event(
    database: Any, layer: StateLayer, code: int, times: int
) -> None:
    """The commit is carried out; what comes back is ``UnknownTransactionCommitResult``."""
    error = {"code": code, "errmsg": "not known"}
    async with failing(database, "commitTransaction", times=times, writeConcernError=error):
        events = await write_all(layer)
    await agrees(layer, events)


@pytest.mark.parametrize("code", [91, 11602])
async def test_c2_an_outcome_that_cannot_be_learned_is_its_own_error(
    database: Any, layer: StateLayer, code: int
) -> None:
    hasty = StateLayer(database, settings=Settings(append_timeout=1))
    first = await hasty.set(f"{T1}/first", 0, actor=USER)
    error = {"code": code, "errmsg": "not known"}
    async with failing(database, "commitTransaction", times=None, writeConcernError=error):
        with pytest.raises(OutcomeUnknownError) as caught:
            await hasty.set(f"{T1}/x", 1, actor=USER, idempotency_key="k")
    again = await hasty.set(f"{T1}/x", 1, actor=USER, idempotency_key="k")
    assert [event.id for event in await stored(layer, T1)] == [first.id, again.id]
    assert list(caught.value.event_ids) == [again.id]
    await hasty.aclose()


# --- transactions of the service


async def order(database: Any, layer: StateLayer, number: str, runs: list[str]) -> str:
    """Write a document of the service and an event together; return the event's id."""

    async def body(tx: JournalTransaction) -> str:
        runs.append(number)
        await database["orders"].insert_one({"_id": number}, session=tx.session)
        return (await tx.set(f"{T1}/orders/{number}", number, actor=USER, idempotency_key=number)).id

    return await layer.transact(body, T1)


async def together(database: Any, layer: StateLayer) -> dict[str, str]:
    """The events of the orders that are stored; there is no order without its event, and no event without its order."""
    events = {event.value: event.id for event in await stored(layer, T1)}
    orders = [document["_id"] for document in await database["orders"].find({}).to_list(None)]
    assert sorted(orders) == sorted(events)
    assert (await layer.verify(T1)).ok
    return events


@pytest.mark.parametrize("command", COMMANDS)
async def test_c2_whatever_fails_a_transaction_happens_once(database: Any, layer: StateLayer, command: str) -> None:
    await database.create_collection("orders")
    done = {"first": await order(database, layer, "first", [])}
    for name, fault in FAULTS.items():
        async with failing(database, command, times=2, **fault):
            done[name] = await order(database, layer, name, [])
    assert await together(database, layer) == done


@pytest.mark.parametrize("command", COMMANDS)
async def test_c2_a_transaction_of_one_try_that_fails_leaves_nothing(
    database: Any, layer: StateLayer, command: str
) -> None:
    await database.create_collection("orders")
    done = {"first": await order(database, layer, "first", [])}

    async def once(number: str) -> None:
        async with layer.transaction(T1) as tx:
            await database["orders"].insert_one({"_id": number}, session=tx.session)
            event = await tx.set(f"{T1}/orders/{number}", number, actor=USER)
        done[number] = event.id

    for name, fault in FAULTS.items():
        async with failing(database, command, **fault):
            with suppress(ContentionError):
                await once(name)
        await once(f"{name}-again")
    assert await together(database, layer) == done


@pytest.mark.fault
@pytest.mark.parametrize("code", [91, 11602])
async def test_c2_a_transaction_whose_replies_are_all_lost_is_found_by_its_events(
    database: Any, layer: StateLayer, code: int
) -> None:
    await database.create_collection("orders")
    hasty = StateLayer(database, settings=Settings(append_timeout=0.5))
    runs: list[str] = []
    error = {"code": code, "errmsg": "not known"}
    async with failing(database, "commitTransaction", times=None, writeConcernError=error):
        event_id = await order(database, hasty, "O1", runs)
    assert await together(database, layer) == {"O1": event_id}
    assert runs == ["O1"]
    await hasty.aclose()


async def test_c2_a_transaction_whose_commit_never_passes_ends_at_its_deadline(
    database: Any, layer: StateLayer
) -> None:
    await database.create_collection("orders")
    hasty = StateLayer(database, settings=Settings(append_timeout=1))
    labels = ["UnknownTransactionCommitResult"]
    async with failing(database, "commitTransaction", times=None, errorCode=189, errorLabels=labels):
        with pytest.raises(ContentionError):
            await order(database, hasty, "O1", [])
    assert await together(database, layer) == {}
    await hasty.aclose()


async def test_what_cannot_pass_is_told_at_once(database: Any, layer: StateLayer) -> None:
    async with failing(database, "insert", times=None, errorCode=13):
        with pytest.raises(StateLayerError):
            await layer.set(f"{T1}/x", 1, actor=USER)
    assert await stored(layer, T1) == []
    assert (await layer.set(f"{T1}/x", 1, actor=USER)).seq == 1


async def test_k4_an_overflowing_counter_is_not_retried(database: Any, layer: StateLayer) -> None:
    """Code 2 says that it will never pass."""
    async with failing(database, "update", times=None, errorCode=2):
        await layer.set(f"{T1}/x", 1, actor=USER)
        with pytest.raises(DatabaseError):
            await layer.set(f"{T1}/x", 2, actor=USER)
    assert (await layer.set(f"{T1}/x", 2, actor=USER)).seq == 2


async def test_c1_endless_conflicts_end_at_the_deadline(database: Any, layer: StateLayer) -> None:
    hasty = StateLayer(database, settings=Settings(append_timeout=0.5))
    await hasty.set(f"{T1}/x", 0, actor=USER)
    async with failing(database, "update", times=None, errorCode=112):
        with pytest.raises(ContentionError, match="Nothing was written"):
            await hasty.set(f"{T1}/x", 1, actor=USER)
    assert (await hasty.set(f"{T1}/x", 1, actor=USER)).seq == 2
    await hasty.aclose()


# --- what is sent after an error


class Commands(CommandListener):
    """Notes, for each transaction, its commands and whether the server refused them."""

    def __init__(self) -> None:
        self.sent: dict[int, tuple[str, str]] = {}
        self.transactions: defaultdict[str, list[tuple[str, bool]]] = defaultdict(list)

    def started(self, event: CommandStartedEvent) -> None:
        if "txnNumber" in event.command:
            session = event.command["lsid"]["id"]
            self.sent[event.request_id] = (event.command_name, f"{session!r}:{event.command['txnNumber']}")

    def succeeded(self, event: CommandSucceededEvent) -> None:
        self._note(event.request_id, refused=bool(event.reply.get("writeErrors")))

    def failed(self, event: CommandFailedEvent) -> None:
        self._note(event.request_id, refused=True)

    def _note(self, request: int, *, refused: bool) -> None:
        if request in self.sent:
            command, of = self.sent.pop(request)
            self.transactions[of].append((command, refused))

    @property
    def errors_met(self) -> int:
        return sum(any(refused for _, refused in sent) for sent in self.transactions.values())

    def after_errors(self) -> set[str]:
        """What was sent in a transaction after the first error that it met."""
        after: set[str] = set()
        for sent in self.transactions.values():
            first = next((n for n, (_, refused) in enumerate(sent) if refused), len(sent))
            after |= {command for command, _ in sent[first + 1 :]}
        return after


@pytest.fixture
async def watched(
    statelayer_server: Any, database: Any, layer: StateLayer, driver: Driver
) -> AsyncIterator[tuple[StateLayer, Commands]]:
    """A layer whose commands are noted, and which has no more than a second for an append."""
    commands = Commands()
    async with connected(driver, statelayer_server.uri, event_listeners=[commands]) as client:
        hasty = StateLayer(client[database.name], settings=Settings(append_timeout=1))
        yield hasty, commands
        await hasty.aclose()


TAKEN = {"keyPattern": {"namespace": 1, "seq": 1}, "keyValue": {"namespace": T1, "seq": 2}}
REFUSALS: dict[str, dict[str, Any]] = {
    "DuplicateKey": {"errorCode": 11000, "errorExtraInfo": TAKEN},
    "WriteConflict": {"errorCode": 112},
}


@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("command", ["insert", "update"])
async def test_c3_nothing_is_sent_in_a_transaction_that_met_an_error(
    database: Any, layer: StateLayer, watched: tuple[StateLayer, Commands], command: str, refusal: str
) -> None:
    """An append that meets a duplicate key each time ends at its deadline, after tries that grow apart."""
    hasty, commands = watched
    await hasty.set(f"{T1}/x", 0, actor=USER)
    async with failing(database, command, times=None, **REFUSALS[refusal]):
        with pytest.raises(ContentionError, match="Nothing was written"):
            await hasty.set(f"{T1}/x", 1, actor=USER)
    assert 1 < commands.errors_met < 100
    assert commands.after_errors() <= {"abortTransaction"}
    assert (await hasty.set(f"{T1}/x", 1, actor=USER)).seq == 2
    assert await seqs(layer) == [1, 2]


async def test_c3_a_duplicate_key_that_no_retry_can_mend_is_judged_outside_its_transaction(
    database: Any, layer: StateLayer, watched: tuple[StateLayer, Commands]
) -> None:
    for n in range(3):
        await layer.set(f"{T1}/x", n, actor=USER)
    await database["namespaces"].update_one({"_id": T1}, {"$set": {"seq": Int64(1)}})
    hasty, commands = watched
    with pytest.raises(IntegrityError, match="goes on to 3"):
        await hasty.set(f"{T1}/y", 1, actor=USER, idempotency_key="k")
    assert commands.errors_met == 1
    assert commands.after_errors() <= {"abortTransaction"}


# --- seqs


async def seqs(layer: StateLayer) -> list[int]:
    return [event.seq for event in await stored(layer, T1)]


async def test_b1_nobody_passes_an_append_that_is_paused_before_its_commit(
    database: Any, layer: StateLayer, other: StateLayer
) -> None:
    """It has its seq. Whoever comes later waits for it, and whoever follows the log sees first what is first."""
    await layer.set(f"{T1}/requests/R0", 0, actor=USER)

    @layer.workflow("w")
    async def echo(run: Run) -> Any:
        return run.event.seq

    await layer.subscriptions.publish(
        {"name": "s", "pattern": "/tasks/*/requests/*", "action": {"type": "execute_workflow", "workflowId": "w"}}
    )
    async with layer.watch(f"{T1}/requests/*") as watch, layer.running():
        async with failing(database, "commitTransaction", blockConnection=True, blockTimeMS=1500):
            early = asyncio.create_task(layer.set(f"{T1}/requests/R1", "early", actor=USER))
            await wait_until(lambda: _commit_is_paused(database))
            late = asyncio.create_task(other.set(f"{T1}/requests/R2", "late", actor=USER))
            assert (await other.replay(T1)).events == 1
            assert await seqs(other) == [1]
            assert not late.done()
            await asyncio.wait([early, late], return_when=asyncio.FIRST_COMPLETED)
            assert early.done()
        assert (await early).seq == 2
        assert (await late).seq > 2
        followed = [(await anext(watch)).value for _ in range(2)]
        outcomes = [await layer.outcome(event.id, timeout=10) for event in (await early, await late)]
    assert followed == ["early", "late"]
    assert [[execution.state for execution in outcome.executions] for outcome in outcomes] == [["succeeded"]] * 2
    found = await seqs(layer)
    assert found == list(range(1, len(found) + 1))


async def _commit_is_paused(database: Any) -> bool:
    pipeline = [{"$currentOp": {}}, {"$match": {"command.commitTransaction": {"$exists": True}}}]
    reply = await database.client["admin"].command({"aggregate": 1, "pipeline": pipeline, "cursor": {}})
    return bool(reply["cursor"]["firstBatch"])


# --- a network that fails


@pytest.fixture
async def proxy(statelayer_server: Any) -> AsyncIterator[Proxy]:
    host, _, port = statelayer_server.uri.partition("://")[2].partition("/")[0].partition(":")
    async with Proxy(host, int(port)) as between:
        yield between


@pytest.fixture
async def distant(proxy: Proxy, layer: StateLayer, database: Any, driver: Driver) -> AsyncIterator[StateLayer]:
    """A layer on the same database, whose connections go through the proxy."""
    async with connected(driver, proxy.uri, retryWrites=False) as client:
        through = StateLayer(client[database.name], settings=Settings(append_timeout=20))
        yield through
        proxy.mend()
        await through.aclose()


@pytest.mark.parametrize("moment", ["request", "reply"])
@pytest.mark.parametrize("command", [*COMMANDS, "abortTransaction"])
async def test_c2_a_connection_that_is_cut_costs_no_event(
    proxy: Proxy, distant: StateLayer, layer: StateLayer, command: str, moment: Any
) -> None:
    first = await distant.set(f"{T1}/first", 0, actor=USER)
    proxy.cut(command, at=moment, times=2)
    events = await write_all(distant)
    assert proxy.cuts_made or command == "abortTransaction"
    await agrees(layer, [first, *events])


async def test_c2_a_commit_that_is_still_running_when_the_client_gives_up(
    statelayer_server: Any, database: Any, layer: StateLayer, driver: Driver
) -> None:
    """Its connection is given up at the socket's timeout; the server carries it out a second later."""
    await layer.set(f"{T1}/first", 0, actor=USER)
    async with connected(driver, statelayer_server.uri, socketTimeoutMS=300) as client:
        hasty = StateLayer(client[database.name], settings=Settings(append_timeout=20))
        async with failing(database, "commitTransaction", blockConnection=True, blockTimeMS=1200):
            event = await hasty.set(f"{T1}/x", 1, actor=USER)
        await hasty.aclose()
    assert [(each.seq, each.version) for each in await stored(layer, T1)] == [(1, 1), (2, 1)]
    assert (await layer.get(f"{T1}/x")).event_id == event.id  # type: ignore[union-attr]


async def test_a_network_that_goes_silent_holds_nobody_for_ever(
    proxy: Proxy, layer: StateLayer, database: Any, driver: Driver
) -> None:
    async with connected(driver, proxy.uri, serverSelectionTimeoutMS=300, connectTimeoutMS=300) as client:
        hasty = StateLayer(client[database.name], settings=Settings(append_timeout=1))
        await hasty.set(f"{T1}/first", 0, actor=USER)
        proxy.silence()
        with pytest.raises(StateLayerError):
            await hasty.set(f"{T1}/x", 1, actor=USER)
        proxy.speak()
        await wait_until(lambda: _written(hasty))
        await hasty.aclose()
    assert (await layer.verify(T1)).ok


async def _written(layer: StateLayer) -> bool:
    try:
        await layer.set(f"{T1}/x", 2, actor=USER, idempotency_key="again")
    except StateLayerError:
        return False
    return True
