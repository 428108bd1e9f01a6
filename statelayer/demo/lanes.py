"""Doing the same with many things, several at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from anyio import create_task_group

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

T = TypeVar("T")

LANES = 32


async def in_lanes(
    items: Iterable[T], work: Callable[[T], Awaitable[None]], *, done: Callable[[], None] = lambda: None
) -> None:
    """Await ``work`` for every item, and call ``done`` after each.

    A lane takes the next item when it is done with its last one, so that a long file is never held in memory. The
    first error stops all lanes and is raised as it is, outside of a group.
    """
    waiting = iter(items)

    async def lane() -> None:
        for item in waiting:
            await work(item)
            done()

    try:
        async with create_task_group() as group:
            for _ in range(LANES):
                group.start_soon(lane)
    except BaseExceptionGroup as failures:
        raise _first(failures) from None


def _first(failure: BaseException) -> BaseException:
    return _first(failure.exceptions[0]) if isinstance(failure, BaseExceptionGroup) else failure
