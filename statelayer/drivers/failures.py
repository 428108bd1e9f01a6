"""From what the driver raised to what the library raises: one table."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import bson.errors
from pymongo import errors as driver

from statelayer.errors import (
    DatabaseError,
    DuplicateKeyError,
    HistoryLostError,
    InvalidValueError,
    PrivilegeRequiredError,
    ReplicaSetRequiredError,
    StateLayerError,
    TransientDatabaseError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TRANSIENT_TRANSACTION = "TransientTransactionError"
UNKNOWN_COMMIT = "UnknownTransactionCommitResult"

DUPLICATE_KEY = 11000
WRITE_CONFLICT = 112
UNAUTHORIZED = 13
NO_TRANSACTIONS = 20
NO_CHANGE_STREAMS = 40573

# The server's "retryable" codes (https://github.com/mongodb/specifications, retryable writes), interruptions by a
# step-down or shutdown, CursorNotFound, CursorKilled, and a drop under way: whoever asked may ask again.
TRANSIENT_CODES = frozenset({6, 7, 43, 50, 63, 89, 91, 112, 134, 150, 189, 237, 251, 262, 9001, 10107, 11600, 11602})
TRANSIENT_CODES |= frozenset({215, 11601, 13388, 13435, 13436})

# 260 a token of something else, 280 the stream cannot go on, 286 the oplog rolled over, 10334 a change is too large.
LOST_STREAM_CODES = frozenset({260, 280, 286, 10334})


@contextmanager
def translated() -> Iterator[None]:
    """Let no driver error out bare; ``__cause__`` keeps it."""
    try:
        yield
    except (driver.PyMongoError, bson.errors.BSONError) as error:
        raise translate(error) from error


def is_transient(error: BaseException) -> bool:
    """Say whether the same call may succeed in a moment, for an error of the driver or of ours."""
    if isinstance(error, (TransientDatabaseError, driver.ConnectionFailure)):
        return True
    return has_label(error, TRANSIENT_TRANSACTION)


def is_timeout(error: BaseException) -> bool:
    """Say whether the driver gave up because the time was up, for an error of the driver."""
    return isinstance(error, driver.PyMongoError) and error.timeout


def is_conflict(error: BaseException) -> bool:
    """Say whether a transaction lost against another one that wrote the same document, for an error of ours."""
    return isinstance(error, DatabaseError) and error.server_code == WRITE_CONFLICT


def is_silence(error: BaseException) -> bool:
    """Say whether the server did not answer, so that nobody knows what it did."""
    return isinstance(error, driver.ConnectionFailure) or isinstance(error.__cause__, driver.ConnectionFailure)


def has_label(error: BaseException, label: str) -> bool:
    """Say whether the server or driver put this label on the error, for an error of the driver or of ours."""
    if isinstance(error, driver.PyMongoError):
        return error.has_error_label(label)
    return isinstance(error, DatabaseError) and label in error.labels


def translate(error: Exception) -> StateLayerError:
    """Return the error of ours that says what the driver's error says."""
    if isinstance(error, (driver.InvalidOperation, driver.ConfigurationError)):
        return DatabaseError(f"The driver refused the call: {error}")
    if isinstance(error, (bson.errors.BSONError, driver.DocumentTooLarge)):
        return InvalidValueError("document", str(error))
    code, message, details = _what_the_server_said(error)
    labels = _labels(error)
    if code == DUPLICATE_KEY:
        return _duplicate(details, message, labels)
    if code == UNAUTHORIZED:
        return PrivilegeRequiredError(f"The database user lacks a privilege: {message}", action=message)
    if code in (NO_TRANSACTIONS, NO_CHANGE_STREAMS):
        return ReplicaSetRequiredError(REPLICA_SET_ADVICE)
    if code in LOST_STREAM_CODES:
        return HistoryLostError(f"The stream cannot go on from that position ({code}: {message}).")
    kind = TransientDatabaseError if _may_be_repeated(error, code, labels) else DatabaseError
    return kind(f"{type(error).__name__}: {message}", server_code=code, labels=labels)


REPLICA_SET_ADVICE = (
    "The server is a standalone mongod; transactions and change streams need a replica set. "
    "Start it with `--replSet rs0` and run `rs.initiate()` once in mongosh (one node is enough)."
)


def _may_be_repeated(error: Exception, code: int | None, labels: frozenset[str]) -> bool:
    return isinstance(error, driver.ConnectionFailure) or code in TRANSIENT_CODES or TRANSIENT_TRANSACTION in labels


def _labels(error: Exception) -> frozenset[str]:
    known = (TRANSIENT_TRANSACTION, UNKNOWN_COMMIT, "RetryableWriteError", "NonResumableChangeStreamError")
    return frozenset(
        label for label in known if isinstance(error, driver.PyMongoError) and error.has_error_label(label)
    )


def _what_the_server_said(error: Exception) -> tuple[int | None, str, Mapping[str, Any]]:
    if isinstance(error, driver.BulkWriteError):
        details = error.details or {}
        first = _first_write_error(details)
        return first.get("code"), first.get("errmsg", str(error)), first
    if isinstance(error, driver.OperationFailure):
        return error.code, (error.details or {}).get("errmsg") or str(error), error.details or {}
    return None, _without_topology(str(error)), {}


def _first_write_error(details: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the worst that an unordered bulk met: a duplicate key must not hide what is no duplicate."""
    problems: list[Mapping[str, Any]] = [*details.get("writeErrors", ()), *details.get("writeConcernErrors", ())]
    return min(problems, key=lambda problem: problem.get("code") == DUPLICATE_KEY, default={})


def _without_topology(message: str) -> str:
    """Drop the driver's settings and its description of every server, which say nothing that helps."""
    return message.partition(", Topology Description:")[0].partition(" (configured timeouts:")[0]


def _duplicate(details: Mapping[str, Any], message: str, labels: frozenset[str]) -> DuplicateKeyError:
    pattern = details.get("keyPattern") or {}
    values = details.get("keyValue") or {}
    return DuplicateKeyError(
        f"A document with the same {', '.join(pattern) or 'key'} is already there: {message}",
        keys=tuple(pattern),
        values=values,
        labels=labels,
    )
