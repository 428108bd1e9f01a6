"""The words in which validators are written: ``$jsonSchema``, with descriptions for who reads it in mongosh.

Every schema is open to fields it does not name, so that a newer release may write beside an older one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Schema = dict[str, Any]


def document(
    title: str, description: str, fields: Mapping[str, Schema], *, required: Sequence[str], **rules: Any
) -> Schema:
    """A whole document. ``required`` are names of fields, ``rules`` further keywords of ``$jsonSchema``."""
    return {"title": title, **record(description, fields, required=required), **rules}


def record(description: str, fields: Mapping[str, Schema], *, required: Sequence[str] = ()) -> Schema:
    schema = {"bsonType": "object", "description": description, "properties": dict(fields)}
    return schema | ({"required": list(required)} if required else {})


def text(description: str, pattern: str | None = None) -> Schema:
    return {"bsonType": "string", "description": description} | ({"pattern": pattern} if pattern else {})


def long(description: str, minimum: int = 0) -> Schema:
    return {"bsonType": "long", "description": description, "minimum": minimum}


def integer(description: str, minimum: int = 0) -> Schema:
    return {"bsonType": "int", "description": description, "minimum": minimum}


def choice(description: str, options: Sequence[str]) -> Schema:
    return {"enum": list(options), "description": description}


def truth(description: str) -> Schema:
    return {"bsonType": "bool", "description": description}


def date(description: str) -> Schema:
    return {"bsonType": "date", "description": description}


def array(description: str, items: Schema | None = None) -> Schema:
    return {"bsonType": "array", "description": description} | ({"items": items} if items else {})


def anything(description: str) -> Schema:
    return {"description": description}


def nullable(schema: Schema) -> Schema:
    """The same, or null."""
    if "enum" in schema:
        return schema | {"enum": [*schema["enum"], None]}
    return schema | {"bsonType": [schema["bsonType"], "null"]}
