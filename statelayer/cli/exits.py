"""How a command ends when it cannot do what was asked for: one message on standard error, and an exit code."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from statelayer.demo.session import UnreadableInputError
from statelayer.errors import StateLayerError, TransientDatabaseError

if TYPE_CHECKING:
    from collections.abc import Coroutine

T = TypeVar("T")

FAILED = 1
MISUSED = 2
INTERRUPTED = 130

_URI = re.compile(r"mongodb(\+srv)?://[\w%.~-]\S*", re.IGNORECASE)
_USER_INFO = re.compile(r"[^\s/]+:[^\s/]+@")


class MisuseError(Exception):
    """An option's value that cannot be used."""


def finished(command: Coroutine[Any, Any, T]) -> T:
    """Run a command to its end and return what it found, or exit.

    An interrupt cancels it, so that what it started is stopped in good order.
    """
    try:
        return asyncio.run(command)
    except KeyboardInterrupt:
        _exit("Interrupted.", INTERRUPTED)
    except (MisuseError, UnreadableInputError) as error:
        _exit(str(error), MISUSED)
    except TransientDatabaseError as error:
        _exit(f"The database does not answer. {error}", FAILED)
    except StateLayerError as error:
        _exit(str(error), FAILED)


def redacted(message: str) -> str:
    """Return a message without connection strings and credentials."""
    return _USER_INFO.sub("…@", _URI.sub("mongodb://…", message))


def _exit(message: str, code: int) -> NoReturn:
    typer.echo(f"statelayer: {redacted(message)}", err=True)
    raise typer.Exit(code) from None
