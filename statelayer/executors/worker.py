"""The worker: claims executions as its capacity allows, keeps their leases, and stops without losing any."""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from contextlib import contextmanager
from operator import itemgetter
from typing import TYPE_CHECKING

import pymongo
import structlog

from statelayer import mongo_indexes as names
from statelayer.drivers import is_transient
from statelayer.errors import StateLayerError
from statelayer.executors import moves
from statelayer.executors.attempts import Attempts
from statelayer.executors.held import Held
from statelayer.instances import Instance, Instances
from statelayer.executors.leases import Leases
from statelayer.executors.results import PASSING, Results
from statelayer.executors.staff import Reservation
from statelayer.loops import first_of, insisted, signalled
from statelayer.servertime import ServerTime
from statelayer.executors.upkeep import Reaper, Waiting
from statelayer.transactions import finished

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence

    from statelayer.clock import Clock
    from statelayer.drivers import Database, Document
    from statelayer.executors.executions import Executions
    from statelayer.executors.models import Execution
    from statelayer.executors.registry import Registration, Registry
    from statelayer.executors.staff import Material
    from statelayer.instances import Offer
    from statelayer.journal import Journal, Origin
    from statelayer.layer import StateLayer
    from statelayer.settings import Settings

log = structlog.get_logger("statelayer.executors")

LAST_MOMENTS = 5.0
"""Seconds that what was cancelled gets to be recorded, before the rest is left to its lease."""


