"""This library: an append is one write to a path of the stream's namespace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from statelayer import StateLayer, Write

if TYPE_CHECKING:
    from collections.abc import Sequence

ACTOR = "user:U7"


class LayerWorker:
    def __init__(self, layer: StateLayer) -> None:
        self._layer = layer

    async def append(self, stream: str, value: dict[str, Any]) -> None:
        await self._layer.set(f"/tasks/{stream}/x", value, actor=ACTOR)

    async def append_many(self, stream: str, values: Sequence[dict[str, Any]]) -> None:
        await self._layer.append([Write(path=f"/tasks/{stream}/x", value=value, actor=ACTOR) for value in values])

    async def read(self, stream: str) -> int:
        return len([event async for event in self._layer.events(f"/tasks/{stream}")])

    async def aclose(self) -> None:
        await self._layer.aclose()


async def opened(uri: str, database: str) -> LayerWorker:
    layer = StateLayer.from_uri(uri, database)
    await layer.setup()
    return LayerWorker(layer)
