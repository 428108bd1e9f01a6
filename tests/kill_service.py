"""The service that ``test_kill`` kills: it listens and works until then. Its code notes each start in ``effects``.

python kill_service.py URI DATABASE DRIVER
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from motor.motor_asyncio import AsyncIOMotorClient
from pymongo import AsyncMongoClient

from statelayer import Settings, StateLayer

if TYPE_CHECKING:
    from statelayer.executors import Run

SETTINGS = Settings(lease=1.0, heartbeat=0.3, poll=0.2)
WORK = 0.25
"""Seconds that a run takes: long enough for a kill to hit some."""


async def main(uri: str, name: str, driver: str) -> None:
    """Run the layer, and say on stdout when it does."""
    client: Any = AsyncIOMotorClient(uri) if driver == "motor" else AsyncMongoClient(uri)
    database = client[name]
    layer = StateLayer(database, settings=SETTINGS)

    async def work(run: Run) -> dict[str, Any]:
        await database["effects"].insert_one({"job": run.execution.id, "attempt": run.attempt})
        await asyncio.sleep(WORK)
        return {"request": run.params["requestId"], "n": run.input["n"]}

    layer.workflow("settle")(work)
    layer.agent("classify")(work)
    async with layer.running():
        sys.stdout.write("running\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
