"""``statelayer demo``: a customs desk at work."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from statelayer.cli import exits
from statelayer.cli.connections import check_name, opened
from statelayer.demo.progress import progress_on
from statelayer.demo.session import SHIPPED, Session
from statelayer.demo.summary import print_summary

if TYPE_CHECKING:
    from statelayer.demo.report import Report


def _database(name: str) -> str:
    try:
        return check_name(name)
    except ValueError as error:
        raise typer.BadParameter(f"{error}.") from error


def demo(
    source: Annotated[
        Path,
        typer.Option(
            "--input",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
            show_default=False,
            help="Import declarations of your own, one JSON object a line; by default those that come with the demo.",
        ),
    ] = SHIPPED,
    uri: Annotated[
        str | None,
        typer.Option(
            metavar="URI",
            help="A MongoDB of your own (6.0 or later, a replica set); by default one is started and removed again.",
        ),
    ] = None,
    database: Annotated[
        str, typer.Option(metavar="NAME", callback=_database, help="The database to use on it.")
    ] = "statelayer_demo",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON; progress stays on stderr.")
    ] = False,
) -> None:
    """Write import declarations and see what they wake: goods are classified, tasks go from stage to stage.

    \b
    Examples:
      statelayer demo
      statelayer demo --input declarations.jsonl
      statelayer demo --uri 'mongodb://localhost:27017/?replicaSet=rs0' --json

    \b
    A declaration:
      {"taskId": "T-1", "requestId": "S-1", "user": "U7", "status": "confirmed",
       "description": "Silk neckties", "origin": "IT", "value": 890, "currency": "EUR"}

    \b
    Exit codes:
      0    everything that was woken ended, and verify found no problem
      1    something never ended, verify found a problem, or the database failed
      2    an option is wrong, the file cannot be read, or an extra is missing
      130  interrupted (Ctrl-C)
    """
    report = exits.finished(_observed(source, uri, database))
    if as_json:
        typer.echo(json.dumps(report.document(), ensure_ascii=False, indent=2, default=str))
    else:
        print_summary(Console(), report)
        typer.echo(_whereabouts(uri, database))
    raise typer.Exit(0 if report.ok else exits.FAILED)


async def _observed(source: Path, uri: str | None, database: str) -> Report:
    """Run the demo while showing how far it is."""
    async with AsyncExitStack() as stack:
        progress = stack.enter_context(progress_on(Console(stderr=True)))
        with progress.phase("Starting an embedded MongoDB" if uri is None else "Connecting"):
            layer = await stack.enter_async_context(opened(uri, database))
        return await Session(layer, progress=progress).run(source)


def _whereabouts(uri: str | None, database: str) -> str:
    if uri is None:
        return "The embedded MongoDB is stopped and its data removed; --uri keeps them on a server of yours."
    return f"All of it is in the database {database} of your server."
