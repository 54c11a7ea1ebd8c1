"""The names by which requests may call a server on loopback.

A web page can make the name of its own server point to 127.0.0.1 (DNS rebinding); then a browser on
this machine lets it read what inference without login answers. The header Host still has that name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from pathlib import Path

from cryptography import x509
from starlette.types import ASGIApp, Receive, Scope, Send

from edge_sdk.wire.address import Address
from server.access.heads import field_of
from server.listening.certificate import first_certificate
from server.routes.errors import error_response


class OwnNames:
    """The names of a server on loopback.

    Args:
        names: besides `localhost` and all loopback addresses; `*.` stands for one label.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names) | {"localhost"}

    def have(self, host: str | None) -> bool:
        """Whether a request with this header `Host` means the server.

        HTTP/1.0 has none; browsers always send it.
        """
        return host is None or self._is_own(_name(host))

    def _is_own(self, name: str) -> bool:
        if name in self._names or f"*.{name.partition('.')[2]}" in self._names:
            return True
        try:
            return ipaddress.ip_address(name).is_loopback
        except ValueError:
            return False


class HostCheck:
    """An application that answers 421 to requests for other names."""

    def __init__(self, app: ASGIApp, names: OwnNames) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] == "http":
            host = field_of(scope, b"host")
            if host is not None and not self._names.have(host):
                text = (
                    f"Host: {host[:100]} is no name of this server, which listens on loopback;"
                    " ask 127.0.0.1 or localhost, or start the server with --host-name NAME"
                )
                await error_response(421, text)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def own_names(address: Address, cert: Path | None, names: Collection[str] = ()) -> OwnNames | None:
    """The names of a server that listens on loopback; None for one that listens beyond.

    Off loopback everything but the health routes asks for a credential, which no web page has.

    Args:
        cert: PEM file; its names count as the server's own.
        names: further names of the server.
    """
    if not address.loopback:
        return None
    own = set() if cert is None else certificate_names(cert)
    return OwnNames({address.host, *names, *own})


def checked(app: ASGIApp, names: OwnNames | None) -> ASGIApp:
    """The application behind a `HostCheck` of these names; as it is without any."""
    return app if names is None else HostCheck(app, names)


def certificate_names(cert: Path) -> set[str]:
    """The names and addresses in the first certificate of a PEM file."""
    first = first_certificate(cert)
    try:
        found = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    addresses = found.get_values_for_type(x509.IPAddress)
    return {*found.get_values_for_type(x509.DNSName), *map(str, addresses)}


def _name(host: str) -> str:
    """The header's value without port, brackets and the dot of the root."""
    host = host.strip().lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.rstrip(".")
