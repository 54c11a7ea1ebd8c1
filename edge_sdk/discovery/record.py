"""Announcements of servers on the network, and what a device makes of them. Pure.

Anybody on the network can announce anything. So an announcement says where a server is, and never
that it is to be trusted: a device gives its token only to a server that shows a certificate of an
authority that the user named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from edge_sdk.errors import ConfigurationError

SERVICE: Final = "_splitedge._tcp.local."
FORM: Final = "1"
HOSTS_BYTES: Final = 200  # a text of DNS-SD has at most 255 bytes
SHOWN_MOST: Final = 8
HOSTS_TRIED: Final = 8

_HOST: Final = re.compile(r"[A-Za-z0-9_.:-]{1,253}")  # names and addresses, nothing of a URL
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """Announcement of one server.

    Attributes:
        name: of the server, for people.
        hosts: names and addresses at which devices may reach it, the best first.
        tls: whether its API speaks https.
        certificate: SHA-256 of its certificate in hex; empty without one. It is shown to people,
            and proves nothing.
    """

    name: str
    hosts: tuple[str, ...]
    port: int
    tls: bool
    certificate: str = ""

    def texts(self) -> dict[str, str]:
        """The texts of its DNS-SD record, but for the name and the port."""
        hosts, size = [], 0
        for host in self.hosts:
            if size + len(host) + 1 <= HOSTS_BYTES:  # one that is too long keeps out no other
                hosts.append(host)
                size += len(host) + 1
        scheme = "https" if self.tls else "http"
        return {
            "v": FORM,
            "scheme": scheme,
            "hosts": ",".join(hosts),
            "certificate": self.certificate,
        }

    @classmethod
    def read(cls, name: str, port: int, texts: Mapping[bytes, bytes | None]) -> Self | None:
        """The record of an announcement; None if it is not of the form that we know."""
        said = {
            key.decode("ascii", "replace"): (value or b"").decode("ascii", "replace")
            for key, value in texts.items()
        }
        hosts = tuple(said.get("hosts", "").split(","))
        scheme, certificate = said.get("scheme"), said.get("certificate", "")
        fits = (
            said.get("v") == FORM
            and scheme in ("http", "https")
            and 0 < port < 65_536
            and all(_HOST.fullmatch(host) for host in hosts)
            and (not certificate or _SHA256.fullmatch(certificate))
        )
        return cls(name, hosts, port, scheme == "https", certificate) if fits else None

    def url(self, reaches: Callable[[str], bool] = lambda _: True) -> str:
        """URL of its API: of the first host that `reaches` accepts, else of the first.

        Only the first eight are asked about: each may take seconds.
        """
        host = next((one for one in self.hosts[:HOSTS_TRIED] if reaches(one)), self.hosts[0])
        shown = f"[{host}]" if ":" in host else host
        return f"{'https' if self.tls else 'http'}://{shown}:{self.port}"


def chosen_server(
    found: Sequence[ServerRecord],
    *,
    has_authority: bool,
    waited_s: float,
    reaches: Callable[[str], bool] = lambda _: True,
) -> str:
    """URL of the server to enrol at.

    Args:
        found: in any order.
        has_authority: whether the user named the authority to trust. That of the system does not
            do: anybody gets a certificate of it for a name of his own, and announces that.
        waited_s: seconds that the search took, for the error.
        reaches: whether this machine can resolve a host.
    Raises: ConfigurationError that says what to type, if there is not exactly one, or if nothing
        would tell the server from somebody who announces himself as it.
    """
    if not found:
        raise ConfigurationError(
            f"--discover: no server announced itself on this network within {waited_s:.0f} s; start"
            " the server with --announce, see that both are in one network (announcements pass no"
            " router), or give --server URL"
        )
    if len(found) > 1:
        # by the first host of each: to look all of them up may take hours, as whoever announces
        # them likes
        lines = [_line(one, one.url()) for one in sorted(found, key=lambda one: one.name)]
        rest = f" and {len(lines) - SHOWN_MOST} more" if len(lines) > SHOWN_MOST else ""
        raise ConfigurationError(
            f"--discover: {len(found)} servers announced themselves: "
            f"{', '.join(lines[:SHOWN_MOST])}{rest}; give that of yours by --server URL"
        )
    (only,) = found
    url = only.url(reaches)
    if not only.tls:
        raise ConfigurationError(
            f"--discover: found {_line(only, url)}, without encryption, so anybody who announces"
            f" himself would get the token; if it is yours, give --server {url}"
        )
    if not has_authority:
        raise ConfigurationError(
            f"--discover: found {_line(only, url)}; anybody may announce himself, so give --ca"
            f" FILE, the authority of your server, or --server {url} if that is its address"
        )
    return url


def _line(record: ServerRecord, url: str) -> str:
    shown = f" (certificate {record.certificate[:16]}...)" if record.certificate else ""
    return f"{record.name!r} at {url}{shown}"
