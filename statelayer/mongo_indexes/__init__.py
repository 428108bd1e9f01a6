"""What the database must hold: collections, validators, indexes and shard keys.

``collections`` declares it and reads as its documentation, ``setup`` makes it so, ``sharding`` spreads it.
"""

from statelayer.mongo_indexes.collections import (
    CHECKPOINTS,
    COLLECTIONS,
    CURSORS,
    ENTRIES,
    EVENTS,
    EXECUTION_REASONS,
    EXECUTION_STATES,
    EXECUTIONS,
    INSTANCES,
    META,
    NAMESPACES,
    SUBSCRIPTIONS,
    CollectionSpec,
    Index,
)
from statelayer.mongo_indexes.report import SetupReport
from statelayer.mongo_indexes.setup import FORMAT_VERSION, check_ready, setup
from statelayer.mongo_indexes.sharding import Zone, sharding_script

__all__ = [
    "CHECKPOINTS",
    "COLLECTIONS",
    "CURSORS",
    "ENTRIES",
    "EVENTS",
    "EXECUTIONS",
    "EXECUTION_REASONS",
    "EXECUTION_STATES",
    "FORMAT_VERSION",
    "INSTANCES",
    "META",
    "NAMESPACES",
    "SUBSCRIPTIONS",
    "CollectionSpec",
    "Index",
    "SetupReport",
    "Zone",
    "check_ready",
    "setup",
    "sharding_script",
]

if __name__ != "statelayer.mongo_indexes":
    raise ImportError("import statelayer.mongo_indexes; the link at the root is for reading")
