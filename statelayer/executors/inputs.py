"""Checking an event's value against a subscription's input schema. No I/O here, and none by the schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing import Registry as Schemas
from referencing.exceptions import Unresolvable

from statelayer.errors import InvalidValueError

if TYPE_CHECKING:
    from collections.abc import Mapping


def check_input(value: Any, schema: Mapping[str, Any] | None) -> None:
    """Raise ``InvalidValueError`` that names the field when the value does not meet the schema.

    A reference that leads out of the schema is an error; nothing is fetched.
    """
    if schema is None:
        return
    validator = validator_for(dict(schema), default=Draft202012Validator)(dict(schema), registry=Schemas())
    try:
        fault = best_match(validator.iter_errors(value))
    except Unresolvable as error:
        raise InvalidValueError("input", f"its schema refers to something that is not in it: {error.ref}") from error
    if fault is not None:
        raise InvalidValueError("input" + fault.json_path.removeprefix("$"), fault.message)
