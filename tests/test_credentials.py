"""I5: whatever fails, no credential is told, and what is told is one of our errors."""

from __future__ import annotations

import asyncio
import gc
import traceback
import warnings
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from pymongo import MongoClient
from structlog.testing import capture_logs

from statelayer import Settings, StateLayer, embedded
from statelayer.errors import DatabaseError, PrivilegeRequiredError, StateLayerError
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

    from statelayer.embedded import ReplicaSet

pytestmark = [
    pytest.mark.anyio,
    # The driver drops the socket of a monitor that is cancelled while it connects in vain.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
]

SECRETS = ("s3cret", "hunter2", "tok3n")
NOWHERE = "127.0.0.1:1/?serverSelectionTimeoutMS=300"

UNREACHABLE = {
    "user and password": f"mongodb://u:s3cret@{NOWHERE}",
    "escaped": f"mongodb://u:p%40ss%2Fs3cret@{NOWHERE}",
    "mechanism properties": (
        f"mongodb://u:s3cret@{NOWHERE}&authMechanism=MONGODB-AWS&authMechanismProperties=AWS_SESSION_TOKEN:tok3n"
    ),
    "token": f"mongodb://u:s3cret@{NOWHERE}&authMechanism=PLAIN&authSource=$external",
}
MALFORMED = {
    "password without a user": f"mongodb://:s3cret@{NOWHERE}",
    "unescaped at sign": f"mongodb://u:p@ss3cret@{NOWHERE}",
    "unescaped at sign and slash": f"mongodb://u:p@s3cret/w@{NOWHERE}",
    "unescaped slash": f"mongodb://u:s3cret/w@{NOWHERE}",
    "unescaped colon": f"mongodb://u:p:s3cret@{NOWHERE}",
    "unescaped percent": f"mongodb://u:s3cret%zz@{NOWHERE}",
    "port that is none": "mongodb://u:s3cret@127.0.0.1:hunter2/",
    "unknown mechanism": f"mongodb://u:s3cret@{NOWHERE}&authMechanism=hunter2",
    "broken properties": f"mongodb://u:s3cret@{NOWHERE}&authMechanism=MONGODB-AWS&authMechanismProperties=tok3n",
    "unknown properties": (
        f"mongodb://u:s3cret@{NOWHERE}&authMechanism=MONGODB-OIDC&authMechanismProperties=ENVIRONMENT:tok3n"
    ),
    "no scheme": f"u:s3cret@{NOWHERE}",
    "srv with a port": "mongodb+srv://u:s3cret@example.invalid:27017/",
    "srv without a domain": "mongodb+srv://u:s3cret@localhost/",
}


async def entered(layer: StateLayer) -> None:
    async with layer.running():
        pass


async def transacted(layer: StateLayer) -> None:
    async def body(tx: Any) -> None:
        await tx.set("/tasks/T1/status", "new", actor="user:U7")

    await layer.transact(body, "/tasks/T1")


CALLS: dict[str, Callable[[StateLayer], Awaitable[Any]]] = {
    "setup": lambda layer: layer.setup(),
    "set": lambda layer: layer.set("/tasks/T1/status", "new", actor="user:U7"),
    "get": lambda layer: layer.get("/tasks/T1/status"),
    "running": entered,
    "publish": lambda layer: layer.subscriptions.publish(
        {"name": "s", "pattern": "/tasks/**", "action": {"type": "execute_agent", "agentId": "a"}}
    ),
    "executions": lambda layer: layer.executions.find(),
    "transact": transacted,
    "verify": lambda layer: layer.verify("/tasks/T1"),
}


@pytest.fixture(autouse=True)
def _sockets_of_dead_monitors() -> Iterator[None]:
    """Have the driver's dropped sockets collected here, where the warning of it is ignored."""
    yield
    gc.collect()


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and all that stands behind it, shown or not."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def told_by(error: BaseException) -> str:
    """All that a log or a person can be shown of an error."""
    parts = ["".join(traceback.format_exception(error))]
    parts += [f"{link} {link!r} {getattr(link, 'args', ())} {vars(link)}" for link in chain(error)]
    return "\n".join(parts)


def leaks(text: str) -> list[str]:
    return [line for line in text.splitlines() if any(secret in line for secret in SECRETS)]


@asynccontextmanager
async def nothing_printed(capfd: pytest.CaptureFixture[str]) -> AsyncIterator[None]:
    """What is logged, by structlog or otherwise, in the block."""
    with capture_logs() as logs:
        yield
    printed = capfd.readouterr()
    assert leaks(f"{logs}\n{printed.out}\n{printed.err}") == []


def quick() -> Settings:
    return Settings(append_timeout=0.5, poll=0.05, heartbeat=0.1, lease=1)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("uri", UNREACHABLE.values(), ids=UNREACHABLE.keys())
