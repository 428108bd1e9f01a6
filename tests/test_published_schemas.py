"""The JSON Schemas that ship for outside consumers: what they say is true of every document (DESIGN §4a)."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import pytest
from bson import json_util
from jsonschema import Draft202012Validator

from statelayer import Write
from statelayer.executors import RetryPolicy
from statelayer.mongo_indexes.published import PUBLIC_EXECUTION_FIELDS, json_schemas
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from statelayer import StateLayer
    from statelayer.executors import Run

pytestmark = pytest.mark.anyio

USER = "user:U7"
T1 = "/tasks/T1"
REVIEW = {
    "name": "review",
    "pattern": "/tasks/*/orders/*",
    "action": {"type": "execute_workflow", "workflowId": "review"},
}


def shipped(name: str) -> dict[str, Any]:
    text = (files("statelayer") / "schemas" / f"{name}.schema.json").read_text(encoding="utf-8")
    return json.loads(text)


def as_json(document: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json_util.dumps(document, json_options=json_util.RELAXED_JSON_OPTIONS))


def faults(name: str, document: dict[str, Any]) -> list[str]:
    found = Draft202012Validator(shipped(name)).iter_errors(as_json(document))
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.mark.parametrize("name", ["events", "entries", "executions"])
def test_what_ships_is_what_the_validators_say(name: str) -> None:
    """`python -m statelayer.mongo_indexes.published statelayer/schemas` writes them again."""
    assert shipped(name) == json_schemas()[name]
    Draft202012Validator.check_schema(shipped(name))


def test_of_executions_the_public_fields_alone_are_described() -> None:
    assert set(shipped("executions")["properties"]) == set(PUBLIC_EXECUTION_FIELDS)


async def test_every_document_is_as_its_schema_says(database: Any, layer: StateLayer) -> None:
    await write_all_kinds(layer)
    for name in ("events", "entries", "executions"):
        documents = await database[name].find().to_list(None)
        assert documents
        for document in documents:
            assert faults(name, document) == []


async def write_all_kinds(layer: StateLayer) -> None:
    """Set, merge and delete; with a key and without; a result, an error and an execution that waits."""

    @layer.workflow("review", retry=RetryPolicy(max_attempts=1))
    async def review(run: Run) -> dict[str, Any]:
        if run.input == 2:
            raise ValueError("two is refused")
        return {"reviewed": run.input}

    await layer.subscriptions.publish(REVIEW)
    await layer.subscriptions.publish(
        {**REVIEW, "name": "nobody", "action": {"type": "execute_workflow", "workflowId": "nobody"}}
    )
    async with layer.running():
        await layer.set(f"{T1}/n", 1.5, actor=USER, idempotency_key="k")
        await layer.merge(f"{T1}/m", {"a": None}, actor=USER)
        await layer.delete(f"{T1}/n", actor=USER)
        await layer.append([Write(path=f"{T1}/orders/{n}", value=n, actor=USER) for n in (1, 2)])

        async def all_known() -> bool:
            states = sorted(execution.state for execution in await layer.executions.find())
            return states == ["failed", "queued", "queued", "succeeded"]

        await wait_until(all_known)


@pytest.mark.parametrize(
    ("field", "value"), [("seq", "1"), ("seq", 0), ("op", "insert"), ("actor", "nobody"), ("committedAt", "today")]
)
async def test_a_document_that_is_none_of_ours_is_told(
    database: Any, layer: StateLayer, field: str, value: object
) -> None:
    await layer.set(f"{T1}/n", 1, actor=USER)
    event = await database["events"].find_one({})
    assert faults("events", event) == []
    [fault] = faults("events", event | {field: value})
    assert fault.startswith(f"$.{field}")


async def test_fields_of_a_later_release_are_let_pass(database: Any, layer: StateLayer) -> None:
    await layer.set(f"{T1}/n", 1, actor=USER)
    event = await database["events"].find_one({})
    assert faults("events", event | {"later": {"than": "this"}}) == []
