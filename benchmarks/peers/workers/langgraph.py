"""langgraph-checkpoint-mongodb: an event is a checkpoint of the thread, which holds the value in one channel."""

from __future__ import annotations

from typing import Any

from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.mongodb import MongoDBSaver
from pymongo import MongoClient


def _thread(stream: str) -> Any:
    return {"configurable": {"thread_id": stream, "checkpoint_ns": ""}}


class LanggraphWorker:
    def __init__(self, client: Any, saver: MongoDBSaver) -> None:
        self._client = client
        self._saver = saver

    async def append(self, stream: str, value: dict[str, Any]) -> None:
        checkpoint = empty_checkpoint()
        checkpoint["channel_values"] = {"value": value}
        checkpoint["channel_versions"] = {"value": 1}
        await self._saver.aput(_thread(stream), checkpoint, {"source": "loop", "step": 1}, {"value": 1})

    async def read(self, stream: str) -> int:
        return len([checkpoint async for checkpoint in self._saver.alist(_thread(stream))])

    async def aclose(self) -> None:
        self._client.close()


async def opened(uri: str, database: str) -> LanggraphWorker:
    client: Any = MongoClient(uri, w="majority", journal=True)
    return LanggraphWorker(client, MongoDBSaver(client, database))
