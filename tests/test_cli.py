"""The command line, run as people run it: what it prints where, and how it exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from statelayer.cli.exits import redacted
from statelayer.demo.session import Session

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from statelayer import StateLayer
    from statelayer.testing.plugin import Database, ExternalServer

# A test run in the background ignores interrupts, and what it starts inherits that.
PROGRAM = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from statelayer.cli import main
main()
"""
SECRET = "s3cret"
DECLARATION = (
    '{"requestId": "S-1", "taskId": "T-1", "user": "U7", "status": "confirmed", "description": "Silk neckties", '
    '"origin": "IT", "value": 890, "currency": "EUR"}\n'
)

one_driver = pytest.mark.parametrize("driver", ["pymongo"], indirect=True)


def started(*arguments: str | Path, program: str = PROGRAM, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(environment),
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    output, errors = process.communicate(timeout=60)
    assert "Traceback" not in errors, errors
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def statelayer(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return ended(started(*arguments, **environment))


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    telling = {"COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE", "STATELAYER_MONGOD"}
    return {name: value for name, value in os.environ.items() if name not in telling} | dict(more)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "declarations.jsonl"
    path.write_text("{\n" + DECLARATION)
    return path


# --- the demo


@one_driver
async def test_the_demo_prints_a_summary_for_people(
    statelayer_server: ExternalServer, database: Database, file: Path
) -> None:
    finished = statelayer("demo", "--uri", statelayer_server.uri, "--database", database.name)
    assert finished.returncode == 0
    for part in ("41 requests in 8 tasks", "max_depth", "/tasks/T-2041/stage/finalized", "└── ", "/tasks/T-2048  ok"):
        assert part in finished.stdout
    assert finished.stdout.endswith(f"All of it is in the database {database.name} of your server.\n")
    assert max(map(len, finished.stdout.splitlines())) <= 80
    assert "\x1b" not in finished.stdout
    assert finished.stderr.splitlines() == [
        "Connecting …",
        "Preparing the database …",
        "Writing requests (46) …",
        "Submitting tasks (8) …",
        "Waiting for what they woke (49) …",
        "Verifying (8) …",
    ]


@one_driver
async def test_the_demo_prints_json_for_programs(
    statelayer_server: ExternalServer, database: Database, file: Path
) -> None:
    finished = statelayer(
        "demo", "--json", "--input", file, "--uri", statelayer_server.uri, "--database", database.name
    )
    assert finished.returncode == 0
    report = json.loads(finished.stdout)
    assert [found["code"] for found in report["classified"]] == ["6215"]
    assert [line["number"] for line in report["broken"]] == [1]
    assert [hop["causedBy"] for hop in report["chain"]["hops"]] == [None, 1, 2, 3]
    assert [(namespace["namespace"], namespace["ok"]) for namespace in report["verified"]] == [("/tasks/T-1", True)]


@one_driver
async def test_what_verify_finds_makes_the_exit_code(
    statelayer_server: ExternalServer, database: Database, layer: StateLayer, file: Path
) -> None:
    first = await Session(layer).run(file)
    result = first.trees[0].root.children[0].path
    await database["entries"].update_one({"_id": result}, {"$set": {"value": "forged"}})
    finished = statelayer("demo", "--input", file, "--uri", statelayer_server.uri, "--database", database.name)
    assert finished.returncode == 1
    assert "/tasks/T-1  broken" in finished.stdout


def test_a_terminal_without_unicode_gets_an_answer_too(file: Path) -> None:
    finished = statelayer("demo", "--input", file, PYTHONIOENCODING="ascii")
    assert finished.returncode == 0
    assert "The embedded MongoDB is stopped" in finished.stdout


# --- what goes wrong


def test_an_input_that_is_not_there_is_misuse(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "none.jsonl", "does not exist"), (tmp_path, "is a directory")):
        finished = statelayer("demo", "--input", path)
        assert finished.returncode == 2
        assert finished.stdout == ""
        assert problem in finished.stderr


def test_a_name_that_no_database_can_have_is_misuse() -> None:
    finished = statelayer("demo", "--database", "a.b")
    assert finished.returncode == 2
    assert "--database" in finished.stderr


def test_a_server_that_does_not_answer_is_said_without_the_secret() -> None:
    finished = statelayer("demo", "--uri", f"mongodb://u:{SECRET}@127.0.0.1:1/")
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert "The database does not answer. ServerSelectionTimeoutError: 127.0.0.1:1: " in finished.stderr
    assert SECRET not in finished.stderr


@pytest.mark.parametrize(
    "uri",
    [
        f"mongodb://u:a/{SECRET}@h/",
        f"mongodb://u:{SECRET}@h:{SECRET}/",
        f"mongodb://u:{SECRET}%@h/",
        SECRET + "://h",
        "",
    ],
    ids=["slash", "port", "percent", "scheme", "empty"],
)
def test_a_uri_that_cannot_be_read_is_misuse_and_not_repeated(uri: str) -> None:
    finished = statelayer("demo", "--uri", uri)
    assert finished.returncode == 2
    assert "--uri: The connection string cannot be read" in finished.stderr
    assert SECRET not in finished.stderr


def test_a_server_that_cannot_be_started_is_said() -> None:
    finished = statelayer("demo", STATELAYER_MONGOD="/nonexistent/mongod")
    assert finished.returncode == 1
    assert "statelayer: No mongod at '/nonexistent/mongod'" in finished.stderr


def test_a_missing_extra_is_said() -> None:
    for extra in ("typer", "rich", "rapidfuzz"):
        program = f"import sys; sys.modules['{extra}'] = None\n{PROGRAM}"
        finished = ended(started("demo", program=program))
        assert finished.returncode == 2
        assert finished.stderr == (
            f"statelayer: the command line needs {extra}, which is not installed. "
            "Run `pip install 'statelayer[cli]'`.\n"
        )


def test_an_interrupt_stops_the_embedded_server(tmp_path: Path) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text("".join(DECLARATION.replace("S-1", f"S-{number}") for number in range(2000)))
    with started("demo", "--input", file, TMPDIR=str(tmp_path)) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("Writing requests"):
            assert process.poll() is None
        running = _processes_on(tmp_path)
        process.send_signal(signal.SIGINT)
        finished = ended(process)
    assert len(running) == 1
    assert finished.returncode == 130
    assert finished.stderr.endswith("statelayer: Interrupted.\n")
    assert _processes_on(tmp_path) == []
    assert list(tmp_path.glob("statelayer-*")) == []


def _processes_on(directory: Path) -> list[str]:
    """Return the mongod processes that have their data below a directory."""
    lines = subprocess.run(["ps", "-wweo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    guards = ("/bin/sh", "sh ")  # they end a moment after what they guard
    return [line for line in lines if f"--dbpath {directory}" in line and not line.startswith(guards)]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("cannot reach mongodb+srv://u:p@h/?x=1 now", "cannot reach mongodb://… now"),
        ("u:p@h:27017 is away", "…@h:27017 is away"),
        ("h:27017: refused", "h:27017: refused"),
        ("It begins with 'mongodb://' or so", "It begins with 'mongodb://' or so"),
    ],
)
def test_connection_strings_are_redacted(message: str, expected: str) -> None:
    assert redacted(message) == expected


# --- what it says of itself


def test_help_shows_examples_and_exit_codes() -> None:
    for arguments in (["--help"], ["demo", "--help"]):
        finished = statelayer(*arguments)
        assert finished.returncode == 0
        assert "  statelayer demo --input declarations.jsonl\n" in finished.stdout
        assert "130  interrupted" in finished.stdout


def test_the_version_is_told() -> None:
    assert statelayer("--version").stdout.startswith("statelayer 0.")
