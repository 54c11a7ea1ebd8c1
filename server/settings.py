"""How a server runs, in one frozen record: units in the names, checked when built."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError
from edge_sdk.mqtt import BrokerAddress
from edge_sdk.wire.frames import MQTT_LIMITS
from profiles.checks import one_of, whole

EMBEDDED: Final = "embedded"
HTTP_DEFAULT: Final = "127.0.0.1:8000"
MQTT_PORT_DEFAULT: Final = 1883
# a reply of a thousand classes; a broker that takes less is of no use
PACKET_BYTES_MIN: Final = 8_192


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, what: str) -> Address:
        """Read `HOST:PORT`; port 0 takes a free one.

        Raises: ConfigurationError naming `what`.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not port.isdigit() or int(port) > 65535:
            raise ConfigurationError(f"{what}: expected HOST:PORT, got {text!r}")
        return cls(host.strip("[]") or "127.0.0.1", int(port))

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What an operator may set.

    Attributes:
        state: folder of everything the server keeps.
        http: where the API listens.
        broker: where the embedded broker listens, or the URL of another.
        mqtt_public: URL of the broker as devices reach it, where that is not `broker`.
        batch_max: queries run at once; queue_max, queue_bytes: queries waiting, and what they hold,
            before one is refused.
        threads: of onnxruntime; half the cores leaves the rest to the network and the broker.
        allocation: `budget` or `supersfl`.
        max_packet_bytes: of one MQTT message's content; longer ones go over HTTP.
        tls_cert, tls_key: PEM files for HTTPS and MQTTS.
        mqtt_ca: PEM file to verify a broker of your own against; the system's store without it.
        insecure: listen in the clear off loopback all the same.
    """

    state: Path
    http: Address
    broker: Address | BrokerAddress
    batch_max: int = 32
    mqtt_public: str | None = None
    queue_max: int = 256
    queue_bytes: int = 64_000_000
    threads: int = max(1, (os.cpu_count() or 2) // 2)
    allocation: str = "budget"
    max_packet_bytes: int = MQTT_LIMITS.frame_bytes
    tls_cert: Path | None = None
    mqtt_ca: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        check_fields(
            self,
            batch_max=whole(1),
            queue_max=whole(1),
            queue_bytes=whole(1),
            threads=whole(1),
            max_packet_bytes=whole(PACKET_BYTES_MIN, MQTT_LIMITS.frame_bytes),
            allocation=one_of(("budget", "supersfl")),
        )
        if self.mqtt_public is not None:
            _check_public(self.mqtt_public)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigurationError("TLS needs both a certificate and its key")
        self._refuse_clear_text()

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls_cert is not None

    @property
    def open_inference(self) -> bool:
        """Whether the inference API asks for no credential: only on loopback."""
        return self.http.loopback

    def _refuse_clear_text(self) -> None:
        if self.tls or self.insecure:
            return
        listening = [("--http", self.http)]
        if isinstance(self.broker, Address):
            listening.append(("--mqtt", self.broker))
        for option, address in listening:
            refuse_clear_text(option, address)


def refuse_clear_text(option: str, address: Address) -> None:
    """Refuse to listen in the clear where other machines can reach it.

    Raises: ConfigurationError naming `option`.
    """
    if not address.loopback:
        raise ConfigurationError(
            f"{option} {address}: reachable from other machines in the clear; "
            "give --tls-cert and --tls-key, or --insecure if you mean it"
        )


def parse_broker(text: str) -> Address | BrokerAddress:
    """Read `embedded[:HOST:PORT]` or `mqtt[s]://HOST:PORT`.

    Raises: ConfigurationError.
    """
    if text == EMBEDDED:
        return Address("127.0.0.1", MQTT_PORT_DEFAULT)
    if text.startswith(f"{EMBEDDED}:"):
        return Address.parse(text.removeprefix(f"{EMBEDDED}:"), "--mqtt")
    if "://" in text:
        return BrokerAddress.parse(text)
    raise ConfigurationError(
        f"--mqtt: expected embedded, embedded:HOST:PORT or mqtt://HOST:PORT, got {text!r}"
    )


def _check_public(url: str) -> None:
    """Raises: ConfigurationError unless devices can be told this."""
    address = BrokerAddress.parse(url)
    if address.username is not None or address.password is not None:
        raise ConfigurationError("--mqtt-public: every device is told it; leave the login out")
