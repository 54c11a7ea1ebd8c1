"""The table [serve] of agent.toml: other programs ask this agent over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError
from edge_sdk.wire.address import Address
from profiles.checks import whole


@dataclass(frozen=True, slots=True)
class ServeTable:
    """Settings of the HTTP server of an agent.

    Attributes:
        address: `HOST:PORT`; None does not listen.
        cert, key: PEM files for https.
        secret: file with one line, that clients send as bearer token.
        insecure: allow other machines without https and without a secret.
        connections: most connections at one time.
        in_flight: most requests that are answered at one time.
    """

    address: str | None = None
    cert: Path | None = None
    key: Path | None = None
    secret: Path | None = None
    insecure: bool = False
    connections: int = 64
    in_flight: int = 32

    def __post_init__(self) -> None:
        check_fields(self, connections=whole(1, 1024), in_flight=whole(1, 1024))
        if (self.cert is None) != (self.key is None):
            raise ConfigurationError("cert and key: expected both or none, got one of them")
        if self.address is None:
            return
        address = Address.parse(self.address, "address")
        if address.loopback or self.insecure:
            return
        if self.cert is None or self.secret is None:
            raise ConfigurationError(
                f"address: other machines reach {address}; give cert and key for https, and a "
                "secret, or set insecure to allow it without them"
            )
