"""Waiting for a condition, instead of sleeping and hoping."""

from __future__ import annotations

from inspect import isawaitable
from typing import TYPE_CHECKING, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")


async def wait_until(
    predicate: Callable[[], T | Awaitable[T]], *, timeout: float = 10.0, interval: float = 0.02, message: str = ""
) -> T:
    """Ask ``predicate`` (sync or async) every ``interval`` seconds until its answer is truthy, and return that answer.

    After ``timeout`` seconds it raises ``AssertionError``, which tells the last answer. What the predicate raises is
    passed on.

        execution = await wait_until(lambda: layer.executions.find(state="succeeded"))
    """
    deadline = anyio.current_time() + timeout
    while not (answer := await _ask(predicate)):
        if anyio.current_time() >= deadline:
            raise AssertionError(f"{message or 'the condition does not hold'} after {timeout:g} s; last: {answer!r}")
        await anyio.sleep(interval)
    return answer


async def _ask(predicate: Callable[[], T | Awaitable[T]]) -> T:
    answer = predicate()
    return await answer if isawaitable(answer) else answer
