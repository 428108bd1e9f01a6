"""What a person publishes (``Subscription``) and what is stored of it (``StoredSubscription``)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime  # noqa: TC003 - pydantic reads the annotations
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from statelayer import values
from statelayer.errors import (
    InvalidConditionError,
    InvalidPathError,
    InvalidSubscriptionError,
    InvalidValueError,
)
from statelayer.events import StoredModel
from statelayer.paths import Template, check_segment
from statelayer.subscriptions.conditions import Condition
from statelayer.subscriptions.patterns import Pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jsonschema.protocols import Validator
    from pydantic_core import ErrorDetails

DEFAULT_TRIGGER_DEPTH: Final = 3
MAX_TRIGGER_DEPTH: Final = 32
DEFINITION_LIMITS: Final = values.Limits(bytes=1024 * 1024)
"""Bounds of a whole subscription, apart from its contract."""

RESERVED_ACTIONS: Final = frozenset({"agent", "workflow", "skip"})
"""Job ids begin with these or with a registered action type, so that no type may be one of them."""

TEMPLATE_NAMES: Final = frozenset({"taskId", "threadId", "eventId", "agentId", "workflowId"})
"""What an output path always knows; they hide captures of the same name, which are ``{params.…}``."""

_ACTION_TYPE = re.compile(r"[a-z][a-z0-9_]*")


def _canonical(value: Any) -> Any:
    return values.canonical(value, limits=DEFINITION_LIMITS)


Segment: TypeAlias = Annotated[str, AfterValidator(check_segment)]
Stored: TypeAlias = Annotated[Any, AfterValidator(_canonical)]


class Definition(StoredModel):
    """What a person writes: a key that nobody reads is refused, because it was meant to do something."""

    model_config = ConfigDict(extra="forbid")


# --- actions ----------------------------------------------------------------------------------------------------------


class Action(Definition):
    """What to run for an event. ``type`` names the executor."""

    type: str

    @property
    def target(self) -> str | None:
        """What of the executor's is run, as far as the action itself says so."""
        return None


class ExecuteAgent(Action):
    """Run an agent."""

    type: Literal["execute_agent"] = "execute_agent"
    agent_id: Segment

    @property
    def target(self) -> str:
        return self.agent_id


class ExecuteWorkflow(Action):
    """Run a workflow."""

    type: Literal["execute_workflow"] = "execute_workflow"
    workflow_id: Segment

    @property
    def target(self) -> str:
        return self.workflow_id


class RegisteredAction(Action):
    """Run an executor that the service registered; what else the action holds is for that executor."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Stored] = Field(init=False)

    @field_validator("type")
    @classmethod
    def _check_type(cls, type: str) -> str:
        if not _ACTION_TYPE.fullmatch(type):
            raise ValueError("it is lower-case letters, digits and '_', beginning with a letter")
        if type in RESERVED_ACTIONS or type in _OWN_ACTIONS:
            raise ValueError(f"{type!r} is reserved; use execute_agent, execute_workflow or a registered type")
        return type

    @property
    def params(self) -> dict[str, Any]:
        """What the action holds beside its type."""
        return dict(self.__pydantic_extra__)


_OWN_ACTIONS: Final = frozenset({"execute_agent", "execute_workflow"})


def _action_tag(action: object) -> str:
    named = action.get("type") if isinstance(action, Mapping) else getattr(action, "type", None)
    return named if isinstance(named, str) and named in _OWN_ACTIONS else "registered"


AnyAction: TypeAlias = Annotated[
    Annotated[ExecuteAgent, Tag("execute_agent")]
    | Annotated[ExecuteWorkflow, Tag("execute_workflow")]
    | Annotated[RegisteredAction, Tag("registered")],
    Discriminator(_action_tag),
]


# --- the definition ---------------------------------------------------------------------------------------------------


class Output(Definition):
    """Where a result is written, when not at the executor's own place."""

    path: str

    @field_validator("path")
    @classmethod
    def _check_path(cls, path: str, info: ValidationInfo) -> str:
        Template.parse(path, roots=_roots(info) or _own_root(path))
        return path

    @cached_property
    def template(self) -> Template:
        """The parsed path."""
        return Template.parse(self.path, roots=_own_root(self.path))


def _roots(info: ValidationInfo) -> Sequence[str] | None:
    """Return the layer's roots, which only the layer knows; a model that is built by itself takes any."""
    return info.context and info.context.get("roots")


