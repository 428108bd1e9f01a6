"""What must be true after a run: found out from the database, and from what the processes were told."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from faults import scene
from statelayer.drivers import Database
from statelayer.events import Event
from statelayer.executors.models import Execution, job_id, skip_id
from statelayer.subscriptions.catalogue import Catalogue
from statelayer.subscriptions.evaluation import evaluate
from statelayer.subscriptions.state import StateReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator

    from faults.world import World
    from statelayer import StateLayer

MAX_SHOWN = 5


class Findings:
    """The database after a run."""

    def __init__(self, world: World, events: list[Event], executions: list[Execution], catalogue: Catalogue) -> None:
        self.world = world
        self.events = events
        self.executions = {execution.id: execution for execution in executions}
        self.catalogue = catalogue
        self.by_id = {event.id: event for event in events}
        self.by_namespace: defaultdict[str, list[Event]] = defaultdict(list)
        for event in events:
            self.by_namespace[event.namespace].append(event)
        self.acknowledged = [line for writer in world.writers for line in writer.log if "event" in line]

    @classmethod
    async def of(cls, world: World) -> Findings:
        """Read everything."""
        database = world.database
        events = await database["events"].find({}, sort=[("namespace", 1), ("seq", 1)]).to_list(None)
        executions = await database["executions"].find({}).to_list(None)
        subscriptions = await database["state_subscriptions"].find({}).to_list(None)
        revision = await database["meta"].find_one({"_id": "subscriptions"})
        assert revision is not None
        return cls(
            world,
            [Event.from_document(document) for document in events],
            [Execution.from_document(document) for document in executions],
            Catalogue(subscriptions, revision=revision["revision"]),
        )

    async def violations(self) -> list[str]:
        """Return everything that is not as it must be, a few of each kind."""
        found = [
            *_shown("seqs are not contiguous", self.gaps()),
            *_shown("acknowledged and not there once", self.lost()),
            *_shown("a request is in the log twice", self.repeated()),
            *_shown("the revision is not that of its transaction", self.misdated()),
            *_shown("a subscription in force was not evaluated", self.unevaluated()),
            *_shown("recorded and recomputed verdicts differ", [wrong async for wrong in self.misjudged()]),
            *_shown("an execution has not ended", self.open()),
            *_shown("not exactly one result or error", self.untold()),
            *_shown("an agent ran twice, or more attempts than were counted", self.overrun()),
            *_shown("cause, root or depth is wrong", self.misattributed()),
            *_shown("verify", [wrong async for wrong in self.unverified(self.world.layer)]),
        ]
        return [*self.world.violations, *found]

    def gaps(self) -> Iterator[str]:
        """P1: the seqs of a namespace are 1, 2, 3, …"""
        for namespace, events in self.by_namespace.items():
            if [event.seq for event in events] != list(range(1, len(events) + 1)):
                yield namespace

    def lost(self) -> Iterator[str]:
        """P3: what was acknowledged is there, with the id that was told."""
        for line in self.acknowledged:
            event = self.by_id.get(line["event"])
            if event is None or event.path != line["path"] or event.value != scene.value(line["n"]):
                yield f"{line['event']} at {line['path']}"

    def repeated(self) -> Iterator[str]:
        """P3: one key, one event, however often it was sent."""
        counts = Counter(event.path for event in self.events if event.actor == scene.USER)
        yield from (path for path, count in counts.items() if count > 1)

    def misdated(self) -> Iterator[str]:
        """P8: a change of subscriptions applies to what began after it returned, and to nothing that ended before."""
        for namespace, events in self.by_namespace.items():
            for before, after in itertools.pairwise(events):
                if after.subscriptions_rev < before.subscriptions_rev:
                    yield f"{namespace} goes back at seq {after.seq}"
        for line in self.acknowledged:
            event = self.by_id.get(line["event"])
            for change in self.world.changes if event is not None else ():
                if line["begun"] > change["ended"] and event.subscriptions_rev < change["revision"]:
                    yield f"{event.id} does not know revision {change['revision']}"
                if line["ended"] < change["begun"] and event.subscriptions_rev >= change["revision"]:
                    yield f"{event.id} knows revision {change['revision']} too early"

    def unevaluated(self) -> Iterator[str]:
        """P4: by rules that are written down here once more, without the library's matching."""
        for event in self.events:
            _, _, _, kind, *rest = event.path.split("/")
            if kind == "requests":
                yield from self._missing(job_id("execute_workflow", event.id, "settle"))
                if event.value["kind"] == "paid":
                    yield from self._missing(job_id("execute_agent", event.id, "classify"))
            if kind == "workflows" and rest[:2] == ["settle", "results"]:
                yield from self._missing(job_id("execute_workflow", event.id, "follow"))

    def _missing(self, job: str) -> Iterator[str]:
        if job not in self.executions:
            yield job

    async def misjudged(self) -> AsyncIterator[str]:
        """P9: the recorded verdicts are what comes out again, with the subscriptions as of each event's revision."""
        state = StateReader(Database(self.world.database))
        expected: set[str] = set()
        for decision in await evaluate(self.events, self.catalogue, state):
            for wakeup in decision.wakeups:
                action = wakeup.subscription.action.type
                expected.add(job_id(action, decision.event.id, wakeup.subscription.target))
            expected |= {skip_id(decision.event.id, skip.name) for skip in decision.skips}
        for job in sorted(expected - self.executions.keys()):
            yield f"not recorded: {job}"
        for job in sorted(self.executions.keys() - expected):
            yield f"recorded for nothing: {job}"

    def open(self) -> Iterator[str]:
        """P7: everything ends."""
        yield from (f"{job.id} is {job.state}" for job in self._jobs() if not job.has_ended)

    def untold(self) -> Iterator[str]:
        """P6: one result for each that succeeded, one error fact for each that failed, and none beside it."""
        told: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for event in self.events:
            if event.actor != scene.USER:
                kind, target, place, event_id = event.path.split("/")[3:]
                told[f"{kind.removesuffix('s')}:{event_id}:{target}"].append((place, event.id))
        for job in self._jobs():
            place = {"succeeded": "results", "failed": "errors"}.get(job.state)
            if told[job.id] != [(place, job.result_event_id)]:
                yield f"{job.id} ({job.state}, {job.reason}) has {told[job.id]}"

    def overrun(self) -> Iterator[str]:
        """P5: code starts as often as its attempts say, and an agent's once."""
        lines = (line for instance in self.world.instances for line in instance.log if "job" in line)
        starts = Counter(line["job"] for line in lines)
        for job in self._jobs():
            most = 1 if job.action_type == "execute_agent" else job.max_attempts
            if starts[job.id] > job.attempts or job.attempts > most:
                yield f"{job.id}: {starts[job.id]} starts, {job.attempts} attempts"
        yield from (f"{job} was never recorded" for job in starts.keys() - self.executions.keys())

    def misattributed(self) -> Iterator[str]:
        """P7: a fact of an execution names the event that woke it, its root, and one step more."""
        for job in self._jobs():
            fact, cause = self.by_id.get(job.result_event_id or ""), self.by_id[job.event_id]
            if fact is None:
                continue
            told = (fact.caused_by_event_id, fact.root_event_id, fact.trigger_depth)
            if told != (cause.id, cause.root_event_id, cause.trigger_depth + 1):
                yield f"{fact.id} of {job.id}"

    async def unverified(self, layer: StateLayer) -> AsyncIterator[str]:
        """P2: the entries are what the log says."""
        for namespace in self.by_namespace:
            for problem in (await layer.verify(namespace)).problems:
                yield f"{namespace}: {problem}"

    def _jobs(self) -> Iterator[Execution]:
        return (execution for execution in self.executions.values() if execution.state != "skipped")


def _shown(what: str, wrong: Iterable[str]) -> Iterator[str]:
    all_of_it = list(wrong)
    for one in all_of_it[:MAX_SHOWN]:
        yield f"{what}: {one}"
    if len(all_of_it) > MAX_SHOWN:
        yield f"{what}: {len(all_of_it) - MAX_SHOWN} more"
