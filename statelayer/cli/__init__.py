"""The command line ``statelayer``.

Exit codes:

    0    what was asked for is done, and nothing is wrong
    1    it could not be done, or something is wrong with what was found; standard error says what
    2    it was not asked for correctly: an option, a file, a missing extra
    130  it was interrupted (Ctrl-C)
"""

from __future__ import annotations

import sys
from io import TextIOWrapper

EXTRA = frozenset({"rapidfuzz", "rich", "typer"})


def main() -> None:
    """Run the command line on ``sys.argv``, and exit."""
    try:
        from statelayer.cli.app import app  # noqa: PLC0415 - the extra may be absent, which is worth a sentence
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA:
            raise
        sys.exit(_without(package))
    except KeyboardInterrupt:
        sys.exit(130)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a tree is readable without its lines, too
    app(prog_name="statelayer")


def _without(package: str) -> int:
    sys.stderr.write(
        f"statelayer: the command line needs {package}, which is not installed. Run `pip install 'statelayer[cli]'`.\n"
    )
    return 2
