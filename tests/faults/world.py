"""A replica set, the processes on it, the network between them, and the hand that breaks them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from anyio import to_thread
from pymongo import AsyncMongoClient
from pymongo.errors import PyMongoError

from faults import scene
from faults.schedule import INSTANCES, WRITERS
from statelayer import StateLayer
from statelayer.embedded import ReplicaSet
from statelayer.errors import EmbeddedServerError, StateLayerError
from statelayer.testing import Proxy, wait_until
from statelayer.testing.plugin import PARAMETERS, QUICK

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from faults.schedule import Step

CUTS = (("commitTransaction", "reply"), ("commitTransaction", "request"), ("update", "reply"), ("insert", "request"))
CUTS += (("find", "request"), ("findAndModify", "reply"), ("aggregate", "request"), ("getMore", "reply"))

LIFETIME = 5
"""Seconds after which the server ends what a killed or frozen process has open; a minute by default."""

HISTORY_LOST = {"failCommands": ["aggregate"], "errorCode": 286, "namespace": f"{scene.DATABASE}.$cmd.aggregate"}
"""What the server says to a stream whose position it no longer has."""


class Process:
    """A process of the service, and the proxies that are its way to the nodes."""

    def __init__(self, world: World, role: str, number: int) -> None:
        self.role = role
        self.number = number
        self.log = scene.CallLog(world.directory / f"{role}-{number}.jsonl")
        self.proxies: list[Proxy] = []
        self.in_hand = asyncio.Lock()
        """Held by the fault that has stopped it, for as long as it is down."""
        self._world = world
        self._output = world.directory / f"{role}-{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start it and wait until it is ready, but not for longer than a fault lasts."""
        ready = sum("ready" in line for line in self.log)
        routes = {node.port: proxy.port for node, proxy in zip(self._world.server.nodes, self.proxies, strict=True)}
        arguments = [self.role, str(self.number), self._world.uri, str(self.log.file), json.dumps(routes)]
        self._process = self._launched(arguments)
        await wait_until(lambda: self.has_ended or sum("ready" in line for line in self.log) > ready, timeout=30)

    def _launched(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "faults.service", *arguments, self._world.mutation],
                cwd=Path(__file__).parent.parent,
                stdout=output,
                stderr=output,
            )

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        self._send(signal.SIGCONT)

    async def stop(self) -> int | None:
        """Ask it to end, and return its exit code; ``None`` when it does not end."""
        assert self._process is not None
        self._send(signal.SIGTERM)
        try:
            await wait_until(lambda: self.has_ended, timeout=30)
        except AssertionError:
            self.kill()
            return None
        return self._process.returncode

    @property
    def last_words(self) -> str:
        """What it said last."""
        return self._output.read_text(errors="replace")[-2000:]

    def _send(self, number: signal.Signals) -> None:
        if self._process is not None and not self.has_ended:
            os.kill(self._process.pid, number)


