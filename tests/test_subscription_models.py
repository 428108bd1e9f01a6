"""What may be published as a subscription, what is stored of it, and when it is in force."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import bson
import pytest
from bson import Decimal128
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from statelayer import values
from statelayer.errors import InvalidSubscriptionError
from statelayer.subscriptions import (
    Condition,
    ExecuteAgent,
    ExecuteWorkflow,
    Output,
    PatternTrie,
    RegisteredAction,
    StoredSubscription,
    Subscription,
)

ROOTS = ("tasks", "threads")
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)

VAT_INTAKE: dict[str, Any] = {
    "name": "vat-intake",
    "pattern": "/tasks/*/requests/*",
    "condition": {
        "all": [
            {"path": "$event.op", "op": "eq", "value": "set"},
            {"path": "$event.value.status", "op": "eq", "value": "confirmed"},
        ]
    },
    "action": {"type": "execute_agent", "agentId": "facade-vat-registration"},
    "maxTriggerDepth": 3,
}


def changed(**fields: Any) -> dict[str, Any]:
    return {**VAT_INTAKE, **fields}


def problems(source: Any) -> tuple[str, ...]:
    with pytest.raises(InvalidSubscriptionError) as refused:
        Subscription.parse(source, roots=ROOTS)
    assert all(problem in str(refused.value) for problem in refused.value.problems)
    return refused.value.problems


def stored(definition: dict[str, Any] = VAT_INTAKE, **fields: Any) -> StoredSubscription:
    published: dict[str, Any] = {"version": 1, "revision": 5, "target": "facade-vat-registration", "published_at": NOON}
    return StoredSubscription.first_in_force(Subscription.parse(definition), **(published | fields))


# --- what a person publishes ------------------------------------------------------------------------------------------


def test_a_definition_is_kept_as_given() -> None:
    subscription = Subscription.parse(VAT_INTAKE, roots=ROOTS)
    assert subscription.definition() == VAT_INTAKE
    assert Subscription.parse(subscription, roots=ROOTS) == subscription
    assert subscription.parsed_pattern.captures == {"taskId", "requestId"}
    assert subscription.parsed_condition == Condition.parse(VAT_INTAKE["condition"])
    assert subscription.parsed_condition is subscription.parsed_condition


def test_python_names_and_wire_names_say_the_same() -> None:
    by_python = Subscription(
        name="vat-intake",
        pattern="/tasks/*/requests/*",
        condition=VAT_INTAKE["condition"],
        action=ExecuteAgent(agent_id="facade-vat-registration"),
        max_trigger_depth=3,
    )
    assert by_python.same_definition(Subscription.parse(VAT_INTAKE))


def test_what_is_left_out_has_its_default() -> None:
    subscription = Subscription.parse({key: VAT_INTAKE[key] for key in ("name", "pattern", "action")})
    assert (subscription.condition, subscription.max_trigger_depth) == (None, 3)
    assert (subscription.input_schema, subscription.output) == (None, None)
    assert subscription.definition() == {**changed(condition=None)}


def test_a_parsed_condition_may_be_given() -> None:
    subscription = Subscription.parse(changed(condition=Condition.parse(VAT_INTAKE["condition"])))
    assert subscription.definition() == VAT_INTAKE


def test_f10_nobody_else_holds_a_definition() -> None:
    source = changed(condition={"path": "$event.value", "op": "eq", "value": [1]}, inputSchema={"required": ["a"]})
    source["action"] = {"type": "notify", "to": ["ops"]}
    subscription = Subscription.parse(source)
    for mine in (source, subscription.definition()):
        mine["condition"]["value"].append(2)
        mine["inputSchema"]["required"].append("b")
        mine["action"]["to"].append("all")
    kept = subscription.definition()
    assert kept["condition"]["value"] == [1]
    assert kept["inputSchema"] == {"required": ["a"]}
    assert kept["action"] == {"type": "notify", "to": ["ops"]}


# --- actions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "kind", "target"),
    [
        ({"type": "execute_agent", "agentId": "a"}, ExecuteAgent, "a"),
        ({"type": "execute_workflow", "workflowId": "w"}, ExecuteWorkflow, "w"),
        ({"type": "notify"}, RegisteredAction, "vat-intake"),
        ({"type": "notify", "agentId": "x y", "after": 1.0, "to": {"$set": NOON}}, RegisteredAction, "vat-intake"),
    ],
)
def test_actions(action: dict[str, Any], kind: type, target: str) -> None:
    subscription = Subscription.parse(changed(action=action))
    assert type(subscription.action) is kind
    assert subscription.definition()["action"] == action
    assert subscription.default_target == target


def test_a_registered_action_tells_what_it_holds() -> None:
    action = Subscription.parse(changed(action={"type": "notify", "to": "ops", "params": 1})).action
    assert isinstance(action, RegisteredAction)
    assert action.params == {"to": "ops", "params": 1}


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (None, "action.type: "),
        ({}, "action.type: Field required"),
        ({"type": 5}, "action.type: "),
        ({"type": ["execute_agent"]}, "action.type: "),
        ({"type": "Notify"}, "action.type: it is lower-case letters"),
        ({"type": "a:b"}, "action.type: it is lower-case letters"),
        ({"type": "notify\n"}, "action.type: it is lower-case letters"),
        ({"type": "agent"}, "action.type: 'agent' is reserved"),
        ({"type": "workflow"}, "action.type: 'workflow' is reserved"),
        ({"type": "skip"}, "action.type: 'skip' is reserved"),
        ({"type": "execute_agent"}, "action.agentId: Field required"),
        ({"type": "execute_agent", "agentId": "a/b"}, "action.agentId: the segment holds '/'"),
        ({"type": "execute_agent", "agentId": "a", "to": 1}, "action.to: Extra inputs"),
        ({"type": "execute_workflow", "agentId": "a"}, "action.workflowId: Field required"),
        ({"type": "execute_workflow", "workflowId": ""}, "action.workflowId: "),
        ({"type": "notify", "at": datetime(2026, 5, 1)}, "action.at: "),  # noqa: DTZ001
        ({"type": "notify", "to": [1, object()]}, "action.to[1]: "),
    ],
)
def test_g4_a_malformed_action_is_refused(action: Any, problem: str) -> None:
    found = problems(changed(action=action))
    assert found[0].startswith(problem) or (action is None and found[0].startswith("action: "))


def test_an_action_of_ours_is_not_built_as_a_registered_one() -> None:
    with pytest.raises(ValidationError, match="reserved"):
        RegisteredAction(type="execute_agent")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"name": "a/b"}, "name: the segment holds '/'"),
        ({"name": ""}, "name: the segment is empty"),
        ({"name": None}, "name: "),
        ({"pattern": "/tasks/*"}, "pattern: it ends at segment 2"),
        ({"pattern": "/orders/*/x"}, "pattern: segment 1 ('orders') is not a root"),
        ({"pattern": 5}, "pattern: "),
        ({"condition": []}, "condition: a clause is an object, not list"),
        ({"condition": {"all": [{"path": "$event.op", "op": "like"}]}}, "condition.all[0].op: unknown operator 'like'"),
        ({"condition": {"path": "$event.params.x", "op": "exists"}}, "condition.path: the pattern has no capture 'x'"),
        ({"condition": {"path": "$state.a/{x}.b", "op": "exists"}}, "condition.path: the pattern has no capture 'x'"),
        ({"maxTriggerDepth": 0}, "maxTriggerDepth: "),
        ({"maxTriggerDepth": 33}, "maxTriggerDepth: "),
        ({"maxTriggerDepth": "3"}, "maxTriggerDepth: "),
        ({"maxTriggerDepth": True}, "maxTriggerDepth: "),
        ({"maxTriggerDepth": 3.0}, "maxTriggerDepth: "),
        ({"maxTriggerDepth": None}, "maxTriggerDepth: "),
        ({"inputSchema": {"type": "strin"}}, "inputSchema: at $.type: 'strin'"),
        ({"inputSchema": {"properties": {"a": {"type": 5}}}}, "inputSchema: at $.properties.a.type: "),
        ({"inputSchema": {"pattern": "("}}, "inputSchema: at $.pattern: "),
        ({"inputSchema": {"$schema": "https://example.org/mine"}}, "inputSchema: $schema 'https://example.org/mine'"),
        ({"inputSchema": {"$schema": 7}}, "inputSchema: $schema 7 is not a known dialect"),
        ({"inputSchema": True}, "inputSchema: "),
        ({"inputSchema": {"const": object()}}, "inputSchema.const: "),
        ({"output": {"path": "/tasks/{taskId}/x/{nobody}"}}, "output.path: nothing is called 'nobody'; use one of"),
        ({"output": {"path": "/tasks/{taskId}/{params.nobody}"}}, "output.path: nothing is called 'params.nobody'"),
        ({"output": {"path": "/threads/{threadId}/x"}}, "output.path: segment 1 ('threads') leaves the namespace"),
        ({"output": {"path": "/orders/{taskId}/x"}}, "output.path: segment 1 ('orders') is not a root"),
        ({"output": {"path": "tasks/{taskId}/x"}}, "output.path: it does not begin with '/'"),
        ({"output": {"path": "/tasks/{taskId}"}}, "output.path: "),
        ({"output": {"path": "/tasks/{taskId}/${eventId}"}}, "output.path: segment 3"),
        ({"output": {"path": "/tasks/{taskId}/*"}}, "output.path: segment 3"),
        ({"output": {"path": "/{taskId}/{taskId}/x"}}, "output.path: segment 1"),
        ({"output": {}}, "output.path: Field required"),
        ({"output": {"path": "/tasks/{taskId}/x", "mode": "set"}}, "output.mode: "),
        ({"enabled": True}, "enabled: Extra inputs"),
        ({"version": 2}, "version: Extra inputs"),
        ({"patern": "/tasks/*/x"}, "patern: Extra inputs"),
    ],
)
def test_g4_a_malformed_definition_is_refused_naming_the_clause(fields: dict[str, Any], problem: str) -> None:
    found = problems(changed(**fields))
    assert len(found) == 1
    assert found[0].startswith(problem)


def test_an_output_stays_in_the_namespace_that_the_pattern_fixes() -> None:
    source = changed(pattern="/tasks/T1/requests/*", output={"path": "/tasks/T2/x/{requestId}"})
    assert problems(source) == ("output.path: segment 2 ('T2') leaves the namespace; the pattern has 'T1'",)


def test_g4_every_problem_of_a_definition_is_told() -> None:
    found = problems(
        {
            "name": "a b",
            "pattern": "/tasks/a*/x",
            "condition": {"any": [{"path": "$env.x", "op": "like", "value": 1}, {"not": []}]},
            "action": {"type": "execute_agent"},
            "maxTriggerDepth": 99,
            "extra": 1,
        }
    )
    assert [problem.partition(": ")[0] for problem in found] == [
        "name",
        "pattern",
        "condition.any[0].path",
        "condition.any[0].op",
        "condition.any[1].not",
        "action.agentId",
        "maxTriggerDepth",
        "extra",
    ]


def test_g4_problems_between_the_parts_are_told_together() -> None:
    found = problems(
        changed(
            condition={"path": "$event.params.x", "op": "exists"}, output={"path": "/threads/{taskId}/{requestId}/{y}"}
        )
    )
    assert [problem.partition(": ")[0] for problem in found] == ["condition.path", "output.path", "output.path"]


@pytest.mark.parametrize("source", [None, "vat-intake", 5, [VAT_INTAKE]])
def test_g4_what_is_no_mapping_is_refused(source: Any) -> None:
    assert problems(source)[0].startswith("subscription: ")


@pytest.mark.parametrize("key", ["condition", "inputSchema", "action"])
def test_g4_five_thousand_levels_are_refused_cleanly(key: str) -> None:
    nested: dict[str, Any] = {}
    for _ in range(5_000):
        nested = {"not": nested}
    source = changed(**{key: {"type": "notify", **nested} if key == "action" else nested})
    assert problems(source)[0].startswith(key)
    with pytest.raises(ValidationError) as refused:
        Subscription.model_validate(source)
    assert "nested" in str(refused.value)


def test_a_definition_has_a_largest_size() -> None:
    found = problems(changed(inputSchema={"description": "x" * 600_000}, action={"type": "a", "b": "x" * 600_000}))
    assert found[0].startswith("subscription: it takes")


def test_building_a_model_raises_pydantics_own_error() -> None:
    with pytest.raises(ValidationError, match="wildcard only in part"):
        Subscription(name="x", pattern="/tasks/a*/x", action=ExecuteAgent(agent_id="a"))
    with pytest.raises(ValidationError, match="no capture"):
        Subscription(
            name="x",
            pattern="/tasks/*/x",
            action=ExecuteAgent(agent_id="a"),
            condition={"path": "$event.params.who", "op": "exists"},
        )


def test_a_model_that_is_built_by_itself_knows_no_roots() -> None:
    subscription = Subscription(
        name="x",
        pattern="/orders/{orderId}/x",
        action=ExecuteAgent(agent_id="a"),
        output=Output(path="/orders/{orderId}/y/{params.orderId}/{eventId}"),
    )
    assert Subscription.parse(subscription, roots=("orders",)) == subscription
    assert len(problems(subscription)) == 2


# --- the same content -------------------------------------------------------------------------------------------------


def test_content_is_the_same_whatever_the_order_of_keys() -> None:
    turned = {key: VAT_INTAKE[key] for key in reversed(VAT_INTAKE)}
    assert Subscription.parse(turned).same_definition(Subscription.parse(VAT_INTAKE))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"action": {"type": "a", "n": 1}}, {"action": {"type": "a", "n": 1.0}}),
        ({"action": {"type": "a", "n": 1}}, {"action": {"type": "a", "n": True}}),
        ({"condition": {"not": {"path": "$event.value", "op": "eq", "value": 1}}}, {"condition": None}),
        ({"inputSchema": {"maximum": 1}}, {"inputSchema": {"maximum": 1.0}}),
        ({"inputSchema": {}}, {}),
        ({"maxTriggerDepth": 4}, {}),
        ({"pattern": "/tasks/{taskId}/requests/{requestId}"}, {}),
    ],
)
def test_types_and_every_part_of_the_content_count(one: dict[str, Any], other: dict[str, Any]) -> None:
    mine, theirs = Subscription.parse(changed(**one)), Subscription.parse(changed(**other))
    assert not mine.same_definition(theirs)
    assert mine.same_definition(Subscription.parse(changed(**one)))


def test_a_stored_version_has_the_definition_it_was_published_with() -> None:
    assert stored().same_definition(Subscription.parse(VAT_INTAKE))
    assert stored().disabled_from(9).same_definition(stored(version=2))
    assert not stored().same_definition(Subscription.parse(changed(maxTriggerDepth=4)))


# --- what is stored ---------------------------------------------------------------------------------------------------


def test_the_stored_document() -> None:
    assert stored().to_document() == {
        "_id": "vat-intake@v1",
        **VAT_INTAKE,
        "version": 1,
        "enabled": True,
        "activeRevs": [[5, None]],
        "target": "facade-vat-registration",
        "publishedAt": NOON,
    }


def test_a_document_comes_back_from_mongodb_as_it_was() -> None:
    definition = changed(
        condition={"path": ["$state", "a.b", "$x"], "op": "in", "value": [UUID(int=7), Decimal128("1.10"), NOON, b"x"]},
        action={"type": "notify", "$set": {"a.b": 2**40}},
        inputSchema={"$schema": "https://json-schema.org/draft/2020-12/schema", "properties": {"a.b": {"$ref": "#"}}},
        output={"path": "/tasks/{taskId}/notes/{requestId}"},
    )
    published = stored(definition, contract={"version": 3, "systemPrompt": "…"}).disabled_from(8).enabled_from(9)
    raw = bson.encode(published.to_document(), codec_options=values.CODEC_OPTIONS)
    read = StoredSubscription.from_document(bson.decode(raw, codec_options=values.CODEC_OPTIONS))
    assert read == published
    assert values.identical(read.to_document(), published.to_document())
    assert read.contract == {"version": 3, "systemPrompt": "…"}


def test_f6_the_time_of_publication_is_what_will_be_read() -> None:
    assert stored(published_at=NOON.replace(microsecond=1_999)).published_at == NOON.replace(microsecond=1_000)


def test_fields_of_later_releases_are_passed_over() -> None:
    assert StoredSubscription.from_document({**stored().to_document(), "since": "v9"}) == stored()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"pattern": "/tasks/*"}, "pattern: "),
        ({"condition": {"any": []}}, "condition.any: "),
        ({"version": 0}, "version: "),
        ({"version": 1.5}, "version: "),
        ({"enabled": "yes"}, "enabled: "),
        ({"target": "a/b"}, "target: "),
        ({"target": None}, "target: "),
        ({"activeRevs": None}, "activeRevs: "),
        ({"activeRevs": [[1]]}, "activeRevs[0][1]: "),
        ({"activeRevs": [["1", None]]}, "activeRevs[0][0]: "),
        ({"activeRevs": [[1, None], [4, None]]}, "activeRevs: only the last interval may be open"),
        ({"activeRevs": [[5, 3]]}, "activeRevs: revisions must rise"),
        ({"activeRevs": [[3, 3]]}, "activeRevs: revisions must rise"),
        ({"activeRevs": [[3, 5], [4, None]]}, "activeRevs: revisions must rise"),
        ({"publishedAt": datetime(2026, 5, 1)}, "publishedAt: "),  # noqa: DTZ001
    ],
)
def test_a_document_broken_by_hand_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidSubscriptionError) as refused:
        StoredSubscription.from_document({**stored().to_document(), **fields})
    assert refused.value.name == "vat-intake"
    assert refused.value.problems[0].startswith(problem)


def test_stored_subscriptions_can_stand_in_a_trie() -> None:
    trie: PatternTrie[StoredSubscription] = PatternTrie()
    first, second = stored(), stored(version=2)
    for subscription in (first, second):
        trie.insert(subscription.parsed_pattern, subscription)
    trie.remove(first.parsed_pattern, StoredSubscription.from_document(first.to_document()))
    assert trie.candidates(("tasks", "T", "requests", "R")) == [second]


# --- in force ---------------------------------------------------------------------------------------------------------


def test_it_is_in_force_from_its_publication_until_it_is_disabled() -> None:
    published = stored(revision=5)
    disabled = published.disabled_from(8)
    enabled = disabled.enabled_from(11)
    assert [revision for revision in range(14) if published.in_force(revision)] == [5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert [revision for revision in range(14) if disabled.in_force(revision)] == [5, 6, 7]
    assert [revision for revision in range(14) if enabled.in_force(revision)] == [5, 6, 7, 11, 12, 13]
    assert (published.enabled, disabled.enabled, enabled.enabled) == (True, False, True)


def test_enabling_and_disabling_twice_is_once() -> None:
    assert stored(revision=5).enabled_from(7) == stored(revision=5)
    assert stored(revision=5).disabled_from(7).disabled_from(9) == stored(revision=5).disabled_from(7)


def test_an_edit_by_hand_of_enabled_is_brought_into_force() -> None:
    switched_off = StoredSubscription.from_document({**stored(revision=5).to_document(), "enabled": False})
    assert switched_off.disabled_from(7) == stored(revision=5).disabled_from(7)
    switched_on = StoredSubscription.from_document(
        {**stored(revision=5).disabled_from(7).to_document(), "enabled": True}
    )
    assert switched_on.enabled_from(9) == stored(revision=5).disabled_from(7).enabled_from(9)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(0, 60))
def test_every_history_of_changes_is_stored_and_read(gaps: list[int], revision: int) -> None:
    history, at = stored(revision=1), 1
    switched = {1: True}
    for index, gap in enumerate(gaps):
        at += gap
        switched[at] = bool(index % 2)
        history = history.enabled_from(at) if switched[at] else history.disabled_from(at)
    read = StoredSubscription.from_document(history.to_document())
    last = max((when for when in switched if when <= revision), default=None)
    assert read == history
    assert read.in_force(revision) is (last is not None and switched[last])
