"""An execution that a worker of this process holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from statelayer.executors.moves import fence_of

if TYPE_CHECKING:
    import asyncio

    from statelayer.executors.models import Execution
    from statelayer.executors.moves import Fence
    from statelayer.executors.registry import Registration
    from statelayer.executors.staff import Material

Stop = Literal["lost", "drained"]


@dataclass(eq=False, slots=True)
class Held:
    """A claimed or running execution, its fence, and the task of the user's code while that runs.

    ``material`` is there when it was recorded in this process a moment ago.
    """

    execution: Execution
    registration: Registration
    material: Material | None = None
    code: asyncio.Task[Any] | None = None
    stopped: Stop | None = None

    @property
    def fence(self) -> Fence:
        return fence_of(self.execution)

    def stop(self, why: Stop) -> None:
        """Cancel the code. A lost lease outweighs a stopping worker."""
        if self.stopped != "lost":
            self.stopped = why
        if self.code is not None:
            self.code.cancel()
