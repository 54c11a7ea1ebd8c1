"""A connection whose waits are counted, so that a silent peer is cut off."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

# Waits are counted in turns of about this many seconds, not by a clock: a process that stood still
# itself does not hold that against its peers.
TICK_S: Final = 1.0


class GuardedProtocol(asyncio.Protocol, ABC):
    """A connection that looks at its own waits.

    Attributes:
        on_lost: called at its end; its port sets it before the connection is made.
    """

    on_lost: Callable[[], object]

    @abstractmethod
    def tick(self) -> None:
        """Cut the connection off if its peer is overdue; called every `TICK_S` seconds."""
