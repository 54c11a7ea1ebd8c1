"""The orderly end of a server on SIGTERM or Ctrl-C."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Final

DEADLINE_S: Final = 10.0
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

logger = logging.getLogger(__name__)


class Stopping:
    """Turns the first SIGTERM or SIGINT into an orderly stop, and lets a second one end it at once.

    Make it in the main thread, before anything is started. Until `on_stop` a signal raises
    SystemExit(0) in the main thread, so that what was started is stopped on the way out.

    Args:
        deadline_s: from the signal on; a stop that takes longer ends the process with status 1.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._stop: Callable[[], None] | None = None
        self.asked = False
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def on_stop(self, stop: Callable[[], None]) -> None:
        """From now on a signal calls `stop`, which must return at once.

        Raises: SystemExit if a signal has come already.
        """
        self._stop = stop
        self.check()

    def check(self) -> None:
        """Raises: SystemExit if a signal has come, which some callbacks swallow."""
        if self.asked:
            raise SystemExit(0)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self.asked = True
        watchdog = threading.Timer(self._deadline_s, self._give_up)
        watchdog.daemon = True
        watchdog.start()
        if self._stop is None:
            raise SystemExit(0)
        self._stop()

    def _give_up(self) -> None:
        logger.error("not everything has stopped within %g s; ended all the same", self._deadline_s)
        logging.shutdown()
        os._exit(1)
