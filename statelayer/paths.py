"""Addresses: ``/tasks/T1/stage/reviewed``.

A path has 3 to 32 segments and at most 1,024 bytes of UTF-8; its first two segments are its namespace. A segment has 1
to 255 bytes, is in Unicode normal form C, holds no control or format characters, no white space and none of
``/ * { } $``, and is not ``.`` or ``..``. Case counts and nothing is percent-decoded. What breaks a rule is refused,
never repaired, so that one name is one address; ``encode_segment`` makes a segment of any foreign id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias
from unicodedata import category, is_normalized

from statelayer.errors import InvalidPathError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

DEFAULT_ROOTS: Final = ("tasks", "threads")
MIN_SEGMENTS: Final = 3
MAX_SEGMENTS: Final = 32
MAX_PATH_BYTES: Final = 1024
MAX_SEGMENT_BYTES: Final = 255

COLLECTION_CAPTURES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tasks": "taskId",
        "requests": "requestId",
        "deliveries": "deliveryId",
        "agents": "agentId",
        "results": "eventId",
        "errors": "eventId",
        "steps": "stepId",
        "batches": "batchId",
        "threads": "threadId",
        "runs": "runId",
    }
)
"""How a ``*`` is named that stands after a known collection."""

Syntax: TypeAlias = Literal["{}", "${}"]
_Fault: TypeAlias = tuple[str, str]  # what is wrong, what to do

_SEGMENT = r"(?!\.\.?(?:/|\Z))[!-#%-)+-.0-z|~]{1,255}"
_ASCII_SEGMENT = re.compile(_SEGMENT)
_ASCII_PATH = re.compile(rf"(?:/{_SEGMENT}){{{MIN_SEGMENTS},{MAX_SEGMENTS}}}")
_CACHED_PATHS = 2048
_SHOWN_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Path:
    """A valid address. Made by ``parse``; building one directly checks nothing."""

    text: str
    segments: tuple[str, ...] = field(compare=False, repr=False)
    namespace: str = field(compare=False, repr=False)
    """The first two segments, ``/tasks/T1``: the unit of order."""

    @property
    def root(self) -> str:
        return self.segments[0]

    @property
    def relative(self) -> str:
        """What follows the namespace, without a leading slash: ``stage/reviewed``."""
        return "/".join(self.segments[2:])

    def __str__(self) -> str:
        return self.text


def parse(text: object, roots: Sequence[str] = DEFAULT_ROOTS) -> Path:
    """Check a path and take it apart; anything but a valid one raises ``InvalidPathError``.

    >>> parse("/tasks/T1/stage/reviewed").relative
    'stage/reviewed'
    """
    return _parse(_as_text(text), tuple(roots))


def parse_namespace(text: object, roots: Sequence[str] = DEFAULT_ROOTS) -> str:
    """Return a namespace such as ``/tasks/T1`` as it is, or raise ``InvalidPathError``."""
    namespace = _as_text(text)
    segments = _split(namespace)
    _refuse_faults(namespace, map(_fault, segments), segments)
    if len(segments) != 2:
        raise InvalidPathError(namespace, "a namespace has exactly two segments", "Write it as /tasks/T1.")
    _require_root(namespace, segments[0], roots)
    return namespace


def check_segment(text: object) -> str:
    """Return a valid segment as it is, or raise ``InvalidPathError``."""
    segment = _as_text(text)
    if fault := _fault(segment):
        problem, advice = fault
        raise InvalidPathError(_shown(segment), f"the segment {problem}", advice)
    return segment


@lru_cache(maxsize=_CACHED_PATHS)
def _parse(text: str, roots: tuple[str, ...]) -> Path:
    if len(text) > MAX_PATH_BYTES or not _ASCII_PATH.fullmatch(text):
        _inspect(text)
    segments = tuple(text[1:].split("/"))
    _require_root(text, segments[0], roots)
    return Path(text, segments, f"/{segments[0]}/{segments[1]}")


def _inspect(text: str) -> None:
    segments = _split(text)
    _refuse_faults(text, map(_fault, segments), segments)
    _require_count(text, segments)


def _as_text(text: object) -> str:
    if type(text) is str:
        return text
    if isinstance(text, str):
        return str.__str__(text)  # the characters, whatever a subclass prints
    raise InvalidPathError(type(text), "it is not text", "Pass a str.")  # its own repr may fail, or be a secret


def _split(text: str) -> list[str]:
    if not text.startswith("/"):
        raise InvalidPathError(_shown(text), "it does not begin with '/'", "Paths are absolute, like /tasks/T1/status.")
    length = _length(text)
    if length > MAX_PATH_BYTES:
        raise InvalidPathError(_shown(text), f"it has {length} bytes; at most {MAX_PATH_BYTES} are allowed")
    return text[1:].split("/")


def _refuse_faults(text: str, faults: Iterable[_Fault | None], segments: Sequence[str]) -> None:
    for number, (fault, segment) in enumerate(zip(faults, segments, strict=True), 1):
        if fault:
            problem, advice = fault
            raise InvalidPathError(text, f"segment {number} ({_shown(segment)!r}) {problem}", advice)


def _require_count(text: str, segments: Sequence[object]) -> None:
    if not MIN_SEGMENTS <= len(segments) <= MAX_SEGMENTS:
        raise InvalidPathError(
            text,
            f"it has {len(segments)} segments, not {MIN_SEGMENTS} to {MAX_SEGMENTS}",
            "The first two name the namespace, the others the place in it, like /tasks/T1/status.",
        )


def _require_root(text: str, root: str, roots: Sequence[str]) -> None:
    if root not in roots:
        known = ", ".join(f"/{name}" for name in roots)
        raise InvalidPathError(text, f"segment 1 ({root!r}) is not a root", f"Begin with one of: {known}.")


def _fault(segment: str) -> _Fault | None:
    if _ASCII_SEGMENT.fullmatch(segment):
        return None
    if not segment:
        return "is empty", "Leave out trailing and doubled slashes, and name every segment."
    if segment in {".", ".."}:
        return "is a relative step", "Paths are absolute; write the whole address."
    if (foreign := next(filter(_is_foreign, segment), None)) is not None:
        return f"holds {foreign!r}", _advice(foreign)
    if not is_normalized("NFC", segment):
        return "is not in Unicode normal form C", "Use unicodedata.normalize('NFC', …), or encode_segment to keep it."
    if (length := _length(segment)) > MAX_SEGMENT_BYTES:
        return f"has {length} bytes; at most {MAX_SEGMENT_BYTES} are allowed", "Use a shorter id."
    return None


def _is_foreign(character: str) -> bool:
    kind = category(character)
    return character in "/*{}$" or kind in {"Cc", "Cf", "Cs"} or kind[0] == "Z"


def _advice(character: str) -> str:
    if character == "*":
        return "Wildcards belong in patterns; name one address."
    if character in "{}$":
        return "Placeholders belong in templates; render them first."
    if category(character) == "Cs":
        return "A lone surrogate is no text; decode the id properly."
    return "encode_segment turns a foreign id into one segment."


def _length(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"


# --- foreign ids ------------------------------------------------------------------------------------------------------

_ESCAPES = re.compile(r"(?:~[0-9A-F]{2})+")


def encode_segment(text: str) -> str:
    """Turn any text into one segment that ``decode_segment`` turns back, the same text always into the same segment.

    What a segment may not hold, and ``~`` itself, becomes its UTF-8 bytes as ``~`` and two upper-case hexadecimal
    digits each. So do characters that normal form C would change, which keeps ids apart that only look alike. ``%`` is
    an ordinary character and ``~`` an unreserved one in URLs, so neither is touched on the way through HTTP. Raises
    ``InvalidPathError`` for empty text, lone surrogates, and a result of more than 255 bytes.

    >>> encode_segment("INV/1 a")
    'INV~2F1~20a'
    """
    plain = _as_text(text)
    if not plain:
        raise InvalidPathError(plain, "an empty id has no segment", "Pass the id.")
    if any(category(character) == "Cs" for character in plain):
        raise InvalidPathError(_shown(plain), "it holds a lone surrogate", _advice("\ud800"))
    segment = _encode(plain) if len(plain) <= MAX_SEGMENT_BYTES else plain
    if (length := _length(segment)) > MAX_SEGMENT_BYTES:
        raise InvalidPathError(
            _shown(plain), f"it needs {length} or more bytes as a segment; {MAX_SEGMENT_BYTES} fit", "Use a shorter id."
        )
    return segment


def decode_segment(segment: str) -> str:
    """Return the text that ``encode_segment`` made this segment of; ``InvalidPathError`` if it made it of none.

    >>> decode_segment("INV~2F1~20a")
    'INV/1 a'
    """
    checked = check_segment(segment)
    try:
        text = _ESCAPES.sub(_unescape, checked)
    except UnicodeDecodeError:
        text = ""
    if _encode(text) != checked:
        raise InvalidPathError(checked, "encode_segment makes no such segment", "Take it as it is, without decoding.")
    return text


def _encode(text: str) -> str:
    if text in {".", ".."}:
        return _escape(text)
    pieces = [_escape(character) if character == "~" or _is_foreign(character) else character for character in text]
    segment = "".join(pieces)
    return segment if is_normalized("NFC", segment) else _escape_unstable(pieces)


def _escape_unstable(pieces: Iterable[str]) -> str:
    # Every part of a text in normal form C is in it too, so that judging by what stands before is enough.
    segment = ""
    for piece in pieces:
        segment += piece if is_normalized("NFC", segment + piece) else _escape(piece)
    return segment


def _escape(text: str) -> str:
    return "".join(f"~{byte:02X}" for byte in text.encode())


def _unescape(escapes: re.Match[str]) -> str:
    return bytes.fromhex(escapes[0].replace("~", "")).decode()


# --- templates --------------------------------------------------------------------------------------------------------

_NAME = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*"
_PLACEHOLDERS: Final[Mapping[Syntax, re.Pattern[str]]] = {
    "{}": re.compile(rf"\{{({_NAME})\}}"),
    "${}": re.compile(rf"\$\{{({_NAME})\}}"),
}
_MARKS = re.compile(r"[{}$]")


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A segment of a template that a value takes the place of."""

    name: str


