"""What acts on a fact: the registry, executions, the worker, workflows and agents."""

if __name__ != "statelayer.executors":
    raise ImportError("import statelayer.executors; the link at the root is for reading")

from statelayer.executors.executions import Executions
from statelayer.executors.models import Execution, Lease, SubscriptionRef
from statelayer.executors.outcome import Outcome, Outcomes
from statelayer.executors.recorder import Recorder
from statelayer.executors.registry import ANY, Executor, Registration, Registry
from statelayer.executors.retry import RetryPolicy
from statelayer.executors.run import Run
from statelayer.executors.runtime import AgentRequest, AgentResponse, AgentRuntime
from statelayer.executors.staff import Staff
from statelayer.executors.worker import Worker

__all__ = [
    "ANY",
    "AgentRequest",
    "AgentResponse",
    "AgentRuntime",
    "Execution",
    "Executions",
    "Executor",
    "Lease",
    "Outcome",
    "Outcomes",
    "Recorder",
    "Registration",
    "Registry",
    "RetryPolicy",
    "Run",
    "Staff",
    "SubscriptionRef",
    "Worker",
]
