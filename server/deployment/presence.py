"""Presence of devices: one rule for the dashboard, the metrics and roll-outs."""

from __future__ import annotations

from typing import Final, Literal

from server.registry.database import TOUCH_RESOLUTION_S
from server.registry.records import Device

Presence = Literal["online", "offline", "never", "waiting", "revoked"]

# an agent sends a heartbeat every 30 s by default: two may get lost, and `last_seen` lags behind
ONLINE_S: Final = 90.0 + TOUCH_RESOLUTION_S


# a device whose connection broke connects again within 2 s (edge_sdk.mqtt.link), an agent that is
# started again within some seconds: neither is shown as away and back
GONE_S: Final = 5.0


def is_online(device: Device, now: float) -> bool:
    """Whether a device counts as there: it was heard lately, and did not go away after that.

    Args:
        now: UTC seconds since 1970.
    """
    if device.gone_at is not None and now - device.gone_at >= GONE_S:
        return False
    return device.last_seen is not None and now - device.last_seen < ONLINE_S


def presence_of(device: Device, now: float) -> Presence:
    """Presence of a device, judged by when it was last heard and whether it went away then.

    Returns: `waiting` for the operator's approval; `never` if it was not heard since it enrolled.
    """
    if device.revoked_at is not None:
        return "revoked"
    if device.approved_at is None:
        return "waiting"
    if device.last_seen is None:
        return "never"
    return "online" if is_online(device, now) else "offline"
