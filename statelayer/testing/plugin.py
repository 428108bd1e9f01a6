"""The pytest plugin: a real server for the session, a database and a layer for each test.

It is active wherever the library is installed, and starts nothing until a fixture is asked for:

    @pytest.mark.anyio
    async def test_an_order_is_confirmed(statelayer_layer): ...

The asynchronous fixtures are run by the plugin that runs the test: anyio's (it comes with the library) for tests with
its marker, pytest-asyncio's under ``asyncio_mode = "auto"``. Both drivers need asyncio, so where Trio is installed too,
override anyio's fixture ``anyio_backend`` to return "asyncio".

To use a server of your own, a three-node set or Motor, override a fixture in ``conftest.py``, or set
STATELAYER_TEST_URI.
"""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from uuid import uuid4

import pytest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Generator

    from motor.motor_asyncio import AsyncIOMotorClient, AsyncIOMotorDatabase
    from pymongo import AsyncMongoClient
    from pymongo.asynchronous.database import AsyncDatabase

    from statelayer import StateLayer
    from statelayer.embedded import ReplicaSet

    Client = AsyncMongoClient[dict[str, Any]] | AsyncIOMotorClient[dict[str, Any]]
    Database = AsyncDatabase[dict[str, Any]] | AsyncIOMotorDatabase[dict[str, Any]]

Driver = Literal["pymongo", "motor"]

QUICK: dict[str, Any] = {"heartbeatFrequencyMS": 500}
"""A client looks for a new primary this often; the drivers' ten seconds are long in a test."""

PARAMETERS: dict[str, Any] = {
    "enableTestCommands": True,  # for failCommand
    # Dropped tables keep their files open for as long as a snapshot may ask for them: by default 300 seconds, in which
    # a suite with a database for each test reaches the limit of open files, and mongod aborts.
    "minSnapshotHistoryWindowInSeconds": 5,
}

TEST_URI_VARIABLE = "STATELAYER_TEST_URI"


@dataclass(frozen=True)
class ExternalServer:
    """A server that somebody else runs."""

    uri: str


@pytest.fixture(scope="session")
def statelayer_server() -> Generator[ReplicaSet | ExternalServer]:
    """The server under test, with its ``uri``: an embedded replica set, or the one that STATELAYER_TEST_URI names."""
    if uri := os.environ.get(TEST_URI_VARIABLE):
        yield ExternalServer(uri)
        return

    from statelayer.embedded import ReplicaSet

    with ReplicaSet(parameters=PARAMETERS) as server:
        yield server


@pytest.fixture
def statelayer_driver() -> Driver:
    """Which driver the databases come from. Override it to run on ``motor``, or parametrise it for both."""
    return "pymongo"


@pytest.fixture
async def statelayer_database(
    statelayer_server: ReplicaSet | ExternalServer, statelayer_driver: Driver
) -> AsyncGenerator[Database]:
    """An empty database of this test's own; dropped afterwards."""
    name = f"test_{uuid4().hex[:16]}"
    async with connected(statelayer_driver, statelayer_server.uri) as client:
        yield client[name]
        await client.drop_database(name)


@pytest.fixture
async def statelayer_layer(statelayer_database: Database) -> AsyncGenerator[StateLayer]:
    """A layer on ``statelayer_database``, set up; nothing runs until the test enters ``layer.running()``."""
    from statelayer import StateLayer

    layer = StateLayer(statelayer_database)
    try:
        await layer.setup()
        yield layer
    finally:
        await layer.aclose()


@asynccontextmanager
async def connected(driver: Driver, uri: str, **options: Any) -> AsyncGenerator[Client]:
    """A client of this driver, closed afterwards; to be entered inside the loop that will use it."""
    if driver == "motor":
        from anyio import to_thread
        from motor.motor_asyncio import AsyncIOMotorClient

        motor: AsyncIOMotorClient[dict[str, Any]] = AsyncIOMotorClient(uri, **QUICK | options)
        try:
            yield motor
        finally:
            await to_thread.run_sync(motor.close)  # it waits for the server, which may be a proxy in this very loop
    else:
        from pymongo import AsyncMongoClient

        async with AsyncMongoClient[dict[str, "Any"]](uri, **QUICK | options) as client:
            yield client
