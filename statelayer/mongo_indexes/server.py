"""What the server and the database user must offer before anything is set up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from statelayer.drivers.failures import REPLICA_SET_ADVICE
from statelayer.errors import PrivilegeRequiredError, ReplicaSetRequiredError, UnsupportedServerError
from statelayer.mongo_indexes.collections import COLLECTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from statelayer.drivers import Database

    Privilege = Mapping[str, Any]

OLDEST_WIRE_VERSION = 17  # MongoDB 6.0

# All of them are in the built-in role readWrite. collMod is not, so setup() does without it where it can.
ON_COLLECTIONS = frozenset({"find", "insert", "update", "remove", "createCollection", "createIndex", "listIndexes"})
ON_DATABASE = frozenset({"changeStream", "listCollections"})


async def check_server(database: Database) -> None:
    """Raise the ``SetupError`` that says what the server or the user lacks, and the command that mends it."""
    hello = await database.admin_command({"hello": 1})
    _check_replica_set(hello)
    _check_version(hello)
    await _check_privileges(database)


def _check_replica_set(hello: Mapping[str, Any]) -> None:
    if "setName" in hello or hello.get("msg") == "isdbgrid":
        return
    if hello.get("isreplicaset"):
        raise ReplicaSetRequiredError(
            "The server was started as a member of a replica set that was never initiated. "
            "Run `rs.initiate()` once in mongosh."
        )
    raise ReplicaSetRequiredError(REPLICA_SET_ADVICE)


def _check_version(hello: Mapping[str, Any]) -> None:
    if hello["maxWireVersion"] < OLDEST_WIRE_VERSION:
        raise UnsupportedServerError(
            f"The server is older than MongoDB 6.0 (wire version {hello['maxWireVersion']}, "
            f"{OLDEST_WIRE_VERSION} is needed). Upgrade it to 6.0 or later."
        )


async def _check_privileges(database: Database) -> None:
    status = (await database.command({"connectionStatus": 1, "showPrivileges": True}))["authInfo"]
    if not (users := status["authenticatedUsers"]):
        return
    privileges = status["authenticatedUserPrivileges"]
    missing = ON_DATABASE - _granted(privileges, database.name, "")
    for spec in COLLECTIONS:
        missing |= ON_COLLECTIONS - _granted(privileges, database.name, database.prefix + spec.name)
    if missing:
        raise _privilege_required(users[0], database.name, sorted(missing))


def _granted(privileges: Iterable[Privilege], database: str, collection: str) -> frozenset[str]:
    covering = (p["actions"] for p in privileges if _covers(p["resource"], database, collection))
    return frozenset().union(*covering)


def _covers(resource: Mapping[str, Any], database: str, collection: str) -> bool:
    if resource.get("anyResource"):
        return True
    return resource.get("db") in ("", database) and resource.get("collection") in ("", collection)


def _privilege_required(user: Mapping[str, str], database: str, missing: list[str]) -> PrivilegeRequiredError:
    actions = ", ".join(missing)
    home, name, target = (json.dumps(text) for text in (user["db"], user["user"], database))
    return PrivilegeRequiredError(
        f"The database user {name} may not {actions} in database {target}. As an administrator, run in mongosh: "
        f'db.getSiblingDB({home}).grantRolesToUser({name}, [{{ role: "readWrite", db: {target} }}])',
        action=actions,
    )
