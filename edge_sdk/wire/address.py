"""Addresses to listen on: of the server, of the trainer, and of an agent that others ask."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from edge_sdk.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a port to listen on."""

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
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address, is this machine's own interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
