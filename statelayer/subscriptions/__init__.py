"""Which facts wake which executors: patterns, conditions, and what is decided from them."""

if __name__ != "statelayer.subscriptions":
    raise ImportError("import statelayer.subscriptions; the link at the root is for reading")

from statelayer.subscriptions.conditions import (
    MISSING,
    Condition,
    Explanation,
    Facts,
    Missing,
)
from statelayer.subscriptions.models import (
    Action,
    ExecuteAgent,
    ExecuteWorkflow,
    Output,
    RegisteredAction,
    StoredSubscription,
    Subscription,
)
from statelayer.subscriptions.patterns import Pattern
from statelayer.subscriptions.trie import PatternTrie

__all__ = [
    "MISSING",
    "Action",
    "Condition",
    "ExecuteAgent",
    "ExecuteWorkflow",
    "Explanation",
    "Facts",
    "Missing",
    "Output",
    "Pattern",
    "PatternTrie",
    "RegisteredAction",
    "StoredSubscription",
    "Subscription",
]
