"""aett: a commit store with optimistic concurrency on the stream's revision."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from datetime import UTC, datetime
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from aett.domain import ConflictingCommitException, NonConflictingCommitException
from aett.eventstore import BaseEvent, Commit, EventMessage, Topic, TopicMap
from aett.storage.asynchronous.mongodb import AsyncCommitStore, AsyncPersistenceManagement
from pymongo import AsyncMongoClient

if TYPE_CHECKING:
    from collections.abc import Sequence

TENANT = "bench"
PAUSE = 0.1
LOST = (ConflictingCommitException, NonConflictingCommitException)


@Topic("stored")
class Stored(BaseEvent):
    value: dict[str, Any]


class AettWorker:
    def __init__(self, client: Any, store: AsyncCommitStore) -> None:
        self._client = client
        self._store = store
        self._revisions: defaultdict[str, int] = defaultdict(int)

    async def append(self, stream: str, value: dict[str, Any]) -> None:
        await self.append_many(stream, [value])

    async def append_many(self, stream: str, values: Sequence[dict[str, Any]]) -> None:
        now = datetime.now(UTC)
        events = [EventMessage(body=Stored(source=stream, timestamp=now, value=value)) for value in values]
        for attempt in count(1):
            revision = self._revisions[stream] + 1
            try:
                await self._store.commit(
                    Commit(
                        tenant_id=TENANT,
                        stream_id=stream,
                        stream_revision=revision,
                        commit_id=uuid4(),
                        commit_sequence=revision,
                        commit_stamp=now,
                        headers={},
                        events=events,
                        checkpoint_token=0,
                    )
                )
            except LOST:
                async for commit in self._store.get(TENANT, stream, revision):
                    self._revisions[stream] = max(self._revisions[stream], commit.stream_revision)
                await asyncio.sleep(random.uniform(0, PAUSE * attempt))
            else:
                self._revisions[stream] = max(self._revisions[stream], revision)
                return

    async def read(self, stream: str) -> int:
        return len([event async for commit in self._store.get(TENANT, stream) for event in commit.events])

    async def aclose(self) -> None:
        await self._client.close()


async def opened(uri: str, database: str) -> AettWorker:
    client: Any = AsyncMongoClient(uri, w="majority", journal=True)
    topics = TopicMap().register(Stored)
    await AsyncPersistenceManagement(client[database], topics).initialize()
    return AettWorker(client, AsyncCommitStore(client[database], topics))
