"""Calls to devices to update: when their version changes, and while they run another one.

A call is a message over MQTT, which is lost if the device is not connected. So a device that
reports another bundle than its own, or another version than it should run, is called when it is
heard from, and again after a while, less and less often: its disk may be full, or its link slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from server.registry.records import Device, DeviceReport

CALL_AGAIN_S: Final = 10.0
CALL_AGAIN_MOST_S: Final = 3600.0


@dataclass(slots=True)
class _Called:
    """One device's last call: for which version, and when the next one is due."""

    version: str
    due: float
    pause_s: float


class UpdateCalls:
    """Decides which devices are called, turn by turn.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._targets: dict[str, str] | None = None  # `MODEL/VERSION` by device, in the last turn
        self._heard: set[str] = set()
        self._called: dict[str, _Called] = {}

    def came_back(self, devices: Iterable[str]) -> None:
        """Note that these devices have just connected: a call may be due at once."""
        for device in devices:
            self._called.pop(device, None)

    def due(
        self,
        devices: Iterable[Device],
        targets: Mapping[str, str],
        reports: Mapping[str, DeviceReport],
        heard: Iterable[str],
        pinned: Mapping[str, str] | None = None,
    ) -> list[Device]:
        """The devices to call now.

        Args:
            targets: version that each device should run, as `MODEL/VERSION`, by id; without the
                devices that have none.
            reports: what devices run and refused, by device id.
            heard: ids of devices from which something came since the last turn.
            pinned: bundles to which devices are pinned, by device id.
        """
        now = self._clock()
        before, self._targets = self._targets, dict(targets)
        self._heard.update(heard)
        called = []
        for device in devices:
            pin = None if pinned is None else pinned.get(device.id)
            target = targets.get(device.id) if pin is None else version_of(pin)
            if target is None:
                continue
            changed = pin is None and self._has_changed(before, device, target)
            if changed or self._is_behind(device, target, reports.get(device.id), now):
                self._note(device.id, target, now)
                called.append(device)
        return called

    @staticmethod
    def _has_changed(before: Mapping[str, str] | None, device: Device, target: str) -> bool:
        """Whether the device's version is another one than in the turn before."""
        if before is None:  # at the first turn nothing is known to have changed
            return False
        if device.id not in before:  # a new device got its bundle when it enrolled
            return version_of(device.bundle) != target
        return before[device.id] != target

    def _is_behind(
        self, device: Device, target: str, report: DeviceReport | None, now: float
    ) -> bool:
        if device.id not in self._heard or report is None or report.running is None:
            return False
        last = self._called.get(device.id)
        if _is_wanted(report.running, device, target) or _is_wanted(report.refused, device, target):
            return False
        return last is None or last.version != target or now >= last.due

    def _note(self, device: str, target: str, now: float) -> None:
        last = self._called.get(device)
        again = last is not None and last.version == target
        pause_s = min(2 * last.pause_s, CALL_AGAIN_MOST_S) if last and again else CALL_AGAIN_S
        self._called[device] = _Called(target, now + pause_s, pause_s)


def version_of(bundle: str | None) -> str | None:
    """`MODEL/VERSION` of a bundle `MODEL/VERSION/VARIANT`."""
    return None if bundle is None else bundle.rpartition("/")[0]


def _is_wanted(bundle: str | None, device: Device, target: str) -> bool:
    """Whether a bundle is the one assigned to the device, or of `target` before it is assigned."""
    if version_of(device.bundle) == target:
        return bundle == device.bundle
    return version_of(bundle) == target
