"""JSON Schemas of what outside consumers may rely on (DESIGN §4a), made from the validators.

They describe documents as relaxed Extended JSON, which is what ``mongoexport``, Debezium and ``bson.json_util`` write: a
long is a number, a date is ``{"$date": …}``. They stand ready in ``statelayer/schemas/``; ``python -m
statelayer.mongo_indexes.published FOLDER`` writes them again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from statelayer.mongo_indexes.collections import COLLECTIONS, ENTRIES, EVENTS, EXECUTIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statelayer.mongo_indexes.schemas import Schema

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"

PUBLIC_EXECUTION_FIELDS: Final = (
    *("_id", "namespace", "eventId", "state", "reason", "target", "resultEventId"),
    *("availableAt", "createdAt", "startedAt", "finishedAt"),
)

_TYPES: Final[Mapping[str, str]] = {
    "string": "string",
    "int": "integer",
    "long": "integer",
    "bool": "boolean",
    "object": "object",
    "array": "array",
    "null": "null",
}
_DATE: Final[Schema] = {
    "type": "object",
    "required": ["$date"],
    "properties": {
        "$date": {
            "description": "ISO 8601 in UTC; milliseconds since 1970 for a year that it cannot write.",
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "required": ["$numberLong"],
                    "properties": {"$numberLong": {"type": "string", "pattern": "^-?[0-9]+$"}},
                },
            ],
        }
    },
    "additionalProperties": False,
}


def json_schemas() -> dict[str, Schema]:
    """Return the schema of each public collection, by the collection's name without the prefix."""
    validators = {spec.name: spec.validator for spec in COLLECTIONS}
    return {
        EVENTS: _schema(EVENTS, validators[EVENTS]),
        ENTRIES: _schema(ENTRIES, validators[ENTRIES]),
        EXECUTIONS: _schema(EXECUTIONS, _only(validators[EXECUTIONS], PUBLIC_EXECUTION_FIELDS)),
    }


def write_json_schemas(folder: Path) -> None:
    """Write a file for each public collection."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, schema in json_schemas().items():
        text = json.dumps(schema, indent=2, ensure_ascii=False)
        (folder / f"{name}.schema.json").write_text(f"{text}\n", encoding="utf-8")


def _schema(name: str, validator: Mapping[str, Any]) -> Schema:
    return {"$schema": DIALECT, "$id": f"urn:statelayer:{name}:1", **_translated(validator)}


def _only(validator: Mapping[str, Any], fields: tuple[str, ...]) -> Schema:
    """The same about these fields alone; rules over several fields speak of others, and are left out."""
    kept = {key: value for key, value in validator.items() if key in ("title", "description", "bsonType")}
    return {
        **kept,
        "properties": {field: validator["properties"][field] for field in fields},
        "required": [field for field in validator["required"] if field in fields],
    }


def _translated(schema: Mapping[str, Any]) -> Schema:
    translated = {key: value for key, value in schema.items() if key not in ("bsonType", "properties", "items")}
    if "properties" in schema:
        translated["properties"] = {name: _translated(field) for name, field in schema["properties"].items()}
    if "items" in schema:
        translated["items"] = _translated(schema["items"])
    kinds = schema.get("bsonType", ())
    return translated | _typed([kinds] if isinstance(kinds, str) else list(kinds))


def _typed(kinds: list[str]) -> Schema:
    if not kinds:
        return {}
    plain = list(dict.fromkeys(_TYPES[kind] for kind in kinds if kind != "date"))
    types: Schema = {"type": plain[0] if len(plain) == 1 else plain}
    if "date" not in kinds:
        return types
    return {"anyOf": [_DATE, types]} if plain else _DATE


if __name__ == "__main__":
    write_json_schemas(Path(sys.argv[1]))
