"""Signs of life, from a thread of its own: work may take long, and a frozen process gives none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from edge_sdk.errors import SplitedgeError

logger = logging.getLogger(__name__)


class Heartbeat:
    """Calls `beat` again and again between `pace` and `__exit__`; one that fails is left out."""

    def __init__(self, beat: Callable[[], object]) -> None:
        self._beat = beat
        self._every_s = 0.0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="splitedge-alive", daemon=True)

    def pace(self, every_s: float) -> None:
        """Beat that often from now on."""
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
                logger.debug("not told that this device is alive: %s", err)
