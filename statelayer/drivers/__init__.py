"""The database as the library sees it: one narrow surface over PyMongo Async and Motor.

Nothing above this room talks to a server by itself. Every error that leaves it is one of ``statelayer.errors``.
"""

from statelayer.drivers.clients import connect
from statelayer.drivers.database import Collection, Database, Document, Session, UpdateCounts
from statelayer.drivers.failures import is_conflict, is_silence, is_timeout, is_transient, translated

__all__ = [
    "Collection",
    "Database",
    "Document",
    "Session",
    "UpdateCounts",
    "connect",
    "is_conflict",
    "is_silence",
    "is_timeout",
    "is_transient",
    "translated",
]
