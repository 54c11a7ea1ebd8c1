"""The servers under comparison: how each is started, and what processor time it has taken."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.reports import child_environment
from server.processes import ServerProcess

HOST: Final = "127.0.0.1"
START_S: Final = 120.0
POLL_S: Final = 0.1
NOT_THERE: Final = (404, 503)
SECONDS_PER_TICK: Final = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers.

    Attributes:
        pid: of its first process. port, path: where it takes the request.
        key: sent with each request; None for a request without a login.
    """

    name: str
    pid: int
    port: int
    path: str
    key: str | None = None

    @property
    def processor_s(self) -> float:
        """Seconds of processor time of the server and all its children, up to now."""
        return sum(_processor_s(pid) for pid in _family(self.pid))


@contextmanager
def splitedge(state: Path, model: str) -> Iterator[Running]:
    """Our server over a state folder that has the model, with its broker and all checks."""
    server = ServerProcess(state)
    server.start(("--http", f"{HOST}:0", "--mqtt", f"embedded:{HOST}:0", "--threads", "1"))
    try:
        port = int(server.http.rpartition(":")[2])
        yield Running("splitedge", server.pid, port, f"/v2/models/{model}/infer")
    finally:
        server.stop()


def with_key(server: Running, state: Path) -> Running:
    """Our server, asked as clients beyond loopback ask it: with a key that may do no more."""
    words = ("server", "keys", "create", "--scope", "infer", "--state", str(state))
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", *words]
    made = subprocess.run(command, env=child_environment(), check=True, capture_output=True)
    key = made.stdout.decode().split()[0]
    return replace(server, name=f"{server.name}, with a key", key=key)


@contextmanager
def plain_fastapi(python: Path, graph: Path, loop: str, http: str) -> Iterator[Running]:
    """Plain FastAPI on uvicorn, with that loop and that parser of HTTP."""
    name = f"FastAPI, {loop}, {http}"
    words = ("benchmarks.peers.plain_fastapi", str(graph), "{port}", loop, http)
    with _module(name, python, words, "/infer") as running:
        yield running


@contextmanager
def litserve(python: Path, graph: Path) -> Iterator[Running]:
    """LitServe with one worker, as its documents show it."""
    words = ("benchmarks.peers.litserve_app", str(graph), "{port}")
    with _module("LitServe", python, words, "/predict") as running:
        yield running


@contextmanager
def ray_serve(python: Path, graph: Path) -> Iterator[Running]:
    """Ray Serve with one replica, as its documents show it."""
    words = ("benchmarks.peers.ray_app", str(graph), "{port}")
    with _module("Ray Serve", python, words, "/infer") as running:
        yield running


@contextmanager
def _module(name: str, python: Path, words: tuple[str, ...], path: str) -> Iterator[Running]:
    """A module of this folder as a server; `{port}` in its words stands for a free port."""
    port = _free_port()
    command = [str(python), "-P", "-m", *(word.format(port=port) for word in words)]
    process = subprocess.Popen(
        command,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_answers(name, process, port, path)
        yield Running(name, process.pid, port, path)
    finally:
        # all that it began: processes of LitServe and of Ray outlive their first one
        family = _family(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        for pid in family - {process.pid}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def _wait_answers(name: str, process: subprocess.Popen[bytes], port: int, path: str) -> None:
    """Wait until the path is there: Ray Serve answers before it has one.

    Raises: TimeoutError; RuntimeError if the process has ended.
    """
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise RuntimeError(f"{name} ended with status {process.returncode}; see its output")
        connection = http.client.HTTPConnection(HOST, port, timeout=START_S)
        try:
            connection.request("GET", path)
            if connection.getresponse().status not in NOT_THERE:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(POLL_S)
    raise TimeoutError(f"{name} did not answer within {START_S:.0f} s")


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as found:
        port: int = found.getsockname()[1]
    return port


def _family(pid: int) -> set[int]:
    """A process, its children, and theirs."""
    parents = _parents()
    family, new = {pid}, {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - family
        family |= new
    return family


def _parents() -> Mapping[int, int]:
    """The parent of each process, as Linux lists them."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = _stat(path)
        if fields:
            found[int(path.parent.name)] = int(fields[1])
    return found


def _processor_s(pid: int) -> float:
    """Processor time of a process, of its ended threads too."""
    fields = _stat(Path(f"/proc/{pid}/stat"))
    return (int(fields[11]) + int(fields[12])) * SECONDS_PER_TICK if fields else 0.0


def _stat(path: Path) -> list[str]:
    """The fields of a process after its name; none if it has ended."""
    try:
        return path.read_text().rpartition(") ")[2].split()
    except OSError:
        return []


def this_python() -> Path:
    """The interpreter of this process."""
    return Path(sys.executable)
