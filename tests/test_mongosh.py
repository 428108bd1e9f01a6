"""A person at mongosh: after a small run the database explains itself (seeds/002, DESIGN §§4, 7, 8, 11)."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import pytest

from statelayer import Settings, StateLayer, mongo_indexes
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from mongosh import Mongosh

    from statelayer.events import Event
    from statelayer.testing.plugin import Driver

pytestmark = pytest.mark.anyio

USER = "user:U7"
QUICK = Settings(poll=0.1, heartbeat=0.2, lease=5)

PLAIN = {"$date", "$numberInt", "$numberLong"}


def subscription(name: str, pattern: str, status: str | None, action: dict[str, str], **others: Any) -> dict[str, Any]:
    condition = {"path": "$event.value.status", "op": "eq", "value": status} if status else None
    return {"name": name, "pattern": pattern, "condition": condition, "action": action, **others}


REQUESTS = "/tasks/*/requests/*"
GREET = subscription("greet", REQUESTS, "confirmed", {"type": "execute_workflow", "workflowId": "greet"})
CLASSIFY = subscription("classify", REQUESTS, "goods", {"type": "execute_agent", "agentId": "facade-hs-code"})
STOPPED = subscription(
    "stopped",
    "/tasks/*/workflows/*/results/*",
    None,
    {"type": "execute_workflow", "workflowId": "greet"},
    maxTriggerDepth=1,
)
NOBODY = subscription("nobody", REQUESTS, "confirmed", {"type": "execute_agent", "agentId": "not-here"})


@dataclass
class Shell:
    """mongosh on the test's database, beside a layer that runs on it."""

    mongosh: Mongosh
    uri: str
    layer: StateLayer

    async def __call__(self, script: str) -> Any:
        return await anyio.to_thread.run_sync(self.mongosh, self.uri, script)

    async def print(self, script: str) -> str:
        return await anyio.to_thread.run_sync(self.mongosh.run, self.uri, script)

    async def typed(self, script: str) -> Any:
        """The value of a script in canonical Extended JSON, where every number says its type."""
        return json.loads(await self.print(f"print(EJSON.stringify({script}, {{ relaxed: false }}))"))

    async def request(self, id: str, status: str, **fields: Any) -> Event:
        value = {"status": status, "name": "Ada", **fields}
        return await self.layer.set(f"/tasks/T1/requests/{id}", value, actor=USER)

    async def listener_is(self, attribute: str, expected: Any) -> bool:
        [statistics] = (await self.layer.health()).listeners
        return getattr(statistics, attribute) == expected

    async def ran(self, event: Event, *names: str) -> None:
        """Wait until these subscriptions' executions of the event have ended."""

        async def ended() -> bool:
            found = await self.layer.executions.find(event_id=event.id)
            return set(names) <= {execution.subscription.name for execution in found if execution.has_ended}

        await wait_until(ended, message=f"executions of {event.path}")


@pytest.fixture
def driver() -> Driver:
    return "pymongo"


@pytest.fixture
async def shell(mongosh: Mongosh, statelayer_server: Any, database: Any) -> AsyncIterator[Shell]:
    layer = StateLayer(database, settings=QUICK)
    await layer.setup()

    @layer.workflow("greet")
    async def greet(run: Any) -> dict[str, str]:
        return {"greeting": f"Hello {run.input['name']}"}

    @layer.agent("facade-hs-code")
    async def classify(run: Any) -> dict[str, str]:
        if run.input.get("goods") == "?":
            raise LookupError("No heading is like it.")
        return {"heading": "0901"}

    for definition in (GREET, CLASSIFY, STOPPED, NOBODY):
        await layer.subscriptions.publish(definition)
    place = statelayer_server.uri.partition("/?")
    yield Shell(mongosh, f"{place[0]}/{database.name}?{place[2]}", layer)
    await layer.aclose()