async def test_i5_an_unreachable_server_tells_no_credentials(
    uri: str, call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with nothing_printed(capfd), StateLayer.from_uri(uri, "orders", settings=quick()) as layer:
        with pytest.raises(StateLayerError) as raised:
            await CALLS[call](layer)
        assert leaks(told_by(raised.value)) == []
        assert "127.0.0.1:1" in told_by(raised.value), "the address is what helps"


@pytest.mark.parametrize("uri", UNREACHABLE.values(), ids=UNREACHABLE.keys())
async def test_i5_what_a_layer_shows_of_itself_tells_no_credentials(uri: str) -> None:
    async with StateLayer.from_uri(uri, "orders", settings=quick()) as layer:
        parts = [layer, layer.settings, layer._database, layer.subscriptions, layer.executions, layer.executors]
        assert leaks("\n".join(f"{part!r} {part} {vars(part)}" for part in parts)) == []
        health = await layer.health()
        assert not health.ok
        assert leaks(f"{health!r}") == []


@pytest.mark.parametrize("uri", MALFORMED.values(), ids=MALFORMED.keys())
async def test_i5_a_malformed_uri_is_refused_without_telling_it(uri: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Whether the driver refuses it, warns of it, or takes a part of the password for a host name."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        async with nothing_printed(capfd):
            with pytest.raises(StateLayerError) as raised:
                async with StateLayer.from_uri(uri, "orders", settings=quick()) as layer:
                    await layer.setup()
    assert leaks("\n".join([told_by(raised.value), *(str(warning.message) for warning in warned)])) == []


async def test_i5_refused_options_of_the_client_are_told_without_the_uri() -> None:
    options: dict[str, Any] = {"maxPoolSize": -5, "password": SECRETS[0]}  # not in the line that a traceback shows
    with pytest.raises(StateLayerError) as raised:
        StateLayer.from_uri(f"mongodb://u:{SECRETS[0]}@{NOWHERE}", "orders", **options)
    assert leaks(told_by(raised.value)) == []
    assert "maxPoolSize" in str(raised.value)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "$x"])
async def test_a_database_name_that_cannot_be_is_refused_as_ours(name: str) -> None:
    with pytest.raises(StateLayerError):
        StateLayer.from_uri(f"mongodb://u:s3cret@{NOWHERE}", name)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("properties", ["", "authMechanism=SCRAM-SHA-256", "authMechanism=SCRAM-SHA-1"])
async def test_i5_refused_credentials_are_not_told(
    statelayer_server: ReplicaSet, properties: str, call: str, capfd: pytest.CaptureFixture[str]
) -> None:
    uri = statelayer_server.uri.replace("mongodb://", "mongodb://u:s3cret@") + f"&{properties}".rstrip("&")
    async with nothing_printed(capfd), StateLayer.from_uri(uri, "orders", settings=quick()) as layer:
        with pytest.raises(DatabaseError, match="Authentication failed") as raised:
            await CALLS[call](layer)
        assert leaks(told_by(raised.value)) == []


@pytest.fixture
def user(statelayer_server: ReplicaSet) -> Iterator[Callable[..., str]]:
    """Make a user with these roles; the uri that authenticates as it. A server checks that without access control."""
    with MongoClient[dict[str, Any]](statelayer_server.uri) as client:

        def create(*roles: str) -> str:
            client.admin.command("createUser", "worker", pwd="s3cret", roles=list(roles))
            return statelayer_server.uri.replace("mongodb://", "mongodb://worker:s3cret@")

        yield create
        client.admin.command("dropUser", "worker")


async def test_i5_a_user_who_lacks_privileges_is_named_without_the_password(
    user: Callable[..., str], capfd: pytest.CaptureFixture[str]
) -> None:
    async with nothing_printed(capfd), StateLayer.from_uri(user("readAnyDatabase"), "orders") as layer:
        with pytest.raises(PrivilegeRequiredError, match='"worker" may not') as raised:
            await layer.setup()
        assert leaks(told_by(raised.value)) == []


@pytest.mark.fault
async def test_i5_a_server_that_goes_away_while_running_tells_no_credentials(capfd: pytest.CaptureFixture[str]) -> None:
    """The listener and the worker say, again and again, that they cannot go on."""
    server = embedded.ReplicaSet()
    await asyncio.to_thread(server.start)
    try:
        server.nodes[0].command("createUser", "worker", pwd="s3cret", roles=["root"])
        uri = server.uri.replace("mongodb://", "mongodb://worker:s3cret@") + "&serverSelectionTimeoutMS=300"
        async with nothing_printed(capfd), StateLayer.from_uri(uri, "orders", settings=quick()) as layer:
            await layer.setup()
            async with layer.running():
                await lose_it(server, layer)
    finally:
        await asyncio.to_thread(server.stop)


async def lose_it(server: ReplicaSet, layer: StateLayer) -> None:
    server.nodes[0].kill()
    with pytest.raises(StateLayerError) as raised:
        await layer.set("/tasks/T1/status", "new", actor="user:U7")
    [listener] = (await layer.health()).listeners
    await wait_until(lambda: listener.restarts["database"] > 1, message="the listener noticed nothing")
    assert leaks(told_by(raised.value)) == []
    await asyncio.to_thread(server.nodes[0].start)
    await asyncio.to_thread(server.primary)
