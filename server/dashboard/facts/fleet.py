"""Facts of the fleet page: one line a device, and the sums.

All of it is read out of the registry, so it is what the API and the command line show too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from edge_sdk.answers.prediction import DEVICE
from edge_sdk.answers.tally import latency_quantile_ms
from profiles.measured import Conditions
from server.deployment.overview import DeviceState, states_of
from server.deployment.presence import Presence
from server.registry.database import Registry
from server.registry.records import Device
from server.registry.telemetry.history import LastReading

SUMS_S: Final = 3_600.0
# the sums of an hour change by less than a hundredth meanwhile, and profiles hardly ever
SUMS_OLD_S: Final = 10.0
PROFILES_OLD_S: Final = 60.0

Sums = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class FleetLine:
    """One device, as the table has it; times are UTC seconds since 1970.

    Attributes:
        presence: `waiting` for the operator's approval; `never` heard of since it enrolled.
        hardware: name and cores, as the device told them.
        exits, offloads, fallbacks: answers of the last hour, by source; None without a heartbeat
            in it.
        memory_bytes: free on the device.
        latency_ms: median time of an answer of the device itself, since its bundle was loaded.
        round_trip_ms: to the server and back.
        offloading: False where a user of the device switched its offloading off.
        tags: the operator's words for it. title: what people call it; None if they use its id.
    """

    id: str
    fleet: str
    presence: Presence
    depth: int | None
    runs: str | None
    wants: str | None
    refused: str | None
    why: str | None
    pinned: str | None
    last_seen: float | None
    hardware: str
    memory_bytes: int | None
    latency_ms: float | None
    round_trip_ms: float | None
    exits: int | None
    offloads: int | None
    fallbacks: int | None
    offloading: bool
    tags: tuple[str, ...]
    title: str | None


@dataclass(frozen=True, slots=True)
class Now:
    """Present state of a device, as it told it with its last heartbeat; None for what it did not.

    Attributes:
        at: when the heartbeat came, UTC seconds since 1970.
        offloading: False where a user of the device switched its offloading off.
    """

    at: float = 0.0
    memory_bytes: float | None = None
    latency_ms: float | None = None
    round_trip_ms: float | None = None
    offloading: bool = True

    @classmethod
    def of(cls, last: LastReading) -> Self:
        """The state in a reading."""
        gauges = last.reading.gauges
        return cls(
            last.at,
            gauges.get("memory_available_bytes"),
            latency_quantile_ms(last.reading.latency.get(DEVICE, ()), 0.5),
            gauges.get("round_trip_ms"),
            last.reading.offloading,
        )

    @property
    def is_whole(self) -> bool:
        """Whether nothing is missing; an agent of an older release tells less."""
        return None not in (self.memory_bytes, self.latency_ms, self.round_trip_ms)

    def completed(self, found: Conditions | None) -> Now:
        """The state, with what is missing from the device's reports over HTTP."""
        if found is None:
            return self
        return replace(
            self,
            memory_bytes=self.memory_bytes or found.memory_available_bytes,
            latency_ms=self.latency_ms or found.latency_ms,
            round_trip_ms=self.round_trip_ms or found.round_trip_ms,
        )


@dataclass(frozen=True, slots=True)
class Told:
    """Reports of devices on themselves, by device id.

    Attributes:
        hardware: name and cores.
        sums: exits, offloads and fallbacks of the last hour.
    """

    hardware: Mapping[str, str]
    now: Mapping[str, Now]
    sums: Sums


class FleetReader:
    """Reads the lines of all devices again and again; one thread at a time uses it.

    Of 500 devices that send a heartbeat every 30 s, a look after 3 s reads the 50 heartbeats that
    are new; what was read of the others is kept.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, registry: Registry, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._now: dict[str, Now] = {}
        self._hardware: dict[str, str] = {}
        self._sums: Sums = {}
        self._sums_at = self._hardware_at = -PROFILES_OLD_S

    def lines(self) -> list[FleetLine]:
        """Every device of every fleet, by id."""
        registry = self._registry
        devices = registry.devices(profiles=False)
        self._read_heartbeats()
        self._read_hardware(devices)
        if self._clock() - self._sums_at >= SUMS_OLD_S:
            self._sums = registry.telemetry.sums(since_s=SUMS_S)
            self._sums_at = self._clock()
        states = states_of(registry, devices)
        poor = [one.id for one in devices if not self._now.get(one.id, Now()).is_whole]
        told = Told(self._hardware, self._completed(poor), self._sums)
        return fleet_lines(devices, states, told)

    def _read_heartbeats(self) -> None:
        """Read the last heartbeats that have come since the last look."""
        history = self._registry.telemetry
        times = history.last_at()
        new = [name for name, at in times.items() if self._now.get(name, Now()).at != at]
        kept = {name: self._now[name] for name in times if name in self._now}
        read = history.last(new) if new else {}
        self._now = {**kept, **{name: Now.of(last) for name, last in read.items()}}

    def _read_hardware(self, devices: Iterable[Device]) -> None:
        """Read the profiles of new devices, and all of them now and then: a device may send one."""
        ids = [one.id for one in devices]
        if self._clock() - self._hardware_at >= PROFILES_OLD_S:
            self._hardware, self._hardware_at = {}, self._clock()
        new = [name for name in ids if name not in self._hardware]
        if new:
            found = self._registry.profiles(new)
            self._hardware |= {name: hardware_of(profile) for name, profile in found.items()}

    def _completed(self, poor: list[str]) -> dict[str, Now]:
        """The state of each device, that of these completed by their reports over HTTP."""
        if not poor:
            return self._now
        told = self._registry.capabilities.conditions_of(poor)
        known = {name: self._now.get(name, Now()).completed(told.get(name)) for name in poor}
        return {**self._now, **known}


def fleet_lines(
    devices: Iterable[Device], states: Iterable[DeviceState], told: Told
) -> list[FleetLine]:
    """The line of each device, in their order."""
    lines = []
    nothing = Now()
    for device, state in zip(devices, states, strict=True):
        present = told.now.get(device.id, nothing)
        memory_bytes = present.memory_bytes
        exits, offloads, fallbacks = told.sums.get(device.id, (None, None, None))
        lines.append(
            FleetLine(
                id=device.id,
                fleet=device.fleet,
                presence=state.presence,
                depth=device.depth,
                runs=state.runs,
                wants=state.wants,
                refused=state.refused,
                why=state.why,
                pinned=state.pinned,
                last_seen=device.last_seen,
                hardware=told.hardware.get(device.id, ""),
                memory_bytes=None if memory_bytes is None else round(memory_bytes),
                latency_ms=present.latency_ms,
                round_trip_ms=present.round_trip_ms,
                exits=exits,
                offloads=offloads,
                fallbacks=fallbacks,
                offloading=present.offloading,
                tags=device.tags,
                title=device.title,
            )
        )
    return lines


def hardware_of(profile: Mapping[str, Any]) -> str:
    """Name and cores of a device's hardware: `raspberry-pi-4, 4 cores`."""
    name, cores = str(profile.get("name") or ""), profile.get("cores")
    return f"{name}, {cores} cores" if name and cores else name
