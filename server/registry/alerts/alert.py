"""Alerts: what someone may have to act on, and the rule by which they open and close. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

Level = Literal["warning", "critical"]
LEVELS: Final[tuple[Level, ...]] = ("warning", "critical")
KINDS: Final = (
    "silent",
    "fallbacks",
    "drift",
    "agreement",
    "refused",
    "signing",
    "certificate",
    "training",
)
Key = tuple[str, str]  # kind, about


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a rule has found now.

    Attributes:
        kind: one of KINDS. about: a device id, the name of a training, or "server".
        text: one sentence on what is wrong, with its figures and what to do.
        opens: whether it is bad enough for a new alert; if not, it only keeps an open one open.
    """

    kind: str
    about: str
    text: str
    level: Level = "warning"
    opens: bool = True

    @property
    def key(self) -> Key:
        """Kind and subject: there is one open alert for each."""
        return self.kind, self.about


@dataclass(frozen=True, slots=True)
class Alert:
    """An alert, open or closed. Times are UTC seconds since 1970.

    Attributes:
        kind, about, text, level: of its finding, the newest while it is open.
        closed_at: None while it is open.
        silenced_until: until then nobody is told; None if nobody silenced it.
    """

    id: int
    kind: str
    about: str
    text: str
    level: str
    opened_at: float
    closed_at: float | None = None
    silenced_until: float | None = None

    @property
    def key(self) -> Key:
        """Kind and subject."""
        return self.kind, self.about

    def is_silenced(self, now: float) -> bool:
        """Whether nobody is told now."""
        return self.silenced_until is not None and now < self.silenced_until


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that findings make.

    Attributes:
        opening: findings that become alerts. closing: alerts that end.
        telling: open alerts with a new text or level, by their ids.
    """

    opening: list[Finding] = field(default_factory=list)
    closing: list[Alert] = field(default_factory=list)
    telling: dict[int, Finding] = field(default_factory=dict)


def changes(
    open_alerts: Iterable[Alert],
    findings: Sequence[Finding],
    looked_at: Iterable[Key] | None = None,
) -> Changes:
    """Compare what is open with what was found.

    An alert opens at a finding with `opens`, and closes when nothing is found about it any more.

    Args:
        looked_at: kinds and subjects that were looked at; an open alert about anything else stays.
            None: all.
    """
    found = {finding.key: finding for finding in findings}
    known = {alert.key: alert for alert in open_alerts}
    seen = None if looked_at is None else set(looked_at) | set(found)
    result = Changes()
    for key, finding in found.items():
        alert = known.get(key)
        if alert is None:
            if finding.opens:
                result.opening.append(finding)
        elif (alert.text, alert.level) != (finding.text, finding.level):
            result.telling[alert.id] = finding
    for key, alert in known.items():
        if key not in found and (seen is None or key in seen):
            result.closing.append(alert)
    return result
