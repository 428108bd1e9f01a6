"""The state layer as a service sees it: one object that wires the parts and owns what runs."""

from __future__ import annotations

import copy
import os
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from statelayer import mongo_indexes
from statelayer.causation import Causation
from statelayer.clock import Clock
from statelayer.drivers import Database, connect
from statelayer.errors import ForkedError
from statelayer.executors import Executions, Outcomes, Recorder, Registry, Staff, Worker
from statelayer.health import Examination
from statelayer.history import History, Reader
from statelayer.instances import Instance, Instances
from statelayer.integrity import Integrity
from statelayer.journal import Journal, Writer
from statelayer.running import Runner, stopped_by_signals
from statelayer.settings import Settings
from statelayer.statistics import Statistics
from statelayer.subscriptions import Pattern
from statelayer.subscriptions.dispatch import Dispatch
from statelayer.subscriptions.evaluation import evaluate
from statelayer.subscriptions.listener import Listener
from statelayer.subscriptions.repository import Subscriptions
from statelayer.subscriptions.state import StateReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from statelayer.causation import CausationTree
    from statelayer.events import Entry, Event, Write
    from statelayer.executors import Outcome, RetryPolicy, Run
    from statelayer.health import Health
    from statelayer.history import Watch
    from statelayer.integrity import ReplayReport, VerifyReport
    from statelayer.journal import JournalTransaction, Origin
    from statelayer.mongo_indexes import SetupReport

T = TypeVar("T")
Handler = TypeVar("Handler", bound="Callable[[Run], Awaitable[Any]]")


