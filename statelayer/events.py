"""The fact (``Event``), its projection (``Entry``), and the wish to write one (``Write``)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime  # noqa: TC003 - pydantic reads the annotations
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self, get_args

from bson.int64 import Int64
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from statelayer import paths, values
from statelayer.errors import (
    InvalidActorError,
    InvalidInputError,
    InvalidValueError,
    InvalidWriteError,
    ReservedPathError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Op = Literal["set", "merge", "delete"]
Source = Literal["api", "workflow_node", "task_node", "subscription", "agent_callback", "system"]

SCHEMA_VERSION = 1
MAX_ACTOR_BYTES = 320
MAX_KEY_BYTES = 512

_OPS: tuple[Op, ...] = get_args(Op)
_SOURCES: tuple[Source, ...] = get_args(Source)
_ACTOR = re.compile(r"[a-z][a-z0-9_-]*:.+")


class StoredModel(BaseModel):
    """A document as a model: snake_case in Python, camelCase in MongoDB and on every wire; both are accepted."""

    model_config = ConfigDict(
        frozen=True, alias_generator=to_camel, populate_by_name=True, arbitrary_types_allowed=True, extra="ignore"
    )


class Event(StoredModel):
    """A fact: what was written, where, by whom, caused by what. Immutable.

    ``value`` is the full value after the write (``None`` for a delete: ``op`` tells it from null); ``patch`` is what
    a merge was given. ``root_event_id`` is the event's own id on a root. ``committed_at`` is the writer's clock just
    before the commit: for people, it orders nothing.
    """

    id: str = Field(alias="_id")
    namespace: str
    seq: int
    path: str
    version: int
    op: Op
    value: Any = None
    patch: dict[str, Any] | None = None
    actor: str
    source: Source
    trigger_depth: int = 0
    caused_by_event_id: str | None = None
    root_event_id: str = Field(default_factory=lambda data: data["id"])
    batch_id: str
    batch_size: int | None = None
    idempotency_key: str | None = None
    subscriptions_rev: int = 0
    partition: int = 0
    committed_at: datetime

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Read a document of the ``events`` collection."""
        return cls.model_validate(document)


class Entry(StoredModel):
    """The current value at a path: a projection of its events, rebuilt by ``replay``."""

    path: str = Field(alias="_id")
    namespace: str
    value: Any = None
    version: int
    seq: int
    event_id: str
    actor: str
    deleted: bool = False
    updated_at: datetime

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Read a document of the ``entries`` collection."""
        return cls.model_validate(document)

    @staticmethod
    def document_of(event: Event) -> dict[str, Any]:
        """Return the ``entries`` document that this event leaves at its path."""
        document: dict[str, Any] = {"_id": event.path, "namespace": event.namespace}
        deleted = event.op == "delete"
        if not deleted:
            document["value"] = event.value
        document |= {
            "version": Int64(event.version),
            "seq": Int64(event.seq),
            "eventId": event.id,
            "actor": event.actor,
            "deleted": deleted,
            "updatedAt": event.committed_at,
        }
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One write of an append. It is checked when it is handed to the layer, before anything is written.

    ``value`` is the new value for ``set``, the fields to replace for ``merge``, and absent for ``delete``.
    ``expected_version`` is the path's version before this write: 0 means "never written".
    """

    path: str
    value: Any = None
    actor: str | None = None
    op: Op = "set"
    source: Source | None = None
    caused_by: str | None = None
    expected_version: int | None = None


class CheckedWrite(NamedTuple):
    """A write that broke no rule: parsed, canonical, owned by nobody else."""

    path: paths.Path
    op: Op
    value: Any
    actor: str
    source: Source
    caused_by: str | None
    expected_version: int | None
    bytes: int


def check_write(
    write: Write,
    *,
    roots: Sequence[str],
    limits: values.Limits,
    actor: str | None = None,
    source: Source = "api",
    owner: bool = False,
) -> CheckedWrite:
    """Return the write in canonical form, or raise the ``Invalid…Error`` that says what is wrong with it.

    ``actor`` and ``source`` sign a write that does not say its own. Only an ``owner`` may write the paths that
    executors and the layer keep for themselves.
    """
    path = paths.parse(write.path, roots)
    if not owner and paths.reserved(path):
        raise ReservedPathError(path.text, "only its owner writes it", "Write a path of your own and point to it.")
    if write.op not in _OPS:
        raise InvalidWriteError(f"Unknown op {write.op!r} at {path}; use one of {', '.join(_OPS)}.")
    source = source if write.source is None else write.source
    if source not in _SOURCES:
        raise InvalidWriteError(f"Unknown source {source!r} at {path}; use one of {', '.join(_SOURCES)}.")
    value, size = _checked_value(write, limits)
    return CheckedWrite(
        path=path,
        op=write.op,
        value=value,
        actor=check_actor(actor if write.actor is None else write.actor),
        source=source,
        caused_by=_checked_cause(write.caused_by),
        expected_version=_checked_version(write),
        bytes=size,
    )


def check_actor(actor: object) -> str:
    """Return the actor if it is ``kind:id``, else raise ``InvalidActorError``."""
    if not isinstance(actor, str):
        raise InvalidActorError(actor, "an actor is required" if actor is None else "an actor is text")
    _refuse_bad_actor(actor)
    return actor


@lru_cache(maxsize=1024)
def _refuse_bad_actor(actor: str) -> None:
    if not _ACTOR.fullmatch(actor) or not actor.isprintable() or not actor.partition(":")[2].strip():
        raise InvalidActorError(actor, "it is not a lower-case kind, a colon and printable text")
    if len(actor.encode()) > MAX_ACTOR_BYTES:
        raise InvalidActorError(actor[:40] + "…", f"it is longer than {MAX_ACTOR_BYTES} bytes")


def check_id(kind: str, id: object) -> str:
    """Return what names one thing of a kind if it is text, else raise ``InvalidInputError``.

    Anything else would reach the server as a query of its own.
    """
    if not isinstance(id, str) or not id:
        raise InvalidInputError(f"What names one {kind} is text, not {id!r:.80}.")
    return id


def check_key(key: object) -> str | None:
    """Return the idempotency key if it can serve as one, else raise ``InvalidWriteError``."""
    if key is None:
        return None
    if not isinstance(key, str) or not key or not key.isprintable() or len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidWriteError(f"An idempotency key is 1 to {MAX_KEY_BYTES} bytes of printable text, not {key!r:.80}.")
    return key


def _checked_value(write: Write, limits: values.Limits) -> tuple[Any, int]:
    if write.op == "delete" and write.value is not None:
        raise InvalidWriteError(f"A delete carries no value; {write.path} was given one.")
    value, size = values.measured(write.value, limits=limits)
    if write.op == "merge" and not isinstance(value, dict):
        raise InvalidValueError("value", f"a merge takes an object of fields, not {type(value).__name__}")
    return value, size


def _checked_cause(caused_by: object) -> str | None:
    if caused_by is not None and not isinstance(caused_by, str):
        raise InvalidWriteError(f"caused_by is the id of an event, not {caused_by!r:.80}; pass event.id.")
    return caused_by


def _checked_version(write: Write) -> int | None:
    version = write.expected_version
    if version is None:
        return None
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise InvalidWriteError(f"expected_version of {write.path} is a whole number from 0 on, not {version!r:.80}.")
    return version
