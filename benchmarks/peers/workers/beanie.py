"""beanie: an event is a document of an indexed collection; nothing orders the writers of a stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from beanie import Document, Indexed, init_beanie
from pymongo import AsyncMongoClient

if TYPE_CHECKING:
    from collections.abc import Sequence


class Stored(Document):
    stream: Annotated[str, Indexed()]
    value: dict[str, Any]


class BeanieWorker:
    def __init__(self, client: Any) -> None:
        self._client = client

    async def append(self, stream: str, value: dict[str, Any]) -> None:
        await Stored(stream=stream, value=value).insert()

    async def append_many(self, stream: str, values: Sequence[dict[str, Any]]) -> None:
        await Stored.insert_many([Stored(stream=stream, value=value) for value in values])

    async def read(self, stream: str) -> int:
        return len(await Stored.find(Stored.stream == stream).sort("_id").to_list())

    async def aclose(self) -> None:
        await self._client.close()


async def opened(uri: str, database: str) -> BeanieWorker:
    client: Any = AsyncMongoClient(uri, w="majority", journal=True)
    await init_beanie(database=client[database], document_models=[Stored])
    return BeanieWorker(client)