def _own_root(path: str) -> tuple[str]:
    return (path[1:].partition("/")[0],)


def _condition_document(condition: object) -> object:
    return (condition if isinstance(condition, Condition) else Condition.parse(condition)).document


def _check_schema(schema: dict[str, Any]) -> dict[str, Any]:
    named = schema.get("$schema")
    dialect = Draft202012Validator if named is None else _dialect(named)
    try:
        dialect.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"at {error.json_path}: {error.message:.200}") from error
    return schema


def _dialect(named: object) -> type[Validator]:
    # The stub forgets that `default` may be anything; without one, an unknown dialect is only warned of.
    found = validator_for({"$schema": named}, default=None) if isinstance(named, str) else None  # type: ignore[arg-type]
    if found is None:
        raise ValueError(f"$schema {named!r:.80} is not a known dialect; leave it out for draft 2020-12")
    return found


class Subscription(Definition):
    """Pattern, condition and action: what is run for which facts.

    Building one directly raises pydantic's ``ValidationError``; ``parse`` raises ``InvalidSubscriptionError``. The
    condition is kept as it was given, in canonical values.
    """

    name: Segment
    pattern: str
    condition: Annotated[dict[str, Any] | None, BeforeValidator(_condition_document)] = None
    action: AnyAction
    max_trigger_depth: StrictInt = Field(default=DEFAULT_TRIGGER_DEPTH, ge=1, le=MAX_TRIGGER_DEPTH)
    """At this depth and beyond an event is recorded and nothing fires."""

    input_schema: Annotated[dict[str, Any], AfterValidator(_canonical), AfterValidator(_check_schema)] | None = None
    """A JSON Schema that the event's value must meet."""

    output: Output | None = None

    @classmethod
    def parse(cls, source: Subscription | Mapping[str, Any], *, roots: Sequence[str] | None = None) -> Self:
        """Check a definition as it is published, or raise ``InvalidSubscriptionError`` with every problem."""
        return _validated(cls, source.definition() if isinstance(source, Subscription) else source, roots)

    @cached_property
    def parsed_pattern(self) -> Pattern:
        return Pattern.parse(self.pattern)

    @cached_property
    def parsed_condition(self) -> Condition:
        return Condition.parse(self.condition)

    @property
    def default_target(self) -> str:
        """What the action runs: its agent or workflow, else what an executor without a choice of its own takes."""
        return self.action.target or self.name

    def definition(self) -> dict[str, Any]:
        """Return what a person gave, as a document; an input schema or output that was not given is left out."""
        document = self.model_dump(by_alias=True, include=set(Subscription.model_fields))
        return {key: value for key, value in document.items() if value is not None or key == "condition"}

    def same_definition(self, other: Subscription) -> bool:
        """Say whether both were given the same content; types count, so that 1 is not 1.0."""
        return values.identical(self.definition(), other.definition())

    @field_validator("pattern")
    @classmethod
    def _check_pattern(cls, pattern: str, info: ValidationInfo) -> str:
        Pattern.parse(pattern, _roots(info))
        return pattern

    @model_validator(mode="after")
    def _check_whole(self) -> Self:
        problems = [*self.parsed_condition.unknown_captures(self.parsed_pattern.captures), *self._output_problems()]
        if problems:
            raise InvalidSubscriptionError(self.name, problems)
        values.canonical(self.definition(), limits=DEFINITION_LIMITS)
        return self

    def _output_problems(self) -> Iterator[str]:
        if self.output is None:
            return
        captures = self.parsed_pattern.captures
        known = TEMPLATE_NAMES | captures | {f"params.{name}" for name in captures}
        for name in sorted(self.output.template.names - known):
            yield f"output.path: nothing is called {name!r}; use one of {' '.join(sorted(known))}"
        namespace = zip(self.output.template.parts[:2], self.parsed_pattern.literals, strict=False)
        for position, (own, asked) in enumerate(namespace, start=1):
            if isinstance(own, str) and asked is not None and own != asked:
                yield f"output.path: segment {position} ({own!r}) leaves the namespace; the pattern has {asked!r}"


# --- what is stored ---------------------------------------------------------------------------------------------------


Interval: TypeAlias = tuple[StrictInt, StrictInt | None]


