"""Places for connections: how many there are, in all and of strangers, and who gives way.

A connection is a stranger's until it is proven: it has logged in, or got an answer. A stranger that
opens connections and says nothing must not keep others out, so the oldest such connection gives way
to a new one. Nothing here waits or closes a socket; time comes from a clock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from server.listening.source import source_network

# A stranger younger than this gives way only where all places are taken (devices that come back all
# at once, behind one address, need so long to log in),
GRACE_S: Final = 1.0
STRANGERS_MOST: Final = 128
# or where there are so many times more strangers of its source: a TLS handshake under way costs
# about 50 kB, and nothing proves yet that it will end
CROWD: Final = 4

Cut = Callable[[], object]


class Place:
    """The place of one connection.

    Attributes:
        source: where the peer comes from.
        cut: closes the connection at once.
        since: monotonic seconds of its arrival.
        proven: whether it has logged in, or got an answer.
        left: whether the place was given up.
    """

    __slots__ = ("cut", "left", "proven", "since", "source")

    def __init__(self, source: str, cut: Cut, since: float) -> None:
        self.source = source
        self.cut = cut
        self.since = since
        self.proven = False
        self.left = False


class Places:
    """The places of one port; for one thread.

    Args:
        most: connections in all.
        strangers_most: of one source that are not proven yet; for a moment, `CROWD` times as many.
        clock: monotonic seconds.
    Attributes:
        taken: connections that have a place.
        evicted, refused: connections that gave way, and that got no place, since the start.
    """

    def __init__(
        self,
        most: int,
        strangers_most: int = STRANGERS_MOST,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._strangers_most = strangers_most
        self._clock = clock
        # by source, each by age; a source without a stranger has no entry
        self._strangers: dict[str, OrderedDict[Place, None]] = {}
        self._idle: OrderedDict[Place, None] = OrderedDict()
        self.taken = 0
        self.evicted = 0
        self.refused = 0

    def take(self, address: str, cut: Cut) -> Place | None:
        """A place for a new connection; None where all others are at work.

        Args:
            address: the peer's IP address.
            cut: closes the connection at once; called if it gives way.
        """
        source, now = source_network(address), self._clock()
        own = self._strangers.get(source)
        if own is not None and len(own) >= self._strangers_most:
            oldest = next(iter(own))
            if now - oldest.since >= GRACE_S or len(own) >= CROWD * self._strangers_most:
                self._evict(oldest)
        if self.taken >= self._most:
            longest = self._next_to_go()
            if longest is None:
                self.refused += 1
                return None
            self._evict(longest)
        place = Place(source, cut, now)
        self._strangers.setdefault(source, OrderedDict())[place] = None
        self.taken += 1
        return place

    def prove(self, place: Place) -> None:
        """Count a connection as a stranger's no more."""
        if not place.proven and not place.left:
            place.proven = True
            self._forget_stranger(place)

    def idle(self, place: Place) -> None:
        """Let a proven connection give way, as long as it asks for nothing."""
        if place.proven and not place.left:
            self._idle[place] = None
            self._idle.move_to_end(place)

    def busy(self, place: Place) -> None:
        """Let a connection keep its place again: it asks for something."""
        self._idle.pop(place, None)

    def leave(self, place: Place) -> None:
        """Give a place up; a second call does nothing."""
        if place.left:
            return
        place.left = True
        self.taken -= 1
        self._forget_stranger(place)
        self._idle.pop(place, None)

    def _next_to_go(self) -> Place | None:
        """The oldest stranger of the source that has most of them, else who is idle longest."""
        if self._strangers:
            heaviest = max(self._strangers.values(), key=len)
            return next(iter(heaviest))
        return next(iter(self._idle), None)

    def _evict(self, place: Place) -> None:
        self.evicted += 1
        self.leave(place)
        place.cut()

    def _forget_stranger(self, place: Place) -> None:
        strangers = self._strangers.get(place.source)
        if strangers is not None:
            strangers.pop(place, None)
            if not strangers:
                del self._strangers[place.source]
