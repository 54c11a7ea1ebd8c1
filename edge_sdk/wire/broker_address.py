"""The address of an MQTT broker, as a URL says it. It needs no MQTT client."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final
from urllib.parse import unquote, urlsplit

from edge_sdk.errors import ConfigurationError

DEFAULT_PORTS: Final = {"mqtt": 1883, "mqtts": 8883}


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    """Address of a broker, with the login from its URL (its repr omits the password)."""

    host: str
    port: int
    tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> BrokerAddress:
        """Read `mqtt[s]://[USER:PASSWORD@]HOST[:PORT]`.

        Raises: ConfigurationError saying which part is wrong.
        """
        hint = "; the signs / @ : of a password are written %2F %40 %3A" if "@" in url else ""
        expected = ConfigurationError(
            f"broker URL: expected mqtt://HOST:PORT, got {shown_broker(url)}{hint}"
        )
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # its text may quote a part of the password
            raise expected from None
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise expected
        return cls(
            host=parts.hostname,
            port=DEFAULT_PORTS[parts.scheme] if port is None else port,
            tls=parts.scheme == "mqtts",
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
        )

    @property
    def url(self) -> str:
        """The address without its login."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtts' if self.tls else 'mqtt'}://{host}:{self.port}"

    def with_login(self, username: str, password: str) -> BrokerAddress:
        """The same address with that login."""
        return replace(self, username=username, password=password)


def shown_broker(url: str) -> str:
    """A broker's URL as an error quotes it, without the login that it may hold."""
    login, at, place = url.rpartition("@")
    if not at:
        return repr(url)
    scheme, slashes, _ = login.partition("//")
    return repr(f"{scheme}{slashes}...@{place}" if slashes else f"...@{place}")
