"""The MongoDB shell as people have it: the one on PATH, else the one from npm."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = "mongosh@2.3.4"


class MongoshError(Exception):
    """The script, or the shell, failed."""


@dataclass(frozen=True)
class Mongosh:
    """Called with a uri and a script, it returns the value of the script's last expression."""

    program: Path
    home: Path

    @classmethod
    def find(cls, cache: Path) -> Mongosh:
        cache.mkdir(parents=True, exist_ok=True)
        program = shutil.which("mongosh") or _installed(cache)
        return cls(Path(program), cache)

    def __call__(self, uri: str, script: str) -> Any:
        return json.loads(self.run(uri, script, "--json=relaxed"))

    def run(self, uri: str, script: str, *options: str) -> str:
        """Run the script and return what it printed."""
        finished = subprocess.run(
            [self.program, "--quiet", "--norc", *options, "--eval", script, uri],
            env=os.environ | {"HOME": str(self.home)},  # it keeps its log and history at home
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if finished.returncode != 0:
            raise MongoshError(f"mongosh ended with {finished.returncode}:\n{finished.stdout}{finished.stderr}")
        return finished.stdout


def _installed(cache: Path) -> str:
    program = cache / "node_modules" / ".bin" / "mongosh"
    with (cache / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # each process of a parallel run comes here
        if not program.exists():
            _install(cache)
    return str(program)


def _install(cache: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError("These tests need mongosh: put it on PATH, or install npm (Debian: `apt-get install npm`).")
    quiet = ["--no-audit", "--no-fund", "--ignore-scripts"]
    finished = subprocess.run(
        [npm, "install", "--prefix", str(cache), *quiet, PACKAGE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if finished.returncode != 0:
        raise RuntimeError(f"npm could not install {PACKAGE}:\n{finished.stderr}")
