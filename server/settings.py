"""Settings of a server in one frozen record, checked when it is built."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError
from edge_sdk.mqtt import BrokerAddress, shown_broker
from edge_sdk.wire.address import Address
from edge_sdk.wire.frames import MQTT_LIMITS
from profiles.checks import one_of, whole

EMBEDDED: Final = "embedded"
HTTP_DEFAULT: Final = "127.0.0.1:8000"
MQTT_PORT_DEFAULT: Final = 1883
# room for a reply of a thousand classes; a broker that takes less cannot be used
PACKET_BYTES_MIN: Final = 8_192


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Settings that an operator may choose.

    Attributes:
        state: folder of all that the server stores.
        http: address of the API.
        broker: address of the embedded broker, or the URL of your own broker.
        mqtt_public: URL at which devices reach the broker, if it differs from `broker`.
        batch_max: most queries run at once.
        queue_max, queue_bytes: most queries waiting, and most bytes of their tensors; above either,
            a query is refused.
        threads: compute threads of onnxruntime; half the cores are left to network and broker.
        allocation: rule of the devices' depths, `budget` or `supersfl`.
        max_packet_bytes: longest payload of an MQTT message; longer ones go over HTTP.
        tls_cert, tls_key: PEM files for HTTPS and MQTTS.
        mqtt_ca: PEM file to verify your own broker with; by default the system's certificates.
        insecure: allow unencrypted connections from other machines.
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
        """Whether inference needs no credential, which is so on loopback only."""
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
    """Refuse an address that other machines reach without encryption.

    Raises: ConfigurationError naming `option`.
    """
    if not address.loopback:
        raise ConfigurationError(
            f"{option} {address}: other machines would reach it without encryption; "
            "give --tls-cert and --tls-key, or --insecure to allow it"
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
        "--mqtt: expected embedded, embedded:HOST:PORT or mqtt://HOST:PORT, got"
        f" {shown_broker(text)}"
    )


def _check_public(url: str) -> None:
    """Raises: ConfigurationError for a URL that devices cannot be told."""
    address = BrokerAddress.parse(url)
    if address.username is not None or address.password is not None:
        raise ConfigurationError("--mqtt-public: all devices are told this; leave the login out")
