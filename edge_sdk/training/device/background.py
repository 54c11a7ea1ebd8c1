"""Training next to a running agent: for each invitation a process of its own, at low priority.

The agent stays small and keeps answering while its device trains: the other process loads torch,
and the system runs it when the cores are free. No torch is imported here.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from edge_sdk.errors import ConfigurationError, SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.installation import install_command
from edge_sdk.training.device.trainer_address import INVITATION, resolve_trainer_url

logger = logging.getLogger(__name__)

NICENESS: Final = 10
# Invitations come every few seconds; a device that cannot train must not load torch for each.
PAUSE_S: Final = 60.0
STOP_S: Final = 10.0
# The process takes 300 MB, and a trainer that is resumed, or another one, invites the device again.
GIVE_UP_MINUTES: Final = 5.0


def check_data(text: str) -> str:
    """Read a device's labelled samples once, in a process of its own.

    A word that is wrong is told when the agent starts, not when the server invites the device; and
    the samples take no memory of the running agent.

    Args:
        text: a word of the grammar (docs/data.md).
    Returns: one line about what was read.
    Raises: ConfigurationError with the reason why they cannot be trained on.
    """
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "data", "--labelled", text]
    plain = {**os.environ, "SPLITEDGE_LOG": "text"}  # its last line stands in a sentence of ours
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=plain)
    if done.returncode:
        why = (done.stderr.strip() or f"ended with status {done.returncode}").splitlines()[-1]
        raise ConfigurationError(f"--train {text}: {why.removeprefix('error: ')}")
    sys.stderr.write(done.stderr)  # files that were skipped
    return done.stdout.strip()


class BackgroundTraining:
    """Trains on this device when it is invited, from `__enter__` to `__exit__`.

    Args:
        data: the device's own samples, as `splitedge agent train --data` takes them.
        threads: compute threads.
        backbone: as `participate` takes it.
    Raises: ConfigurationError if training is not installed; EnrolmentError or ConfigurationError
        if the state folder has no identity.
    """

    def __init__(
        self, state: Path, data: str, *, threads: int = 1, backbone: str | None = None
    ) -> None:
        if find_spec("torch") is None:
            raise ConfigurationError(f"--train: needs torch; run `{install_command('train')}`")
        self._identity = Identity.load(state)
        self._command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "train"]
        self._command += ["--state", str(state), "--data", data, "--threads", str(threads)]
        self._command += ["--give-up", f"{GIVE_UP_MINUTES:g}"]
        self._command += [] if backbone is None else ["--backbone", backbone]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._backoff_until = 0.0
        self._closed = False

    def command(self, command: Mapping[str, Any]) -> None:
        """Handle a command of the server; an invitation while the device trains changes nothing."""
        if command.get("op") != INVITATION:
            return
        try:
            trainer = resolve_trainer_url(self._identity, str(command.get("url")))
        except SplitedgeError as err:
            logger.warning("invitation refused: %s", err)
            return
        with self._lock:
            if not self._closed and not self._busy():
                self._start(trainer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._closed = True
            process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _busy(self) -> bool:
        """Whether the device trains, or failed to a moment ago."""
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return True
            self._process = None
            if status != 0:
                logger.warning("training ended with status %d; its own log says why", status)
                self._backoff_until = time.monotonic() + PAUSE_S
        return time.monotonic() < self._backoff_until

    def _start(self, trainer: str) -> None:
        logger.info("device=%s trains at %s", self._identity.device, trainer)
        try:
            self._process = subprocess.Popen([*self._command, "--trainer", trainer])
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICENESS)
        except OSError as err:
            logger.warning("training did not start: %s", err)
            self._backoff_until = time.monotonic() + PAUSE_S
