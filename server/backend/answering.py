"""The thread that gives the answers of a batch while the engine computes the next one.

It has room for one batch. The engine's thread, which finds it taken, gives the answers itself: so
it never gets further ahead than that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class AnsweringThread:
    """A thread that does one piece of work at a time, without a queue."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._work: Callable[[], None] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="splitedge-answers", daemon=True)
        self._thread.start()

    @property
    def free(self) -> bool:
        """Whether it would take work."""
        return self._work is None

    def take(self, work: Callable[[], None]) -> bool:
        """Take a piece of work. If it fails, the log says so, and the thread goes on.

        Returns: False while it has one already.
        """
        with self._changed:
            if self._work is not None or self._stopping:
                return False
            self._work = work
            self._changed.notify()
        return True

    def stop(self) -> None:
        """End, once the work that was taken is done."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._work is None and not self._stopping:
                    self._changed.wait()
                work = self._work
            if work is None:
                return
            try:
                work()
            except Exception:  # outermost loop of this thread: later answers must come
                logger.exception("answers were not given")
            finally:
                with self._changed:
                    self._work = None
