"""Which event caused which: the tree of a task, or the one that an event belongs to.

A tree holds the events of one namespace. A cause in another one is named and never read: a task does not show what
happened in its neighbour.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import ValidationError

from statelayer import mongo_indexes as names
from statelayer import paths
from statelayer.errors import IntegrityError, InvalidInputError, NotFoundError
from statelayer.events import Event, check_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Document
    from statelayer.settings import Settings

DEEPEST_INDENT = 32
"""Levels that are indented when a tree is printed; what lies deeper stands below each other."""


@dataclass(slots=True, eq=False)
class CausationNode:
    """An event and what it caused, in the order of the log."""

    event: Event
    children: list[CausationNode] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"<CausationNode {self.event.id} {self.event.path}, {len(self.children)} children>"


@dataclass(slots=True, eq=False)
class CausationTree:
    """Events under their causes. Iterating goes depth first, in the order of the log; ``str`` prints it.

    ``roots`` are the events without a cause, and those whose cause is not in the answer: ``dangling_caused_by`` names
    these causes.
    """

    roots: list[CausationNode]
    dangling_caused_by: list[str]
    _nodes: dict[str, CausationNode]

    @classmethod
    def of(cls, events: Iterable[Event]) -> CausationTree:
        """Put events, in the order of their log, under their causes. Only an earlier event can be a cause."""
        roots: list[CausationNode] = []
        nodes: dict[str, CausationNode] = {}
        dangling: dict[str, None] = {}
        for event in events:
            node = CausationNode(event)
            cause = event.caused_by_event_id
            if cause is not None and cause in nodes:
                nodes[cause].children.append(node)
            else:
                roots.append(node)
            if cause is not None and cause not in nodes:
                dangling[cause] = None
            nodes[event.id] = node
        return cls(roots, list(dangling), nodes)

    @property
    def links_resolved(self) -> bool:
        """Whether every cause is in the answer."""
        return not self.dangling_caused_by

    def find(self, event_id: str) -> CausationNode | None:
        """Return the node of an event, or ``None`` when it is not in the answer."""
        return self._nodes.get(event_id)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[CausationNode]:
        waiting = self.roots[::-1]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"<CausationTree of {len(self)} events, {len(self.roots)} roots>"

    def render(self) -> str:
        """Return the tree as text, one line for each event: path, source, actor, depth and id."""
        lines: list[str] = []
        waiting = [(root, "", "") for root in reversed(self.roots)]
        while waiting:
            node, branch, indent = waiting.pop()
            lines.append(branch + _line(node.event, is_root=not branch))
            waiting.extend(reversed(_branches(node.children, indent)))
        return "\n".join(lines)


def _line(event: Event, *, is_root: bool) -> str:
    line = f"{event.path}  {event.source}  {event.actor}  depth {event.trigger_depth}  {event.id}"
    if is_root and event.caused_by_event_id is not None:
        line += f"  (caused by {event.caused_by_event_id}, outside this answer)"
    return line


def _branches(children: Sequence[CausationNode], indent: str) -> list[tuple[CausationNode, str, str]]:
    """Return each child with what stands before its own line and before those of its children."""
    deepest = len(indent) >= 3 * DEEPEST_INDENT
    last = len(children) - 1
    return [
        (child, indent + ("├─ " if n < last else "└─ "), indent if deepest else indent + ("│  " if n < last else "   "))
        for n, child in enumerate(children)
    ]


class Causation:
    """Reads causation trees."""

    def __init__(self, database: Database, settings: Settings, clock: Clock) -> None:  # noqa: ARG002 - as every part
        self._settings = settings
        self._events = database.collection(names.EVENTS)

    async def trace(self, event_id: str | None = None, task_id: str | None = None) -> CausationTree:
        """Return the tree that an event belongs to inside its namespace, or all trees of a task.

        Raises ``InvalidInputError`` unless exactly one is given, ``InvalidPathError`` for a task id that is no
        segment, ``NotFoundError`` for an unknown event.
        """
        if (event_id is None) == (task_id is None):
            raise InvalidInputError("Trace the causation of an event_id or of a task_id: pass exactly one of them.")
        if task_id is not None:
            documents = await self._of_namespace(self._namespace(task_id))
        else:
            documents = await self._of_event(event_id)
        return CausationTree.of(map(_event, documents))

    def _namespace(self, task_id: str) -> str:
        return paths.parse_namespace(f"/tasks/{paths.check_segment(task_id)}", self._settings.roots)

    async def _of_namespace(self, namespace: str) -> list[Document]:
        documents: list[Document] = []
        page, after = await self._page(namespace, 0), 0
        while page:
            documents += page
            after = page[-1]["seq"]
            page = await self._page(namespace, after)
        return documents

    async def _page(self, namespace: str, after: int) -> list[Document]:
        wanted = {"namespace": namespace, "seq": {"$gt": after}}
        return await self._events.find(wanted, sort=[("seq", 1)], limit=self._settings.page_size)

    async def _of_event(self, event_id: object) -> list[Document]:
        event = await self._events.find_one(
            {"_id": check_id("event", event_id)}, projection={"namespace": 1, "rootEventId": 1}
        )
        if event is None:
            raise NotFoundError("event", str(event_id))
        namespace, root = event["namespace"], event.get("rootEventId", event_id)
        wanted = [{"_id": root, "namespace": namespace}, {"namespace": namespace, "rootEventId": root}]
        return await self._events.find({"$or": wanted}, sort=[("seq", 1)])


def _event(document: Document) -> Event:
    try:
        return Event.from_document(document)
    except ValidationError as error:
        raise IntegrityError(
            f"The event {document['_id']} (seq {document.get('seq')!r}) cannot be read. Run `verify` on its namespace.",
            namespace=str(document.get("namespace")),
            path=document.get("path"),
        ) from error
