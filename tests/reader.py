"""A reader who types what a document says: its blocks, a folder, a server that a block starts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import urllib3

from server.run import Addresses
from tests.waiting import wait_until

ROOT: Final = Path(__file__).parents[1]
# The API's address in every document; a reader's server listens elsewhere, beside others.
WRITTEN_HTTP: Final = "http://127.0.0.1:8000"
_TOKEN: Final = re.compile(r"^\S+\.[0-9a-f]{32}$", re.MULTILINE)


class Document:
    """A document of the repository; the blocks that tests type stand under a comment:

        <!-- snippet: NAME -->
        ```sh
        ...
        ```

    Args:
        name: path from the root of the repository.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.text = (ROOT / name).read_text()

    def snippet(self, name: str) -> str:
        """The block of that name."""
        found = re.search(rf"<!-- snippet: {name} -->\n```\w+\n(.*?)```", self.text, re.DOTALL)
        assert found is not None, f"{self.name} has no snippet {name}"
        return found[1]


@dataclass(frozen=True)
class Reader:
    """A folder in which scripts are typed.

    Attributes:
        http: URL of the reader's server; scripts name it WRITTEN_HTTP.
        token: that the server's block printed; scripts name it TOKEN.
    """

    folder: Path
    http: str = WRITTEN_HTTP
    token: str = "TOKEN"

    def shell(self, script: str, *, timeout_s: float = 240) -> str:
        """The stdout of a script, which must succeed."""
        script = script.replace(WRITTEN_HTTP, self.http)
        script = re.sub(r"\bTOKEN\b", self.token, script)
        done = subprocess.run(
            ["bash", "-euc", script],
            cwd=self.folder,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def environment() -> dict[str, str]:
    """Environment with this installation's `splitedge` and `python` first, and torch on one
    thread.
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


def free_ports(count: int) -> list[int]:
    """Different TCP ports of loopback that were free just now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@contextmanager
def started_server(folder: Path, script: str, *, state: str = "server") -> Iterator[Reader]:
    """The server that a block starts in the background, on free ports, until the end.

    The block also makes a token, the last thing that it prints.

    Args:
        state: folder of the server in the block.
    """
    http, mqtt = (f"127.0.0.1:{port}" for port in free_ports(2))
    (folder / state).mkdir(parents=True, exist_ok=True)
    Addresses(http, f"embedded:{mqtt}").save(folder / state)  # as if it had run there before
    log = folder / "server.log"
    with log.open("w") as printed:
        shell = subprocess.Popen(
            ["bash", "-euc", script],
            cwd=folder,
            env=environment(),
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
    try:
        assert shell.wait(120) == 0, log.read_text()
        wait_until(lambda: _is_ready(f"http://{http}"), log.read_text, 60)
        (token,) = _TOKEN.findall(log.read_text())
        yield Reader(folder, f"http://{http}", token)
    finally:
        with contextlib.suppress(ProcessLookupError):  # a document may have stopped the server
            os.killpg(shell.pid, signal.SIGKILL)  # also the server that the shell left behind


def _is_ready(http: str) -> bool:
    with contextlib.suppress(urllib3.exceptions.HTTPError):
        return urllib3.request("GET", f"{http}/v2/health/ready", retries=False).status == 200
    return False
