"""The sink `module:function`: a user's own function, called with each row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from edge_sdk.pipeline.answer import Row

logger = logging.getLogger(__name__)


class FunctionWriter:
    """Calls a function with a dictionary for each answer. A call that fails is logged and counted.

    Args:
        word: the function's name, for people.
    """

    def __init__(self, function: Callable[[Row], Any], word: str) -> None:
        self._function = function
        self._word = word
        self._failed = 0

    def write(self, rows: Sequence[Row]) -> int:
        """Call the function with each row."""
        for row in rows:
            try:
                self._function(dict(row))
            except Exception:  # the user's function; the stream goes on
                self._failed += 1
                if self._failed == 1:
                    logger.exception("sink %s failed for %s", self._word, row["input"])
        return len(rows)

    def close(self, timeout_s: float) -> int:  # noqa: ARG002 - nothing is held
        """Say how many calls failed."""
        if self._failed:
            logger.warning("sink %s: %d calls failed", self._word, self._failed)
        return 0
