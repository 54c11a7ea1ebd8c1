"""The demo's server and devices as child processes, talked to over pipes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final

import orjson

from edge_sdk.errors import LinkError

START_TIMEOUT_S: Final = 60.0
STOP_TIMEOUT_S: Final = 15.0


class ServerProcess:
    """`splitedge server run` on a state folder; on ports of its own choice, kept over restarts."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._process: subprocess.Popen[str] | None = None
        self.http = ""
        self.log = state.with_name(f"{state.name}.log")

    def start(self, options: Sequence[str] = ()) -> float:
        """Start it and wait until it takes requests.

        Returns: the monotonic time at which it did.
        Raises: LinkError with what it said when it ends instead.
        """
        command = [sys.executable, "-P", "-m", "edge_sdk.cli", "server", "run"]
        command += ["--state", str(self._state), *options]
        with self.log.open("ab") as log:
            process = _popen(command, log)
        self._process = process
        words = _read_line(process).split()
        if "(API)," not in words:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
            raise LinkError(f"the server did not start: {' '.join(last)}; see {self.log}")
        self.http = words[words.index("(API),") - 1]
        return time.monotonic()

    def stop(self) -> None:
        """End it as Ctrl-C would, and wait."""
        if self._process is not None:
            self._process.terminate()
            _wait(self._process)
            self._process = None


class DeviceProcess:
    """`python -m server.demo.device` on a state folder."""

    def __init__(self, state: Path, samples: Path) -> None:
        command = [sys.executable, "-P", "-m", "server.demo.device"]
        command += ["--state", str(state), "--samples", str(samples)]
        self._process = _popen(command)
        self.ready = self.answer()

    def order(self, word: str) -> None:
        """Give an order; `answer` has what comes back."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The next JSON line.

        Raises: LinkError if the process ended.
        """
        line = _read_line(self._process)
        try:
            answer: dict[str, Any] = orjson.loads(line)
        except orjson.JSONDecodeError:
            raise LinkError(f"a device ended early: {line.strip() or 'no output'}") from None
        return answer

    def stop(self) -> None:
        """Close its stdin and wait for its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        _wait(self._process)


def _popen(command: Sequence[str], log: IO[bytes] | None = None) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1)


def _read_line(process: subprocess.Popen[str]) -> str:
    """One line of its stdout; what it has when it ends or the time is over."""
    assert process.stdout is not None
    timer = threading.Timer(START_TIMEOUT_S, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
