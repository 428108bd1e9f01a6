"""A virtual environment for each peer, built once and kept in a folder."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

LAST_LINES = 15


class PeerError(Exception):
    """A peer could not be installed, or failed while it was measured."""


async def python_with(requirements: Sequence[str], folder: Path) -> str:
    """Return the interpreter of an environment that has these packages, after building it when it is not complete."""
    python, complete = folder / "bin" / "python", folder / "complete"
    wanted = "\n".join(requirements)
    if not complete.is_file() or complete.read_text(encoding="utf-8") != wanted:
        await output_of(sys.executable, "-m", "venv", "--clear", str(folder))
        await output_of(str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *requirements)
        complete.write_text(wanted, encoding="utf-8")
    return str(python)


async def output_of(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Run a program to its end and return what it printed; it is stopped when the caller is."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        tail = "\n".join(errors.decode(errors="replace").splitlines()[-LAST_LINES:])
        raise PeerError(f"{' '.join(command)} failed:\n{tail}")
    return output.decode()
