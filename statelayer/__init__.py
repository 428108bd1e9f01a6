"""A MongoDB-native state layer: facts in an append-only log wake executors, which write the next facts."""

from statelayer import embedded
from statelayer.events import Entry, Event, Write
from statelayer.layer import StateLayer, Submission
from statelayer.settings import Settings
from statelayer.subscriptions import Condition, Subscription

__all__ = [
    "Condition",
    "Entry",
    "Event",
    "Settings",
    "StateLayer",
    "Submission",
    "Subscription",
    "Write",
    "embedded",
]