@asynccontextmanager
async def small_run(shell: Shell) -> AsyncIterator[tuple[Event, Event]]:
    """One request that a workflow answers, and one that an agent fails on; the layer runs during the block."""
    async with shell.layer.running():
        good = await shell.request("R1", "confirmed", pieces=12, weight=2**40)
        bad = await shell.request("R2", "goods", goods="?")
        await shell.ran(good, "greet")
        await shell.ran(bad, "classify")
        result = await shell.layer.wait_for(f"/tasks/T1/workflows/greet/results/{good.id}", timeout=10)
        skipped = await shell.layer.event(result.event_id)
        assert skipped is not None
        await shell.ran(skipped, "stopped")
        yield good, bad


async def test_the_three_queries_of_the_seed_answer(shell: Shell) -> None:
    await shell.layer.subscriptions.disable("nobody")
    answers = await shell(
        """({
            enabled: db.state_subscriptions.countDocuments({ enabled: true }),
            profiles: db.agent_profiles.find({ status: 'active' }, { agentId: 1 }).toArray(),
            subscriptions: db.state_subscriptions.find({ enabled: true }, { name: 1, pattern: 1 }).toArray(),
        })"""
    )
    assert answers["enabled"] == 3
    assert answers["profiles"] == []
    assert {(found["name"], found["pattern"]) for found in answers["subscriptions"]} == {
        ("greet", REQUESTS),
        ("classify", REQUESTS),
        ("stopped", "/tasks/*/workflows/*/results/*"),
    }


async def test_a_result_leads_to_its_request_and_an_error_too(shell: Shell) -> None:
    async with small_run(shell) as (good, bad):
        for place, request in (("workflows/greet/results", good), ("agents/facade-hs-code/errors", bad)):
            told = await shell(
                f"""
                const entry = db.entries.findOne({{ _id: /^.tasks.T1.{place.replace("/", ".")}/ }});
                const fact = db.events.findOne({{ _id: entry.eventId }});
                const cause = db.events.findOne({{ _id: fact.causedByEventId }});
                ({{ fact, cause, rootOfFact: fact.rootEventId }})
                """
            )
            assert told["fact"]["path"] == f"/tasks/T1/{place}/{request.id}"
            assert told["fact"]["triggerDepth"] == 1
            assert (told["cause"]["_id"], told["cause"]["path"]) == (request.id, request.path)
            assert told["cause"]["actor"] == USER
            assert told["rootOfFact"] == request.id
            assert "causedByEventId" not in told["cause"]


async def test_the_causes_of_an_event_can_be_asked_the_other_way_round(shell: Shell) -> None:
    async with small_run(shell) as (good, _):
        effects = await shell(f"db.events.find({{ causedByEventId: '{good.id}' }}, {{ path: 1, actor: 1 }}).toArray()")
        assert [(effect["path"], effect["actor"]) for effect in effects] == [
            (f"/tasks/T1/workflows/greet/results/{good.id}", "workflow:greet")
        ]


async def test_what_a_subscription_did_can_be_listed(shell: Shell) -> None:
    async with small_run(shell) as (good, bad):
        listed = await shell(
            """['greet', 'classify', 'nobody'].map(name =>
                db.executions.find({ 'subscription.name': name }).toArray())"""
        )
        [greeted], [classified], [waiting] = listed
        assert greeted["_id"] == f"workflow:{good.id}:greet"
        assert (greeted["state"], greeted["attempts"]) == ("succeeded", 1)
        assert "reason" not in greeted
        assert classified["_id"] == f"agent:{bad.id}:facade-hs-code"
        assert (classified["state"], classified["reason"]) == ("failed", "handler_error")
        assert (waiting["state"], waiting["reason"], waiting["target"]) == ("queued", "no_executor", "not-here")
        assert "resultEventId" not in waiting
        facts = await shell(
            f"""['{greeted["resultEventId"]}', '{classified["resultEventId"]}'].map(id =>
                db.events.findOne({{ _id: id }}).value)"""
        )
        assert facts[0]["output"] == {"greeting": "Hello Ada"}
        assert (facts[1]["status"], facts[1]["reason"]) == ("failed", "handler_error")
        assert facts[1]["error"]["type"] == "LookupError"
        assert facts[1]["error"]["message"] == "No heading is like it."


