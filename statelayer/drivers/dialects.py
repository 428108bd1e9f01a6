"""Where PyMongo Async and Motor differ, and nothing else.

The driver is told apart by ``isinstance``: both answer ``hasattr`` for any name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from motor.motor_asyncio import AsyncIOMotorClient, AsyncIOMotorDatabase
from pymongo import AsyncMongoClient
from pymongo.asynchronous.database import AsyncDatabase

from statelayer.errors import InvalidSettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Dialect(Protocol):
    """The calls that one driver awaits and the other does not."""

    async def start_session(self, client: Any) -> Any: ...
    async def start_transaction(self, session: Any, **options: Any) -> None: ...
    async def aggregate(self, collection: Any, pipeline: Sequence[Mapping[str, Any]], **options: Any) -> Any: ...
    async def list_indexes(self, collection: Any) -> list[dict[str, Any]]: ...
    async def close(self, client: Any) -> None: ...


class PyMongoDialect:
    """PyMongo's own asynchronous API."""

    async def start_session(self, client: Any) -> Any:
        return client.start_session(causal_consistency=False)

    async def start_transaction(self, session: Any, **options: Any) -> None:
        await session.start_transaction(**options)

    async def aggregate(self, collection: Any, pipeline: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        return await collection.aggregate(pipeline, **options)

    async def list_indexes(self, collection: Any) -> list[dict[str, Any]]:
        return [dict(index) async for index in await collection.list_indexes()]

    async def close(self, client: Any) -> None:
        await client.close()


class MotorDialect:
    """Motor, which runs plain PyMongo in threads."""

    async def start_session(self, client: Any) -> Any:
        return await client.start_session(causal_consistency=False)

    async def start_transaction(self, session: Any, **options: Any) -> None:
        session.start_transaction(**options)

    async def aggregate(self, collection: Any, pipeline: Sequence[Mapping[str, Any]], **options: Any) -> Any:
        return collection.aggregate(pipeline, **options)

    async def list_indexes(self, collection: Any) -> list[dict[str, Any]]:
        return [dict(index) async for index in collection.list_indexes()]

    async def close(self, client: Any) -> None:
        client.close()


def dialect_of(database: object) -> Dialect:
    """Return the dialect of this database handle, or raise ``InvalidSettingsError`` for anything else."""
    if isinstance(database, AsyncDatabase):
        return PyMongoDialect()
    if isinstance(database, AsyncIOMotorDatabase):
        return MotorDialect()
    raise InvalidSettingsError(
        f"A layer stands on a pymongo AsyncDatabase or a Motor AsyncIOMotorDatabase, not on {_describe(database)}."
    )


def _describe(handle: object) -> str:
    name = f"a {type(handle).__module__}.{type(handle).__qualname__}"
    if isinstance(handle, (AsyncMongoClient, AsyncIOMotorClient)):
        return f"{name}; name the database: client['orders']"
    return name
