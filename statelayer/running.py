"""Hosting what runs: the listener and the workers, for as long as a block or a process lasts."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import threading
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from statelayer.errors import RunnerStoppedError
from statelayer.loops import first_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager


class Service(Protocol):
    """Something that runs until it is told to stop."""

    async def run(self, started: Callable[[], None]) -> None:
        """Run until stopped, calling ``started`` once it is ready; raise what cannot heal."""

    def stop(self) -> None:
        """Let ``run`` end when what it is doing is done."""


class Runner:
    """Hosts services in a task of its own.

    The task belongs to no caller's scope, so that a block can be entered in one task (a pytest fixture, an ASGI
    lifespan) and left in another, and it starts with an empty context.
    """

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = services
        self._host: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start every service and return when all are ready, or raise what kept one from it."""
        loop = asyncio.get_running_loop()
        ready = [asyncio.Event() for _ in self._services]
        self._host = loop.create_task(self._run(ready), name="statelayer-running", context=contextvars.Context())
        waiting = asyncio.ensure_future(_all_set(ready))
        try:
            await asyncio.wait([self._host, waiting], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self.stop()
            raise
        finally:
            waiting.cancel()
        if self._host.done():
            await self.ended()

    def request_stop(self) -> None:
        """Tell every service to stop."""
        for service in self._services:
            service.stop()

    async def stop(self) -> None:
        """Stop every service gracefully, and raise ``RunnerStoppedError`` if one had ended by itself before.

        Whoever is cancelled while he waits here has lost his patience: the services are then stopped at once.
        """
        self.request_stop()
        with anyio.CancelScope(shield=True):  # anyio would cancel again and again what waits in a cancelled scope
            try:
                await self.ended()
            except asyncio.CancelledError:
                await self._stop_at_once()
                raise

    async def ended(self) -> None:
        """Wait until nothing runs any more."""
        if self._host is None:
            return
        await asyncio.wait([self._host])
        try:
            self._host.result()
        except BaseExceptionGroup as group:
            cause = first_of(group)
            raise RunnerStoppedError(f"The layer stopped running: {cause}") from cause

    async def _stop_at_once(self) -> None:
        while self._host is not None and not self._host.done():
            self._host.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([self._host])

    async def _run(self, ready: Sequence[asyncio.Event]) -> None:
        async with asyncio.TaskGroup() as group:
            for service, event in zip(self._services, ready, strict=True):
                group.create_task(service.run(event.set), name=f"statelayer-{type(service).__name__.lower()}")


class _Termination:
    """SIGTERM, as process managers send it, for everything that runs in the main thread."""

    def __init__(self) -> None:
        self._stops: list[Callable[[], None]] = []
        self._earlier: Any = None

    @contextmanager
    def stops(self, stop: Callable[[], None]) -> Iterator[None]:
        """Call ``stop`` on SIGTERM for as long as the block runs; the service's own handler comes back afterwards."""
        loop = asyncio.get_running_loop()
        if not self._stops:
            self._earlier = signal.getsignal(signal.SIGTERM)
            loop.add_signal_handler(signal.SIGTERM, self._arrived)
        self._stops.append(stop)
        try:
            yield
        finally:
            self._stops.remove(stop)
            if not self._stops:
                loop.remove_signal_handler(signal.SIGTERM)
                signal.signal(signal.SIGTERM, self._earlier)

    def _arrived(self) -> None:
        for stop in list(self._stops):
            stop()


_termination = _Termination()


def stopped_by_signals(stop: Callable[[], None]) -> AbstractContextManager[None]:
    """Call ``stop`` on SIGTERM for as long as the block runs.

    Signals reach the main thread only; a loop in another thread is stopped by being cancelled.
    """
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return _termination.stops(stop)


async def _all_set(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()