async def test_why_nothing_fired_is_a_document(shell: Shell) -> None:
    async with small_run(shell) as (good, _):
        await shell("db.state_subscriptions.updateOne({ name: 'stopped' }, { $set: { maxTriggerDepth: 'many' } })")
        await wait_until(lambda: shell.listener_is("quarantined", ("stopped@v1",)))
        again = await shell.request("R3", "confirmed")
        result = await shell.layer.wait_for(f"/tasks/T1/workflows/greet/results/{again.id}", timeout=10)
        fact = await shell.layer.event(result.event_id)
        assert fact is not None
        await shell.ran(fact, "stopped")
        skips = await shell("db.executions.find({ state: 'skipped' }).sort({ _id: 1 }).toArray()")
        deep, broken = skips
        first = await shell.layer.get(f"/tasks/T1/workflows/greet/results/{good.id}")
        assert first is not None
        assert (deep["_id"], deep["reason"]) == (f"skip:{first.event_id}:stopped", "max_depth")
        assert (broken["_id"], broken["reason"]) == (f"skip:{fact.id}:stopped", "quarantined")
        assert {skip["eventId"] for skip in skips} == {first.event_id, fact.id}
        assert all(skip["subscription"]["name"] == "stopped" for skip in skips)


async def test_each_collection_shows_documents_as_a_person_wants_them(shell: Shell, database: Any) -> None:
    async with small_run(shell):
        await wait_until(lambda: database["checkpoints"].count_documents({}), message="a checkpoint")
        documents = await shell.typed(
            "Object.fromEntries(db.getCollectionNames().map(name => [name, db[name].find().toArray()]))"
        )
    assert set(documents) == {spec.name for spec in mongo_indexes.COLLECTIONS}
    for name, found in documents.items():
        assert found, f"nothing in {name}"
        assert set(noise(found)) <= ({"$timestamp"} if name == "checkpoints" else set())
        assert all(isinstance(document["_id"], str) for document in found) or name == "checkpoints"

    events = {event["seq"]["$numberLong"]: event for event in documents["events"]}
    assert set(events) == {str(seq) for seq in range(1, len(events) + 1)}
    request = events["1"]
    assert list(request)[:4] == ["_id", "namespace", "seq", "path"]
    assert request["value"]["pieces"] == {"$numberInt": "12"}
    assert request["value"]["weight"] == {"$numberLong": str(2**40)}
    assert set(request["committedAt"]) == {"$date"}
    assert request["version"] == {"$numberLong": "1"}
    assert request["triggerDepth"] == {"$numberInt": "0"}
    entry = next(entry for entry in documents["entries"] if entry["_id"] == request["path"])
    assert (entry["value"], entry["updatedAt"]) == (request["value"], request["committedAt"])
    for execution in documents["executions"]:
        assert set(execution["createdAt"]) == {"$date"}
        assert None not in execution.values(), "an absent field is left out, not null"


async def test_a_document_prints_as_mongosh_prints_dates_and_longs(shell: Shell) -> None:
    async with small_run(shell) as (good, _):
        printed = await shell.print(f"db.events.findOne({{ _id: '{good.id}' }})")
    assert f"_id: '{good.id}'" in printed
    assert "seq: Long('1')" in printed
    assert "triggerDepth: 0," in printed
    assert f"committedAt: ISODate('{good.committed_at.isoformat(timespec='milliseconds').replace('+00:00', 'Z')}')" in (
        printed
    )
    for word in ("ObjectId", "UUID", "Binary", "Decimal128", "Double", "null", "undefined"):
        assert word not in printed


