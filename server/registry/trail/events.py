"""Events of the audit log on their way to it: logins and refusals, counted where they repeat.

A hostile peer is refused as often as it likes. So repeated refusals of one source are one event
with a count, and the number of different events that wait is bounded too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from server.listening.source import source_network

Outcome = Literal["done", "refused"]

WAITING_MOST: Final = 4_096
DROPPED: Final = "audit.dropped"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a peer did, or was refused.

    Attributes:
        what: `mqtt.login`, `http.request`...
        who: the name that the peer gave itself; only after a login is it known to be true.
        proven: whether it is: the peer had logged in.
        source: address of the peer.
        detail: the reason of a refusal, for people; never a secret.
        at: first time, UTC seconds since 1970. until: the last one.
        count: how often in between.
    """

    what: str
    outcome: Outcome
    who: str
    source: str
    detail: str = ""
    at: float = 0.0
    until: float = 0.0
    count: int = 1
    proven: bool = False

    @property
    def key(self) -> tuple[str, ...]:
        """Key under which repetitions are counted: refusals of one source are alike, whatever
        name it gave itself, unless a login proved the name.
        """
        if self.outcome == "refused":
            who = (self.who,) if self.proven else ()
            return self.what, self.outcome, source_network(self.source), *who
        return self.what, self.outcome, self.source, self.who

    def to_dict(self) -> dict[str, Any]:
        """The event as the columns of its row."""
        values = asdict(self)
        del values["proven"]
        return values


class Tally:
    """Collects events until they are taken; from any thread.

    Beyond `most` different events new ones are counted as one of the kind `audit.dropped`.

    Args:
        clock: UTC seconds since 1970.
    """

    def __init__(self, most: int = WAITING_MOST, *, clock: Callable[[], float] = time.time) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[tuple[str, ...], Event] = {}

    def note(self, event: Event) -> None:
        """Count an event; its text is cut and made printable when it is the first of its kind."""
        now = self._clock()
        at, until = event.at or now, event.until or now
        key = event.key
        with self._lock:
            known = self._waiting.get(key)
            if known is None and len(self._waiting) >= self._most:
                event = Event(DROPPED, "refused", "", "", "more different events than are kept")
                key = event.key
                known = self._waiting.get(key)
            if known is None:
                self._waiting[key] = replace(_clean(event), at=at, until=until)
            else:
                count = known.count + event.count
                self._waiting[key] = replace(known, until=max(until, known.until), count=count)

    def take(self) -> list[Event]:
        """The events since the last call, oldest first."""
        with self._lock:
            taken, self._waiting = self._waiting, {}
        return list(taken.values())


def printable(text: str, most: int) -> str:
    """A peer's words on one line of at most `most` characters, without what moves a cursor."""
    # half a surrogate pair is not printable, so what is left can be stored and shown anywhere
    letters = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * most])
    return " ".join(letters.split())[:most].rstrip()


def _clean(event: Event) -> Event:
    return replace(
        event,
        what=printable(event.what, 40),
        who=printable(event.who, 80),
        source=printable(event.source, 64),
        detail=printable(event.detail, 300),
    )
