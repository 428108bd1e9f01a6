from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from mongosh import Mongosh, MongoshError

from statelayer import embedded
from statelayer.embedded import Node, ReplicaSet
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import Generator

COMPOSE = Path(__file__).parent.parent / "compose"
MEMBERS = {
    "single.yaml": {"mongo": 27017},
    "replica-set.yaml": {"mongo1": 27017, "mongo2": 27018, "mongo3": 27019},
}

pytestmark = pytest.mark.parametrize("file", MEMBERS)


def load(file: str) -> dict[str, Any]:
    return yaml.safe_load((COMPOSE / file).read_text())


def members_of(file: str) -> dict[str, dict[str, Any]]:
    services = load(file)["services"]
    return {name: service for name, service in services.items() if service["command"][0] == "mongod"}


def health_script(service: dict[str, Any]) -> str:
    return service["healthcheck"]["test"][-1]


def option(command: list[str], name: str, default: str) -> str:
    return command[command.index(name) + 1] if name in command else default


def test_every_node_is_a_member_of_the_set(file: str) -> None:
    members = members_of(file)
    assert {name: int(option(m["command"], "--port", "27017")) for name, m in members.items()} == MEMBERS[file]
    assert {option(m["command"], "--replSet", "") for m in members.values()} == {"rs0"}
    assert {m["image"] for m in members.values()} == {"mongo:7"}


def test_every_node_has_a_health_check_on_its_own_port(file: str) -> None:
    for name, member in members_of(file).items():
        test = member["healthcheck"]["test"]
        assert test[:2] == ["CMD", "mongosh"]
        assert int(option(test, "--port", "27017")) == MEMBERS[file][name]


def test_one_node_initiates_and_names_all_members(file: str) -> None:
    (script,) = (script for m in members_of(file).values() if "rs.initiate" in (script := health_script(m)))
    assert [int(port) for port in re.findall(r'host: "127\.0\.0\.1:(\d+)"', script)] == list(MEMBERS[file].values())


def test_ports_are_open_on_loopback_only(file: str) -> None:
    published = [port for service in load(file)["services"].values() for port in service.get("ports", ())]
    assert published == [f"127.0.0.1:{port}:{port}" for port in MEMBERS[file].values()]


def test_every_node_keeps_its_data_in_a_named_volume(file: str) -> None:
    volumes = [volume for member in members_of(file).values() for volume in member["volumes"]]
    assert volumes == [f"{name}:/data/db" for name in load(file)["volumes"]]
    assert len(set(volumes)) == len(MEMBERS[file])


def test_the_readme_gives_the_connection_string(file: str) -> None:
    addresses = ",".join(f"127.0.0.1:{port}" for port in MEMBERS[file].values())
    assert f"`mongodb://{addresses}/?replicaSet=rs0`" in (COMPOSE / "README.md").read_text()


@pytest.fixture
def bare_nodes(file: str) -> Generator[list[Node]]:
    """As many servers as the file has, started with a set's name and not yet initiated."""
    server = ReplicaSet(len(MEMBERS[file]), name="rs0")
    try:
        server.nodes = server._create_nodes(embedded.find_mongod())
        for node in server.nodes:
            node.launch()
            node.settle_on_port()
        yield list(server.nodes)
    finally:
        server.stop()


async def test_the_health_checks_make_a_replica_set(file: str, mongosh: Mongosh, bare_nodes: list[Node]) -> None:
    ports = dict(zip(map(str, MEMBERS[file].values()), (str(node.port) for node in bare_nodes), strict=True))
    checks = [
        (node, re.sub("|".join(ports), lambda found: ports[found[0]], health_script(member)))
        for node, member in zip(bare_nodes, members_of(file).values(), strict=True)
    ]

    def all_are_healthy() -> bool:
        return all(is_healthy(mongosh, node, script) for node, script in checks)

    assert not is_healthy(mongosh, bare_nodes[-1], "if (!db.hello().setName) quit(1)")
    await wait_until(all_are_healthy, timeout=60, interval=0.5)
    assert all_are_healthy()  # once initiated, they leave it as it is
    assert sum(node.hello()["isWritablePrimary"] for node in bare_nodes) == 1


def is_healthy(mongosh: Mongosh, node: Node, script: str) -> bool:
    try:
        mongosh.run(f"mongodb://{node.address}/?directConnection=true", script)
    except MongoshError:
        return False
    return True
