"""Clients of the library's own, made from a connection string that nothing ever repeats.

The driver quotes parts of a malformed string in its errors and warnings, and takes the rest of an unescaped password
for a host name, which then stands in every message about that host. So the string is checked here, and the driver's
own words are kept out of the refusal, of its cause and of its context.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from pymongo import AsyncMongoClient
from pymongo.errors import PyMongoError

from statelayer.errors import InvalidSettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pymongo.asynchronous.database import AsyncDatabase

_HOW_TO_WRITE_ONE = (
    "It begins with 'mongodb://' or 'mongodb+srv://' and names a host; in its user name and password the characters "
    ": / ? # [ ] @ % are written percent-encoded."
)


def connect(uri: str, database: str, options: Mapping[str, Any]) -> AsyncDatabase[dict[str, Any]]:
    """Return a handle on a database with a client of its own, which connects when it is first used.

    Raises ``InvalidSettingsError`` for a string, an option or a name that the driver does not take.
    """
    if not _is_escaped(uri) or not isinstance(_client(uri, {}), AsyncMongoClient):
        raise InvalidSettingsError(f"The connection string cannot be read. {_HOW_TO_WRITE_ONE}")
    client = _client(uri, options)
    if not isinstance(client, AsyncMongoClient):
        raise InvalidSettingsError(f"The driver refuses one of the options {', '.join(options)} ({client}).")
    try:
        return client[database]
    except (PyMongoError, TypeError) as error:
        raise InvalidSettingsError(f"A database cannot be called {database!r:.80}: {error}.") from error


def _is_escaped(uri: object) -> bool:
    """Say whether at most one ``@`` stands in the string, between credentials and hosts."""
    if not isinstance(uri, str):
        return False
    authority, _, rest = uri.partition("://")[2].partition("/")
    return authority.count("@") <= 1 and "@" not in rest.partition("?")[0]


def _client(uri: str, options: Mapping[str, Any]) -> AsyncMongoClient[dict[str, Any]] | str:
    """Return the client, or the name of the error that the driver raised."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AsyncMongoClient(uri, **options)
    except (PyMongoError, ValueError, TypeError) as error:
        return type(error).__name__
