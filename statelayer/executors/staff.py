"""The workers of one process, as its listener sees them: who starts at once what is recorded here, or looks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from statelayer.events import Event
    from statelayer.executors.models import Execution
    from statelayer.executors.worker import Worker
    from statelayer.subscriptions import StoredSubscription


@dataclass(frozen=True, slots=True)
class Material:
    """What an execution is made from, when it need not be read again."""

    event: Event
    subscription: StoredSubscription


@dataclass(frozen=True, slots=True)
class Reservation:
    """A slot of a worker for one execution. One of ``begin`` and ``release`` is called, once."""

    owner: str
    lease: float
    begin: Callable[[Execution, Material], None]
    release: Callable[[], None]


class Staff:
    """The workers that run in this process now."""

    def __init__(self) -> None:
        self.workers: list[Worker] = []

    @property
    def works(self) -> bool:
        """Whether somebody here runs what is registered."""
        return bool(self.workers)

    def reserve(self, action_type: str, target: str) -> Reservation | None:
        """Keep a slot for what is about to be recorded, if somebody is free and nothing has waited for longer."""
        for worker in self.workers:
            if (reservation := worker.reserve(action_type, target)) is not None:
                return reservation
        return None

    def wake(self) -> None:
        """Say that something waits."""
        for worker in self.workers:
            worker.wake()
