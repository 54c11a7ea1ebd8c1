"""Logins and refusals, read from the log lines of Mosquitto 2."""

from __future__ import annotations

import re
from typing import Any, Final

_CONNECTION: Final = re.compile(r"New connection from (\S+):(\d+) on port \d+\.")
_LOGIN: Final = re.compile(r"New client connected from (\S+):(\d+) as (\S+) \(")
# such as "closed its connection", also without a word of MQTT
_END: Final = re.compile(r"(?:Client|Bad socket read/write on client) <unknown>[ :]")
_REFUSED: Final = re.compile(r"Client <unknown> disconnected(?:,| due to) (.+)\.")
_REVOKED: Final = re.compile(r"Client (\S+) been disconnected by administrative action\.")
_CUT: Final = re.compile(r"Client (\S+) (?:disconnected due to|has exceeded) (.+)\.")
_OPEN_MOST: Final = 1_000


class MosquittoLog:
    """Turns lines into events with the keys `event`, `client_id`, `peer` and `why`.

    A refused login has no client id in the log, and its peer only where no other connection had
    still to log in; both are "" otherwise.
    """

    def __init__(self) -> None:
        self._open: dict[str, None] = {}  # peers that have not logged in, in order of arrival
        self._ended = 0  # of those, how many have gone, which the log does not tell apart

    def read(self, line: str) -> dict[str, Any] | None:
        """The event of a line; None if it tells none."""
        if found := _CONNECTION.match(line):
            self._open[_peer(found)] = None
            if len(self._open) > _OPEN_MOST:
                del self._open[next(iter(self._open))]
                self._ended = max(self._ended - 1, 0)
            return None
        if found := _LOGIN.match(line):
            self._open.pop(_peer(found), None)
            self._forget_ended()
            return _event("login", client_id=found[3], peer=_peer(found))
        if _END.match(line):
            only = next(iter(self._open)) if len(self._open) == 1 else ""
            self._ended += 1
            self._forget_ended()
            found = _REFUSED.match(line)
            return _event("refused", peer=only, why=found[1]) if found else None
        if found := _REVOKED.match(line):
            # Mosquitto does not tell which of the two
            return _event("revoked", client_id=found[1], why="revoked, or its login was changed")
        if found := _CUT.match(line):
            return _event("cut", client_id=found[1], why=found[2])
        return None

    def _forget_ended(self) -> None:
        """Forget the peers once all of them have gone."""
        if self._ended >= len(self._open):
            self._open.clear()
            self._ended = 0


def _peer(found: re.Match[str]) -> str:
    host, port = found[1], found[2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _event(kind: str, *, client_id: str = "", peer: str = "", why: str = "") -> dict[str, Any]:
    return {"event": kind, "client_id": client_id, "peer": peer, "why": why}
