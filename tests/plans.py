"""Which index the server really uses, and how much it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True)
class Plan:
    """How a command was executed.

    ``index`` is the name of the index it read (``_id_`` also for reads by ``_id``), or ``COLLSCAN``; ``stages`` are
    all stages of the winning plan, the last one first.
    """

    index: str
    stages: tuple[str, ...]
    keys_examined: int
    docs_examined: int
    returned: int

    @property
    def sorts_in_memory(self) -> bool:
        return "SORT" in self.stages


async def winning_index(
    database: Any, collection: str, filter: Mapping[str, Any], sort: Mapping[str, int] | None = None
) -> str:
    """Return the name of the index that this read uses, or ``COLLSCAN``. ``collection`` is the full name."""
    return (await plan_of_find(database, collection, filter, sort)).index


async def plan_of_find(
    database: Any, collection: str, filter: Mapping[str, Any], sort: Mapping[str, int] | None = None, limit: int = 0
) -> Plan:
    """Execute the read, and say how it was done."""
    command: dict[str, Any] = {"find": collection, "filter": dict(filter)}
    return await plan_of(
        database, command | ({"sort": dict(sort)} if sort else {}) | ({"limit": limit} if limit else {})
    )


async def plan_of_update(database: Any, collection: str, filter: Mapping[str, Any], update: Any) -> Plan:
    """Say how an update of one document is done. Explaining it changes nothing."""
    return await plan_of(database, {"update": collection, "updates": [{"q": dict(filter), "u": update}]})


async def plan_of_aggregate(database: Any, collection: str, pipeline: Sequence[Mapping[str, Any]]) -> Plan:
    """Execute the pipeline, and say how its first read was done."""
    return await plan_of(database, {"aggregate": collection, "pipeline": list(pipeline), "cursor": {}})


async def plan_of(database: Any, command: Mapping[str, Any]) -> Plan:
    """Explain any command that the server can explain. ``database`` is ours or either driver's."""
    reply = await database.command({"explain": dict(command), "verbosity": "executionStats"})
    stages = list(_stages(next(_values(reply, "winningPlan"))))
    statistics = next(_values(reply, "executionStats"))
    return Plan(
        index=next((name for stage in stages if (name := _index(stage))), "COLLSCAN"),
        stages=tuple(stage["stage"] for stage in stages),
        keys_examined=statistics["totalKeysExamined"],
        docs_examined=statistics["totalDocsExamined"],
        returned=statistics["nReturned"],
    )


def _index(stage: Mapping[str, Any]) -> str | None:
    return "_id_" if stage["stage"] == "IDHACK" else stage.get("indexName")


def _stages(plan: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(plan, dict):
        if "stage" in plan:
            yield plan
        for value in plan.values():
            yield from _stages(value)
    elif isinstance(plan, list):
        for value in plan:
            yield from _stages(value)


def _values(reply: Any, key: str) -> Iterator[Any]:
    if isinstance(reply, dict):
        if key in reply:
            yield reply[key]
        for value in reply.values():
            yield from _values(value, key)
    elif isinstance(reply, list):
        for value in reply:
            yield from _values(value, key)
