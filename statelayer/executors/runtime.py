"""What runs an agent's prompt. A runtime knows no state, no subscription and no queue, and keeps no session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from statelayer.errors import InvalidExecutorError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statelayer.executors.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """Everything that a runtime is told. ``budget`` is the contract's, in units that contract and runtime agree on."""

    system_prompt: str
    input: Any
    budget: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentResponse:
    """What came out, and what it took. ``usage`` is kept in the result's envelope."""

    output: Any
    usage: Mapping[str, Any] | None = None


class AgentRuntime(Protocol):
    """Turns a prompt, an input and a budget into an output, or raises."""

    async def run(self, request: AgentRequest) -> AgentResponse:
        """Answer one request. It is asked once for each attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeAgent:
    """The executor of an agent that is a prompt. The stored contract's prompt and budget go before its own."""

    runtime: AgentRuntime
    system_prompt: str | None = None
    budget: Mapping[str, Any] = field(default_factory=dict)

    async def execute(self, run: Run) -> AgentResponse:
        """Ask the runtime with the event's snapshot."""
        contract = run.subscription.contract or {}
        prompt = contract.get("systemPrompt", self.system_prompt)
        if prompt is None:
            raise InvalidExecutorError(
                f"Agent {run.execution.target!r} has no system prompt: neither its subscription's contract nor its "
                "registration gives one."
            )
        budget = contract.get("budget") or self.budget
        return await self.runtime.run(AgentRequest(system_prompt=prompt, input=run.input, budget=budget))
