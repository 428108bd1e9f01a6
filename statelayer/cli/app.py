"""The commands, and what they have in common."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from statelayer.cli import logs
from statelayer.cli.demo import demo

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"statelayer {version('statelayer')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[  # noqa: ARG001 - its callback has answered
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """A MongoDB-native state layer: facts wake executors, which write the next facts.

    \b
    Example:
      statelayer demo --input declarations.jsonl

    \b
    Exit codes:
      0    done, and nothing is wrong
      1    it could not be done, or something is wrong
      2    it was not asked for correctly
      130  interrupted
    """
    logs.configure()


app.command()(demo)