@dataclass(frozen=True, slots=True)
class Template:
    """An address with placeholders, each a whole segment: ``/tasks/{taskId}/agents/{agentId}/results/{eventId}``.

    Output paths and subscriptions write ``{name}``, ``stateReads`` and ``stateWrites`` write ``${name}``. A name may be
    dotted (``{params.eventId}``); it is looked up as it is written.
    """

    text: str
    parts: tuple[str | Placeholder, ...] = field(compare=False, repr=False)

    @classmethod
    def parse(cls, text: object, syntax: Syntax = "{}", roots: Sequence[str] = DEFAULT_ROOTS) -> Template:
        """Check a template once, with its root; a malformed one raises ``InvalidPathError``."""
        template = _as_text(text)
        segments = _split(template)
        _refuse_faults(template, (_template_fault(segment, syntax) for segment in segments), segments)
        _require_count(template, segments)
        _require_root(template, segments[0], roots)
        return cls(template, tuple(_part(segment, syntax) for segment in segments))

    @property
    def names(self) -> frozenset[str]:
        return frozenset(part.name for part in self.parts if isinstance(part, Placeholder))

    def render(self, values: Mapping[str, str]) -> Path:
        """Put the values in. Each must be exactly one valid segment, so that no id can lead elsewhere.

        A name without a value, and a value that is no segment, raise ``InvalidPathError``.
        """
        segments = [part if isinstance(part, str) else self._fill(part.name, values) for part in self.parts]
        return parse("/" + "/".join(segments), (segments[0],))

    def may_collide(self, other: Template) -> bool:
        """Whether some values let both render the same path. Names that occur twice are taken to be independent."""
        if len(self.parts) != len(other.parts):
            return False
        pairs = zip(self.parts, other.parts, strict=True)
        return all(mine == theirs for mine, theirs in pairs if isinstance(mine, str) and isinstance(theirs, str))

    def _fill(self, name: str, values: Mapping[str, str]) -> str:
        if name not in values:
            known = ", ".join(sorted(values)) or "none"
            raise InvalidPathError(self.text, f"there is no value for {name!r}", f"Known names: {known}.")
        try:
            return check_segment(values[name])
        except InvalidPathError as error:
            raise InvalidPathError(
                self.text,
                f"the value of {name!r} is not exactly one segment ({error})",
                "encode_segment turns a foreign id into one.",
            ) from error

    def __str__(self) -> str:
        return self.text


