"""Orders to devices over MQTT, repeated until a device says that it has carried them out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from server.registry.records import Order

AGAIN_S: Final = 10.0
AGAIN_MOST_S: Final = 3600.0

_Key = tuple[str, str, str]


class OrderCalls:
    """Decides which orders are sent, turn by turn.

    An order is sent at once, when its device connects, and then less and less often while the
    device is heard from: a message is lost if the device is away, and an old device ignores it.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: dict[_Key, tuple[float, float, float]] = {}  # asked, next time, pause

    def due(
        self, orders: Sequence[Order], heard: Iterable[str], connected: Iterable[str]
    ) -> list[Order]:
        """The orders to send now.

        Args:
            orders: all that are not done.
            heard: devices from which something came since the last turn.
            connected: those that have just connected.
        """
        now, heard, connected = self._clock(), set(heard), set(connected)
        known = {_key(order) for order in orders}
        self._sent = {key: sent for key, sent in self._sent.items() if key in known}
        due = []
        for order in orders:
            asked, at, pause_s = self._sent.get(_key(order), (0.0, 0.0, 0.0))
            new = asked != order.asked_at
            again = order.device in connected or (order.device in heard and now >= at)
            if not new and not again:
                continue
            pause_s = AGAIN_S if new else min(2 * pause_s, AGAIN_MOST_S)
            self._sent[_key(order)] = order.asked_at, now + pause_s, pause_s
            due.append(order)
        return due


def _key(order: Order) -> _Key:
    return order.device, order.op, order.argument
