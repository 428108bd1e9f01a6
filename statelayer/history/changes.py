"""What the reader stream says, and where in it somebody stands."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from bson.timestamp import Timestamp

from statelayer import mongo_indexes as names
from statelayer.drivers.failures import REPLICA_SET_ADVICE
from statelayer.errors import InvalidInputError, LogLostError, ReplicaSetRequiredError, TransientDatabaseError
from statelayer.streams import GONE

if TYPE_CHECKING:
    from statelayer.drivers import Database, Document

FIRST_PAUSE = 0.1
LONGEST_PAUSE = 5.0

_POSITION = re.compile(r"(?P<time>[0-9a-f]{8})(?P<inc>[0-9a-f]{8})(?:-(?P<event>[0-9A-Za-z]{1,64}))?")


@dataclass(frozen=True, slots=True)
class Change:
    """An event that was inserted, or an execution that was inserted or moved.

    ``fields`` is the whole document, or for an update the fields that it set, under their dotted names: never a
    document looked up afterwards, which may say more than happened. All watchers share it: copy before handing it on.
    """

    collection: Literal["events", "executions"]
    id: str
    fields: Document
    at: Timestamp


def match(database: Database) -> list[dict[str, Any]]:
    """Return what the stream must let through. Of executions, a renewed lease says nothing to anybody."""
    events, executions = (database.prefix + name for name in (names.EVENTS, names.EXECUTIONS))
    moved = [{f"updateDescription.updatedFields.{field}": {"$exists": True}} for field in ("state", "reason")]
    return [
        {"operationType": "insert", "ns.coll": {"$in": [events, executions]}},
        {"operationType": "replace", "ns.coll": executions},
        {"operationType": "update", "ns.coll": executions, "$or": moved},
        {"operationType": {"$in": list(GONE)}, "ns.coll": {"$in": [events, None]}},
        {"operationType": "rename", "to.coll": events},
    ]


def change_of(document: Document, database: Database) -> Change:
    """Read one change, or raise ``LogLostError`` when it says that the log is gone."""
    kind = document["operationType"]
    if kind in GONE:
        raise LogLostError(f"The event log of {database.name!r} was lost ({kind}). Run `statelayer doctor`.")
    is_event = document["ns"]["coll"] == database.prefix + names.EVENTS
    return Change(
        collection="events" if is_event else "executions",
        id=document["documentKey"]["_id"],
        fields=document["updateDescription"]["updatedFields"] if kind == "update" else document["fullDocument"],
        at=document["clusterTime"],
    )


async def cluster_time(database: Database) -> Timestamp:
    """Return the time of the newest operation. What is committed after this call has a later one."""
    answer = await database.command({"hello": 1})
    if "setName" not in answer:
        raise ReplicaSetRequiredError(REPLICA_SET_ADVICE)
    if "operationTime" not in answer:
        raise TransientDatabaseError("The server has no keys yet to sign its time with, and so does not tell it.")
    now: Timestamp = answer["operationTime"]
    return now


def following(time: Timestamp) -> Timestamp:
    """Return the first time after this one."""
    return Timestamp(time.time, time.inc + 1)


@dataclass(frozen=True, slots=True)
class Position:
    """Where a reader of the stream stands: before everything of the time ``at``, or behind ``event_id`` within it.

    All events of one transaction have the same time, so a time alone cannot say that half of them were read.
    """

    at: Timestamp
    event_id: str | None = None

    @classmethod
    def parse(cls, text: object) -> Self:
        """Read what ``str`` made of a position, or raise ``InvalidInputError``."""
        found = _POSITION.fullmatch(text) if isinstance(text, str) else None
        if found is None:
            raise InvalidInputError(
                f"Invalid position {text!r:.80}: pass an earlier `events.position`, or a seq when the pattern fixes "
                "the namespace."
            )
        return cls(Timestamp(int(found["time"], 16), int(found["inc"], 16)), found["event"])

    def __str__(self) -> str:
        time = f"{self.at.time:08x}{self.at.inc:08x}"
        return time if self.event_id is None else f"{time}-{self.event_id}"


class Sieve:
    """Lets each event through once while streams that overlap are read one after the other, each in order."""

    def __init__(self, position: Position) -> None:
        self._at = position.at
        self._last = self._resume_behind = position.event_id
        self._seen: set[str] = set()

    @property
    def position(self) -> Position:
        return Position(self._at, self._last)

    def admits(self, change: Change) -> bool:
        """Say whether this event is new, and remember it."""
        self.advance(change.at)
        if change.at < self._at or change.id in self._seen:
            return False
        self._seen.add(change.id)
        if self._resume_behind is not None:
            self._resume_behind = None if change.id == self._resume_behind else self._resume_behind
            return False
        self._last = change.id
        return True

    def advance(self, time: Timestamp) -> None:
        """Note that everything before this time has been read."""
        if time > self._at:
            self._at = time
            self._last = self._resume_behind = None
            self._seen.clear()


class Backoff:
    """How long to wait before trying again what keeps failing: longer each time, with jitter."""

    def __init__(self) -> None:
        self._failures = 0

    def reset(self) -> None:
        self._failures = 0

    async def pause(self) -> None:
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(self._failures, 10))
        self._failures += 1
        await asyncio.sleep(random.uniform(longest / 2, longest))