class StateLayer(Writer):
    """The facade. Nothing starts until it is asked for; reading and writing need no ``running()``.

    ``database`` is a pymongo ``AsyncDatabase`` or a Motor ``AsyncIOMotorDatabase``. The layer uses its client with
    options of its own and leaves closing it to the service; ``from_uri`` makes a layer that owns its client.
    """

    def __init__(self, database: Any, *, settings: Settings | None = None, clock: Clock | None = None) -> None:
        self.settings = settings or Settings()
        self._clock = clock or Clock()
        self._database = Database(database, self.settings.prefix)
        self._owns_client = False
        self._origin: Origin | None = None
        self._wire()

    @classmethod
    def from_uri(cls, uri: str, database: str, *, settings: Settings | None = None, **client_options: Any) -> Self:
        """Make a layer with a client of its own; close it with ``async with`` or ``aclose``.

        Raises ``InvalidSettingsError`` for what the driver does not take; it never repeats the connection string.
        """
        layer = cls(connect(uri, database, client_options), settings=settings)
        layer._owns_client = True
        return layer

    def _wire(self) -> None:
        database, settings, clock = self._database, self.settings, self._clock
        self._readiness = _Readiness(database, settings)
        self._journal = Journal(database, settings, clock)
        self._reader = Reader(database, settings, clock)
        self._history = History(database, settings, clock, self._reader)
        self._causation = Causation(database, settings, clock)
        self._integrity = Integrity(database, settings, clock)
        self._dispatch = Dispatch(database)
        self._examination = Examination(database, settings, clock)
        self._listeners: list[Listener] = []
        self._staff = Staff()
        self.executors = Registry()
        self.executions = Executions(database)
        self.subscriptions = Subscriptions(database, settings, clock, target_of=self.executors.target_of)
        self._outcomes = Outcomes(database, clock, self.executions, self._reader)

    # --- lifecycle

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Finish the appends that were accepted, stop watching, and close the client if it is the layer's own."""
        await self._journal.aclose()
        await self._reader.aclose()
        if self._owns_client:
            await self._database.close_client()

    async def setup(self) -> SetupReport:
        """Create what the database must hold, once; afterwards compare, repair harmless drift, and report.

        Raises the ``SetupError`` that says what is wrong and the command that mends it.
        """
        return await mongo_indexes.setup(self._database, self.settings)

    @asynccontextmanager
    async def running(self, *, listen: bool = True, work: bool = True) -> AsyncIterator[Self]:
        """Run the listener (``listen``) and the worker (``work``) until the block ends.

        When the block is entered the change stream is open: nothing written from then on is waited for in vain.
        Leaving it drains the worker. Raises ``RunnerStoppedError`` with the cause when something could not go on.
        """
        async with self._hosted(listen=listen, work=work):
            yield self

    async def run(self, *, listen: bool = True, work: bool = True) -> None:
        """Run as ``running()`` does, until cancelled or until the process gets SIGTERM."""
        async with self._hosted(listen=listen, work=work) as runner:
            with stopped_by_signals(runner.request_stop):
                await runner.ended()

    @asynccontextmanager
    async def _hosted(self, *, listen: bool, work: bool) -> AsyncIterator[Runner]:
        await self._readiness.check()
        instance = Instance(Instances(self._database, self._clock, lease=self.settings.lease), self._clock.new_id())
        workers = [self._new_worker(instance)] if work else []
        listeners = [self._new_listener(instance)] if listen else []
        runner = Runner([*listeners, *workers])
        self._staff.workers += workers
        self._listeners += listeners
        try:
            await runner.start()
            yield runner
        finally:
            try:
                await runner.stop()
            finally:
                for worker in workers:
                    self._staff.workers.remove(worker)
                for listener in listeners:
                    self._listeners.remove(listener)

    def _new_worker(self, instance: Instance) -> Worker:
        return Worker(
            self._database,
            self.settings,
            self._clock,
            registry=self.executors,
            executions=self.executions,
            journal=self._journal,
            bind=self._bound_to,
            instance=instance,
        )

    def _new_listener(self, instance: Instance) -> Listener:
        recorder = Recorder(self._database, self.settings, self._clock, self.executors, self._staff)
        return Listener(
            self._database,
            self.settings,
            self._clock,
            subscriptions=self.subscriptions,
            recorder=recorder,
            instance=instance,
        )

    # --- writing

    async def append(self, writes: Sequence[Write], *, idempotency_key: str | None = None) -> list[Event]:
        """Append the writes as one atomic batch, over one or more namespaces; return their events in order."""
        await self._readiness.check()
        return await self._journal.append(writes, idempotency_key=idempotency_key, origin=self._origin)

    def transaction(self, *namespaces: str) -> AbstractAsyncContextManager[JournalTransaction]:
        """Open a transaction over these namespaces, for events beside the service's own documents. One try.

        Pass ``tx.session`` to the service's collections. Raises ``ContentionError`` when another writer won: run the
        block again.
        """
        self._readiness.refuse_fork()
        return self._journal.transaction(*namespaces, origin=self._origin)

    async def transact(self, body: Callable[[JournalTransaction], Awaitable[T]], *namespaces: str) -> T:
        """Run ``body(tx)`` in a transaction over these namespaces and return its result; it may run more than once."""
        await self._readiness.check()
        return await self._journal.transact(body, *namespaces, origin=self._origin)

    async def submit(self, path: str, value: Any, *, actor: str | None = None, **options: Any) -> Submission:
        """Set a value and say at once which subscriptions fire for it; an empty list means that nobody listens."""
        event = await self.set(path, value, actor=actor, **options)
        catalogue = await self.subscriptions.refresh()
        [decision] = await evaluate([event], catalogue, StateReader(self._database))
        return Submission(event, [wakeup.subscription.name for wakeup in decision.wakeups])

    # --- reading

    async def get(self, path: str, model: Any = None) -> Entry | None:
        """Return the current entry at a path, or ``None`` when nothing is there."""
        await self._readiness.check()
        return await self._history.get(path, model)

    async def entries(self, namespace_or_prefix: str) -> list[Entry]:
        """Return the current entries under a namespace or a path, by path, as of one instant."""
        await self._readiness.check()
        return await self._history.entries(namespace_or_prefix)

    async def event(self, event_id: str) -> Event | None:
        """Return one event, or ``None`` when the log does not have it."""
        await self._readiness.check()
        return await self._history.event(event_id)

    async def events(self, namespace: str, after: int = 0) -> AsyncIterator[Event]:
        """Yield the events of a namespace in the order of their seqs, beginning after one."""
        await self._readiness.check()
        async for event in self._history.events(namespace, after):
            yield event

    async def read_version(self, path: str, n: int) -> Event | None:
        """Return the n-th write of a path, or ``None``."""
        await self._readiness.check()
        return await self._history.read_version(path, n)

    async def state_at(self, namespace: str, seq: int) -> dict[str, Any]:
        """Return the values of a namespace by path, as they were when this seq had been written."""
        await self._readiness.check()
        return await self._history.state_at(namespace, seq)

    def watch(self, pattern: str, *, after: int | str | None = None) -> AbstractAsyncContextManager[Watch]:
        """Watch the events whose path matches: those after ``after``, then live, without a gap.

        ``after`` is a seq when the pattern fixes the namespace, else a ``position`` of an earlier watch; without it,
        from now on. Raises ``HistoryLostError`` when the server no longer has that position.
        """
        self._readiness.refuse_fork()
        parsed = Pattern.parse(pattern, self.settings.roots)
        return self._history.watch(parsed.namespace, lambda segments: parsed.mismatch(segments) is None, after=after)

    async def wait_for(self, path: str, *, timeout: float | None = None) -> Entry:
        """Wait until a path has a value and return its entry. ``timeout`` in seconds raises ``TimeoutError``."""
        await self._readiness.check()
        return await self._history.wait_for(path, timeout=timeout)

    async def outcome(self, event_id: str, *, timeout: float | None = None) -> Outcome:
        """Wait until an event is evaluated and every execution of it has ended or waits for somebody."""
        await self._readiness.check()
        return await self._outcomes.outcome(event_id, timeout=timeout)

    async def trace_causation(self, *, event_id: str | None = None, task_id: str | None = None) -> CausationTree:
        """Return what caused what: the tree that an event belongs to, or all trees of a task."""
        await self._readiness.check()
        return await self._causation.trace(event_id=event_id, task_id=task_id)

    async def verify(self, namespace: str) -> VerifyReport:
        """Compare the entries of a namespace with its log, and the log with its own rules."""
        await self._readiness.check()
        return await self._integrity.verify(namespace)

    async def replay(self, namespace: str) -> ReplayReport:
        """Rebuild the entries of a namespace from its log. No executor is called."""
        await self._readiness.check()
        return await self._integrity.replay(namespace)

    # --- executors

    def workflow(
        self,
        id: str,
        *,
        max_attempts: int | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | None = None,
        concurrency: int | None = None,
    ) -> Callable[[Handler], Handler]:
        """Register the async function below as a workflow, which takes the run: ``@layer.workflow("review")``.

        An attempt that raises, or takes longer than ``timeout`` seconds, is repeated as ``retry`` says (three attempts
        by default). ``concurrency`` bounds how many run at a time in this process.
        """
        return self.executors.workflow(
            id, max_attempts=max_attempts, retry=retry, timeout=timeout, concurrency=concurrency
        )

    def agent(
        self, id: str, *, timeout: float | None = None, concurrency: int | None = None
    ) -> Callable[[Handler], Handler]:
        """Register the async function below as an agent, which is attempted once: ``@layer.agent("facade-hs-code")``.

        A runtime that knows only prompt, input and budget is registered with ``layer.executors.agent_runtime``.
        """
        return self.executors.agent(id, timeout=timeout, concurrency=concurrency)

    # --- operating

    async def pause(self) -> None:
        """Stop evaluating and claiming on every instance; appends go on and are evaluated later."""
        await self._dispatch.pause()

    async def unpause(self) -> None:
        """Go on where ``pause`` stopped."""
        await self._dispatch.unpause()

    async def health(self) -> Health:
        """Say how this layer and its database are, for probes and people. Never raises for what it finds.

        What waits is counted in the database: a head and a cursor of each namespace are read, for a few seconds.
        """
        return await self._examination.of(self._listeners, self._staff.workers)

    @property
    def statistics(self) -> Statistics:
        """What this layer did so far in this process: batches and conflicts, streams, evaluations."""
        return copy.deepcopy(
            Statistics(
                journal=self._journal.statistics,
                reader=self._reader.statistics,
                listeners=tuple(listener.statistics for listener in self._listeners),
            )
        )

    def _bound_to(self, origin: Origin) -> StateLayer:
        """Return a handle whose writes carry the cause, depth and signature of an execution."""
        bound = copy.copy(self)
        bound._origin = origin  # noqa: SLF001 - the copy is ours
        return bound


@dataclass(frozen=True, slots=True)
class Submission:
    """A submitted fact, and the names of the subscriptions that fire for it."""

    event: Event
    triggered: list[str]


class _Readiness:
    """Makes sure once that the database was set up and is what this process expects, and stays in this process."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._process: int | None = None

    async def check(self) -> None:
        if self._process is None:
            await mongo_indexes.check_ready(self._database, self._settings)
            self._process = os.getpid()
        self.refuse_fork()

    def refuse_fork(self) -> None:
        """Refuse to go on in a child of the process that has used the connections."""
        if self._process not in (None, os.getpid()):
            raise ForkedError(
                f"This layer and its connections belong to process {self._process}, of which {os.getpid()} is a fork. "
                "Make the client and the layer in each process, after forking."
            )
