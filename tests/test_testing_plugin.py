from __future__ import annotations

from textwrap import dedent
from typing import TYPE_CHECKING

import pytest
from motor.motor_asyncio import AsyncIOMotorDatabase
from pymongo import MongoClient
from pymongo.asynchronous.database import AsyncDatabase

from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from mongosh import Mongosh

    from statelayer.embedded import ReplicaSet
    from statelayer.testing.plugin import Database, Driver, ExternalServer

    Server = ReplicaSet | ExternalServer

ANYIO_ON_ASYNCIO = """
    import pytest

    @pytest.fixture
    def anyio_backend():
        return "asyncio"
"""


@pytest.fixture
def run_service_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, statelayer_server: Server
) -> Callable[..., pytest.RunResult]:
    """Run tests as a service would have them, on this session's server; ``conftest`` is the service's own."""

    def run(tests: str, *, conftest: str = "") -> pytest.RunResult:
        monkeypatch.setenv("STATELAYER_TEST_URI", statelayer_server.uri)
        pytester.makeconftest(dedent(ANYIO_ON_ASYNCIO) + dedent(conftest))
        pytester.makepyfile(dedent(tests))
        return pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider")

    return run


def test_a_service_gets_a_layer_that_is_set_up(run_service_tests: Callable[..., pytest.RunResult]) -> None:
    result = run_service_tests("""
        import pytest

        @pytest.mark.anyio
        async def test_a_fact_is_read_back(statelayer_layer):
            await statelayer_layer.set("/tasks/T1/status", {"stage": "new"}, actor="user:U7")
            entry = await statelayer_layer.get("/tasks/T1/status")
            assert entry.value == {"stage": "new"}
    """)
    result.assert_outcomes(passed=1)


DATABASE_TESTS = """
    import pytest

    DRIVER = "pymongo"
    names = set()

    @pytest.mark.anyio
    @pytest.mark.parametrize("turn", [1, 2])
    async def test_each_test_has_an_empty_database(statelayer_database, turn):
        assert await statelayer_database.list_collection_names() == []
        await statelayer_database["things"].insert_one({"turn": turn})
        names.add(statelayer_database.name)
        assert len(names) == turn
        assert type(statelayer_database).__module__.startswith(DRIVER)
"""


def test_each_test_has_a_database_of_its_own(
    run_service_tests: Callable[..., pytest.RunResult], statelayer_server: Server
) -> None:
    with MongoClient(statelayer_server.uri) as client:
        before = client.list_database_names()
        run_service_tests(DATABASE_TESTS).assert_outcomes(passed=2)
        assert client.list_database_names() == before


def test_a_service_chooses_its_driver(run_service_tests: Callable[..., pytest.RunResult]) -> None:
    result = run_service_tests(
        DATABASE_TESTS.replace("pymongo", "motor"),
        conftest="""
            @pytest.fixture
            def statelayer_driver():
                return "motor"
        """,
    )
    result.assert_outcomes(passed=2)


def test_nothing_starts_before_a_fixture_is_asked_for(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATELAYER_MONGOD", "/no/such/mongod")
    pytester.makepyfile("def test_nothing(): pass")
    pytester.runpytest_subprocess("-W", "error").assert_outcomes(passed=1)


def test_without_a_uri_an_embedded_server_is_started(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STATELAYER_TEST_URI", raising=False)
    pytester.makepyfile("""
        def test_embedded(statelayer_server):
            assert statelayer_server.primary().command("getParameter", enableTestCommands=1)["enableTestCommands"]
    """)
    pytester.runpytest_subprocess("-W", "error").assert_outcomes(passed=1)


async def test_the_suite_runs_on_both_drivers(database: Database, driver: Driver) -> None:
    await database["things"].insert_one({})
    assert isinstance(database, {"pymongo": AsyncDatabase, "motor": AsyncIOMotorDatabase}[driver])


def test_mongosh_returns_the_last_value(mongosh: Mongosh, statelayer_server: Server) -> None:
    script = "({primary: db.hello().isWritablePrimary, at: new Date(0)})"
    assert mongosh(statelayer_server.uri, script) == {"primary": True, "at": {"$date": "1970-01-01T00:00:00Z"}}
    assert mongosh.run(statelayer_server.uri, "print('printed')") == "printed\n"


# --- wait_until -------------------------------------------------------------------------------------------------------


async def test_wait_until_returns_the_first_truthy_answer() -> None:
    answers = iter([0, [], None, "there", "later"])
    assert await wait_until(lambda: next(answers), interval=0) == "there"


async def test_wait_until_awaits_an_asynchronous_predicate() -> None:
    answers = iter([False, 7])

    async def ask() -> int:
        return next(answers)

    assert await wait_until(ask, interval=0) == 7


async def test_wait_until_fails_with_the_last_answer() -> None:
    with pytest.raises(AssertionError, match=r"^nobody came after 0\.05 s; last: \[\]$"):
        await wait_until(list, timeout=0.05, message="nobody came")


async def test_wait_until_passes_errors_on() -> None:
    with pytest.raises(ZeroDivisionError):
        await wait_until(lambda: 1 / 0)
