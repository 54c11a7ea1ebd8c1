"""Rules of alerts: from the facts about devices and the server to what is wrong now. Pure.

Each rule has two limits: at one an alert opens, at the other it closes. In between it stays as it
is, so an alert does not flap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from edge_sdk.answers.tally import fallback_share
from edge_sdk.cli.times import ago, plural
from server.alerts.drift import Drift
from server.alerts.limits import AlertLimits
from server.alerts.trainings import TrainingFacts
from server.listening.certificate import CertificateEnds
from server.registry.alerts.alert import Finding, Level

SERVER: Final = "server"
# exits that an agreement's bound rests on before it can be called broken
AUDITS_LEAST: Final = 200
DAY_S: Final = 86_400.0
ABOUT_MOST: Final = 63
# a round may be that much longer than the ones before it
LONGER: Final = 3.0


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """Facts about one device.

    Attributes:
        heard_at: when it was last heard, UTC seconds since 1970; None if never.
        exits, offloads, fallbacks: answers of the last ten minutes, by source.
        bound, delta: of the agreement controller; None without.
        audits: exits behind the bound.
        refused, why: the bundle that it refused or rolled back, and why; None if none.
        bundle: that it runs.
    """

    id: str
    heard_at: float | None = None
    exits: int = 0
    offloads: int = 0
    fallbacks: int = 0
    bound: float | None = None
    delta: float | None = None
    audits: int = 0
    refused: str | None = None
    why: str | None = None
    bundle: str = ""


def device_findings(
    facts: DeviceFacts, limits: AlertLimits, *, now: float, since: float
) -> list[Finding]:
    """Findings about a device, but for its drift.

    Args:
        since: when the server began to listen: before, it heard nobody.
    """
    found = (
        silence(facts, limits, now=now, since=since),
        fallbacks(facts, limits),
        agreement(facts),
        refusal(facts),
    )
    return [finding for finding in found if finding is not None]


def silence(facts: DeviceFacts, limits: AlertLimits, *, now: float, since: float) -> Finding | None:
    """The device has said nothing for too long.

    A server that began to listen a short time ago opens no alert, and closes none: that nobody was
    heard meanwhile says nothing.
    """
    if facts.heard_at is None or now - facts.heard_at < limits.silent_s:
        return None
    text = f"last heard {ago(facts.heard_at, now)}; is it on, and does it reach the broker?"
    return Finding("silent", facts.id, text, opens=now - since >= limits.silent_s)


def fallbacks(facts: DeviceFacts, limits: AlertLimits) -> Finding | None:
    """Too many of the device's queries got no answer in time."""
    asked = facts.offloads + facts.fallbacks
    share = fallback_share(facts.offloads, facts.fallbacks)
    if share is None or share < limits.fallback_share / 2:
        return None
    text = (
        f"{share:.0%} of its {asked} queries to the server in ten minutes got no answer in time"
        " (fallback); look at the link and the load of the server"
    )
    enough = asked >= limits.fallback_least and share > limits.fallback_share
    return Finding("fallbacks", facts.id, text, opens=enough)


def agreement(facts: DeviceFacts) -> Finding | None:
    """The device cannot hold the agreement with the server that it was asked for."""
    if facts.delta is None:
        return None
    if facts.bound is not None and facts.bound <= facts.delta:
        return None
    bound = "no threshold holds it" if facts.bound is None else f"the bound is {facts.bound:.3f}"
    text = (
        f"agreement: its answers may differ from the server's in at most {facts.delta:g} of the"
        f" cases, but {bound}; it asks the server more often, or about everything"
    )
    broken = facts.bound is not None or facts.audits >= AUDITS_LEAST
    return Finding("agreement", facts.id, text, opens=broken)


def refusal(facts: DeviceFacts) -> Finding | None:
    """The device refused a bundle, or went back to the one before."""
    if facts.refused is None or facts.refused == facts.bundle:
        return None
    text = f"refused {facts.refused}: {facts.why or 'no reason told'}"
    return Finding("refused", facts.id, text)


def drift(device: str, result: Drift, limits: AlertLimits, alpha: float) -> Finding | None:
    """The device's inputs have become others than those that its gate was measured on."""
    if limits.drift_distance >= 1 or result.distance < limits.drift_distance / 2:
        return None
    sure = "less" if result.less_sure else "more"
    text = (
        f"its answers are {sure} sure than on the held-out samples (distance {result.distance:.2f}"
        f" over {result.answers} answers): have its inputs changed, or its camera moved?"
    )
    opens = result.distance >= limits.drift_distance and result.p_value < alpha
    return Finding("drift", device, text, opens=opens)


def signing(problems: Iterable[str]) -> list[Finding]:
    """Findings about the server's keys and signed metadata; the sentences say what to do."""
    text = "; ".join(problems)
    level: Level = "critical" if "expired" in text else "warning"
    return [Finding("signing", SERVER, text, level)] if text else []


def certificate(ends: CertificateEnds | None, limits: AlertLimits, now: float) -> Finding | None:
    """The TLS certificate that the server shows ends soon; None without TLS."""
    if ends is None or ends.served - now > limits.certificate_days * DAY_S:
        return None
    over = now >= ends.served
    text = f"the certificate of --tls-cert {'ended' if over else 'ends'} on {_day(ends.served)}"
    if ends.on_disk is not None and ends.on_disk > ends.served:
        text = (
            f"{text}, and the server still shows it: its file has a new one until"
            f" {_day(ends.on_disk)}, so restart the server"
        )
    else:
        text = f"{text}: devices then refuse the server; put a new one in its place and restart"
    return Finding("certificate", SERVER, text, "critical" if over else "warning")


def stalled(
    trainings: Iterable[TrainingFacts], limits: AlertLimits, now: float
) -> Iterator[Finding]:
    """Trainings that run, and in which no round has ended for long.

    Long is `training_s`, or LONGER times the longest of the last rounds where that is more.
    """
    for one in trainings:
        longest_s = max(one.rounds_s, default=0.0)
        if now - one.moved_at < max(limits.training_s, LONGER * longest_s):
            continue
        last = "none has, since it was made"
        if one.rounds_s:
            last = f"its last round took {plural(max(1, round(one.rounds_s[-1])), 'second')}"
        text = (
            f"it runs, and no round has ended for {ago(one.moved_at, now).removesuffix(' ago')}"
            f" ({last}): are enough of its devices on? `splitedge train` tells whom it waits for;"
            " after a stop, --resume goes on"
        )
        yield Finding("training", one.name[:ABOUT_MOST], text)


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
