"""Commands in child processes, for the demo and the benchmarks: talked to over pipes, by lines."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from edge_sdk.errors import LinkError

# far above what an idle machine takes, because a busy machine is no failure
START_TIMEOUT_S: Final = 120.0
END_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 15.0


class ChildProcess:
    """A command in a process of its own.

    Args:
        name: what errors call it.
        log: file to which its stderr is appended; without it, its stderr is ours.
        folder: where it runs.
        environment: its environment; ours by default.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path | None = None,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._name = name
        self._log = log
        pipe = subprocess.PIPE
        with contextlib.ExitStack() as stack:
            stderr = None if log is None else stack.enter_context(log.open("ab"))
            self._process = subprocess.Popen(
                command,
                stdin=pipe,
                stdout=pipe,
                stderr=stderr,
                text=True,
                bufsize=1,
                cwd=folder,
                env=environment,
            )

    @classmethod
    def splitedge(
        cls, name: str, words: Sequence[str], log: Path, folder: Path | None = None
    ) -> ChildProcess:
        """The command `splitedge WORDS`."""
        return cls(name, [sys.executable, "-P", "-m", "edge_sdk.cli", *words], log, folder)

    def write_line(self, line: str) -> None:
        """Send a line to its stdin."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def read_line(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """The next line of its stdout, "" at its end; it is killed if that takes too long."""
        assert self._process.stdout is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            return self._process.stdout.readline()
        finally:
            timer.cancel()

    def expect(self, text: str, failure: str) -> str:
        """The next line, which must contain `text`.

        Raises: LinkError of the name, `failure` and the last line of the log.
        """
        line = self.read_line()
        if text not in line:
            raise self.error(failure)
        return line

    def check_running(self) -> None:
        """Raises: LinkError if it has ended."""
        if self._process.poll() is not None:
            raise self.error("ended early")

    def wait_end(self, failure: str) -> None:
        """Wait until it ends by itself with status 0.

        Raises: LinkError as `expect`.
        """
        try:
            status = self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status = -1
        if status != 0:
            raise self.error(failure)

    def error(self, failure: str) -> LinkError:
        """The failure in words, the last line of the log, and the place to read on."""
        if self._log is None:
            return LinkError(f"{self._name} {failure}; its output above says why")
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["no output"]
        return LinkError(f"{self._name} {failure}: {lines[-1]}; see {self._log}")

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def stop(self) -> None:
        """End it as SIGTERM does, and wait."""
        self._process.terminate()
        self.close()

    def close(self) -> None:
        """Close its stdin and wait for its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # a line it did not read
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class ServerProcess:
    """`splitedge server run` on a state folder, which keeps its ports over restarts.

    Attributes:
        http: URL of the API, once started.
    """

    def __init__(self, state: Path) -> None:
        self.http = ""
        self._state = state
        self._process: ChildProcess | None = None

    def start(self, options: Sequence[str] = ()) -> float:
        """Start it and wait until it takes requests.

        Returns: the monotonic time at which it did.
        Raises: LinkError if it ends instead.
        """
        words = ["server", "run", "--state", str(self._state), *options]
        log = self._state.with_name(f"{self._state.name}.log")
        self._process = ChildProcess.splitedge("the server", words, log)
        line = self._process.expect("(API),", "did not start").split()
        self.http = line[line.index("(API),") - 1]
        return time.monotonic()

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def stop(self) -> None:
        """End it as SIGTERM does, and wait."""
        if self._process is not None:
            self._process.stop()
            self._process = None
