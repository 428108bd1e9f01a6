"""What the database holds: every collection with its documents, its indexes and its place in a sharded cluster.

The collections that grow with use are sharded by namespace. A unique index can be kept across shards only if it begins
with the shard key, so in these collections every unique index begins with ``namespace``, or is ``_id`` and fixes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, get_args

from statelayer.events import Op, Source
from statelayer.mongo_indexes.schemas import (
    anything,
    array,
    choice,
    date,
    document,
    integer,
    long,
    nullable,
    record,
    text,
    truth,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

EVENTS: Final = "events"
ENTRIES: Final = "entries"
NAMESPACES: Final = "namespaces"
SUBSCRIPTIONS: Final = "state_subscriptions"
EXECUTIONS: Final = "executions"
CURSORS: Final = "cursors"
CHECKPOINTS: Final = "checkpoints"
INSTANCES: Final = "instances"
META: Final = "meta"

EXECUTION_STATES: Final = (
    "queued",
    "claimed",
    "running",
    "succeeded",
    "failed",
    "interrupted",
    "waiting_external",
    "cancelled",
    "skipped",
)
EXECUTION_REASONS: Final = (
    "handler_error",
    "timeout",
    "lease_lost",
    "invalid_input",
    "invalid_output",
    "budget_exceeded",
    "no_executor",
    "rendering_failed",
    "superseded",
    "deadline",
    "cancelled",
    "max_depth",
    "quarantined",
)
LEASED_STATES: Final = ("claimed", "running")
DISPATCH_STATES: Final = ("on", "paused", "log_lost")

EVENT_ID = r"^[0-9a-f]{24}$"
NAMESPACE = r"^/[^/]+/[^/]+$"
PATH = r"^/[^/]+/[^/]+/."
ACTOR = r"^[a-z][a-z0-9_-]*:."
JOB_ID = r"^[^:]+:[0-9a-f]{24}:."


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """One index, ascending in all of its keys. ``partial`` is the filter of the documents that it holds."""

    name: str
    keys: tuple[str, ...]
    unique: bool = False
    partial: Mapping[str, Any] | None = None

    @property
    def pattern(self) -> list[tuple[str, int]]:
        """The keys as the server takes them."""
        return [(key, 1) for key in self.keys]

    @property
    def options(self) -> dict[str, Any]:
        """What makes this index more than its keys, as the server names it."""
        unique = {"unique": True} if self.unique else {}
        return unique | ({"partialFilterExpression": dict(self.partial)} if self.partial else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionSpec:
    """One collection as it must be.

    ``grows`` says whether it grows with use; then ``shard_key`` is the field that holds the namespace. ``marks`` are
    fields that every document of ours has: a collection found without them belongs to somebody else.
    """

    name: str
    validator: Mapping[str, Any]
    indexes: tuple[Index, ...] = ()
    marks: tuple[str, ...] = ()
    grows: bool = False
    shard_key: str | None = None


_EVENTS = CollectionSpec(
    name=EVENTS,
    grows=True,
    shard_key="namespace",
    marks=("namespace", "seq"),
    indexes=(
        Index(name="namespace_seq", keys=("namespace", "seq"), unique=True),
        Index(name="namespace_path_version", keys=("namespace", "path", "version"), unique=True),
        # $state as of a seq is the newest event of a path up to it: one key here, every later version in the one above.
        Index(name="namespace_path_seq", keys=("namespace", "path", "seq")),
        Index(
            name="namespace_idempotencyKey",
            keys=("namespace", "idempotencyKey"),
            unique=True,
            partial={"idempotencyKey": {"$exists": True}},
        ),
        # Effects may lie in other namespaces than their cause, so this one alone does not name it.
        Index(name="causedByEventId", keys=("causedByEventId",), partial={"causedByEventId": {"$exists": True}}),
        Index(
            name="namespace_rootEventId",
            keys=("namespace", "rootEventId"),
            partial={"rootEventId": {"$exists": True}},
        ),
    ),
    validator=document(
        "Event",
        "A fact: what was written, where, by whom, caused by what. Only ever inserted, never changed or deleted.",
        {
            "_id": text("24 hexadecimal characters, as text.", EVENT_ID),
            "namespace": text("The first two segments of the path: the unit of order.", NAMESPACE),
            "seq": long("Place in the namespace: 1, 2, 3, … without a gap, in the order of commits.", 1),
            "path": text("The address that was written.", PATH),
            "version": long("This is the n-th write of the path.", 1),
            "op": choice(
                "set replaces the value, merge replaces the fields of patch, delete removes it.", get_args(Op)
            ),
            "value": anything("The full value after the write; absent for delete."),
            "patch": record("What a merge was given.", {}),
            "actor": text("Who did it, as kind:id, for example user:U7.", ACTOR),
            "source": choice("By which way it was written.", get_args(Source)),
            "triggerDepth": integer("How many causes stand behind it; 0 for what came from outside."),
            "causedByEventId": text("The event that caused it; absent on a root.", EVENT_ID),
            "rootEventId": text("The first event of its chain of causes; absent on a root.", EVENT_ID),
            "batchId": text("Events with the same one were committed together."),
            "batchSize": integer("How many events its batch has; beside an idempotencyKey.", 1),
            "idempotencyKey": text(
                "The caller's key, which makes a repeated append find this one; once per namespace."
            ),
            "subscriptionsRev": long("The revision of the subscriptions that apply to it."),
            "partition": integer("crc32 of the namespace, modulo the number of partitions in meta."),
            "committedAt": date("The writer's clock just before the commit: for people, it orders nothing."),
            "traceparent": text("W3C trace context of the write."),
            "schemaVersion": integer("Version of this document's form.", 1),
        },
        required=(
            *("_id", "namespace", "seq", "path", "version", "op", "actor", "source", "triggerDepth", "batchId"),
            *("subscriptionsRev", "partition", "committedAt", "schemaVersion"),
        ),
    ),
)

_ENTRIES = CollectionSpec(
    name=ENTRIES,
    grows=True,
    shard_key="namespace",
    marks=("namespace", "version"),
    indexes=(Index(name="namespace", keys=("namespace",)),),
    validator=document(
        "Entry",
        "The current value at a path: a projection of events, which replay() rebuilds.",
        {
            "_id": text("The path.", PATH),
            "namespace": text("The first two segments of the path.", NAMESPACE),
            "value": anything("The value; absent when deleted."),
            "version": long("The path's version, as of its newest event.", 1),
            "seq": long("The seq of its newest event.", 1),
            "eventId": text("Its newest event.", EVENT_ID),
            "actor": text("Who wrote it last.", ACTOR),
            "deleted": truth("Whether its newest event is a delete."),
            "updatedAt": date("committedAt of its newest event."),
        },
        required=("_id", "namespace", "version", "seq", "eventId", "actor", "deleted", "updatedAt"),
    ),
)

_NAMESPACES = CollectionSpec(
    name=NAMESPACES,
    grows=True,
    shard_key="_id",
    marks=("seq", "repairs"),
    indexes=(Index(name="partition", keys=("partition",)),),
    validator=document(
        "Namespace head",
        "How far the log of a namespace goes. Written only in the transaction of an append.",
        {
            "_id": text("The namespace.", NAMESPACE),
            "seq": long("The seq of its newest event."),
            "repairs": long("Raised by replay(), so that writers forget the versions they remember."),
            "partition": integer("crc32 of the namespace, modulo the number of partitions in meta."),
        },
        required=("_id", "seq", "repairs", "partition"),
    ),
)

_SUBSCRIPTIONS = CollectionSpec(
    name=SUBSCRIPTIONS,
    marks=("name", "activeRevs"),
    indexes=(
        Index(name="name_version", keys=("name", "version"), unique=True),
        Index(name="name_enabled", keys=("name",), unique=True, partial={"enabled": True}),
    ),
    # Deliberately loose: a document broken by hand is quarantined, visibly, by whoever evaluates it.
    validator=document(
        "Subscription",
        "What wakes whom: events on paths like pattern, for which condition holds, trigger action.",
        {
            "_id": anything("{name}@v{version}."),
            "name": text("Its name. One version of a name is enabled at a time."),
            "version": {"bsonType": ["int", "long"], "minimum": 1, "description": "1, 2, 3, … under the name."},
            "enabled": truth("Whether it is in force for new events. May be set by hand."),
            "activeRevs": array("[[from, to or null], …]: in force for events with from <= subscriptionsRev < to."),
            "pattern": text("Paths it listens to, for example /tasks/*/requests/*."),
            "condition": anything("What must hold for the event; null for always."),
            "action": record(
                "What is run.",
                {"type": text("execute_agent, execute_workflow, or a registered type.")},
                required=("type",),
            ),
            "target": anything("What the action runs: the last part of its job ids."),
            "maxTriggerDepth": anything("Events of this triggerDepth and above trigger nothing."),
            "inputSchema": anything("JSON Schema that the event's value must meet."),
            "output": anything("Where the result is written, when not at the executor's own place."),
            "contract": anything("The agent's contract it was compiled from, frozen."),
            "publishedAt": date("When it was published."),
        },
        required=("name", "version", "enabled", "activeRevs", "pattern", "action"),
    ),
)

_EXECUTIONS = CollectionSpec(
    name=EXECUTIONS,
    grows=True,
    shard_key="namespace",
    marks=("namespace", "eventId"),
    indexes=(
        # Targets come before the time, so that work which nobody here offers does not stand in the way of a claim.
        Index(name="claim", keys=("state", "action.type", "target", "availableAt")),
        # Partial by state: leases are judged by the server's clock, and an $expr cannot use one partial on the lease.
        Index(name="reap", keys=("state", "lease.until"), partial={"state": {"$in": list(LEASED_STATES)}}),
        Index(name="eventId", keys=("eventId",)),
        Index(name="namespace_state", keys=("namespace", "state")),
    ),
    validator=document(
        "Execution",
        "One run of one action's target for one event; the durable job.",
        {
            "_id": text("{agent, workflow or type}:{eventId}:{target}, or skip:{eventId}:{subscription}.", JOB_ID),
            "namespace": text("The namespace of the event.", NAMESPACE),
            "eventId": text("The event that woke it, and its input.", EVENT_ID),
            "rootEventId": nullable(text("The first event of the chain of causes.", EVENT_ID)),
            "subscription": record(
                "What made it.",
                {"name": text("Name of the subscription."), "version": anything("Its version.")},
                required=("name",),
            ),
            "triggerDepth": integer("How deep the waking event stands in its chain."),
            "params": anything("What the pattern captured from the path."),
            "cancelledBy": anything("Who cancelled it, if somebody did."),
            "alsoMatched": array("Other subscriptions that wanted the same target for the same event."),
            "action": nullable(record("What is run.", {"type": text("Type of the executor.")})),
            "target": nullable(text("Which agent, workflow or other target is run.")),
            "state": choice("Where it stands.", EXECUTION_STATES),
            "reason": nullable(choice("Why it stands there.", EXECUTION_REASONS)),
            "attempts": integer("How often it was started."),
            "maxAttempts": integer("How often it may be started.", 1),
            "availableAt": date("Not claimed before (the server's clock)."),
            "lease": nullable(
                record(
                    "Who runs it, and until when without renewing (the server's clock).",
                    {"owner": text("Id of the instance."), "token": text("The fence."), "until": date("End.")},
                )
            ),
            "reads": array("What its nodes read: as, path, version, seq, eventId."),
            "warnings": array("What went wrong without failing it."),
            "resultEventId": nullable(text("The event that holds its result or error.", EVENT_ID)),
            "createdAt": date("When it was recorded."),
            "startedAt": nullable(date("When its last attempt began.")),
            "finishedAt": nullable(date("When it ended.")),
        },
        required=("_id", "namespace", "eventId", "subscription", "state", "createdAt"),
        anyOf=[
            {"properties": {"state": {"enum": ["skipped"]}}},
            {
                "required": ["action", "target", "attempts", "maxAttempts", "availableAt"],
                "properties": {
                    "action": {"bsonType": "object", "required": ["type"]},
                    "target": {"bsonType": "string"},
                },
            },
        ],
    ),
)

_CURSORS = CollectionSpec(
    name=CURSORS,
    grows=True,
    shard_key="_id",
    marks=("at",),
    validator=document(
        "Cursor",
        "How far the events of a namespace have been evaluated against the subscriptions.",
        {
            "_id": text("The namespace.", NAMESPACE),
            "at": record(
                "Everything up to here has been evaluated.",
                {"seq": long("seq of the last evaluated event."), "eventId": text("Its id.")},
                required=("seq", "eventId"),
            ),
        },
        required=("_id", "at"),
    ),
)

_CHECKPOINTS = CollectionSpec(
    name=CHECKPOINTS,
    validator=document(
        "Checkpoint",
        "From where a partition's change stream is read on, and which instance reads it.",
        {
            "_id": integer("The partition."),
            "clusterTime": nullable({"bsonType": "timestamp", "description": "Evaluated up to this cluster time."}),
            "lease": nullable(
                record(
                    "Which instance evaluates the partition; null for none.",
                    {"owner": text("Id of the instance."), "until": date("Until when (the server's clock).")},
                    required=("owner", "until"),
                )
            ),
        },
        required=("_id",),
    ),
)

_INSTANCES = CollectionSpec(
    name=INSTANCES,
    marks=("heartbeatAt",),
    validator=document(
        "Instance",
        "A process that evaluates or works, as it reports itself.",
        {
            "_id": text("Id of the instance."),
            "host": text("Name of its machine."),
            "pid": {"bsonType": ["int", "long"], "description": "Its process id there."},
            "startedAt": date("When it started."),
            "heartbeatAt": date("When it last reported itself (the server's clock)."),
            "listens": truth("Whether it evaluates events."),
            "works": truth("Whether it runs executions."),
            "partitions": array("What it evaluates.", integer("A partition.")),
            "sessions": array("Sessions of the server that it used lately; ended when it dies.", text("A UUID.")),
            "executors": array(
                "What it can run.",
                record(
                    "One executor.",
                    {"type": text("Type of the action."), "target": anything("Which target; null for all.")},
                    required=("type",),
                ),
            ),
        },
        required=("_id", "host", "pid", "startedAt", "heartbeatAt", "executors"),
    ),
)

_META = CollectionSpec(
    name=META,
    validator=document(
        "Meta",
        "What holds for the whole database: documents format, subscriptions and dispatch.",
        {"_id": text("Which one it is.")},
        required=("_id",),
        anyOf=[
            record(
                "The form of everything stored. Fixed by the first setup().",
                {
                    "_id": {"enum": ["format"]},
                    "version": integer("Version of the form.", 1),
                    "partitions": integer("In how many partitions the namespaces are divided.", 1),
                },
                required=("version", "partitions"),
            ),
            record(
                "Counts the changes of subscriptions; every append reads it.",
                {"_id": {"enum": ["subscriptions"]}, "revision": long("The revision now.")},
                required=("revision",),
            ),
            record(
                "Whether events are evaluated and executions claimed, anywhere. May be set by hand.",
                {
                    "_id": {"enum": ["dispatch"]},
                    "state": choice("log_lost is cleared by `statelayer doctor`.", DISPATCH_STATES),
                },
                required=("state",),
            ),
            record("Anything else.", {"_id": {"not": {"enum": ["format", "subscriptions", "dispatch"]}}}),
        ],
    ),
)

COLLECTIONS: Final[tuple[CollectionSpec, ...]] = (
    _EVENTS,
    _ENTRIES,
    _NAMESPACES,
    _SUBSCRIPTIONS,
    _EXECUTIONS,
    _CURSORS,
    _CHECKPOINTS,
    _INSTANCES,
    _META,
)
