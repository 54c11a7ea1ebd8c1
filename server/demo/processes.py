"""The demo's server, trainer and devices as child processes, talked to over pipes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

import orjson

from edge_sdk.errors import LinkError

# All of these are long past what an idle machine takes: a busy one is no failure.
START_TIMEOUT_S: Final = 120.0
ROUND_TIMEOUT_S: Final = 600.0
END_TIMEOUT_S: Final = 60.0
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
        words = ["server", "run", "--state", str(self._state), *options]
        process = self._process = _splitedge(words, self.log)
        said = _read_line(process).split()
        if "(API)," not in said:
            raise LinkError(f"the server did not start: {_last_line(self.log)}; see {self.log}")
        self.http = said[said.index("(API),") - 1]
        return time.monotonic()

    def stop(self) -> None:
        """End it as Ctrl-C would, and wait."""
        if self._process is not None:
            self._process.terminate()
            _wait(self._process)
            self._process = None


class MemberProcess:
    """`splitedge agent train` on a state folder: waits for an invitation, trains, ends."""

    def __init__(self, state: Path, data: Path) -> None:
        self.log = data.with_suffix(".log")
        words = ["agent", "train", "--state", str(state), "--data", str(data)]
        self._name = state.name
        self._process = _splitedge(words, self.log)

    def wait_ready(self) -> None:
        """Return when it waits to be invited.

        Raises: LinkError with what it said when it ends instead.
        """
        if "waits to be invited" not in _read_line(self._process):
            raise LinkError(f"{self._name} does not train: {_last_line(self.log)}; see {self.log}")

    def check_running(self) -> None:
        """Raises: LinkError with what it said, if it has ended."""
        if self._process.poll() is not None:
            raise LinkError(f"{self._name} ended early: {_last_line(self.log)}; see {self.log}")

    def wait_end(self) -> None:
        """Return when it has ended by itself, as it does with the training.

        Raises: LinkError if it does not.
        """
        if not _ends_well(self._process):
            raise LinkError(f"{self._name} did not end with the training; see {self.log}")

    def stop(self) -> None:
        """End it where it still runs."""
        self._process.terminate()
        _wait(self._process)


class TrainerProcess:
    """`splitedge train` by a recipe, with the devices of a server's state folder.

    It runs where the recipe lies: files that the recipe names are found beside it.
    """

    def __init__(self, recipe: Path, server: Path) -> None:
        self.log = recipe.with_suffix(".log")
        words = ["train", recipe.name, "--state", str(server.resolve()), "--http", "127.0.0.1:0"]
        self._process = _splitedge([*words, "--join-minutes", "1"], self.log, folder=recipe.parent)

    def rounds(self) -> Iterator[str]:
        """What it says of each round, as it comes, until the training has ended.

        Raises: LinkError with what it said last when it does not end well.
        """
        while line := _read_line(self._process, ROUND_TIMEOUT_S):
            if line.startswith("round "):
                yield line.strip()
        if not _ends_well(self._process):
            raise LinkError(f"the training failed: {_last_line(self.log)}; see {self.log}")

    def stop(self) -> None:
        """End it where it still runs."""
        self._process.terminate()
        _wait(self._process)


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


def _splitedge(
    words: Sequence[str], log: Path, folder: Path | None = None
) -> subprocess.Popen[str]:
    """The command as a user would give it; what it says on stderr is added to `log`."""
    with log.open("ab") as file:
        return _popen([sys.executable, "-P", "-m", "edge_sdk.cli", *words], file, folder)


def _popen(
    command: Sequence[str], log: IO[bytes] | None = None, folder: Path | None = None
) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=log, text=True, bufsize=1, cwd=folder
    )


def _read_line(process: subprocess.Popen[str], timeout_s: float = START_TIMEOUT_S) -> str:
    """One line of its stdout; what it has when it ends or the time is over."""
    assert process.stdout is not None
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        return process.stdout.readline()
    finally:
        timer.cancel()


def _ends_well(process: subprocess.Popen[str]) -> bool:
    """Whether it ends by itself, and says that all went well."""
    try:
        return process.wait(END_TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        return False


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _wait(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
