"""Who, inside this process, is writing to which namespace.

A ``transact`` block would lose to a busy committer on its namespace every time: the block reads, the committer commits,
the block conflicts. So both claim what they are about to write, and a waiting block goes before the next batch.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection


class Claims:
    """Namespaces that are being written, and those that somebody waits for; ``on_release`` hears when one is free."""

    def __init__(self, on_release: Callable[[], None]) -> None:
        self._held: set[str] = set()
        self._waiting: list[tuple[frozenset[str], asyncio.Future[None]]] = []
        self._on_release = on_release

    def free(self, namespaces: Collection[str]) -> bool:
        """Say whether a batch may take these now: nobody holds them and nobody waits for them."""
        return self._held.isdisjoint(namespaces) and all(wanted.isdisjoint(namespaces) for wanted, _ in self._waiting)

    def take(self, namespaces: Collection[str]) -> None:
        """Claim namespaces that are free."""
        self._held.update(namespaces)

    def release(self, namespaces: Collection[str]) -> None:
        """Give claimed namespaces back; the first who waits and can have all of his gets them."""
        self._held.difference_update(namespaces)
        self._admit()
        self._on_release()

    @asynccontextmanager
    async def claimed(self, namespaces: Collection[str]) -> AsyncIterator[None]:
        """Hold the namespaces for the block, waiting for them in turn."""
        await self._wait_for(frozenset(namespaces))
        try:
            yield
        finally:
            self.release(namespaces)

    async def _wait_for(self, wanted: frozenset[str]) -> None:
        turn = asyncio.get_running_loop().create_future()
        place = (wanted, turn)
        self._waiting.append(place)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            self._withdraw(place)
            raise

    def _withdraw(self, place: tuple[frozenset[str], asyncio.Future[None]]) -> None:
        if place in self._waiting:
            self._waiting.remove(place)
            self._admit()
            self._on_release()
        else:
            self.release(place[0])

    def _admit(self) -> None:
        ahead: set[str] = set()
        for place in list(self._waiting):
            wanted, turn = place
            if self._held.isdisjoint(wanted) and ahead.isdisjoint(wanted):
                self._waiting.remove(place)
                self._held |= wanted
                if not turn.done():
                    turn.set_result(None)
            ahead |= wanted
