"""The database that a command works on: the user's own, or an embedded one."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from statelayer import StateLayer, embedded
from statelayer.cli.exits import MisuseError
from statelayer.errors import InvalidSettingsError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SELECTION_TIMEOUT_MS = 8000
"""How long a server may take to answer for the first time; the driver's 30 seconds are long for somebody who looks."""

_FORBIDDEN = frozenset('/\\. "$*<>:|?\0')
_MAX_NAME_BYTES = 63


@asynccontextmanager
async def opened(uri: str | None, database: str) -> AsyncIterator[StateLayer]:
    """Open a layer on a server, by default on an embedded one that is stopped afterwards."""
    if uri is not None:
        async with _connect(uri, database) as layer:
            yield layer
    else:
        async with embedded.replica_set(database=database) as handle, StateLayer(handle) as layer:
            yield layer


def check_name(name: str) -> str:
    """Return a database's name, or raise ``ValueError`` when the server would not take it.

    See https://www.mongodb.com/docs/manual/reference/limits/#naming-restrictions.
    """
    if not name or len(name.encode()) > _MAX_NAME_BYTES or not _FORBIDDEN.isdisjoint(name):
        raise ValueError(
            f"a database's name has 1 to {_MAX_NAME_BYTES} bytes and none of / \\ . \" $ * < > : | ? or space"
        )
    return name


def _connect(uri: str, database: str) -> StateLayer:
    try:
        return StateLayer.from_uri(uri, database, serverSelectionTimeoutMS=SELECTION_TIMEOUT_MS)
    except InvalidSettingsError as error:
        raise MisuseError(f"--uri: {error}") from error
