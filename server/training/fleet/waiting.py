"""Line that tells the operator which devices the trainer still waits for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from edge_sdk.cli.times import ago, plural
from server.registry.records import Device

# A fleet may have thousands of devices.
NAMES_MAX: Final = 5


def waiting_line(
    count: int,
    left_s: float,
    joined: Collection[str],
    enrolled: Iterable[Device],
    absent: Mapping[str, str],
) -> str:
    """Devices that joined, enrolled ones that did not, and the time that is left.

    Args:
        count: devices that are needed.
        absent: reasons of the devices that are known to take no part, by name.
    """
    away = [
        f"{device.id} ({absent.get(device.id) or _seen(device)})"
        for device in enrolled
        if device.active and device.id not in joined
    ]
    left = f"{left_s / 60:.0f} min" if left_s >= 90 else f"{left_s:.0f} s"
    return (
        f"waiting for {plural(count, 'device')}, {left} left; joined: {_names(sorted(joined))};"
        f" enrolled and not here: {_names(away)}"
    )


def _seen(device: Device) -> str:
    """When the server last heard of it."""
    if device.last_seen is None:
        return "the server has not heard of it since its enrolment"
    return f"the server heard of it {ago(device.last_seen)}, it has not joined"


def _names(names: list[str]) -> str:
    more = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "") or "none"
