"""The table [serve] of agent.toml: other programs ask this agent over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError
from edge_sdk.wire.address import Address
from profiles.checks import whole

TEMPLATE: Final = """\
# [serve] answers programs on this device or in its network over HTTP, by the v2 protocol.
[serve]
# HOST:PORT to listen on. By default the agent does not listen.
#address = "127.0.0.1:8080"
# PEM files for https. Other machines may connect only with https and a secret.
#cert = "serve-cert.pem"
#key = "serve-key.pem"
# File with one line, the secret that clients send as `Authorization: Bearer SECRET`.
#secret = "serve-secret.txt"
# true: let other machines connect without https and without a secret.
#insecure = false
# Most connections at one time.
#connections = 64
# Most requests that are answered at one time; one more is told to come again.
#in_flight = 32
"""


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