class World:
    """Everything that a run needs, for as long as the block lasts. ``mutation`` is the name of one, or empty."""

    def __init__(self, directory: Path, *, nodes: int, mutation: str = "") -> None:
        self.directory = directory
        self.mutation = mutation
        self.violations: list[str] = []
        self.changes: list[dict[str, Any]] = []
        self.faults = 0
        self.server = ReplicaSet(nodes, parameters=PARAMETERS | {"transactionLifetimeLimitSeconds": LIFETIME})
        self.instances = [Process(self, "instance", n) for n in range(INSTANCES)]
        self.writers = [Process(self, "writer", n) for n in range(WRITERS)]
        self._stack = AsyncExitStack()
        self._versions = 0
        self._electing = asyncio.Lock()
        self._publishing = asyncio.Lock()

    @property
    def uri(self) -> str:
        return f"{self.server.uri}&heartbeatFrequencyMS={QUICK['heartbeatFrequencyMS']}"

    @property
    def processes(self) -> list[Process]:
        return [*self.instances, *self.writers]

    async def __aenter__(self) -> Self:
        await to_thread.run_sync(self.server.start)
        self._stack.push_async_callback(to_thread.run_sync, self.server.stop)
        client = await self._stack.enter_async_context(AsyncMongoClient[dict[str, "Any"]](self.uri, tz_aware=True))
        self.database = client[scene.DATABASE]
        self.layer = await self._stack.enter_async_context(StateLayer(self.database, settings=scene.SETTINGS))
        await self.layer.setup()
        for subscription in scene.STANDING:
            await self.layer.subscriptions.publish(subscription)
        for process in self.processes:
            self._stack.callback(process.kill)
            for node in self.server.nodes:
                process.proxies.append(await self._stack.enter_async_context(Proxy("127.0.0.1", node.port)))
        async with asyncio.TaskGroup() as starting:
            for process in self.processes:
                starting.create_task(process.start())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    async def suffer(self, steps: Sequence[Step]) -> None:
        """Let the faults befall, each at its time, whether the one before is over or not; then heal what they broke."""
        start = time.monotonic()
        async with asyncio.TaskGroup() as running:
            for step in steps:
                await asyncio.sleep(start + step.at - time.monotonic())
                running.create_task(getattr(self, step.fault)(step.luck), name=f"{step.fault} at {step.at:.1f}")
                self.faults += 1
                await self._revive()
        await to_thread.run_sync(self.server.wait_until_complete)
        for proxy in (proxy for process in self.processes for proxy in process.proxies):
            proxy.mend()
        await self._revive()

    async def come_to_rest(self, patience: float) -> None:
        """Let the writers end, and wait until everything that they wrote has been evaluated and carried out."""
        await self._stop(self.writers)
        try:
            await wait_until(self._is_quiet, timeout=patience, interval=0.25)
        except AssertionError as error:
            self.violations.append(f"it does not come to rest: {error}")
        await self._stop(self.instances)

    async def _is_quiet(self) -> bool:
        health = await self.layer.health()
        leased = await self.database["executions"].count_documents({"state": {"$in": ["claimed", "running"]}})
        return health.lags == () and health.queues == () and not leased and (await self.layer.health()).lags == ()

    async def _stop(self, processes: Sequence[Process]) -> None:
        async with asyncio.TaskGroup() as stopping:
            codes = {process: stopping.create_task(process.stop()) for process in processes}
        for process, task in codes.items():
            if task.result() != 0:
                self._accuse(process, f"did not end well ({task.result()})")

    async def _revive(self) -> None:
        """A process that has ended by itself is a violation, and is started again."""
        for process in self.processes:
            if process.has_ended and not process.in_hand.locked():
                self._accuse(process, "ended by itself")
                await process.start()

    def _accuse(self, process: Process, what: str) -> None:
        self.violations.append(f"{process.role} {process.number} {what}: {process.last_words}")

    # --- the faults

    async def kill_instance(self, luck: float) -> None:
        await self._kill(self.instances, luck)

    async def kill_writer(self, luck: float) -> None:
        await self._kill(self.writers, luck)

    async def freeze_instance(self, luck: float) -> None:
        """Stop it for longer than its lease lasts, as a long pause of a machine does; it does not know."""
        process = _pick(self.instances, luck)
        async with process.in_hand:
            process.freeze()
            await asyncio.sleep(scene.FROZEN)
            process.thaw()

    async def step_down(self, luck: float) -> None:
        if len(self.server.nodes) > 1 and not self._electing.locked():
            async with self._electing:
                await to_thread.run_sync(self.server.step_down)
                await to_thread.run_sync(self.server.wait_until_complete)

    async def kill_primary(self, luck: float) -> None:
        if len(self.server.nodes) > 1 and not self._electing.locked():
            async with self._electing:
                node = await to_thread.run_sync(self.server.primary)
                await to_thread.run_sync(node.kill)
                await asyncio.sleep(4 * luck)
                await to_thread.run_sync(node.start)
                await to_thread.run_sync(self.server.wait_until_complete)

    async def cut(self, luck: float) -> None:
        """Cut the connection of the next few commands of one kind, before the server has them or after."""
        command, moment = _pick(CUTS, luck * 7 % 1)
        for proxy in _pick(self.processes, luck).proxies:
            proxy.cut(command, at=moment, times=1 + round(3 * luck))  # type: ignore[arg-type]

    async def delay(self, luck: float) -> None:
        process = _pick(self.processes, luck)
        for proxy in process.proxies:
            proxy.delay = 0.02 + 0.1 * (luck * 7 % 1)
        await asyncio.sleep(1 + 2 * luck)
        for proxy in process.proxies:
            proxy.delay = 0.0

    async def silence(self, luck: float) -> None:
        """Let nothing through to one process for longer than its lease lasts."""
        process = _pick(self.processes, luck)
        for proxy in process.proxies:
            proxy.silence()
        await asyncio.sleep(scene.FROZEN)
        for proxy in process.proxies:
            proxy.speak()

    async def lose_positions(self, luck: float) -> None:
        """Start an instance again when the server no longer has the stream's position."""
        await to_thread.run_sync(self._lose_positions, 1)
        await self._kill(self.instances, luck)

    async def restart_without_positions(self, luck: float) -> None:
        """Stop all instances for a while; when they are there again, the server has no position of theirs."""
        async with AsyncExitStack() as hands:
            for process in self.instances:
                await hands.enter_async_context(process.in_hand)
                process.kill()
            await asyncio.sleep(1)
            await to_thread.run_sync(self._lose_positions, len(self.instances))
            for process in self.instances:
                await process.start()

    def _lose_positions(self, times: int) -> None:
        with suppress(EmbeddedServerError, PyMongoError):  # without a primary nobody opens a stream either
            primary = self.server.primary()
            primary.command("configureFailPoint", "failCommand", mode={"times": times}, data=HISTORY_LOST)

    async def publish(self, luck: float) -> None:
        async with self._publishing:
            self._versions += 1
            await self._change(lambda: self.layer.subscriptions.publish(scene.changing(self._versions)))

    async def disable(self, luck: float) -> None:
        await self._toggle("disable")

    async def enable(self, luck: float) -> None:
        await self._toggle("enable")

    async def _toggle(self, how: str) -> None:
        async with self._publishing:
            if self._versions:
                await self._change(lambda: getattr(self.layer.subscriptions, how)("extra"))

    async def _change(self, change: Callable[[], Any]) -> None:
        """Change the subscriptions, and note between which moments; some changes turn out to be none."""
        before, begun = await self._revision(), time.monotonic()
        await self._insist(change)
        after, ended = await self._revision(), time.monotonic()
        if after != before:
            self.changes.append({"begun": begun, "ended": ended, "revision": after})

    async def _revision(self) -> int:
        found: list[int] = []

        async def read() -> None:
            document = await self.database["meta"].find_one({"_id": "subscriptions"})
            found.append(document["revision"] if document else 0)

        await self._insist(read)
        return found[-1]

    async def _kill(self, processes: Sequence[Process], luck: float) -> None:
        process = _pick(processes, luck)
        async with process.in_hand:
            process.kill()
            await asyncio.sleep(2 * (luck * 11 % 1))
            await process.start()

    async def _insist(self, step: Callable[[], Any]) -> None:
        async def done() -> bool:
            try:
                await step()
            except (StateLayerError, PyMongoError):
                return False
            return True

        await wait_until(done, timeout=60)


def _pick(of: Sequence[Any], luck: float) -> Any:
    return of[min(int(luck * len(of)), len(of) - 1)]
