"""eventsourcing: an event store over SQLite, in threads; a version that was taken is asked for again."""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, UUID, uuid5

from eventsourcing.domain import DomainEvent
from eventsourcing.persistence import DatetimeAsISO, EventStore, IntegrityError, JSONTranscoder, Mapper, UUIDAsHex
from eventsourcing.sqlite import SQLiteAggregateRecorder, SQLiteDatastore

if TYPE_CHECKING:
    from collections.abc import Sequence


PAUSE = 0.01


class Stored(DomainEvent):
    value: dict[str, Any]


class EventsourcingWorker:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._datastore = SQLiteDatastore(f"{folder}/events.sqlite")
        self._recorder = SQLiteAggregateRecorder(self._datastore)
        self._recorder.create_table()
        transcoder = JSONTranscoder()
        transcoder.register(UUIDAsHex())
        transcoder.register(DatetimeAsISO())
        self._store: Any = EventStore(Mapper(transcoder), self._recorder)
        self._versions: defaultdict[UUID, int] = defaultdict(int)

    async def append(self, stream: str, value: dict[str, Any]) -> None:
        await self.append_many(stream, [value])

    async def append_many(self, stream: str, values: Sequence[dict[str, Any]]) -> None:
        await asyncio.to_thread(self._put, uuid5(NAMESPACE_URL, stream), values)

    def _put(self, stream: UUID, values: Sequence[dict[str, Any]]) -> None:
        for attempt in count(1):
            first = self._versions[stream] + 1
            events = [
                Stored(
                    originator_id=stream,
                    originator_version=first + n,
                    timestamp=Stored.create_timestamp(),
                    value=value,
                )
                for n, value in enumerate(values)
            ]
            try:
                self._store.put(events)
            except IntegrityError:
                [newest] = self._recorder.select_events(stream, desc=True, limit=1)
                self._versions[stream] = max(self._versions[stream], newest.originator_version)
                time.sleep(random.uniform(0, PAUSE * attempt))
            else:
                self._versions[stream] = max(self._versions[stream], first + len(values) - 1)
                return

    async def read(self, stream: str) -> int:
        return len(await asyncio.to_thread(lambda: list(self._store.get(uuid5(NAMESPACE_URL, stream)))))

    async def aclose(self) -> None:
        self._datastore.close()
        await asyncio.to_thread(shutil.rmtree, self._folder)


async def opened(_uri: str, _database: str) -> EventsourcingWorker:
    return EventsourcingWorker(await asyncio.to_thread(tempfile.mkdtemp, prefix="eventsourcing-"))
