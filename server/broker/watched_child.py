"""A broker as a child process of the server: started, followed, and started again after a crash."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Final

from edge_sdk.errors import SplitedgeError

_FIRST_BACKOFF_S: Final = 0.1
_LONGEST_BACKOFF_S: Final = 5.0
_HEALTHY_S: Final = 30.0  # a run this long makes the next crash a first one

OnEvent = Callable[[dict[str, Any]], None]

logger = logging.getLogger(__name__)


class WatchedChild(ABC):
    """A process that a thread starts, follows until it ends, and starts again.

    A child class says how the process is launched, asked to end, and what its lines mean. Every
    method may be called from any thread.

    Args:
        name: of the process, for the log.
        port: 0 where it is not known yet.
        stop_s: seconds in which the process ends after it was asked to; then it is killed.
        on_event: called in the thread that follows the process, with each event that it tells. An
            exception of it is logged, and the process is followed further.
    """

    def __init__(self, name: str, port: int, stop_s: float, on_event: OnEvent | None) -> None:
        self._name = name
        self._port = port
        self._stop_s = stop_s
        self._on_event = on_event
        self._changed = threading.Condition()  # guards the fields below, and those of child classes
        self._process: subprocess.Popen[str] | None = None
        self._listening = False
        self._listened = False  # once at least
        self._stopping = False
        self._error = ""  # why the process ended, or was not started; "" while all is well
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-child", daemon=True)

    @property
    def port(self) -> int:
        """Port on which it listens; known once started."""
        return self._port

    @property
    def alive(self) -> bool:
        """Whether the broker accepts connections now."""
        with self._changed:
            return self._listening

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while none runs."""
        with self._changed:
            return self._process.pid if self._process is not None else None

    def stop(self) -> None:
        """Stop the broker and wait until it has ended."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            process = self._process
        self._ask_to_end(process)
        if process is not None:
            try:
                process.wait(self._stop_s)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._watcher.is_alive():
            self._watcher.join()

    @abstractmethod
    def _launch(self) -> subprocess.Popen[str]:
        """Start a process that ends with this one; the lock is held.

        Raises: SplitedgeError or OSError; the next attempt is made later.
        """

    @abstractmethod
    def _follow(self, process: subprocess.Popen[str]) -> None:
        """Read the lines of the process until it ends."""

    @abstractmethod
    def _ask_to_end(self, process: subprocess.Popen[str] | None) -> None:
        """Ask the process to end in order, if one runs; `stop` calls it."""

    def _watch_until_up(self, timeout_s: float) -> bool:
        """Watch from now on; returns whether the broker accepts connections in time."""
        self._watcher.start()
        with self._changed:
            self._changed.wait_for(lambda: self._listening or self._error, timeout_s)
            return self._listening

    def _now_listening(self) -> None:
        """Note that the broker accepts connections."""
        with self._changed:
            self._listening = self._listened = True
            self._changed.notify_all()

    def _tell(self, event: dict[str, Any]) -> None:
        """Tell an event; who is told cannot stop the watching."""
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception:  # it is not ours, and the broker must be watched on
            logger.exception("%s: an event was not taken: %.200s", self._name, event)

    def _watch(self) -> None:
        """Start the process, follow it until it ends, start it again."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            began = time.monotonic()
            process = self._spawn()
            if process is not None:
                self._follow_to_the_end(process)
            with self._changed:
                self._process = None
                self._listening = False
                if process is not None:
                    self._error = self._error or _ending(process.returncode)
                self._changed.notify_all()
                if self._stopping:
                    return
            if time.monotonic() - began > _HEALTHY_S:
                backoff_s = _FIRST_BACKOFF_S
            if self._listened:  # the first start has a caller, who is told and does not go on
                logger.error("%s: %s; next start in %.1f s", self._name, self._error, backoff_s)
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, backoff_s)
            backoff_s = min(2 * backoff_s, _LONGEST_BACKOFF_S)

    def _spawn(self) -> subprocess.Popen[str] | None:
        """A new process; None when stopping, or if it was not started."""
        with self._changed:
            if self._stopping:
                return None
            self._error = ""
            try:
                self._process = self._launch()
            except (SplitedgeError, OSError) as err:
                self._error = str(err)
            return self._process

    def _follow_to_the_end(self, process: subprocess.Popen[str]) -> None:
        try:
            self._follow(process)
        except Exception:  # outermost loop of this thread: it must start the next process
            logger.exception("%s pid=%d: its lines cannot be read, killed", self._name, process.pid)
            process.kill()
        process.wait()


def _ending(status: int) -> str:
    """Words for the end of a process, by its status; negative ones are signals."""
    if status >= 0:
        return f"it ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it was ended by signal {-status}"
