"""A network that fails when a test says so: a proxy before one mongod, which cuts connections at chosen moments."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Self

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

Moment = Literal["request", "reply"]


@dataclass(slots=True)
class _Cut:
    command: bytes
    moment: Moment
    times: int


class Proxy:
    """Stands between a client and one mongod for as long as the block runs.

        async with Proxy("127.0.0.1", 27017) as proxy:
            client = AsyncMongoClient(proxy.uri)
            proxy.cut("commitTransaction", at="reply")

    ``cut`` closes the connection of a command: at its ``request``, before the server gets it, or at its ``reply``, when
    the server has carried it out and the client never learns of it. ``silence`` holds everything back, as a network
    does that drops packets, until ``speak``. ``delay`` is a time in seconds that every request takes longer.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._cuts: list[_Cut] = []
        self._speaking = asyncio.Event()
        self._speaking.set()
        self.delay = 0.0
        self.cuts_made = 0

    @property
    def port(self) -> int:
        """Where the proxy listens, on loopback."""
        assert self._server is not None, "enter the proxy first"
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def uri(self) -> str:
        """Connects through the proxy to this one server; a replica set would be discovered past it."""
        return f"mongodb://127.0.0.1:{self.port}/?directConnection=true"

    def cut(self, command: str, *, at: Moment, times: int = 1) -> None:
        """Close the connection of the next ``times`` commands of this name, at their request or their reply."""
        self._cuts.append(_Cut(command.encode(), at, times))

    def mend(self) -> None:
        """Make no more cuts."""
        self._cuts.clear()

    def silence(self) -> None:
        """Let nothing through in either direction; connections stay open."""
        self._speaking.clear()

    def speak(self) -> None:
        """Let everything through again."""
        self._speaking.set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(self, reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # Only leaving the block cancels this task, and the server that made it takes a cancellation for an error.
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await link.run(self._host, self._port)
        finally:
            self._tasks.discard(task)

    async def pass_by(self) -> None:
        """Wait until something may pass."""
        await self._speaking.wait()

    def wanted_cut(self, request: bytes) -> Moment | None:
        """Return when the connection of this request is to be cut, and count it."""
        for cut in self._cuts:
            if _names(request, cut.command):
                cut.times -= 1
                if not cut.times:
                    self._cuts.remove(cut)
                self.cuts_made += 1
                return cut.moment
        return None


class _Link:
    """One connection of a client, and the one to the server that goes with it."""

    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._client = (reader, writer)
        self._cut_reply = False

    async def run(self, host: str, port: int) -> None:
        server = await asyncio.open_connection(host, port)
        try:
            await _until_one_ends(self._requests(server[1]), self._replies(server[0]))
        finally:
            for writer in (self._client[1], server[1]):
                writer.close()

    async def _requests(self, server: asyncio.StreamWriter) -> None:
        while True:
            request = await _message(self._client[0])
            await asyncio.sleep(self._proxy.delay)
            await self._proxy.pass_by()
            moment = self._proxy.wanted_cut(request)
            if moment == "request":
                return
            self._cut_reply = moment == "reply"
            server.write(request)
            await server.drain()

    async def _replies(self, server: asyncio.StreamReader) -> None:
        while True:
            reply = await _message(server)
            await self._proxy.pass_by()
            if self._cut_reply:
                return
            self._client[1].write(reply)
            await self._client[1].drain()


async def _message(reader: asyncio.StreamReader) -> bytes:
    """Read one message of the wire protocol, which begins with its length."""
    head = await reader.readexactly(4)
    return head + await reader.readexactly(int.from_bytes(head, "little") - 4)


def _names(request: bytes, command: bytes) -> bool:
    """Say whether a message carries this command, whose name is the first key of its document."""
    return request[26 : 26 + len(command) + 1] == command + b"\0"


async def _until_one_ends(*directions: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.ensure_future(direction) for direction in directions]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
