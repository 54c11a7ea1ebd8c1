"""The running agent's monitor: it watches memory, speed and link, and reports changes that last.

It also sends measurements that a server did not get, and measures the other variant of the bundle
(int8 beside fp32) where the server asks for it. Nothing of it stands in the way of a prediction.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from edge_sdk.bundles.measurements import Measurements
from edge_sdk.bundles.run_update import UpdateOutcome
from edge_sdk.errors import LinkError, SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.monitor.lasting_change import LastingChange
from edge_sdk.offload.link_meter import LinkSample
from profiles.measured import Conditions

logger = logging.getLogger(__name__)

# twenty looks in a minute make a median; each takes some 0.1 ms
LOOKS: Final = 20
# after a report that did not arrive
PAUSE_S: Final = 30.0
# after a measurement that did not come to its end, then twice as long
MEASURE_FIRST_S: Final = 60.0
# at most, and after one that was refused: each may load two bundles beside the one that answers
MEASURE_LAST_S: Final = 86_400.0
SOON: Final = ("busy", "unreachable", "stopped")
QUANTITIES: Final = ("memory_available_bytes", "latency_ms", "round_trip_ms", "bandwidth_mbps")


class Watched(Protocol):
    """The agent, as far as the monitor looks at it."""

    def running_bundle(self) -> tuple[str, str]:
        """Name of the bundle that runs, and digest of its content."""

    def take_latency_ms(self) -> float | None:
        """Time that the device's part of a prediction took since the last look; None without."""

    def take_link(self) -> LinkSample:
        """The link since the last look."""

    def measure_bundles(self, bundles: Sequence[str]) -> UpdateOutcome:
        """Measure bundles that do not run here; `unchanged` where all were measured."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The change that is reported: more than `share` of the reported value, for `lasts_s`."""

    share: float
    lasts_s: float


class ConditionsWatch:
    """The present conditions of a device, and whether the server should hear of them."""

    def __init__(self, limits: Limits) -> None:
        self._bundle = ""
        self._watched = {name: LastingChange(limits.share, limits.lasts_s) for name in QUANTITIES}

    def add(self, now: float, found: Conditions) -> None:
        """Take what was seen at `now`; a new bundle has another latency."""
        if found.bundle != self._bundle:
            self._bundle = found.bundle
            self._watched["latency_ms"].forget()
        for name, watched in self._watched.items():
            value = getattr(found, name)
            if value is not None:
                watched.add(now, value)

    def changed(self, now: float) -> Conditions | None:
        """The conditions to report, if one of them has changed and stayed so; else None."""
        if not any(watched.has_changed(now) for watched in self._watched.values()):
            return None
        values = {name: watched.value for name, watched in self._watched.items()}
        memory = values.pop("memory_available_bytes")
        return Conditions(
            self._bundle,
            memory_available_bytes=None if memory is None else round(memory),
            latency_ms=values["latency_ms"],
            round_trip_ms=values["round_trip_ms"],
            bandwidth_mbps=values["bandwidth_mbps"] or None,
        )

    def note_reported(self, reported: Conditions) -> None:
        """Take this for what the server knows now."""
        for name, watched in self._watched.items():
            value = getattr(reported, name)
            if value is not None:
                watched.reported = value


class Monitor:
    """Looks at an agent every few seconds, in a thread of its own.

    Args:
        memory_bytes: memory that is available now; None asks the system.
    """

    def __init__(
        self,
        state: Path,
        identity: Identity,
        agent: Watched,
        limits: Limits,
        *,
        memory_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._identity = identity
        self._agent = agent
        self._watch = ConditionsWatch(limits)
        self._pause_s = limits.lasts_s / LOOKS
        self._lasts_s = limits.lasts_s
        self._memory_bytes = memory_bytes or _available_bytes
        self._measurements = Measurements(state)
        self._known: tuple[str, int] = ("", 0)  # digest and measured memory of the running bundle
        self._not_before = 0.0
        self._measure_at: float | None = None
        self._measure_pause_s = MEASURE_FIRST_S
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="splitedge-monitor", daemon=True)
        self._thread.start()

    def change_identity(self, identity: Identity) -> None:
        """Report with another credential from now on."""
        self._identity = identity

    def close(self) -> None:
        """Stop looking. A variant that is being measured is left to its process."""
        self._stopping.set()
        self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while not self._stopping.wait(self._pause_s):
            try:
                self.look(time.monotonic())
            except SplitedgeError as err:
                logger.warning("%s", err)
            except Exception:  # outermost loop of this thread: one failed look is not the last
                logger.exception("watching this device failed")

    def look(self, now: float) -> None:
        """Take one look, report what has changed for long enough, and measure what is asked for."""
        bundle, digest = self._agent.running_bundle()
        if digest != self._known[0]:
            measured = self._measurements.of(digest)
            self._known = digest, 0 if measured is None else measured.memory_bytes
            self._measure_at, self._measure_pause_s = now + self._lasts_s, MEASURE_FIRST_S
        link = self._agent.take_link()
        found = Conditions(
            bundle,
            memory_available_bytes=self._memory_bytes() + self._known[1],
            latency_ms=self._agent.take_latency_ms(),
            round_trip_ms=link.round_trip_ms,
            bandwidth_mbps=link.bandwidth_mbps,
        )
        self._watch.add(now, found)
        if now < self._not_before:
            return
        try:
            self._tell(now)
        except LinkError as err:
            logger.debug("conditions were not reported: %s", err)
            self._not_before = now + PAUSE_S

    def _tell(self, now: float) -> None:
        from edge_sdk.api import report_conditions  # noqa: PLC0415 - urllib3, only to report

        changed = self._watch.changed(now)
        if changed is not None:
            report_conditions(self._identity, changed)
            self._watch.note_reported(changed)
            logger.info("told the server: %s", changed)
        if self._measure_at is not None and now >= self._measure_at:
            self._measure(now)

    def _measure(self, now: float) -> None:
        """Send what a server did not get, and measure what it asks for; the rest is tried again."""
        again_s: float | None = self._measure_pause_s
        self._measure_pause_s = min(2 * self._measure_pause_s, MEASURE_LAST_S)
        began = time.monotonic()
        try:
            self._measurements.report(self._identity)
            outcome = self._measure_variants()
            if outcome.status == "unchanged":
                again_s = None
            elif outcome.status not in SOON:
                again_s = self._measure_pause_s = MEASURE_LAST_S
        finally:
            # a try may take an hour, and no update is made meanwhile: the pause begins at its end
            took_s = time.monotonic() - began
            self._measure_at = None if again_s is None else now + took_s + again_s

    def _measure_variants(self) -> UpdateOutcome:
        """Measure what the server asks for; `unchanged` where nothing of it is left."""
        from edge_sdk.api import unmeasured_bundles  # noqa: PLC0415

        bundles = unmeasured_bundles(self._identity)
        if not bundles or self._stopping.is_set():
            return UpdateOutcome("unchanged", None)
        outcome = self._agent.measure_bundles(bundles)
        names = ", ".join(bundles)
        if outcome.status == "unchanged":
            logger.info("measured %s", names)
        else:
            when = "later" if outcome.status in SOON else "in a day"
            logger.warning("%s not measured: %s; it is tried again %s", names, outcome.reason, when)
        return outcome


def _available_bytes() -> int:
    from profiles.device import memory_bytes  # noqa: PLC0415 - psutil, only where it watches

    return memory_bytes()[1]
