"""Limits of alerts and where they are sent: `alerts.toml` in the server's state folder."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError
from edge_sdk.records import read_record
from profiles.checks import number, whole

ALERTS_NAME: Final = "alerts.toml"
SIZE_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class AlertLimits:
    """Settings of alerts.

    Attributes:
        silent_s: seconds without a heartbeat after which a device is silent.
        fallback_share: share of the queries to the server without an answer in time, over ten
            minutes, above which a device falls back too much; below half of it, it is well again.
        fallback_least: queries from which on that share counts.
        drift_distance: largest distance of the distribution of a device's uncertainties from the
            held-out one that is no alert, in [0, 1]; 1 looks for no drift.
        drift_look_s: seconds between two looks at a device's drift; looks that are more frequent
            each need more answers, so that chance alone causes no more alerts a day.
        drift_least: answers from which on a drift is looked for.
        drift_false_alarms: alerts of a drift a day, over all devices, that chance alone may cause.
        certificate_days: days before its end from which on a TLS certificate is an alert.
        training_s: seconds in which a round of a training ends; longer where its rounds are long.
        webhook: URL that is sent every alert; None for none.
        webhook_secret: file of the secret that signs what is sent there; None for no signature.
        mqtt: `mqtt[s]://[USER:PASSWORD@]HOST[:PORT]/TOPIC` of a broker that is sent every alert.
    """

    silent_s: float = 300.0
    fallback_share: float = 0.2
    fallback_least: int = 20
    drift_distance: float = 0.15
    drift_look_s: float = 900.0
    drift_least: int = 100
    drift_false_alarms: float = 0.01
    certificate_days: float = 21.0
    training_s: float = 1_800.0
    webhook: str | None = None
    webhook_secret: Path | None = None
    mqtt: str | None = None

    def __post_init__(self) -> None:
        check_fields(
            self,
            silent_s=number(least=60),
            fallback_share=number(above=0, most=1),
            fallback_least=whole(1),
            drift_distance=number(above=0, most=1),
            drift_look_s=number(least=10, most=86_400),
            drift_least=whole(10),
            drift_false_alarms=number(above=0, most=10),
            certificate_days=number(least=0),
            training_s=number(least=60),
        )
        if self.webhook is not None and not self.webhook.startswith(("http://", "https://")):
            raise ConfigurationError(
                f"webhook: expected https://HOST/PATH, got {host_of(self.webhook)!r:.80}"
            )
        if self.webhook_secret is not None and self.webhook is None:
            raise ConfigurationError("webhook_secret: expected a webhook beside it")
        if self.mqtt is not None and not self.mqtt.startswith(("mqtt://", "mqtts://")):
            raise ConfigurationError("mqtt: expected mqtt://HOST/TOPIC")

    @property
    def drift_looks_per_day(self) -> float:
        """Looks at the drift of one device in a day."""
        return 86_400.0 / self.drift_look_s

    @classmethod
    def load(cls, state: Path) -> AlertLimits:
        """Read `alerts.toml` in the state folder; without the file, the defaults.

        Raises: ConfigurationError naming the file, the key, what was expected and what was got.
        """
        path = state / ALERTS_NAME
        try:
            with path.open("rb") as file:
                raw = file.read(SIZE_MAX)
        except FileNotFoundError:
            return cls()
        except OSError as err:
            raise ConfigurationError(f"{path}: cannot be read ({err.strerror})") from err
        try:
            return read_record(cls, tomllib.loads(raw.decode()), str(path))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as err:
            raise ConfigurationError(f"{path}: not a TOML file ({err})") from err

    def open_secrets(self, state: Path) -> list[Path]:
        """The files with secrets that other users of this machine can read.

        The URL of a webhook is one, and so is a password in the URL of a broker.

        Args:
            state: the server's state folder.
        """
        files = []
        if self.webhook is not None or "@" in (self.mqtt or ""):
            files.append(state / ALERTS_NAME)
        if self.webhook_secret is not None:
            files.append(state / self.webhook_secret)
        return [path for path in files if _others_read(path)]


def _others_read(path: Path) -> bool:
    """Whether the group or everybody may read a file, and reach it in its folder."""
    try:
        file, folder = path.stat().st_mode, path.parent.stat().st_mode
    except OSError:
        return False
    return any(file & read and folder & reach for read, reach in ((0o040, 0o010), (0o004, 0o001)))


def host_of(url: str) -> str:
    """Scheme and host of a URL: the path and the rest of a webhook's are often its secret."""
    before, between, after = url.partition("://")
    scheme, rest = (before, after) if between else ("", before)
    host = rest.partition("/")[0].partition("?")[0].rpartition("@")[2]
    return f"{scheme}{between}{host}"
