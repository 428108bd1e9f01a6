"""What a command lets through of the library's log: warnings and worse, on standard error."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import structlog

if TYPE_CHECKING:
    from collections.abc import MutableMapping

    from structlog.typing import WrappedLogger

TOLD_IN_REPORTS = frozenset({"execution_failed"})
"""These are results of what was asked for, and the report explains them."""


def configure() -> None:
    """Configure structlog for this process."""
    structlog.configure(
        processors=[
            _without_told,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        # Looked up at each line: while a progress bar is shown, it stands in for standard error.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def _without_told(
    _logger: WrappedLogger,
    _method: str,
    event: MutableMapping[str, Any],
) -> MutableMapping[str, Any]:
    if event["event"] in TOLD_IN_REPORTS:
        raise structlog.DropEvent
    return event
