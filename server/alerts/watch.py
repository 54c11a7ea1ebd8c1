"""The watch over a fleet: it looks at the facts every few seconds, and opens and closes alerts."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from edge_sdk.errors import SplitedgeError
from edge_sdk.gate.gate import largest_uncertainty
from edge_sdk.manifest import BundleManifest
from server.alerts import rules
from server.alerts.drift import HeldOut, find_drift, look_alpha
from server.alerts.limits import AlertLimits
from server.alerts.rules import DeviceFacts
from server.alerts.senders import Sender
from server.alerts.trainings import TrainingFacts
from server.listening.certificate import CertificateEnds
from server.registry.alerts.alert import Alert, Finding, Key, changes
from server.registry.alerts.store import KEPT_S, TEXT_MOST
from server.registry.database import Registry
from server.registry.records import Device
from server.registry.telemetry.point import TelemetryPoint, merged
from server.registry.trail.events import printable

logger = logging.getLogger(__name__)

LOOK_S: Final = 10.0
# a device's drift is looked for in the answers of the last hour
DRIFT_WINDOW_S: Final = 3_600.0
DRIFTS_AT_ONCE: Final = 25
BUNDLES_MOST: Final = 256
SUMS_S: Final = 600.0
PRUNE_S: Final = 3_600.0


class Manifests(Protocol):
    """Place of the manifests of published bundles."""

    def __call__(self, bundle: str) -> BundleManifest | None:
        """The manifest of `{model}/{version}/{variant}`; None if this server has none."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Distribution of a bundle's uncertainties, on the scale of its gate."""

    held_out: HeldOut
    largest: float


