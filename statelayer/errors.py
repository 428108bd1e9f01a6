"""Every error the library raises.

    StateLayerError
    ├── InvalidInputError (ValueError)         refused before anything was written
    │   ├── InvalidPathError
    │   │   └── ReservedPathError
    │   ├── InvalidValueError
    │   ├── InvalidActorError
    │   ├── InvalidWriteError
    │   ├── InvalidSettingsError
    │   ├── InvalidConditionError
    │   ├── InvalidSubscriptionError
    │   └── InvalidExecutorError
    ├── ConflictError                          somebody else was first
    │   ├── VersionConflictError
    │   ├── IdempotencyConflictError
    │   └── ExecutionStateError
    ├── NotFoundError
    │   └── CausationNotFoundError
    ├── SetupError                             the database is not what the library needs
    │   ├── SetupRequiredError
    │   ├── ReplicaSetRequiredError
    │   ├── UnsupportedServerError
    │   ├── PrivilegeRequiredError
    │   ├── IndexConflictError
    │   └── FormatMismatchError
    ├── IntegrityError                         the stored log contradicts itself
    ├── HistoryLostError                       a stream position can no longer be read from
    ├── LogLostError                           the event log was dropped, renamed or replaced
    ├── LeaseLostError                         another worker owns the execution now
    ├── ContentionError                        the deadline passed while others kept winning
    ├── OutcomeUnknownError                    the commit may or may not have happened
    ├── ClosedError                            the layer was closed
    ├── RunnerStoppedError                     what ``running()`` hosts ended by itself
    ├── EmbeddedServerError                    the embedded mongod cannot be started
    └── DatabaseError                          the server or the network said no
        ├── DuplicateKeyError
        └── TransientDatabaseError

Each class has a stable ``code`` for programs and logs, the facts as attributes, and a message that says what was
wrong, where, and what to do next. Messages never contain a connection string.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any


def _sentence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


class StateLayerError(Exception):
    """Base of every error of this library."""

    code: ClassVar[str] = "state_layer_error"


# --- refused input ----------------------------------------------------------------------------------------------------


class InvalidInputError(StateLayerError, ValueError):
    """The input breaks a rule; nothing was written."""

    code = "invalid_input"


class InvalidPathError(InvalidInputError):
    """A path, a segment or a template breaks a rule of the address space."""

    code = "invalid_path"

    def __init__(self, path: object, problem: str, advice: str = "") -> None:
        self.path = path
        self.problem = problem
        super().__init__(_sentence(f"Invalid path {path!r}: {problem}.", advice))


class ReservedPathError(InvalidPathError):
    """The path belongs to an executor or to the layer itself, which alone write it."""

    code = "reserved_path"


class InvalidValueError(InvalidInputError):
    """A value cannot be stored without loss, or exceeds a limit. ``where`` is the place inside the value."""

    code = "invalid_value"

    def __init__(self, where: str, problem: str, advice: str = "") -> None:
        self.where = where
        self.problem = problem
        super().__init__(_sentence(f"Invalid value at {where}: {problem}.", advice))


class InvalidActorError(InvalidInputError):
    """An actor is missing or is not ``kind:id``."""

    code = "invalid_actor"

    def __init__(self, actor: object, problem: str) -> None:
        self.actor = actor
        super().__init__(f"Invalid actor {actor!r}: {problem}. Name who did it as 'kind:id', for example 'user:U7'.")


class InvalidWriteError(InvalidInputError):
    """A write, or an append of several, is malformed as a whole."""

    code = "invalid_write"


class InvalidSettingsError(InvalidInputError):
    """Settings contradict each other or the database."""

    code = "invalid_settings"


class InvalidConditionError(InvalidInputError):
    """A condition is malformed. ``problems`` names each clause that is wrong and why."""

    code = "invalid_condition"

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems) + ".")


class InvalidSubscriptionError(InvalidInputError):
    """A subscription is malformed. ``problems`` names each clause that is wrong and why."""

    code = "invalid_subscription"

    def __init__(self, name: object, problems: Sequence[str]) -> None:
        self.name = name
        self.problems = tuple(problems)
        super().__init__(f"Subscription {name!r} is refused: " + "; ".join(self.problems) + ".")


class InvalidExecutorError(InvalidInputError):
    """An executor cannot be registered as asked."""

    code = "invalid_executor"


# --- conflicts --------------------------------------------------------------------------------------------------------


class ConflictError(StateLayerError):
    """Somebody else was first; nothing was written."""

    code = "conflict"


class VersionConflictError(ConflictError):
    """The path is not at the version the caller expected."""

    code = "version_conflict"

    def __init__(self, path: str, *, expected: int, actual: int) -> None:
        self.path = path
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"{path} is at version {actual}, not {expected}. Read it again and decide on what is there now."
        )


class IdempotencyConflictError(ConflictError):
    """The idempotency key was used before, for other content. ``event_id`` is the first event under that key."""

    code = "idempotency_conflict"

    def __init__(self, key: str, *, namespace: str, event_id: str) -> None:
        self.key = key
        self.namespace = namespace
        self.event_id = event_id
        super().__init__(
            f"Idempotency key {key!r} was used in {namespace} by event {event_id} for other content. "
            "Use a new key for a new fact."
        )


class ExecutionStateError(ConflictError):
    """An execution cannot make this move from the state it is in."""

    code = "execution_state"

    def __init__(self, job_id: str, *, state: str, wanted: str) -> None:
        self.job_id = job_id
        self.state = state
        super().__init__(f"Execution {job_id} is {state}; it cannot be {wanted}.")


# --- not there --------------------------------------------------------------------------------------------------------


class NotFoundError(StateLayerError):
    """What was asked for does not exist. ``kind`` says what it is, ``id`` which one."""

    code = "not_found"

    def __init__(self, kind: str, id: str, advice: str = "") -> None:
        self.kind = kind
        self.id = id
        super().__init__(_sentence(f"No {kind} {id!r}.", advice))


class CausationNotFoundError(NotFoundError):
    """``caused_by`` names an event that is not in the log."""

    code = "causation_not_found"

    def __init__(self, event_id: str) -> None:
        super().__init__("event", event_id, "A cause must be committed before its effect; nothing was written.")


# --- the database is not ready ----------------------------------------------------------------------------------------


class SetupError(StateLayerError):
    """The database is not what the library needs."""

    code = "setup"


class SetupRequiredError(SetupError):
    """The database was never prepared."""

    code = "setup_required"

    def __init__(self, database: str) -> None:
        self.database = database
        super().__init__(
            f"Database {database!r} is not set up. Run `await layer.setup()` once (or `statelayer setup`)."
        )


class ReplicaSetRequiredError(SetupError):
    """The server is a standalone mongod, which has neither transactions nor change streams."""

    code = "replica_set_required"


class UnsupportedServerError(SetupError):
    """The server is older than the library supports."""

    code = "unsupported_server"


class PrivilegeRequiredError(SetupError):
    """The database user lacks a privilege. ``action`` is what was refused."""

    code = "privilege_required"

    def __init__(self, message: str, *, action: str) -> None:
        self.action = action
        super().__init__(message)


class IndexConflictError(SetupError):
    """An index the log depends on is missing, differs, or cannot be built over what is stored."""

    code = "index_conflict"

    def __init__(
        self, message: str, *, collection: str, index: str, duplicates: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.collection = collection
        self.index = index
        self.duplicates = tuple(duplicates)
        super().__init__(message)


class FormatMismatchError(SetupError):
    """The stored format, or a number fixed at setup, is not the one this process was started with."""

    code = "format_mismatch"


# --- what happens at run time -----------------------------------------------------------------------------------------


class IntegrityError(StateLayerError):
    """The stored log contradicts itself. ``verify`` says where, ``replay`` mends entries."""

    code = "integrity"

    def __init__(self, message: str, *, namespace: str, path: str | None = None) -> None:
        self.namespace = namespace
        self.path = path
        super().__init__(message)


class HistoryLostError(StateLayerError):
    """The position is older than what the server can still stream. Read the log from the last known seq instead."""

    code = "history_lost"


class LogLostError(StateLayerError):
    """The event log was dropped, renamed or replaced; nothing is evaluated until an operator decides."""

    code = "log_lost"


class LeaseLostError(StateLayerError):
    """The worker no longer owns the execution, so nothing it says about it is stored."""

    code = "lease_lost"

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        super().__init__(f"The lease on execution {job_id} is lost; its result is refused.")


class ContentionError(StateLayerError):
    """Other writers kept winning until the deadline. ``attempts`` says how often it was tried; nothing was written."""

    code = "contention"

    def __init__(self, message: str, *, attempts: int) -> None:
        self.attempts = attempts
        super().__init__(message)


class OutcomeUnknownError(StateLayerError):
    """The commit was sent and its outcome cannot be learned. ``event_ids`` are the events it would have written."""

    code = "outcome_unknown"

    def __init__(self, message: str, *, event_ids: Sequence[str]) -> None:
        self.event_ids = tuple(event_ids)
        super().__init__(message)


class ClosedError(StateLayerError):
    """The layer was closed; the call was not accepted, or was withdrawn before it was committed."""

    code = "closed"


class ForkedError(StateLayerError):
    """The process was forked after the layer had used its connections, which belong to the parent."""

    code = "forked"


class RunnerStoppedError(StateLayerError):
    """What ``running()`` hosts ended by itself; ``__cause__`` says why."""

    code = "runner_stopped"


class EmbeddedServerError(StateLayerError):
    """The embedded mongod cannot be found or started."""

    code = "embedded_server"


# --- the server or the network ----------------------------------------------------------------------------------------


class DatabaseError(StateLayerError):
    """The server or the network refused an operation. ``__cause__`` is the driver's error.

    ``server_code`` and ``labels`` are the server's (``labels`` as in the driver specifications, for example
    ``TransientTransactionError``).
    """

    code = "database"

    def __init__(self, message: str, *, server_code: int | None = None, labels: Iterable[str] = ()) -> None:
        self.server_code = server_code
        self.labels = frozenset(labels)
        super().__init__(message)


class TransientDatabaseError(DatabaseError):
    """The server is away or changing its primary; the same call may succeed in a moment."""

    code = "database_transient"


class DuplicateKeyError(DatabaseError):
    """A unique index refused a document. ``keys`` are the fields of that index, ``values`` what collided."""

    code = "duplicate_key"

    def __init__(
        self,
        message: str,
        *,
        keys: Sequence[str],
        values: Mapping[str, Any],
        server_code: int | None = 11000,
        labels: Iterable[str] = (),
    ) -> None:
        self.keys = tuple(keys)
        self.values = dict(values)
        super().__init__(message, server_code=server_code, labels=labels)
