"""Events of the broker, as its process tells them, for the audit log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from server.registry.trail.events import DROPPED, Event, Outcome

logger = logging.getLogger(__name__)

_KINDS: Final[Mapping[str, tuple[str, Outcome]]] = {
    "login": ("mqtt.login", "done"),
    "refused": ("mqtt.login", "refused"),
    "swapped": ("credential.swapped", "refused"),
    "denied": ("mqtt.topic", "refused"),
    "cut": ("mqtt.cut", "refused"),
    "revoked": ("mqtt.cut", "done"),
    "left_out": (DROPPED, "refused"),
}
# what only a client that has logged in can do: its name is known to be true
_AFTER_LOGIN: Final = frozenset({"denied", "cut"})


def read_broker_event(told: Mapping[str, Any]) -> Event | None:
    """The event that the broker told; None for one that this program does not know.

    Args:
        told: `event`, `client_id`, `peer`, `why`, and `count` where it stands for several.
    """
    try:
        what, outcome = _KINDS[told["event"]]
        count = int(told.get("count", 1))
    except (KeyError, TypeError, ValueError):
        logger.debug("the broker told an event that is not known")
        return None
    who, why = str(told.get("client_id") or ""), str(told.get("why") or "")
    source, proven = _address(told.get("peer")), told["event"] in _AFTER_LOGIN
    return Event(what, outcome, who, source, why, count=max(count, 1), proven=proven)


def _address(peer: object) -> str:
    """The address of `HOST`, `HOST:PORT`, `[HOST]:PORT` or (HOST, PORT, ...)."""
    if isinstance(peer, list | tuple):
        peer = peer[0] if peer else ""
    text = "" if peer is None else str(peer)
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0] if text.count(":") == 1 else text
