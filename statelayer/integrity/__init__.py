"""Proving that entries and log agree, and making them agree.

``report`` says what was found, ``scans`` lets the server fold and join the log page by page, ``verify`` judges what
comes back, ``replay`` mends entries.
"""

from statelayer.integrity.integrity import Integrity
from statelayer.integrity.report import MAX_PROBLEMS, Problem, ProblemKind, ReplayReport, VerifyReport

__all__ = ["MAX_PROBLEMS", "Integrity", "Problem", "ProblemKind", "ReplayReport", "VerifyReport"]