class Worker:
    """Runs the executions of one process. ``bind`` makes the layer handle that a run is given."""

    def __init__(
        self,
        database: Database,
        settings: Settings,
        clock: Clock,
        *,
        registry: Registry,
        executions: Executions,
        journal: Journal,
        bind: Callable[[Origin], StateLayer],
        instance: Instance | None = None,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._executions = executions
        self._meta = database.collection(names.META)
        self._instances = Instances(database, clock, lease=settings.lease)
        self._instance = instance or Instance(self._instances, clock.new_id())
        self._leases = Leases(database, clock, owner=self._instance.id, lease=settings.lease)
        results = Results(database, journal, self._leases, registry, ServerTime(database, clock))
        limit = settings.max_value_bytes
        self._attempts = Attempts(database, self._leases, results, bind, max_value_bytes=limit)
        self._reaper = Reaper(self._leases, results)
        self._waiting = Waiting(database, registry, self._instances)
        self._held: dict[asyncio.Task[None], Held] = {}
        self._reserved: Counter[Offer] = Counter()
        self._unreserved = asyncio.Event()
        self._unreserved.set()
        self._more = True
        self._next_round = float("-inf")
        self._clock = clock
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()
        self._fault: BaseException | None = None

    @property
    def id(self) -> str:
        """The id of this process in ``instances``, and in the leases of what it holds."""
        return self._instance.id

    @property
    def running(self) -> list[str]:
        """The job ids of what this worker holds."""
        return sorted(held.execution.id for held in self._held.values())

    def wake(self) -> None:
        """Look for work now. Called, on the worker's event loop, by whoever queued some in this process."""
        self._wake.set()

    def reserve(self, action_type: str, target: str) -> Reservation | None:
        """Keep a slot for an execution that is about to be recorded, unless others have waited for longer.

        Called, like what is in the reservation, on the worker's event loop.
        """
        registration = self._registry.find(action_type, target)
        if registration is None or self._more or self._stopping.is_set():
            return None
        if self._free <= 0 or registration.is_at_its_bound(self._busy[registration.offer]):
            return None
        self._reserved[registration.offer] += 1
        self._unreserved.clear()

        def release() -> None:
            self._reserved[registration.offer] -= 1
            if not self._reserved.total():
                self._unreserved.set()

        def begin(execution: Execution, material: Material) -> None:
            release()
            if self._ended.is_set():
                log.warning("execution_left_to_its_lease", job=execution.id, error="stopped")
            else:
                self._hold(Held(execution, registration, material))

        return Reservation(self._instance.id, self._settings.lease, begin, release)

    async def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Work until ``stop``, calling ``started`` once this process is known as one that works.

        What fails transiently is tried again; anything else ends it, with the cause. Being cancelled stops it without
        waiting for what runs.
        """
        try:
            with self._changes_heard():
                await self._work_until_stopped(started)
        except BaseExceptionGroup as faults:
            fault = first_of(faults)
            raise fault from fault.__cause__
        finally:
            await finished(self._leave())

    def stop(self) -> None:
        """Claim nothing more, and let ``run`` return when what runs has ended, after ``drain_timeout`` at the latest.

        What was claimed and has not started is given back. What does not end in time is cancelled: a workflow is queued
        again if attempts are left, an agent fails with ``lease_lost``.
        """
        self._stopping.set()
        self._wake.set()

    async def _work_until_stopped(self, started: Callable[[], None]) -> None:
        await insisted("start", self._beat, self._stopping)
        started()
        async with asyncio.TaskGroup() as loops:
            beats = self._repeat("heartbeat", self._beat, self._settings.heartbeat, self._changed)
            upkeep = self._repeat("upkeep", self._keep_up, self._settings.poll, self._ended)
            for loop in (beats, upkeep):
                loops.create_task(loop, context=contextvars.Context())
            while not self._stopping.is_set():
                await insisted("claim", self._claim, self._stopping)
                await signalled(self._wake, self._settings.poll)
            await self._drain(self._settings.drain_timeout)
            self._raise_fault()
            # Not cancelled: in the middle of a driver's call that can leave a lock of its client taken for ever.
            self._ended.set()
            self._changed.set()

    async def _repeat(
        self, name: str, step: Callable[[], Awaitable[None]], every: float, signal: asyncio.Event
    ) -> None:
        while not self._ended.is_set():
            await insisted(name, step, self._ended)
            await signalled(signal, every)

    # --- claiming

    async def _claim(self) -> None:
        """Claim what there is room for and start it."""
        self._wake.clear()
        self._raise_fault()
        if not await self._is_dispatching():
            return
        free = self._free
        candidates: list[Document] = []
        for offers, limit in shares(self._registry.registrations(), self._busy, free):
            candidates += await self._leases.candidates(offers, limit)
        candidates.sort(key=itemgetter("availableAt"))
        # While there is more than fits, each end of an execution is a reason to look again.
        self._more = free <= 0 or bool(candidates)
        if candidates:
            # Not to be left half-way: a claim whose answer nobody heard blocks its executions for a lease.
            await finished(self._take([document["_id"] for document in candidates[:free]]))

    async def _take(self, job_ids: Sequence[str]) -> None:
        claimed = await self._leases.claim(job_ids)
        for execution in claimed:
            registration = self._registry.find(execution.action_type, execution.target)
            assert registration is not None, "claimed without an offer"
            self._hold(Held(execution, registration))
        if len(claimed) < len(job_ids):  # others were faster; there may be more behind these
            self._wake.set()

    @property
    def _free(self) -> int:
        return self._settings.concurrency - len(self._held) - self._reserved.total()

    @property
    def _busy(self) -> Counter[Offer]:
        return self._reserved + Counter(held.registration.offer for held in self._held.values())

    async def _is_dispatching(self) -> bool:
        document = await self._meta.find_one({"_id": "dispatch"})
        return document is None or document["state"] == "on"

    def _hold(self, held: Held) -> None:
        name = f"statelayer-{held.execution.id}"
        task = asyncio.create_task(self._work(held), name=name, context=contextvars.Context())
        self._held[task] = held
        task.add_done_callback(self._let_go)

    def _let_go(self, task: asyncio.Task[None]) -> None:
        del self._held[task]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fault = self._fault or error
        if self._more or error is not None:
            self._wake.set()

    async def _work(self, held: Held) -> None:
        try:
            if self._stopping.is_set() and held.execution.state == "claimed":
                await self._leases.make(moves.given_back(), held.fence)
            else:
                await self._attempts.run(held)
        except StateLayerError as error:
            if not (is_transient(error) or isinstance(error, PASSING)):
                raise
            log.warning("execution_left_to_its_lease", job=held.execution.id, error=error.code)

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    # --- keeping

    async def _beat(self) -> None:
        """Renew every lease, stop what was lost, and say that this process is alive."""
        self._changed.clear()
        lost = await self._leases.renew({held.fence for held in self._held.values()})
        for held in self._held.values():
            if held.fence in lost:
                held.stop("lost")
        await self._instance.works(self._registry.offers())

    async def _keep_up(self) -> None:
        """Do what any worker does for all of them; some of it only at the pace of the heartbeat."""
        await self._reaper.reap(mine={held.execution.id for held in self._held.values()})
        is_due = self._clock.monotonic() >= self._next_round
        await self._waiting.mark(anyway=is_due)
        if is_due:
            await self._instances.bury()
            self._next_round = self._clock.monotonic() + self._settings.heartbeat

    @contextmanager
    def _changes_heard(self) -> Iterator[None]:
        """Hear of registrations and of executions moved by hand, from whatever thread they come."""
        loop = asyncio.get_running_loop()

        def tell() -> None:
            loop.call_soon_threadsafe(self._look_around)

        ignored = [self._registry.on_change(tell), self._executions.on_move(tell)]
        try:
            yield
        finally:
            for ignore in ignored:
                ignore()

    def _look_around(self) -> None:
        self._changed.set()
        self._wake.set()

    # --- stopping

    async def _drain(self, timeout: float) -> None:
        await signalled(self._unreserved, timeout)
        await self._wait_for_held(timeout)
        for held in list(self._held.values()):
            held.stop("drained")
        await self._wait_for_held(LAST_MOMENTS)
        for task in list(self._held):
            task.cancel()
        await self._wait_for_held(LAST_MOMENTS)
        for held in self._held.values():
            log.error("executor_ignores_cancellation", job=held.execution.id)

    async def _wait_for_held(self, timeout: float) -> None:
        if self._held:
            await asyncio.wait(list(self._held), timeout=timeout)

    async def _leave(self) -> None:
        self._stopping.set()
        await self._drain(0)
        try:
            with pymongo.timeout(LAST_MOMENTS):
                await self._instance.leave("works")
        except StateLayerError as error:
            log.warning("instance_left_behind", instance=self.id, error=type(error).__name__)


def shares(
    registrations: Iterable[Registration], busy: Mapping[Offer, int], free: int
) -> list[tuple[list[Offer], int]]:
    """Return which offers to look for together, and how many of each such group at most.

    Executors with a bound of their own are looked for by themselves, so that what waits for them hides nothing else.
    """
    bounded = [registration for registration in registrations if registration.concurrency is not None]
    others = sorted((r.offer for r in registrations if r.concurrency is None), key=str)
    groups = [([r.offer], min(free, (r.concurrency or 0) - busy.get(r.offer, 0))) for r in bounded]
    return [(offers, limit) for offers, limit in [(others, free), *groups] if offers and limit > 0]
