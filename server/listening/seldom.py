"""Log lines that a stranger causes: each kind at most once a second."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

EVERY_S: Final = 1.0


class SeldomFilter(logging.Filter):
    """Passes one record of a kind each second; the next one says how many were left out.

    A kind is the text before its arguments are put in. A record with a traceback always passes.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._passed_at: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        if record.exc_info is not None:
            return True
        kind, now = str(record.msg), self._clock()
        last = self._passed_at.get(kind)
        if last is not None and now - last < EVERY_S:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return False
        self._passed_at[kind] = now
        left_out = self._left_out.pop(kind, 0)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like this)", ()
        return True
