"""Which executors this process has."""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from pydantic import ValidationError

from statelayer.errors import InvalidActorError, InvalidExecutorError, InvalidPathError
from statelayer.events import check_actor
from statelayer.executors.retry import RetryPolicy
from statelayer.executors.runtime import RuntimeAgent
from statelayer.paths import check_segment
from statelayer.subscriptions import RegisteredAction

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statelayer.executors.run import Run
    from statelayer.executors.runtime import AgentRuntime
    from statelayer.instances import Offer
    from statelayer.subscriptions import Subscription

ANY: Final[None] = None
"""Stands for every target of an action type, in an offer; null in the ``instances`` documents."""

Handler: TypeAlias = Callable[["Run"], Awaitable[Any]]
_Handler = TypeVar("_Handler", bound=Handler)


class Executor(Protocol):
    """Anything that can run an execution. It may also have ``target(action) -> str``: what of its own is run."""

    async def execute(self, run: Run) -> Any:
        """Return the output, or raise."""


@dataclass(frozen=True, slots=True)
class FunctionExecutor:
    """An executor made of an asynchronous function."""

    function: Handler

    async def execute(self, run: Run) -> Any:
        """Call the function."""
        return await self.function(run)


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An executor and the terms under which it runs.

    ``timeout`` is in seconds; ``concurrency`` bounds how many run at a time in this process.
    """

    action_type: str
    target: str | None
    executor: Executor
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    timeout: float | None = None
    concurrency: int | None = None

    def __post_init__(self) -> None:
        if self.timeout is not None and not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise InvalidExecutorError(f"A timeout is a number of seconds above 0, not {self.timeout!r}.")
        if self.concurrency is not None and self.concurrency < 1:
            raise InvalidExecutorError(f"At least one execution runs at a time, not {self.concurrency!r}.")

    def is_at_its_bound(self, busy: int) -> bool:
        """Whether no more than these may run at a time."""
        return self.concurrency is not None and busy >= self.concurrency

    @property
    def offer(self) -> Offer:
        """What it takes."""
        return self.action_type, self.target


class Registry:
    """The executors of one process. Registering while a worker runs is honoured at once."""

    def __init__(self) -> None:
        self._registrations: dict[Offer, Registration] = {}
        self._listeners: list[Callable[[], None]] = []

    # --- registering

    def register(
        self,
        action_type: str,
        executor: Executor,
        *,
        retry: RetryPolicy | None = None,
        timeout: float | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Run every target of an action type of the service's own with this executor.

        Raises ``InvalidExecutorError`` for a reserved or malformed type, one that is registered already, and an object
        without ``async def execute(self, run)``.
        """
        _check_action_type(action_type)
        execute = getattr(executor, "execute", None)
        if not inspect.iscoroutinefunction(execute):
            raise InvalidExecutorError(f"The executor of {action_type!r} needs `async def execute(self, run)`.")
        self._add(
            Registration(
                action_type=action_type,
                target=ANY,
                executor=executor,
                retry=retry or RetryPolicy(),
                timeout=timeout,
                concurrency=concurrency,
            )
        )

    def workflow(
        self,
        id: str,
        *,
        max_attempts: int | None = None,
        retry: RetryPolicy | None = None,
        timeout: float | None = None,
        concurrency: int | None = None,
    ) -> Callable[[_Handler], _Handler]:
        """Register the asynchronous function below as a workflow; it returns a JSON-like result or ``None``.

        ``retry`` is the whole policy, ``max_attempts`` the default policy with another number of attempts.
        """
        policy = _policy(id, max_attempts, retry)

        def decorate(function: _Handler) -> _Handler:
            self._add_function("execute_workflow", id, function, policy, timeout, concurrency)
            return function

        return decorate

    def agent(
        self, id: str, *, timeout: float | None = None, concurrency: int | None = None
    ) -> Callable[[_Handler], _Handler]:
        """Register the asynchronous function below as an agent. An agent is attempted once."""

        def decorate(function: _Handler) -> _Handler:
            self._add_function("execute_agent", id, function, RetryPolicy(max_attempts=1), timeout, concurrency)
            return function

        return decorate

    def agent_runtime(
        self,
        id: str,
        runtime: AgentRuntime,
        *,
        system_prompt: str | None = None,
        budget: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Register a runtime as an agent.

        ``system_prompt`` and ``budget`` serve subscriptions that were not compiled from a contract, which has its own.
        """
        if not inspect.iscoroutinefunction(getattr(runtime, "run", None)):
            raise InvalidExecutorError(f"The runtime of agent {id!r} needs `async def run(self, request)`.")
        self._add(
            Registration(
                action_type="execute_agent",
                target=_check_id(id),
                executor=RuntimeAgent(runtime=runtime, system_prompt=system_prompt, budget=budget or {}),
                retry=RetryPolicy(max_attempts=1),
                timeout=timeout,
                concurrency=concurrency,
            )
        )

    # --- asking

    def find(self, action_type: str, target: str) -> Registration | None:
        """Return what runs this target here, if anything does."""
        return self._registrations.get((action_type, target)) or self._registrations.get((action_type, ANY))

    def registrations(self) -> list[Registration]:
        return list(self._registrations.values())

    def offers(self) -> set[Offer]:
        """Return what this process can run."""
        return set(self._registrations)

    def max_attempts(self, action_type: str, target: str) -> int:
        """Return how often an execution may be started.

        An agent once. Otherwise as the policy says that is registered here; where the executor is registered only
        elsewhere, the default, because whoever records an execution need not be who runs it.
        """
        if action_type == "execute_agent":
            return 1
        return self.policy(action_type, target).max_attempts

    def policy(self, action_type: str, target: str) -> RetryPolicy:
        """Return the retry policy of a target, the default one when it is not registered here."""
        registration = self.find(action_type, target)
        return registration.retry if registration else RetryPolicy()

    def target_of(self, subscription: Subscription) -> str:
        """Return what a subscription's action runs: the last part of its job ids.

        For a registered type the executor decides, if it is registered here and has ``target(action)``; else it is the
        subscription's name. ``InvalidExecutorError`` when what it decides is not exactly one segment.
        """
        registration = self.find(subscription.action.type, subscription.default_target)
        decide = getattr(registration.executor, "target", None) if registration else None
        if subscription.action.target is not None or not callable(decide):
            return subscription.default_target
        try:
            return check_segment(decide(subscription.action))
        except InvalidPathError as error:
            raise InvalidExecutorError(
                f"The executor of {subscription.action.type!r} chose no valid target for {subscription.name!r}: {error}"
            ) from error

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after each registration; return what ends that."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _add_function(
        self,
        action_type: str,
        id: str,
        function: Handler,
        retry: RetryPolicy,
        timeout: float | None,
        concurrency: int | None,
    ) -> None:
        if not _is_asynchronous(function):
            raise InvalidExecutorError(f"{id!r} needs an `async def` function of one argument, the run.")
        self._add(
            Registration(
                action_type=action_type,
                target=_check_id(id),
                executor=FunctionExecutor(function),
                retry=retry,
                timeout=timeout,
                concurrency=concurrency,
            )
        )

    def _add(self, registration: Registration) -> None:
        if registration.offer in self._registrations:
            action_type, target = registration.offer
            named = action_type if target is ANY else f"{action_type} {target!r}"
            raise InvalidExecutorError(f"An executor for {named} is registered already; use another id.")
        self._registrations[registration.offer] = registration
        for listener in list(self._listeners):
            listener()


def _policy(id: str, max_attempts: int | None, retry: RetryPolicy | None) -> RetryPolicy:
    if max_attempts is None:
        return retry or RetryPolicy()
    if retry is not None:
        raise InvalidExecutorError(f"{id!r} is given max_attempts and retry; RetryPolicy(max_attempts=…) says both.")
    return RetryPolicy(max_attempts=max_attempts)


def _check_id(id: str) -> str:
    """An id is a segment of the paths, and a part of the actor, of what its executor writes."""
    try:
        check_actor(f"workflow:{check_segment(id)}")
    except (InvalidPathError, InvalidActorError) as error:
        raise InvalidExecutorError(f"{id!r:.80} cannot be an executor's id: {error}") from error
    return id


def _check_action_type(action_type: str) -> None:
    try:
        RegisteredAction(type=action_type)
        check_segment(action_type)
    except ValidationError as error:
        problem = error.errors(include_input=False)[0]["msg"].removeprefix("Value error, ")
        raise InvalidExecutorError(f"{action_type!r:.80} cannot be registered: {problem}.") from error
    except InvalidPathError as error:
        raise InvalidExecutorError(f"{action_type!r:.80} cannot be registered: {error}") from error


def _is_asynchronous(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004 - asked for what it is, not whether it is there
