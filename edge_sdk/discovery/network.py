"""Announcements of servers on the local network, by multicast DNS. Only importer of zeroconf."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import ifaddr
from zeroconf import (
    Error,
    InterfaceChoice,
    IPVersion,
    ServiceBrowser,
    ServiceInfo,
    ServiceListener,
    Zeroconf,
)

from edge_sdk.discovery.record import SERVICE, ServerRecord
from edge_sdk.errors import ConfigurationError, LinkError

FOUND_MOST: Final = 64  # servers; who floods the network with announcements fills no memory
WAIT_S: Final = 10.0
# once one is found: answers to one question come within 0.12 s of each other
MORE_S: Final = 1.0
DETAILS_MS: Final = 3_000
# a network that comes up after the server, and an address that changes, are seen after this time
LOOK_S: Final = 60.0
UNSPECIFIED: Final = ("0.0.0.0", "::", "")  # noqa: S104 - recognised, not listened on
LABEL_MOST: Final = 53  # a label of DNS has at most 63 bytes, of which "-splitedge" takes 10
# zeroconf raises RuntimeError without an interface, and for an address that no adapter has
_NO_NETWORK: Final = (OSError, RuntimeError, Error)

logger = logging.getLogger(__name__)


def reachable_addresses(host: str) -> list[str]:
    """The addresses at which others reach a socket that listens at `host`, IPv4 first.

    Those of all interfaces are their IPv4 addresses: none on a machine that has only IPv6, and only
    loopback's on one without a network.

    Raises: OSError for a name that has none.
    """
    if host in UNSPECIFIED:
        found = [str(ip.ip) for card in ifaddr.get_adapters() for ip in card.ips if ip.is_IPv4]
        return [one for one in found if not ipaddress.ip_address(one).is_loopback] or found
    known = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return sorted({str(one[4][0]) for one in known}, key=lambda one: (":" in one, one))


def resolves(host: str) -> bool:
    """Whether this machine finds an address for a host."""
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(host, None))
    return False


@dataclass(frozen=True, slots=True)
class Announcement:
    """Record of a server, and the addresses at which it is reached."""

    record: ServerRecord
    addresses: tuple[str, ...]


@contextmanager
def announced(
    find: Callable[[], Announcement], service: str = SERVICE, *, look_s: float = LOOK_S
) -> Iterator[None]:
    """Announce a server for as long as the block runs, from a thread of its own.

    A network that comes up later, and an address that changes, are announced at the next look.
    What fails is logged once: the server works without.

    Args:
        find: gives what holds now; it is announced on the interfaces of its addresses. Errors of
            the system, and ConfigurationError, say that there is nothing to announce.
        look_s: seconds between two looks.
    """
    done = threading.Event()
    thread = threading.Thread(target=_announce, args=(find, service, look_s, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def find_servers(
    service: str = SERVICE, *, wait_s: float = WAIT_S, more_s: float = MORE_S
) -> list[ServerRecord]:
    """The servers that announce themselves on the networks of this machine.

    Args:
        wait_s: seconds until the first is found. more_s: seconds for others after that.
    Raises: LinkError if this machine has no network to ask.
    """
    listener = _Listener()
    try:
        zeroconf = Zeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.V4Only)
    except _NO_NETWORK as err:
        why = (isinstance(err, OSError) and err.strerror) or str(err) or type(err).__name__
        raise LinkError(
            f"--discover: the network cannot be asked ({why}); give --server URL"
        ) from err
    with contextlib.closing(zeroconf):
        browser = ServiceBrowser(zeroconf, service, listener)
        end = time.monotonic() + wait_s
        found: dict[str, ServerRecord] = {}
        while not found and listener.wait(end - time.monotonic()):
            found = _details(zeroconf, service, listener, end)
        if found:
            end = time.monotonic() + more_s
            while listener.wait(end - time.monotonic()):
                found |= _details(zeroconf, service, listener, end)
        browser.cancel()
    return list(found.values())


class _Listener(ServiceListener):
    """Names of announced services that were not looked at yet."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._seen: set[str] = set()
        self._changed = threading.Condition()

    def wait(self, seconds: float) -> bool:
        """Wait for a name; whether there is one."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._names), max(seconds, 0))

    def take(self) -> list[str]:
        """The names since the last call."""
        with self._changed:
            names, self._names = self._names, []
            return names

    def add_service(self, _zc: Zeroconf, _type: str, name: str) -> None:
        """Note a service."""
        with self._changed:
            if name not in self._seen and len(self._seen) < FOUND_MOST:
                self._seen.add(name)
                self._names.append(name)
                self._changed.notify()

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Note a service, if it is not known."""
        self.add_service(zc, type_, name)

    def remove_service(self, _zc: Zeroconf, _type: str, _name: str) -> None:
        """Do nothing: whoever connects sees that it is gone."""


def _details(
    zeroconf: Zeroconf, service: str, listener: _Listener, end: float
) -> dict[str, ServerRecord]:
    """The records of services that have just been found, by name.

    Args:
        end: time of the monotonic clock. Services that were not asked by then are passed over:
            many names that nobody answers for must not hold the search.
    """
    found = {}
    for name in listener.take():
        left_ms = min(DETAILS_MS, int(1000 * (end - time.monotonic())))
        if left_ms <= 0:
            break
        info = zeroconf.get_service_info(service, name, left_ms)
        if info is None or info.port is None:
            continue
        record = ServerRecord.read(name.removesuffix(f".{service}"), info.port, info.properties)
        if record is not None:
            found[name] = record
    return found


def _announce(
    find: Callable[[], Announcement], service: str, look_s: float, done: threading.Event
) -> None:
    said = ""
    current: Announcement | None = None
    with contextlib.ExitStack() as registered:
        while True:
            try:
                found = find()
                if found != current:
                    registered.close()
                    current = None
                    registered.enter_context(_registered(found, service))
                    current, said = found, ""
            except (*_NO_NETWORK, ConfigurationError) as err:
                if current is not None:  # the network went away
                    registered.close()
                    current = None
                why = str(err) or type(err).__name__
                if why != said:
                    said = why
                    logger.warning(
                        "the server is not announced on the network (%s); devices need its"
                        " --server URL until this changes",
                        why,
                    )
            if done.wait(look_s):
                return


@contextmanager
def _registered(announcement: Announcement, service: str) -> Iterator[None]:
    record, addresses = announcement.record, list(announcement.addresses)
    name = record.name[:LABEL_MOST].rstrip("-")
    info = ServiceInfo(
        service,
        f"{name}.{service}",
        port=record.port,
        parsed_addresses=addresses,
        properties=record.texts(),
        # a name of its own: another program of this machine may announce the plain one
        server=f"{name}-splitedge.local.",
    )
    with contextlib.closing(Zeroconf(interfaces=list(addresses))) as zeroconf:
        zeroconf.register_service(info, allow_name_change=True)
        logger.info(
            "announced on the network as %s, at %s",
            info.name.removesuffix(f".{service}"),
            ", ".join(addresses),
        )
        yield
