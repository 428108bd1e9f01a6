"""A process of a run: it listens and works, or it writes, until it gets SIGTERM.

python -m faults.service ROLE NUMBER URI LOG ROUTES MUTATION
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from faults import mutations, scene
from statelayer import StateLayer
from statelayer.errors import ContentionError, OutcomeUnknownError, TransientDatabaseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from faults.scene import CallLog
    from statelayer import Run

LANES = 3
"""Writes of one writer at the same time."""

PACE = 0.4
"""Seconds between two writes of a lane."""


def main(role: str, number: str, uri: str, log: str, routes: str, mutation: str) -> None:
    """Play a role with every connection going through the routes, which are ports by ports."""
    _reroute({int(port): via for port, via in json.loads(routes).items()})
    if mutation:
        mutations.BY_NAME[mutation]()
    play = {"instance": instance, "writer": writer}[role]
    asyncio.run(_played(play, int(number), uri, scene.CallLog(Path(log))))


async def _played(play: Any, number: int, uri: str, log: CallLog) -> None:
    driver = scene.DRIVERS[number % 2]
    client: Any = AsyncIOMotorClient(uri) if driver == "motor" else AsyncMongoClient(uri)
    layer = StateLayer(client[scene.DATABASE], settings=scene.SETTINGS)
    await play(layer, number, log)
    await layer.aclose()


async def instance(layer: StateLayer, number: int, log: CallLog) -> None:
    """Listen and work."""

    async def work(run: Run) -> dict[str, Any]:
        log.note(job=run.execution.id, attempt=run.attempt)
        luck = int(run.execution.event_id[-2:], 16)
        await asyncio.sleep(luck / 1000)
        if luck % 16 == 0 and run.attempt == 1:
            raise ValueError("as it must")
        return {"luck": luck}

    for target in ("settle", "follow", "extra"):
        layer.workflow(target)(work)
    layer.agent("classify")(work)
    stopped = _termination()
    async with layer.running():
        log.note(ready=number)
        await stopped.wait()


async def writer(layer: StateLayer, number: int, log: CallLog) -> None:
    """Write in several lanes. After a kill each goes on with the write that it was not told of."""
    done = {(line["lane"], line["n"]) for line in log if "event" in line}
    stopped = _termination()
    log.note(ready=number)
    async with asyncio.TaskGroup() as lanes:
        for lane in range(LANES):
            first = next(n for n in range(len(done) + 1) if (lane, n) not in done)
            lanes.create_task(_lane(layer, number, lane, first, log, stopped))


async def _lane(layer: StateLayer, number: int, lane: int, first: int, log: CallLog, stopped: asyncio.Event) -> None:
    n = first
    while not stopped.is_set():
        path, key = scene.path(number, lane, n), f"W{number}L{lane}N{n}"
        begun = time.monotonic()
        try:
            event = await layer.set(path, scene.value(n), actor=scene.USER, idempotency_key=key)
        except (ContentionError, OutcomeUnknownError, TransientDatabaseError) as error:
            log.note(lane=lane, n=n, refused=error.code)
        else:
            log.note(lane=lane, n=n, event=event.id, path=path, begun=begun, ended=time.monotonic())
            n += 1
        await asyncio.sleep(PACE)


def _termination() -> asyncio.Event:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    return stopped


def _reroute(routes: Mapping[int, int]) -> None:
    """Resolve the nodes' ports to those of the proxies before them; a replica set would be discovered past these."""
    resolve = socket.getaddrinfo

    def resolved(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        return resolve(host, routes.get(port, port), *arguments, **options)

    socket.getaddrinfo = resolved


if __name__ == "__main__":
    main(*sys.argv[1:])