def _check_intervals(intervals: tuple[Interval, ...]) -> tuple[Interval, ...]:
    bounds = [bound for interval in intervals for bound in interval]
    if None in bounds[:-1]:
        raise ValueError("only the last interval may be open")
    known = [bound for bound in bounds if bound is not None]
    if known != sorted(known) or any(start == end for start, end in intervals):
        raise ValueError("revisions must rise")
    return intervals


class StoredSubscription(Subscription):
    """One version of a subscription, as it stands in ``state_subscriptions``."""

    model_config = ConfigDict(extra="ignore")

    version: StrictInt = Field(ge=1)
    enabled: StrictBool
    active_revs: Annotated[tuple[Interval, ...], AfterValidator(_check_intervals)]
    """From which revision of all subscriptions to which (exclusive, or still) it is in force."""

    target: Segment
    """What the action runs, frozen at publication: the last part of the job id."""

    contract: Annotated[dict[str, Any], AfterValidator(_canonical)] | None = None
    """The contract that it was compiled from, whole."""

    published_at: Annotated[AwareDatetime, AfterValidator(_canonical)]

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Read what ``to_document`` wrote; one that was broken by hand raises ``InvalidSubscriptionError``."""
        return _validated(cls, document)

    @classmethod
    def first_in_force(
        cls,
        definition: Subscription,
        *,
        version: int,
        revision: int,
        target: str,
        published_at: datetime,
        contract: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return a new version of a definition, enabled and in force from the revision of its publication on."""
        stored = {
            "version": version,
            "enabled": True,
            "activeRevs": [[revision, None]],
            "target": target,
            "publishedAt": published_at,
            "contract": contract,
        }
        return cls.from_document({**definition.definition(), **stored})

    @property
    def id(self) -> str:
        return f"{self.name}@v{self.version}"

    def to_document(self) -> dict[str, Any]:
        """Return the document of the ``state_subscriptions`` collection."""
        stored = self.model_dump(by_alias=True, include=_STORED_FIELDS, exclude_none=True)
        revs = [list(interval) for interval in self.active_revs]
        return {"_id": self.id, **self.definition(), **stored, "activeRevs": revs}

    def in_force(self, revision: int) -> bool:
        """Say whether it applies to an event that was stamped with this revision."""
        return any(start <= revision and (end is None or revision < end) for start, end in self.active_revs)

    def enabled_from(self, revision: int) -> Self:
        """Return it enabled, in force from this revision on unless it already is."""
        is_open = any(end is None for _, end in self.active_revs)
        opened = self.active_revs if is_open else (*self.active_revs, (revision, None))
        return self.model_copy(update={"enabled": True, "active_revs": opened})

    def disabled_from(self, revision: int) -> Self:
        """Return it disabled, no longer in force from this revision on."""
        closed = tuple((start, revision if end is None else end) for start, end in self.active_revs)
        return self.model_copy(update={"enabled": False, "active_revs": closed})

    def __hash__(self) -> int:
        return hash((self.name, self.version))


_STORED_FIELDS: Final = set(StoredSubscription.model_fields) - set(Subscription.model_fields)


# --- what was wrong ---------------------------------------------------------------------------------------------------

_Model = TypeVar("_Model", bound=Subscription)
_ACTION_TAGS: Final = _OWN_ACTIONS | {"registered"}


def _validated(model: type[_Model], document: Mapping[str, Any], roots: Sequence[str] | None = None) -> _Model:
    try:
        return model.model_validate(document, context={"roots": roots})
    except ValidationError as error:
        problems = [told for detail in error.errors(include_input=False) for told in _tell(detail)]
        name = document.get("name") if isinstance(document, Mapping) else None
        raise InvalidSubscriptionError(name, problems) from error


def _tell(detail: ErrorDetails) -> Iterator[str]:
    where, cause = _where(detail["loc"]), detail.get("ctx", {}).get("error")
    if isinstance(cause, InvalidConditionError | InvalidSubscriptionError):
        yield from cause.problems
    elif isinstance(cause, InvalidValueError):
        yield f"{where}{cause.where.removeprefix('value')}: {cause.problem}"
    elif isinstance(cause, InvalidPathError):
        yield f"{where}: {cause.problem}"
    else:
        yield f"{where}: {cause or detail['msg']}"


def _where(place: tuple[int | str, ...]) -> str:
    """Return the place as clauses are named: ``activeRevs[0]``; the tag that chose the kind of action is no part."""
    if place[:1] == ("action",) and place[1:2] and place[1] in _ACTION_TAGS:
        place = ("action", *place[2:])
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.removeprefix(".") or "subscription"
