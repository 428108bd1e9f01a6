"""Reading what was written: entries, the log, and both of them as they change.

``history`` asks the database, ``log`` pages through a namespace, ``reader`` holds the one change stream that all
watchers of a process share, ``changes`` is what that stream says, ``watch`` joins the log to it without a gap.
"""

from statelayer.history.changes import Change, Position
from statelayer.history.history import History
from statelayer.history.reader import Delivery, Reader, ReaderStatistics, Watcher
from statelayer.history.watch import Watch

__all__ = ["Change", "Delivery", "History", "Position", "Reader", "ReaderStatistics", "Watch", "Watcher"]
