"""The end of a runner's time: after its hours, or when a signal asks it to stop."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Iterator
from types import FrameType

import typer


class OutOfTimeError(Exception):
    """A job was left at a checkpoint, because the runner's time is over."""


class Clock:
    """Time that is left to a runner.

    Args:
        hours: from now on; None for no end.
    """

    def __init__(self, hours: float | None = None) -> None:
        self._end = math.inf if hours is None else time.monotonic() + 3600 * hours
        self._asked = False

    def is_over(self, next_s: float = 0.0) -> bool:
        """Whether the time is over, or would be after a step of `next_s` seconds."""
        return self._asked or time.monotonic() + next_s > self._end

    def check(self, next_s: float = 0.0) -> None:
        """Check that there is time for a step of `next_s` seconds.

        Raises: OutOfTimeError.
        """
        if self.is_over(next_s):
            raise OutOfTimeError

    @contextlib.contextmanager
    def ended_by_signals(self) -> Iterator[None]:
        """Let SIGTERM and Ctrl-C end the time; a second one ends the program at once."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._ask) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        typer.echo("stopping after this round; again to stop at once", err=True)
