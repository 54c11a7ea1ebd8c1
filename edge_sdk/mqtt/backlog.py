"""Messages that a link has published and still holds. paho bounds those of QoS 1 alone."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Final

from paho.mqtt.client import MQTTMessageInfo

# most bytes of messages of QoS 0 that are not written to the socket yet
UNWRITTEN_BYTES: Final = 32_000_000


class Backlog:
    """Messages of QoS 1 that the broker has not acknowledged, and unwritten ones of QoS 0.

    Args:
        unwritten_most: messages of QoS 0 that may wait for the socket.
    """

    def __init__(self, unwritten_most: int) -> None:
        self._unwritten_most = unwritten_most
        # when each was published, by the monotonic clock
        self._under_way: deque[tuple[MQTTMessageInfo, float]] = deque()
        self._unwritten: deque[tuple[MQTTMessageInfo, int]] = deque()  # with their sizes
        self._unwritten_bytes = 0
        self._counting = threading.Lock()

    def add(self, sent: MQTTMessageInfo, qos: int, size_bytes: int) -> None:
        """Count a message that was published."""
        with self._counting:
            if qos:
                self._forget_acknowledged()
                self._under_way.append((sent, time.monotonic()))
            elif not sent.is_published():
                self._unwritten.append((sent, size_bytes))
                self._unwritten_bytes += size_bytes

    def behind_s(self, now: float) -> float:
        """Age of the oldest message that is not acknowledged; 0 if there is none.

        Args:
            now: the monotonic clock.
        """
        with self._counting:
            self._forget_acknowledged()
            return now - self._under_way[0][1] if self._under_way else 0.0

    def unacknowledged(self) -> int:
        """Number of messages of QoS 1 that the broker has not acknowledged."""
        with self._counting:
            self._forget_acknowledged()
            return len(self._under_way)

    def is_full(self, size_bytes: int) -> bool:
        """Whether so many messages of QoS 0 wait for the socket that this one is too much."""
        if not self._unwritten:
            return False
        with self._counting:
            while self._unwritten and self._unwritten[0][0].is_published():
                self._unwritten_bytes -= self._unwritten.popleft()[1]
            full = len(self._unwritten) >= self._unwritten_most
            return full or self._unwritten_bytes + size_bytes > UNWRITTEN_BYTES

    def forget_unwritten(self) -> None:
        """Forget messages of QoS 0 that went down with their connection."""
        with self._counting:
            self._unwritten.clear()
            self._unwritten_bytes = 0

    def forget_under_way(self) -> None:
        """Forget messages of QoS 1: a new client has published none."""
        with self._counting:
            self._under_way.clear()

    def _forget_acknowledged(self) -> None:
        """Forget the oldest messages that the broker has; brokers acknowledge in order."""
        while self._under_way and self._under_way[0][0].is_published():
            self._under_way.popleft()
