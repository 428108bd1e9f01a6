"""What the parts of one layer did, in numbers, without asking the database."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from statelayer.history.reader import ReaderStatistics
    from statelayer.journal.statistics import JournalStatistics
    from statelayer.subscriptions.listener import ListenerStatistics


@dataclass(frozen=True, slots=True)
class Statistics:
    """Numbers of one layer in one process, as they were when they were asked for."""

    journal: JournalStatistics
    reader: ReaderStatistics
    listeners: tuple[ListenerStatistics, ...]
