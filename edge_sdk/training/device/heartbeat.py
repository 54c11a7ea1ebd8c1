"""Signs of life from a thread of their own: one task may take long, and a frozen process stops."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from edge_sdk.errors import SplitedgeError

logger = logging.getLogger(__name__)


class Heartbeat:
    """Calls `beat` at a steady pace, from `pace` to `__exit__`; a call that fails is skipped."""

    def __init__(self, beat: Callable[[], object]) -> None:
        self._beat = beat
        self._every_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="splitedge-heartbeat", daemon=True)

    def pace(self, every_s: float) -> None:
        """Set the pace: once in `every_s` from now on."""
        self._every_s = every_s
        if not self._thread.is_alive():
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        while not self._stopping.wait(self._every_s):
            try:
                self._beat()
            except SplitedgeError as err:
                logger.debug("no sign of life sent: %s", err)
