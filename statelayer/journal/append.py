"""What a caller wants appended, and what it is bound to."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from statelayer.errors import InvalidWriteError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from statelayer.clock import Clock
    from statelayer.drivers import Document
    from statelayer.drivers.database import Operation
    from statelayer.errors import StateLayerError
    from statelayer.events import CheckedWrite, Event, Source
    from statelayer.settings import Settings


@dataclass(frozen=True, slots=True)
class Origin:
    """What an execution is bound to: the event that woke it, and how it signs what it writes."""

    event_id: str
    root_event_id: str
    depth: int
    source: Source
    actor: str


_ORIGIN: ContextVar[tuple[str, Origin] | None] = ContextVar("statelayer_origin", default=None)


def current_origin(log: str) -> Origin | None:
    """Return the origin of the execution that runs here, for code that only has the service's ``layer``.

    An execution of another log is none: its event could not be named as a cause in this one.
    """
    bound = _ORIGIN.get()
    return bound[1] if bound is not None and bound[0] == log else None


@contextmanager
def bound_origin(origin: Origin, log: str) -> Iterator[None]:
    """Bind what is written to a log in this context to an execution."""
    token = _ORIGIN.set((log, origin))
    try:
        yield
    finally:
        _ORIGIN.reset(token)


class Companion(Protocol):
    """A document of a room above that must change in the same transaction, or the append must fail.

    The journal reads the document, lets ``judge`` decide, and sends ``operation``, which must touch exactly one
    document under the same condition.
    """

    @property
    def collection(self) -> str:
        """The collection's name without the prefix."""

    @property
    def id(self) -> Any:
        """The document's ``_id``."""

    def judge(self, document: Document | None) -> StateLayerError | None:
        """Say why the append must be refused, or ``None``."""

    def operation(self, events: Sequence[Event]) -> Operation:
        """Return the write that goes with these events."""


@dataclass(slots=True, eq=False)
class Append:
    """One atomic append: its writes with the identities they will have, captured when it was asked for.

    The ids stay the same however often it is tried, so that a commit whose outcome was lost can be recognised;
    ``in_doubt`` says that there was one.
    """

    writes: Sequence[CheckedWrite]
    event_ids: Sequence[str]
    key: str | None = None
    origin: Origin | None = None
    companions: Sequence[Companion] = ()
    in_doubt: bool = False
    namespaces: tuple[str, ...] = field(init=False)
    bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.namespaces = tuple(dict.fromkeys(write.path.namespace for write in self.writes))
        self.bytes = sum(write.bytes for write in self.writes)

    @classmethod
    def of(
        cls,
        writes: Sequence[CheckedWrite],
        *,
        settings: Settings,
        clock: Clock,
        key: str | None,
        origin: Origin | None,
        companions: Sequence[Companion] = (),
    ) -> Append:
        """Build an append, or raise ``InvalidWriteError`` when it is empty or too large to be one."""
        append = cls(writes, [clock.new_id() for _ in writes], key, origin, companions)
        if not writes:
            raise InvalidWriteError("An append needs at least one write.")
        if len(writes) > settings.max_append_writes:
            raise InvalidWriteError(
                f"An append holds at most {settings.max_append_writes} writes, not {len(writes)}; split it."
            )
        if append.bytes > settings.max_append_bytes:
            raise InvalidWriteError(
                f"An append holds at most {settings.max_append_bytes} bytes of values, not {append.bytes}; split it."
            )
        return append
