"""Availability of the server, as a state machine that is told events and asked for decisions.

    state      query answered   probe answered              deadline missed   link lost
    UNKNOWN    PRESENT          PRESENT unless probation    AWAY              AWAY
    PRESENT    PRESENT          PRESENT                     AWAY              AWAY
    AWAY       PRESENT          PRESENT unless probation    AWAY              AWAY

No query waits for a server that is AWAY. A caller's deadline that is shorter than the agent's own
holds for that caller alone: its misses count only once neither a query nor a probe was answered for
as long as the agent's own deadline.

A server that answers probes but misses the deadline of every query goes on probation: its probes do
not count for a time that doubles with each miss, up to PROBATION_MAX_S. An overloaded server stays
PRESENT and gets no query during its back-off.

Pure: no clock, no thread, no network. Times are seconds of one monotonic clock. One thread at a
time may report an event; any thread may read.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

PROBATION_MAX_S: Final = 4.0
TIMED_OUT: Final = "no reply within the deadline"
OVERLOADED: Final = "server overloaded; retry after its back-off"


class Presence(Enum):
    """Presence of the server, as far as the device knows."""

    UNKNOWN = "unknown"
    PRESENT = "present"
    AWAY = "away"


class Availability:
    """Whether a query may be sent now.

    Args:
        probe_interval_s: time between two probes; the unit of probation.
        deadline_s: the agent's own.
    """

    def __init__(self, probe_interval_s: float, deadline_s: float) -> None:
        self._probe_interval_s = probe_interval_s
        self._deadline_s = deadline_s
        self._presence = Presence.UNKNOWN
        self._why_away = ""
        self._misses = 0  # deadlines missed since the last answer to a query
        self._doubted_since: float | None = None
        self._probation_until = 0.0
        self._backoff_until = 0.0

    @property
    def presence(self) -> Presence:
        """Presence of the server, as far as the device knows."""
        return self._presence

    @property
    def why_away(self) -> str:
        """Why the server is away; empty if it is not."""
        return self._why_away if self._presence is Presence.AWAY else ""

    @property
    def doubted(self) -> bool:
        """Whether a short deadline was missed, and nothing was answered since."""
        return self._doubted_since is not None

    def refusal(self, now: float) -> str | None:
        """Why no query may be sent at `now`; None if one may."""
        if self._presence is Presence.AWAY:
            return f"server away: {self._why_away}"
        return OVERLOADED if now < self._backoff_until else None

    def query_answered(self) -> None:
        """A query got its reply."""
        self._misses = 0
        self._doubted_since = None
        self._presence = Presence.PRESENT

    def probe_answered(self, now: float) -> None:
        """A probe got its reply."""
        self._doubted_since = None
        if now >= self._probation_until:
            self._presence = Presence.PRESENT

    def deadline_missed(self, now: float) -> None:
        """A query got no reply in time."""
        # queries under way together miss together: only the first of them counts
        if self._presence is not Presence.AWAY:
            self._misses += 1
            # the first miss ends with the next probe
            if self._misses > 1:
                probation_s = self._probe_interval_s * 2 ** min(self._misses - 1, 10)
                self._probation_until = now + min(probation_s, PROBATION_MAX_S)
        self._set_away(TIMED_OUT)

    def short_deadline_missed(self, now: float) -> None:
        """A query got no reply in a time that is shorter than the agent's own deadline."""
        if self._doubted_since is None:
            self._doubted_since = now
        elif now - self._doubted_since >= self._deadline_s:
            self.deadline_missed(now)

    def link_lost(self, why: str) -> None:
        """The link to the broker is down, or takes no message."""
        self._set_away(why)

    def overloaded(self, now: float, retry_after_s: float) -> None:
        """The server refused a query and asked for a back-off."""
        self._backoff_until = now + retry_after_s

    def _set_away(self, why: str) -> None:
        self._why_away = why
        self._presence = Presence.AWAY
