"""The watchdog: the service manager hears of this process only while its parts really work.

Where a part hangs, nothing is sent any more, and the manager restarts the process.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
from collections.abc import Callable
from typing import Final, Self

from edge_sdk.systemd.notify import Notifier

logger = logging.getLogger(__name__)

# of the manager's patience: three messages fit in, and one that is late does no harm
TURN: Final = 0.25
PATIENCE: Final = 0.5

# takes the seconds that a part may be without a sign of life; gives why it hangs, or ""
Check = Callable[[float], str]


class Watchdog:
    """Asks every part whether it works, in a thread of its own, and tells the service manager.

        with Watchdog(notifier) as watchdog:
            watchdog.add(stream.hangs)

    Without a watchdog of the manager it does nothing. A check that hangs itself is a part that
    hangs.
    """

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier
        self._checks: list[Check] = []
        self._told = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="splitedge-watchdog", daemon=True)

    def add(self, check: Check) -> None:
        """Watch one more part."""
        self._checks.append(check)

    def __enter__(self) -> Self:
        if self._notifier.watchdog_s:
            # the manager's SIGABRT then leaves in the log where each thread hangs
            faulthandler.enable()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _run(self) -> None:
        while not self._closing.wait(TURN * self._notifier.watchdog_s):
            try:
                self.look()
            except Exception:  # outermost loop of this thread: a part that fails does not work
                logger.exception("the watchdog could not ask")

    def look(self) -> None:
        """Ask every part, and tell the manager if all of them work."""
        limit_s = PATIENCE * self._notifier.watchdog_s
        why = next((why for check in tuple(self._checks) if (why := check(limit_s))), "")
        if not why:
            self._notifier.alive()
        if why != self._told:
            self._told = why
            if why:
                logger.error("%s; the service manager restarts this process if that lasts", why)
                self._notifier.status(f"hangs: {why}")
            else:
                logger.warning("all parts work again")
                self._notifier.status("works again")
