"""The suite stands on the fixtures that services use; here they run on both drivers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from listening import Recorded
from mongosh import Mongosh
from workbench import Workbench

from statelayer import StateLayer, mongo_indexes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from statelayer.testing.plugin import Database, Driver

pytest_plugins = ["pytester"]

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(params=["pymongo", "motor"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return request.param


@pytest.fixture
def statelayer_driver(driver: Driver) -> Driver:
    return driver


@pytest.fixture
def database(statelayer_database: Database) -> Database:
    return statelayer_database


@pytest.fixture
def layer(statelayer_layer: StateLayer) -> StateLayer:
    return statelayer_layer


@pytest.fixture
async def other(database: Database, layer: StateLayer) -> AsyncIterator[StateLayer]:
    """One more layer on the same database, which knows of the first as little as another process would."""
    async with StateLayer(database) as other:
        yield other


@pytest.fixture
async def others(database: Database, layer: StateLayer) -> AsyncIterator[list[StateLayer]]:
    """Three more layers on the same database, as other processes would have them."""
    layers = [StateLayer(database) for _ in range(3)]
    yield layers
    for other in layers:
        await other.aclose()


@pytest.fixture
async def bench(database: Database) -> Workbench:
    bench = Workbench(database)
    await mongo_indexes.setup(bench.database, bench.settings)
    return bench


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture(scope="session")
def mongosh() -> Mongosh:
    return Mongosh.find(REPOSITORY / ".cache" / "mongosh")