async def test_enabled_set_by_hand_is_performed_by_the_listener(shell: Shell) -> None:
    async with shell.layer.running():
        await shell("db.state_subscriptions.updateOne({ name: 'greet' }, { $set: { enabled: false } })")

        async def closed() -> bool:
            revs = await shell.layer.subscriptions.get("greet")
            return revs is not None and revs.active_revs[-1][1] is not None

        await wait_until(closed, message="the flag was not performed")
        quiet = await shell.request("R1", "confirmed")
        await shell("db.state_subscriptions.updateOne({ name: 'greet' }, { $set: { enabled: true } })")

        async def reopened() -> bool:
            return not await closed()

        await wait_until(reopened, message="the flag was not performed")
        loud = await shell.request("R2", "confirmed")
        await shell.ran(loud, "greet")
        fired = await shell("db.executions.find({ 'subscription.name': 'greet' }).toArray().map(e => e.eventId)")
        assert fired == [loud.id]
        revs = await shell("db.state_subscriptions.findOne({ name: 'greet' }).activeRevs")
        assert revs[0][0] < revs[0][1] < revs[1][0]
        assert revs[1][1] is None
        stored = await shell(f"db.events.findOne({{ _id: '{quiet.id}' }}).subscriptionsRev")
        assert revs[0][1] <= stored < revs[1][0]


async def test_dispatch_set_by_hand_is_honoured(shell: Shell) -> None:
    async with shell.layer.running():
        await shell("db.meta.updateOne({ _id: 'dispatch' }, { $set: { state: 'paused' } })")
        await wait_until(lambda: shell.listener_is("state", "paused"))
        event = await shell.request("R1", "confirmed")
        assert await shell("db.executions.countDocuments()") == 0
        await shell("db.meta.updateOne({ _id: 'dispatch' }, { $set: { state: 'on' } })")
        await shell.ran(event, "greet")


async def test_the_validators_explain_each_collection_and_field(shell: Shell) -> None:
    infos = await shell("db.getCollectionInfos()")
    schemas = {info["name"]: info["options"]["validator"]["$jsonSchema"] for info in infos}
    assert set(schemas) == {spec.name for spec in mongo_indexes.COLLECTIONS}
    for name, schema in schemas.items():
        assert schema["title"], name
        assert len(schema["description"]) > 20, name
        undescribed = [field for field, rule in schema["properties"].items() if not rule.get("description")]
        assert undescribed == [], name
    assert all(info["options"].get("validationAction", "error") == "error" for info in infos)


async def test_every_field_that_is_stored_is_described(shell: Shell) -> None:
    async with small_run(shell):
        undescribed = await shell(
            """Object.fromEntries(db.getCollectionInfos()
                .filter(info => info.name !== 'meta')
                .map(({ name, options: { validator: { $jsonSchema: { properties } } } }) => {
                    const stored = new Set(db[name].find().toArray().flatMap(document => Object.keys(document)));
                    return [name, [...stored].filter(field => !(field in properties)).sort()];
                })
                .filter(([_, fields]) => fields.length))"""
        )
    assert undescribed == {}


async def test_what_breaks_the_form_is_refused_in_the_shell(shell: Shell) -> None:
    told = await shell(
        """
        let told = 'accepted';
        try { db.events.insertOne({ _id: 'mine', namespace: '/tasks/T1' }) } catch (error) { told = error.message }
        told
        """
    )
    assert told == "Document failed validation"


def noise(value: Any) -> Iterator[str]:
    """Yield the type wrappers of canonical Extended JSON that a person has no use for."""
    for element in value if isinstance(value, list) else ():
        yield from noise(element)
    if isinstance(value, dict) and set(value) - PLAIN:
        for key, element in value.items():
            if key.startswith("$"):
                yield key
            else:
                yield from noise(element)
