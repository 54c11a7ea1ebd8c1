"""Rules of alerts, at the limits where they open, stay and close."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_sdk.errors import ConfigurationError
from server.alerts import rules
from server.alerts.drift import Drift
from server.alerts.limits import AlertLimits
from server.alerts.rules import DeviceFacts
from server.alerts.trainings import TrainingFacts
from server.listening.certificate import CertificateEnds
from server.registry.alerts.alert import Alert, Changes, Finding, changes

NOW = 1_800_000_000.0
LIMITS = AlertLimits()


def opens(finding: Finding | None) -> bool | None:
    """Whether a finding opens an alert; None if there is none, so that it closes."""
    return None if finding is None else finding.opens


@pytest.mark.parametrize(
    ("heard_s", "listening_s", "found"),
    [(299, 1e6, None), (301, 1e6, True), (1e5, 299, False), (1e5, 301, True), (None, 1e6, None)],
)
def test_silence(heard_s: float | None, listening_s: float, found: bool | None) -> None:
    facts = DeviceFacts("pi", heard_at=None if heard_s is None else NOW - heard_s)
    finding = rules.silence(facts, LIMITS, now=NOW, since=NOW - listening_s)
    assert opens(finding) is found
    if heard_s == 301:
        assert finding is not None
        assert "last heard 5 minutes ago" in finding.text


@pytest.mark.parametrize(
    ("offloads", "fallbacks", "found"),
    [
        (0, 0, None),
        (79, 21, True),
        (80, 20, False),  # at the limit: an open alert stays, none opens
        (90, 10, False),
        (91, 9, None),
        (3, 16, False),  # too few queries
        (3, 17, True),
    ],
)
def test_fallbacks(offloads: int, fallbacks: int, found: bool | None) -> None:
    facts = DeviceFacts("pi", exits=5000, offloads=offloads, fallbacks=fallbacks)
    assert opens(rules.fallbacks(facts, LIMITS)) is found


@pytest.mark.parametrize(
    ("delta", "bound", "audits", "found"),
    [
        (None, 0.5, 999, None),
        (0.05, 0.049, 999, None),
        (0.05, 0.051, 10, True),
        (0.05, None, 10, False),  # it has only begun to audit
        (0.05, None, 200, True),
    ],
)
def test_agreement(
    delta: float | None, bound: float | None, audits: int, found: bool | None
) -> None:
    facts = DeviceFacts("pi", delta=delta, bound=bound, audits=audits)
    assert opens(rules.agreement(facts)) is found


def test_a_refused_bundle_is_named_with_its_reason() -> None:
    facts = DeviceFacts("pi", refused="digits/2/d2", why="no memory", bundle="digits/1/d2")
    finding = rules.refusal(facts)
    assert finding is not None
    assert finding.text == "refused digits/2/d2: no memory"
    assert rules.refusal(DeviceFacts("pi", refused="digits/2/d2", bundle="digits/2/d2")) is None
    assert rules.refusal(DeviceFacts("pi")) is None


@pytest.mark.parametrize(
    ("distance", "p_value", "found"),
    [(0.07, 0.0, None), (0.08, 0.0, False), (0.16, 1e-4, False), (0.16, 1e-6, True)],
)
def test_drift(distance: float, p_value: float, found: bool | None) -> None:
    result = Drift(distance, p_value, 400, less_sure=True)
    assert opens(rules.drift("pi", result, LIMITS, 1e-5)) is found
    off = AlertLimits(drift_distance=1.0)
    assert rules.drift("pi", Drift(1.0, 0.0, 400, less_sure=True), off, 1e-5) is None


def test_what_signs_and_certifies() -> None:
    assert rules.signing([]) == []
    soon, over = rules.signing(["the root expires on 2027-01-01"]), rules.signing(["root expired"])
    assert [each.level for each in (*soon, *over)] == ["warning", "critical"]
    day = 86_400.0
    ends = [CertificateEnds(NOW + days * day) for days in (22, 20, -1)]
    found = [rules.certificate(one, LIMITS, NOW) for one in ends]
    assert found[0] is None
    assert [each.level for each in found[1:] if each] == ["warning", "critical"]
    assert rules.certificate(None, LIMITS, NOW) is None
    renewed = rules.certificate(CertificateEnds(NOW + day, NOW + 90 * day), LIMITS, NOW)
    assert renewed is not None
    assert "the server still shows it" in renewed.text
    assert "restart the server" in renewed.text


@pytest.mark.parametrize(
    ("quiet_s", "rounds_s", "found"),
    [
        (1_799, (), False),
        (1_801, (), True),
        (1_801, (30.0, 40.0), True),
        (1_801, (900.0, 40.0), False),  # rounds of a quarter of an hour
        (2_701, (900.0, 40.0), True),
    ],
)
def test_a_training_stalls(quiet_s: float, rounds_s: tuple[float, ...], found: bool) -> None:
    facts = TrainingFacts("yard", NOW - quiet_s, rounds_s)
    assert [(one.kind, one.about) for one in rules.stalled([facts], LIMITS, NOW)] == [
        ("training", "yard")
    ] * found


def test_an_alert_opens_once_tells_its_newest_text_and_closes_by_itself() -> None:
    bad = Finding("fallbacks", "pi", "30 %")
    assert changes([], [bad]) == Changes(opening=[bad])
    alert = Alert(1, "fallbacks", "pi", "30 %", "warning", NOW)
    assert changes([alert], [bad]) == Changes()
    better = Finding("fallbacks", "pi", "15 %", opens=False)
    assert changes([alert], [better]) == Changes(telling={1: better})
    assert changes([], [better]) == Changes()
    assert changes([alert], []) == Changes(closing=[alert])
    # nobody has looked at it in this turn
    assert changes([alert], [], looked_at=[("silent", "pi")]) == Changes()
    assert changes([alert], [], looked_at=[alert.key]) == Changes(closing=[alert])


def test_limits_are_read_from_the_file(tmp_path: Path) -> None:
    assert AlertLimits.load(tmp_path) == AlertLimits()
    (tmp_path / "alerts.toml").write_text('silent_s = 120\nwebhook = "https://x/y"\n')
    assert AlertLimits.load(tmp_path) == AlertLimits(silent_s=120, webhook="https://x/y")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("silent_s = 1", "silent_s: expected a finite number of at least 60"),
        ("silence = 1", "unknown silence; known are"),
        ("silent_s = ", "not a TOML file"),
        ('webhook = "mail:me"', "webhook: expected https://HOST/PATH"),
        ('webhook_secret = "s"', "expected a webhook beside it"),
        ('mqtt = "ftp://x"', "mqtt: expected mqtt://HOST/TOPIC"),
    ],
)
def test_a_mistake_in_the_file_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "alerts.toml").write_text(text)
    with pytest.raises(ConfigurationError) as fault:
        AlertLimits.load(tmp_path)
    assert message in str(fault.value)
    assert str(tmp_path / "alerts.toml") in str(fault.value)