def _part(segment: str, syntax: Syntax) -> str | Placeholder:
    placeholder = _PLACEHOLDERS[syntax].fullmatch(segment)
    return Placeholder(placeholder[1]) if placeholder else segment


def _template_fault(segment: str, syntax: Syntax) -> _Fault | None:
    if not _MARKS.search(segment):
        return _fault(segment)
    if _PLACEHOLDERS[syntax].fullmatch(segment):
        return None
    own = syntax.replace("}", "name}")
    if any(other.fullmatch(segment) for other in _PLACEHOLDERS.values()):
        return "is written in the other template syntax", f"Write {own} here."
    if any(placeholder.search(segment) for placeholder in _PLACEHOLDERS.values()):
        return "mixes a placeholder with other text", f"Give {own} a segment of its own."
    if segment.count("{") != segment.count("}"):
        return "has unbalanced braces", f"Write {own}."
    return "is not a placeholder", f"Write {own}; a name has ASCII letters, digits and '_', and may be dotted."


# --- who may write ----------------------------------------------------------------------------------------------------

_OWNER_SEGMENTS: Final[Mapping[str, int]] = {"agents": 2, "workflows": 2, "executors": 3}
_OWNED = frozenset({"results", "errors", "steps", "interrupts"})
_BOOKKEEPING = frozenset({"steps", "batches", "decisions"})
_COMMITTED = frozenset({"runs", "state"})


def reserved(path: Path) -> bool:
    """Whether only the owner writes here: an executor, a workflow's bookkeeping, or a thread's commits.

    ``…/interrupts/{id}/answer`` is open, because writing it is how an interrupt is answered.
    """
    place = path.segments[2:]
    return _is_bookkeeping(place) or _is_owned(place) or (path.root == "threads" and _is_committed(place))


def _is_owned(place: Sequence[str]) -> bool:
    at = _OWNER_SEGMENTS.get(place[0], len(place))
    kind, rest = place[at : at + 1], place[at + 1 :]
    if not rest or kind[0] not in _OWNED:
        return False
    is_answer = kind[0] == "interrupts" and len(rest) == 2 and rest[1] == "answer"
    return not is_answer


def _is_bookkeeping(place: Sequence[str]) -> bool:
    return place[0] in _BOOKKEEPING if len(place) > 1 else place[0] == "decision"


def _is_committed(place: Sequence[str]) -> bool:
    return place[0] in _COMMITTED if len(place) > 1 else place[0] == "head"
