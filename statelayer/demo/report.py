"""What a run of the demo found, as plain data: no I/O, no layout."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from pydantic.alias_generators import to_camel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from statelayer.demo.requests import BrokenLine


@dataclass(frozen=True, slots=True)
class Goods:
    """A request that was written, and the event that wrote it."""

    path: str
    event_id: str
    description: str

    @property
    def name(self) -> str:
        """Its task and its own id: ``T-2041/S-001``."""
        _, _, task, _, request = self.path.split("/")
        return f"{task}/{request}"


@dataclass(frozen=True, slots=True)
class Classified:
    """Goods whose heading was found. ``score`` is 0 to 100."""

    goods: Goods
    code: str
    heading: str
    score: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Goods that could not be classified: the execution's reason, and the error's own sentence."""

    goods: Goods
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """An error fact that is about no request: where it stands, the execution's reason, and the error's sentence."""

    path: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A request that the library refused to write."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Woken:
    """How many executions of a target ended in a state. A skip's kind is ``subscription``, its target the name."""

    kind: str
    target: str
    state: str
    reason: str | None
    count: int


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An event whose outcome never came."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Hop:
    """One write of a chain; ``caused_by`` is the number of another one."""

    number: int
    path: str
    source: str
    depth: int
    caused_by: int | None


@dataclass(frozen=True, slots=True)
class Stop:
    """Where a chain stopped although a subscription matched."""

    hop: int
    subscription: str
    reason: str


@dataclass(frozen=True, slots=True)
class Chain:
    """The stages of one task, in the order of the log."""

    task: str
    hops: Sequence[Hop]
    stops: Sequence[Stop]


@dataclass(frozen=True, slots=True)
class Fact:
    """An event in a tree, with what it caused."""

    path: str
    source: str
    actor: str
    depth: int
    event_id: str
    caused_by_event_id: str | None
    children: Sequence[Fact]


@dataclass(frozen=True, slots=True)
class Tree:
    """The causation tree of one request of a kind: ``classified``, ``refused`` or ``chain``."""

    kind: str
    root: Fact


@dataclass(frozen=True, slots=True)
class Verified:
    """What ``verify`` said of a namespace."""

    namespace: str
    ok: bool
    events: int
    entries: int
    problems: Sequence[str]


@dataclass(frozen=True, slots=True)
class Report:
    """A run, from the first line of the file to ``verify``. ``events`` are those that this run wrote or caused."""

    source: str
    tasks: int
    requests: int
    drafts: Sequence[Goods]
    broken: Sequence[BrokenLine]
    rejected: Sequence[Rejected]
    woken: Sequence[Woken]
    classified: Sequence[Classified]
    refused: Sequence[Refused]
    failed: Sequence[Failed]
    unfinished: Sequence[Unfinished]
    chain: Chain | None
    trees: Sequence[Tree]
    verified: Sequence[Verified]
    events: int
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether everything that was woken ended and every namespace is what its log says."""
        return not self.unfinished and all(namespace.ok for namespace in self.verified)

    @property
    def executions(self) -> int:
        """How many executions were recorded; what was only skipped is none."""
        return sum(woken.count for woken in self.woken if woken.state != "skipped")

    def document(self) -> dict[str, Any]:
        """Return the report as JSON-like data, named in camelCase."""
        return {"ok": self.ok, "executions": self.executions, **_wire(self)}


def _wire(value: Any) -> Any:
    if is_dataclass(value):
        return {to_camel(field.name): _wire(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [_wire(item) for item in value]
    return value
