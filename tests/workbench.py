"""The executors' room without a listener: decisions are made by hand, of events that are really in the log."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from statelayer import mongo_indexes
from statelayer.clock import Clock
from statelayer.drivers import Database
from statelayer.executors import Executions, Recorder, Registry, RetryPolicy, Staff, Worker
from statelayer.executors.models import job_id
from statelayer.instances import Instance, Instances
from statelayer.journal import Journal, Writer
from statelayer.settings import Settings
from statelayer.subscriptions import StoredSubscription, Subscription
from statelayer.subscriptions.decisions import Decision, Skip, Wakeup
from statelayer.testing import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from statelayer.events import Event, Write
    from statelayer.executors import Execution, Run
    from statelayer.journal import Origin

USER = "user:U7"
WORKFLOW = {"type": "execute_workflow", "workflowId": "review"}
AGENT = {"type": "execute_agent", "agentId": "facade"}
SOON = RetryPolicy(wait=0)
FAST = Settings(poll=0.05, heartbeat=0.1, lease=1.0, drain_timeout=5)


class Handle(Writer):
    """What a run is given as its layer, as far as these tests need one."""

    def __init__(self, journal: Journal, origin: Origin | None = None) -> None:
        self.journal = journal
        self.origin = origin

    async def append(self, writes: Sequence[Write], *, idempotency_key: str | None = None) -> list[Event]:
        return await self.journal.append(writes, idempotency_key=idempotency_key, origin=self.origin)


class Gate:
    """An executor that says when it has started and ends when it is let."""

    def __init__(self, output: Any = "done", *, is_open: bool = False) -> None:
        self.started = asyncio.Event()
        self.open = asyncio.Event()
        self.output = output
        self.runs: list[int] = []
        self.cancelled = 0
        if is_open:
            self.open.set()

    async def __call__(self, run: Run) -> Any:
        self.runs.append(run.attempt)
        self.started.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.output


class Onlookers(Staff):
    """Workers to whom nothing is handed: what is recorded is queued, and they are told."""

    works = True

    def reserve(self, action_type: str, target: str) -> None:
        return None


class Workbench:
    """One database with everything that stands around a worker."""

    def __init__(self, handle: Any, settings: Settings = FAST) -> None:
        self.handle = handle
        self.settings = settings
        self.clock = Clock()
        self.database = Database(handle)
        self.journal = Journal(self.database, settings, self.clock)
        self.layer = Handle(self.journal)
        self.registry = Registry()
        self.executions = Executions(self.database)
        self.staff = Onlookers()
        self.contract: dict[str, Any] | None = None
        self.recorder = Recorder(self.database, settings, self.clock, self.registry, self.staff)

    async def event(self, path: str = "/tasks/T1/requests/R1", value: Any = "v", **options: Any) -> Event:
        return await self.layer.set(path, value, actor=USER, **options)

    async def subscription(
        self, action: dict[str, Any], *, name: str = "intake", target: str | None = None, **definition: Any
    ) -> StoredSubscription:
        """Store a subscription as publishing it would."""
        parsed = Subscription.parse({"name": name, "pattern": "/tasks/**", "action": action} | definition)
        stored = StoredSubscription.first_in_force(
            parsed,
            version=1,
            revision=1,
            target=target or self.registry.target_of(parsed),
            published_at=datetime.now(UTC),
            contract=self.contract,
        )
        await self.database.collection(mongo_indexes.SUBSCRIPTIONS).insert_one(stored.to_document())
        return stored

    async def wake(self, event: Event, subscription: StoredSubscription, params: dict[str, str] | None = None) -> str:
        """Record that the event wakes the subscription; return the job id."""
        await self.recorder.record([Decision(event, wakeups=(Wakeup(subscription, params or {}),))])
        found = await self.executions.find(event_id=event.id, target=subscription.target)
        return found[0].id

    async def skip(self, event: Event, name: str, reason: Any) -> None:
        await self.recorder.record([Decision(event, skips=(Skip(name, 1, reason),))])

    async def dispatch(self, state: str) -> None:
        """Set whether anything is claimed, as ``layer.pause()`` does."""
        await self.handle["meta"].replace_one({"_id": "dispatch"}, {"_id": "dispatch", "state": state}, upsert=True)

    async def states(self, jobs: Sequence[str]) -> set[str]:
        """Return the states that these executions are in."""
        documents = await self.database.collection(mongo_indexes.EXECUTIONS).find({"_id": {"$in": list(jobs)}})
        return {document["state"] for document in documents}

    async def all_ended(self, jobs: Sequence[str]) -> bool:
        return await self.states(jobs) <= {"succeeded", "failed", "cancelled"}

    async def many(self, action: dict[str, Any], count: int, **definition: Any) -> list[str]:
        """Wake an action for so many events, and return the job ids."""
        subscription = await self.subscription(action, **definition)
        events = [await self.event(f"/tasks/T{number % 7}/requests/R{number}") for number in range(count)]
        await self.recorder.record([Decision(event, wakeups=(Wakeup(subscription, {}),)) for event in events])
        return [job_id(action["type"], event.id, subscription.target) for event in events]

    async def state_of(self, job_id: str) -> str:
        return (await self.executions.get(job_id)).state

    async def ended(self, job_id: str, timeout: float = 10) -> Execution:
        async def end() -> Execution | None:
            execution = await self.executions.get(job_id)
            return execution if execution.has_ended else None

        found = await wait_until(end, timeout=timeout, message=f"{job_id} has not ended")
        assert found is not None
        return found

    async def in_state(self, job_id: str, state: str, timeout: float = 10) -> Execution:
        async def there() -> Execution | None:
            execution = await self.executions.get(job_id)
            return execution if execution.state == state else None

        found = await wait_until(there, timeout=timeout, message=f"{job_id} is not {state}")
        assert found is not None
        return found

    async def result_of(self, execution: Execution) -> dict[str, Any]:
        """Return the stored event that holds the result or error."""
        found = await self.database.collection(mongo_indexes.EVENTS).find_one({"_id": execution.result_event_id})
        assert found is not None, "no result fact"
        return found

    async def events_at(self, path: str) -> list[dict[str, Any]]:
        return await self.database.collection(mongo_indexes.EVENTS).find({"path": path}, sort=[("seq", 1)])

    def instance(self, id: str) -> Instance:
        return Instance(Instances(self.database, self.clock, lease=self.settings.lease), id)

    def worker(self, *, journal: Journal | None = None, registry: Registry | None = None, **options: Any) -> Worker:
        journal = journal or self.journal
        settings = options.pop("settings", self.settings)
        worker = Worker(
            self.database,
            settings,
            self.clock,
            registry=registry or self.registry,
            executions=self.executions,
            journal=journal,
            bind=lambda origin: Handle(journal, origin),  # type: ignore[arg-type, return-value]
            **options,
        )
        self.staff.workers.append(worker)
        return worker

    @asynccontextmanager
    async def working(self, worker: Worker | None = None, **options: Any) -> AsyncIterator[Worker]:
        """Run a worker for the block, and stop it gracefully."""
        worker = worker or self.worker(**options)
        started = asyncio.Event()
        task = asyncio.create_task(worker.run(started.set))
        starting = asyncio.create_task(started.wait())
        await asyncio.wait([task, starting], return_when=asyncio.FIRST_COMPLETED)
        starting.cancel()
        try:
            yield worker
        finally:
            worker.stop()
            self.staff.workers.remove(worker)
            await task

    def other_journal(self) -> Journal:
        """A journal as another process would have it."""
        return Journal(self.database, self.settings, self.clock)
