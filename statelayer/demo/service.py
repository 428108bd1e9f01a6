"""A customs desk as a service would write it: what wakes whom, an agent, and a chain of workflows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statelayer.demo.classifier import HeadingTable

if TYPE_CHECKING:
    from statelayer import StateLayer
    from statelayer.executors import Run

AGENT = "facade-hs-code"

SUBSCRIPTIONS: list[dict[str, Any]] = [
    {
        "name": "classify-confirmed-requests",
        "pattern": "/tasks/*/requests/*",
        "condition": {
            "all": [
                {"path": "$event.op", "op": "eq", "value": "set"},
                {"path": "$event.value.status", "op": "eq", "value": "confirmed"},
            ]
        },
        "action": {"type": "execute_agent", "agentId": AGENT},
        "inputSchema": {
            "type": "object",
            "required": ["description"],
            "properties": {"description": {"type": "string", "minLength": 1}},
        },
    },
    {
        "name": "review-submitted-tasks",
        "pattern": "/tasks/*/status",
        "condition": {"path": "$event.value", "op": "eq", "value": "submitted"},
        "action": {"type": "execute_workflow", "workflowId": "review"},
    },
    {
        "name": "settle-reviewed-tasks",
        "pattern": "/tasks/*/stage/reviewed",
        "action": {"type": "execute_workflow", "workflowId": "settle"},
    },
    {
        "name": "finalize-settled-tasks",
        "pattern": "/tasks/*/stage/settled",
        "action": {"type": "execute_workflow", "workflowId": "finalize"},
    },
    {
        "name": "archive-finalized-tasks",
        "pattern": "/tasks/*/stage/finalized",
        "action": {"type": "execute_workflow", "workflowId": "archive"},
    },
]
"""The last one matches and never fires: what finalizes a task is written at the limit of the trigger depth."""


def register(layer: StateLayer) -> None:
    """Teach a layer what its subscriptions ask for."""
    table = HeadingTable.load()

    @layer.agent(AGENT)
    async def classify(run: Run) -> dict[str, Any]:
        found = table.classify(run.input["description"])
        return {"code": found.code, "heading": found.heading, "score": found.score}

    @layer.workflow("review")
    async def review(run: Run) -> None:
        requests = await run.layer.entries(f"{run.event.namespace}/requests")
        confirmed = [entry for entry in requests if entry.value["status"] == "confirmed"]
        await reach(run, "reviewed", {"requests": len(requests), "confirmed": len(confirmed)})

    @layer.workflow("settle")
    async def settle(run: Run) -> None:
        requests = await run.layer.entries(f"{run.event.namespace}/requests")
        total: dict[str, float] = {}
        for entry in requests:
            if entry.value["status"] == "confirmed":
                total[entry.value["currency"]] = total.get(entry.value["currency"], 0) + entry.value["value"]
        await reach(run, "settled", {"total": {currency: round(amount, 2) for currency, amount in total.items()}})

    @layer.workflow("finalize")
    async def finalize(run: Run) -> None:
        await reach(run, "finalized", run.input)

    @layer.workflow("archive")
    async def archive(run: Run) -> None:
        await reach(run, "archived", run.input)


async def reach(run: Run, stage: str, value: Any) -> None:
    """Write the next stage of the task that the run is about."""
    await run.layer.set(f"{run.event.namespace}/stage/{stage}", value, idempotency_key=f"{run.execution.id}:{stage}")
