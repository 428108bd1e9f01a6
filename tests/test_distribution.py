"""What is published: the wheel built from the sdist, used outside of the repository."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

REPOSITORY = Path(__file__).parent.parent
ROOMS = ("subscriptions", "executors", "mongo_indexes")

EXTRAS = ("typer", "rich", "rapidfuzz", "pytest")
NEED_EXTRAS = ("statelayer.cli", "statelayer.demo", "statelayer.testing.plugin")

IMPORT_EVERYTHING = """
import importlib, json, pkgutil, sys

installed, absent = sys.argv[1], sys.argv[2:]
sys.path.insert(0, installed)
sys.modules.update(dict.fromkeys(absent))  # None: importing it fails

import statelayer
assert statelayer.__file__.startswith(installed), statelayer.__file__

outcomes = {}
for module in pkgutil.walk_packages(statelayer.__path__, "statelayer.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        outcomes[module.name] = None
    except ImportError as error:
        outcomes[module.name] = str(error)
print(json.dumps(outcomes))
"""


def run(*command: str | Path, cwd: Path) -> str:
    finished = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, f"{command} failed:\n{finished.stdout}{finished.stderr}"
    return finished.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", into, source, cwd=into)
    (built,) = into.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", REPOSITORY, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an installer would."""
    directory = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(directory, filter="data")
    (source,) = (path for path in directory.iterdir() if path.is_dir())
    return build("wheel", source, directory)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", "--target", str(target)]
    run(sys.executable, "-m", "pip", "install", *options, wheel, cwd=target)
    return target


def import_everything(installed: Path, *, absent: Sequence[str] = ()) -> dict[str, str | None]:
    """Import each module of the installed package; the answer holds each one's error."""
    command = (sys.executable, "-P", "-W", "error", "-c", IMPORT_EVERYTHING, installed, *absent)
    return json.loads(run(*command, cwd=installed))


def test_every_module_of_the_wheel_imports(installed: Path) -> None:
    outcomes = import_everything(installed)
    sources = (path.relative_to(REPOSITORY) for path in (REPOSITORY / "statelayer").rglob("*.py"))
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in sources}
    assert outcomes == dict.fromkeys(modules - {"statelayer", "statelayer.__main__"})
    assert outcomes.keys() >= {f"statelayer.{room}" for room in ROOMS}


def test_the_core_imports_without_extras(installed: Path) -> None:
    outcomes = import_everything(installed, absent=EXTRAS)
    assert {name: error for name, error in outcomes.items() if error and not name.startswith(NEED_EXTRAS)} == {}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == {"statelayer", "statelayer-0.1.0.dist-info"}
    assert "statelayer/py.typed" in names
    assert "statelayer-0.1.0.dist-info/licenses/LICENSE" in names
    for room in ROOMS:
        assert f"statelayer/{room}/__init__.py" in names


def test_the_sdist_keeps_the_rooms_where_they_are(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    for room in ROOMS:
        assert f"statelayer/{room}/__init__.py" in names
        assert not any(name == room or name.startswith(f"{room}/") for name in names)


@pytest.mark.parametrize("room", ROOMS)
def test_the_links_at_the_root_are_for_reading(room: str) -> None:
    link = REPOSITORY / room
    assert link.readlink() == Path("statelayer") / room
    finished = subprocess.run(
        [sys.executable, "-c", f"import {room}"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert f"ImportError: import statelayer.{room}; the link at the root is for reading" in finished.stderr
