"""Import declarations from JSON lines: each line is a request, or is reported by number while the rest goes on."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from statelayer.errors import InvalidPathError
from statelayer.paths import check_segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from pydantic_core import ErrorDetails

_BOM = "\ufeff"
_COUNTRY = re.compile(r"[A-Z]{2}")
_CURRENCY = re.compile(r"[A-Z]{3}")
_LARGEST_AMOUNT = 10**15  # a double still holds it to the cent
_SHOWN_CHARACTERS = 40
_TOO_LARGE = "the line is not JSON that can be read: it is too large or too deeply nested"


def _refuse(sentence: str) -> NoReturn:
    raise PydanticCustomError("declaration", "{sentence}", {"sentence": sentence})


def _segment(value: str) -> str:
    try:
        return check_segment(value)
    except InvalidPathError as error:
        _refuse(f"must be one path segment, but {_shown(value)} {error.problem.removeprefix('the segment ')}")


def _not_blank(value: str) -> str:
    return value if value.strip() else _refuse("must not be blank")


def _country(value: str) -> str:
    if not _COUNTRY.fullmatch(value):
        _refuse(f'must be a two-letter country code such as "DE", not {_shown(value)}')
    return value


def _currency(value: str) -> str:
    if not _CURRENCY.fullmatch(value):
        _refuse(f'must be a three-letter currency code such as "EUR", not {_shown(value)}')
    return value


def _amount(value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        _refuse(f"must be a number, not {_kind(value)}")
    if not value > 0:
        _refuse(f"must be greater than 0, not {_shown(value)}")
    if value > _LARGEST_AMOUNT:
        _refuse(f"must be at most {_LARGEST_AMOUNT:,}, not {_shown(value)}")
    return value


Id = Annotated[str, AfterValidator(_segment)]
Text = Annotated[str, AfterValidator(_not_blank)]
Country = Annotated[str, AfterValidator(_country)]
Currency = Annotated[str, AfterValidator(_currency)]
Amount = Annotated[int | float, BeforeValidator(_amount)]


class Request(BaseModel):
    """One import declaration. The wire is camelCase; a field that is not known is refused, as it may be misspelt."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, alias_generator=to_camel, populate_by_name=True)

    request_id: Id
    task_id: Id
    user: Id
    description: Text
    origin: Country
    value: Amount
    currency: Currency
    quantity: Amount | None = None
    unit: Text | None = None
    status: Literal["confirmed", "draft"]

    @property
    def path(self) -> str:
        """Where the request is written: ``/tasks/T-2041/requests/S-001``."""
        return f"/tasks/{self.task_id}/requests/{self.request_id}"

    @property
    def actor(self) -> str:
        return f"user:{self.user}"

    def fact(self) -> dict[str, Any]:
        """The value to write: the fields that were given, named as on the wire."""
        return self.model_dump(by_alias=True, exclude_none=True)


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that is no request: its number, counted from 1, what is wrong with it, and the line itself."""

    number: int
    reason: str
    text: str


class _BrokenError(Exception):
    """What is wrong with a line."""


def read_requests(lines: Iterable[str | bytes]) -> Iterator[Request | BrokenLine]:
    """One request from each line that is not blank; a line that holds none becomes a ``BrokenLine``.

    Lines may end in LF or CRLF, and the first may begin with a byte order mark. Bytes are read as UTF-8. A task's
    request is accepted once; that it appears again is reported.
    """
    first_seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = _decoded(line).removeprefix(_BOM if number == 1 else "").strip()
        if not text:
            continue
        try:
            request = _parse(text, line)
            _require_first(request, first_seen.setdefault(request.path, number), number)
        except _BrokenError as broken:
            yield BrokenLine(number, str(broken), text)
        else:
            yield request


def read_file(path: Path) -> Iterator[Request | BrokenLine]:
    """``read_requests`` of a file, which stays open until the last line was read."""
    with path.open("rb") as lines:
        yield from read_requests(lines)


def _decoded(line: str | bytes) -> str:
    return line if isinstance(line, str) else line.decode("utf-8", errors="replace")


def _parse(text: str, line: str | bytes) -> Request:
    if isinstance(line, bytes):
        _require_utf8(line)
    document = _load(text)
    _require_whole_characters(document)
    if not isinstance(document, dict):
        raise _BrokenError(f"the line holds {_kind(document)} where a JSON object is expected")
    try:
        return Request.model_validate(document)
    except ValidationError as error:
        raise _BrokenError("; ".join(_reasons(error))) from error


def _require_first(request: Request, first: int, number: int) -> None:
    if first != number:
        raise _BrokenError(
            f"request {request.request_id} of task {request.task_id} appears again, first on line {first}"
        )


def _require_utf8(line: bytes) -> None:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _BrokenError(f"the line is not UTF-8 text: byte {error.start + 1} cannot be read") from error


def _require_whole_characters(document: object) -> None:
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise _BrokenError("the line holds half of a surrogate pair, which is no character") from error
    except RecursionError as error:
        raise _BrokenError(_TOO_LARGE) from error


def _load(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        problem = error.msg[:1].lower() + error.msg[1:]
        raise _BrokenError(f"the line is not JSON: {problem} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand nested lists
        raise _BrokenError(_TOO_LARGE) from error


def _once_each(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in pairs:
        if name in fields:
            raise _BrokenError(f"{_shown(name)} stands twice in one object")
        fields[name] = value
    return fields


def _no_constant(name: str) -> NoReturn:
    raise _BrokenError(f"the line is not JSON: {name} is no JSON number")


def _reasons(error: ValidationError) -> list[str]:
    return [_reason(details) for details in error.errors(include_url=False)]


def _reason(details: ErrorDetails) -> str:
    name = ".".join(str(part) for part in details["loc"])
    given = details["input"]
    match details["type"]:
        case "missing":
            return f"{name} is missing"
        case "extra_forbidden":
            return f"{name} is not a known field"
        case "string_type":
            return f"{name} must be text, not {_kind(given)}"
        case "literal_error":
            return f'{name} must be "confirmed" or "draft", not {_kind(given)}'
        case _:
            return f"{name} {details['msg']}"


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return f"the text {_shown(value)}"
        case list():
            return "a list"
        case _:
            return "an object"


def _shown(value: object) -> str:
    shown = json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()
    return shown if len(shown) <= _SHOWN_CHARACTERS else f"{shown[: _SHOWN_CHARACTERS - 1]}…"