class AlertWatch:
    """Opens, closes and sends the alerts of a running server; one thread uses it.

    Args:
        senders: to the receivers, by name.
        manifests: of bundles, by name.
        signing: sentences on what is wrong with keys and signed metadata.
        certificate: ends of the TLS certificate; None without TLS.
        trainings: that run now.
        clock: monotonic seconds. now: UTC seconds since 1970.
    """

    def __init__(
        self,
        registry: Registry,
        limits: AlertLimits,
        senders: Mapping[str, Sender],
        *,
        manifests: Manifests,
        signing: Callable[[], Sequence[str]],
        certificate: Callable[[], CertificateEnds | None] = lambda: None,
        trainings: Callable[[], Sequence[TrainingFacts]] = tuple,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._limits = limits
        self._senders = senders
        self._manifests = manifests
        self._signing = signing
        self._certificate = certificate
        self._trainings = trainings
        self._clock, self._now = clock, now
        self._since = now()
        self._next_look = clock()
        self._next_prune = clock()
        self._forgot = False  # whether receivers of earlier settings are forgotten
        self._looked: dict[str, float] = {}  # when each device was looked at for a drift
        self._expected: dict[str, Expected] = {}  # by bundle

    def turn(self) -> None:
        """Look, if it is time.

        Raises: RegistryError; the next call looks again.
        """
        self._note_told()
        if self._clock() < self._next_look:
            return
        self._next_look = self._clock() + LOOK_S
        self.look()

    def keep_bounds(self, *, by_age: bool = True) -> None:
        """Drop closed alerts that are above the bounds, if it is time.

        Args:
            by_age: whether the clock is right, so that what is old is dropped too.
        Raises: RegistryError.
        """
        if self._clock() >= self._next_prune:
            self._registry.alerts.prune(age_s=KEPT_S if by_age else math.inf)
            self._next_prune = self._clock() + PRUNE_S

    def look(self) -> None:
        """Look at all rules now, and at the drift of the devices that are due."""
        devices = [device for device in self._registry.devices(profiles=False) if device.active]
        is_open = self._registry.alerts.open()
        titles = {device.id: device.title for device in devices if device.title is not None}
        findings = [*self._about_server(), *self._about_devices(devices)]
        seen: set[Key] = {alert.key for alert in is_open if alert.kind != "drift"}
        for device in self._due(devices):
            answer = self._drift(device, len(devices))
            if answer is not None:
                seen.add(("drift", device.id))
                findings += answer
        there = {device.id for device in devices}
        seen |= {alert.key for alert in is_open if alert.about not in there}  # revoked or removed
        new = changes(is_open, [_as_kept(_with_title(one, titles)) for one in findings], seen)
        opened, closed = self._registry.alerts.apply(new)
        _log(opened, "open")
        _log(closed, "closed")
        self._tell()

    def close(self) -> None:
        """End the senders, and note what they have told; what they have not waits in the registry.

        Raises: RegistryError; what was told is then told again at the next start.
        """
        for sender in self._senders.values():
            sender.close()
        self._note_told()

    def _tell(self) -> None:
        """Send what was not told yet, of this run of the server or of an earlier one."""
        notices = self._registry.notices
        if not self._forgot:
            notices.keep_only(list(self._senders))
            self._forgot = True
        notices.make(self._senders)
        for name, sender in self._senders.items():
            sender.send(notices.waiting(name))

    def _note_told(self) -> None:
        for sender in self._senders.values():
            done = sender.done()
            self._registry.notices.done(done)
            sender.forget(done)

    def _about_server(self) -> list[Finding]:
        certificate = rules.certificate(self._certificate(), self._limits, self._now())
        try:
            signing = rules.signing(self._signing())
        except SplitedgeError as err:  # damaged files must not hide what else is wrong
            signing = [Finding("signing", rules.SERVER, str(err), "critical")]
        trainings = rules.stalled(self._trainings(), self._limits, self._now())
        return [*signing, *trainings, *([certificate] if certificate else [])]

    def _about_devices(self, devices: Sequence[Device]) -> list[Finding]:
        history = self._registry.telemetry
        sums, last = history.sums(since_s=SUMS_S), history.last()
        reports = self._registry.reports.all()
        found: list[Finding] = []
        for device in devices:
            exits, offloads, fallbacks = sums.get(device.id, (0, 0, 0))
            reading = last[device.id].reading if device.id in last else None
            gauges = {} if reading is None else reading.gauges
            report = reports.get(device.id)
            facts = DeviceFacts(
                id=device.id,
                heard_at=device.last_seen,
                exits=exits,
                offloads=offloads,
                fallbacks=fallbacks,
                bound=gauges.get("agreement_bound"),
                delta=gauges.get("agreement_delta"),
                audits=round(gauges.get("audits", 0)),
                refused=None if report is None else report.refused,
                why=None if report is None else report.why,
                bundle="" if report is None else report.running or "",
            )
            now, since = self._now(), self._since
            found += rules.device_findings(facts, self._limits, now=now, since=since)
        return found

    # drift

    def _due(self, devices: Sequence[Device]) -> list[Device]:
        """The devices whose drift is looked at now, a few at once: each takes a query."""
        now = self._clock()
        there = {device.id for device in devices}
        self._looked = {device: at for device, at in self._looked.items() if device in there}
        every_s = self._limits.drift_look_s
        due = [
            device for device in devices if now - self._looked.get(device.id, -every_s) >= every_s
        ]
        return due[:DRIFTS_AT_ONCE]

    def _drift(self, device: Device, devices: int) -> list[Finding] | None:
        """Findings about a device's drift; None if there is too little to say."""
        self._looked[device.id] = self._clock()
        if self._limits.drift_distance >= 1:
            return []
        window = self._window(device.id)
        if window is None or sum(window.uncertainty) < self._limits.drift_least:
            return None
        expected = self._expected_of(window.bundle)
        if expected is None or abs(expected.largest - window.largest) > 1e-6 * window.largest:
            return None  # another gate than that of the bundle: its curve says nothing about it
        result = find_drift(window.uncertainty, window.uncertainty_edges, expected.held_out)
        limits = self._limits
        alpha = look_alpha(limits.drift_false_alarms, limits.drift_looks_per_day, devices)
        finding = rules.drift(device.id, result, self._limits, alpha)
        return [] if finding is None else [finding]

    def _window(self, device_id: str) -> TelemetryPoint | None:
        """The answers of the last hour with the bundle that runs now, as one point."""
        points = self._registry.telemetry.of(device_id, since_s=DRIFT_WINDOW_S)
        points = [point for point in points if point.uncertainty]
        if not points:
            return None
        bundle = points[-1].bundle
        begin = max((i + 1 for i, one in enumerate(points) if one.bundle != bundle), default=0)
        return merged(points[begin:])

    def _expected_of(self, bundle: str) -> Expected | None:
        """The distribution that a bundle was measured with; None where it is not known."""
        known = self._expected.get(bundle)
        if known is not None:
            return known
        manifest = self._manifests(bundle)
        held_out = None if manifest is None else HeldOut.of(manifest.gate.curve)
        if manifest is None or held_out is None:
            return None
        largest = largest_uncertainty(manifest.gate.policy, len(manifest.class_names))
        if len(self._expected) >= BUNDLES_MOST:
            self._expected.clear()
        self._expected[bundle] = expected = Expected(held_out, largest)
        return expected


def _log(alerts: Iterable[Alert], state: str) -> None:
    for alert in alerts:
        logger.warning("alert=%s about=%s %s: %s", alert.kind, alert.about, state, alert.text)


def _with_title(finding: Finding, titles: Mapping[str, str]) -> Finding:
    """A finding whose text begins with the title of its device, if the device has one."""
    title = titles.get(finding.about)
    return finding if title is None else replace(finding, text=f"{title}: {finding.text}")


def _as_kept(finding: Finding) -> Finding:
    """A finding with its text as the registry keeps it: one that it cut or folded is no news."""
    return replace(finding, text=printable(finding.text, TEXT_MOST))


def manifest_reader(models: Path) -> Manifests:
    """Reads manifests of bundles out of a server's folder of models."""

    def read(bundle: str) -> BundleManifest | None:
        parts = bundle.split("/")
        if len(parts) != 3:
            return None
        model, version, variant = parts
        try:
            return BundleManifest.load(models / model / version / "bundles" / variant)
        except SplitedgeError:
            return None

    return read
