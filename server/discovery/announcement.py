"""The announcement of a server: its name, its addresses, and its certificate."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edge_sdk.discovery.record import ServerRecord
from edge_sdk.errors import ConfigurationError
from edge_sdk.identity import host_id
from edge_sdk.wire.address import Address
from server.routes.host_names import certificate_names

logger = logging.getLogger(__name__)


@contextmanager
def announcing(address: Address, cert: Path | None, service: str | None) -> Iterator[None]:
    """Announce the API that listens at `address` for as long as the block runs.

    A server that cannot be announced works without; the log says why.

    Args:
        cert: PEM file of its certificate; None for http.
        service: type of the announcement; None announces nothing.
    """
    if service is None:
        yield
        return
    from edge_sdk.discovery.network import (  # noqa: PLC0415 - extra
        Announcement,
        announced,
        reachable_addresses,
    )

    said = ""

    def find() -> Announcement:
        nonlocal said
        addresses = reachable_addresses(address.host)
        if all(_is_loopback(one) for one in addresses) and addresses:
            only = f"{address.host} is {', '.join(addresses)} at this time"
            if said != only:
                said = only
                logger.warning(
                    "%s, so only this machine finds the server; give --http an address that other"
                    " machines reach, or wait until the network is up",
                    only,
                )
        else:
            said = ""
        return Announcement(server_record(address.port, addresses, cert), tuple(addresses))

    with announced(find, service):
        yield


def server_record(port: int, addresses: list[str], cert: Path | None) -> ServerRecord:
    """The announcement of an API.

    Its hosts are the names of its certificate, because devices check that; without one they are its
    addresses. Names with a star are none that a device can ask. Those of loopback would send each
    device to itself, so they count only if the server has no other address.

    Args:
        addresses: at which others reach it.
    Raises: ConfigurationError if there is nothing that devices could ask.
    """
    if not addresses:
        raise ConfigurationError(
            "this machine has no IPv4 address; give --http its IPv6 address, or give the devices"
            " --server URL"
        )
    name = host_id() or "server"
    if cert is None:
        return ServerRecord(name, tuple(addresses), port, tls=False)
    names: set[str] = set()
    fitting: set[str] = set()
    digest = ""
    here = all(_is_loopback(one) for one in addresses)
    with contextlib.suppress(OSError, ValueError):  # the server has said so when it started
        names = certificate_names(cert)
        fitting = {
            one for one in names if not one.startswith("*") and (here or not _is_loopback(one))
        }
        first, end, _ = cert.read_text("ascii", "replace").partition(ssl.PEM_FOOTER)
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(_from_header(first + end))).hexdigest()
    if names and not fitting:
        raise ConfigurationError(
            f"{cert}: the certificate names only {', '.join(sorted(names))}, where no device of the"
            " network can ask; make one with the name or the address of this machine, or give the"
            " devices --server URL"
        )
    # names first, then addresses that others reach, then the rest
    hosts = sorted(fitting, key=lambda one: (_is_address(one), one not in addresses, one))
    return ServerRecord(name, tuple(hosts or addresses), port, tls=True, certificate=digest)


def _from_header(text: str) -> str:
    return text[text.index(ssl.PEM_HEADER) :]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        labels = host.lower().rstrip(".").split(".")
        return "localhost" in (labels[0], labels[-1])


def _is_address(host: str) -> bool:
    return ":" in host or host.replace(".", "").isdigit()
