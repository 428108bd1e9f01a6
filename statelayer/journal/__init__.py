"""Writing events: one queue, one committer, one transaction for what arrives together.

``queue`` holds what callers want, ``committer`` leads it through transactions, ``judge`` decides each append in memory
over what one snapshot said, ``batch`` reads that snapshot and writes what was judged good. ``memory`` saves reads
between two batches, ``contention`` keeps namespaces that others fight for out of everybody else's way.
"""

from statelayer.journal.append import Append, Companion, Origin, bound_origin, current_origin
from statelayer.journal.journal import Journal
from statelayer.journal.transact import JournalTransaction
from statelayer.journal.writer import Writer

__all__ = ["Append", "Companion", "Journal", "JournalTransaction", "Origin", "Writer", "bound_origin", "current_origin"]
