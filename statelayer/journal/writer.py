"""The four ways to write, for whatever can append."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from statelayer.events import Write

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from statelayer.events import Event, Source


class Writer(ABC):
    """Offers ``set``, ``merge``, ``delete`` and ``append`` over one method that appends.

    All four raise an ``Invalid…Error`` for what breaks a rule, ``VersionConflictError``, ``IdempotencyConflictError``,
    ``CausationNotFoundError``, ``ContentionError`` or ``OutcomeUnknownError``; then nothing was written (the last one
    says that it is not known).

    ``actor`` says who did it (``kind:id``); inside an execution it is by default the executor. ``source`` says by which
    way, by default from the context. ``expected_version`` is the path's version before the write, 0 for "never
    written". The same ``idempotency_key`` with the same content returns the first event.
    """

    @abstractmethod
    async def append(self, writes: Sequence[Write], *, idempotency_key: str | None = None) -> list[Event]:
        """Append the writes as one atomic batch, over one or more namespaces; return their events in order."""

    async def set(
        self,
        path: str,
        value: Any,
        *,
        actor: str | None = None,
        source: Source | None = None,
        caused_by: str | None = None,
        expected_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> Event:
        """Replace the value at a path."""
        write = Write(
            path=path,
            value=value,
            actor=actor,
            source=source,
            caused_by=caused_by,
            expected_version=expected_version,
        )
        [event] = await self.append([write], idempotency_key=idempotency_key)
        return event

    async def merge(
        self,
        path: str,
        fields: Mapping[str, Any],
        *,
        actor: str | None = None,
        source: Source | None = None,
        caused_by: str | None = None,
        expected_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> Event:
        """Replace the given fields of the object at a path, as ``dict.update`` does; null is a value.

        On a path that holds no object it behaves as ``set``.
        """
        write = Write(
            path=path,
            value=fields,
            op="merge",
            actor=actor,
            source=source,
            caused_by=caused_by,
            expected_version=expected_version,
        )
        [event] = await self.append([write], idempotency_key=idempotency_key)
        return event

    async def delete(
        self,
        path: str,
        *,
        actor: str | None = None,
        source: Source | None = None,
        caused_by: str | None = None,
        expected_version: int | None = None,
        idempotency_key: str | None = None,
    ) -> Event:
        """Delete what is at a path; its versions go on. ``NotFoundError`` when nothing is there."""
        write = Write(
            path=path,
            op="delete",
            actor=actor,
            source=source,
            caused_by=caused_by,
            expected_version=expected_version,
        )
        [event] = await self.append([write], idempotency_key=idempotency_key)
        return event
