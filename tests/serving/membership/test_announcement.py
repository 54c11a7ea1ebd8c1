"""What a server announces, by the names of its certificate and the addresses of its machine."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from zeroconf import Zeroconf

from edge_sdk.discovery.network import (
    DETAILS_MS,
    Announcement,
    _details,
    _Listener,
    announced,
    find_servers,
)
from edge_sdk.discovery.record import ServerRecord
from edge_sdk.errors import ConfigurationError
from server.discovery.announcement import server_record
from tests.waiting import wait_until

LAN = "192.168.1.10"
SERVICE = "_semenda._tcp.local."

Certificate = Callable[..., Path]


@pytest.fixture
def certificate(tmp_path: Path) -> Certificate:
    """Makes a certificate for names and addresses."""

    def make(*names: str) -> Path:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([])
        start = datetime.now(UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(start + timedelta(days=1))
            .add_extension(x509.SubjectAlternativeName(list(map(san, names))), critical=True)
            .sign(key, hashes.SHA256())
        )
        file = tmp_path / "server.pem"
        file.write_bytes(made.public_bytes(Encoding.PEM))
        return file

    return make


def san(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def test_names_of_loopback_send_no_device_to_itself(certificate: Certificate) -> None:
    cert = certificate("localhost", "hub.localhost", "127.0.0.1", "::1", LAN)
    assert server_record(8443, [LAN], cert).hosts == (LAN,)
    here = server_record(8443, ["127.0.0.1"], cert).hosts
    assert set(here) == {"localhost", "hub.localhost", "127.0.0.1", "::1", LAN}


@pytest.mark.parametrize("names", [("*.example.org",), ("localhost", "127.0.0.1")])
def test_a_certificate_without_a_name_to_ask_is_not_announced(
    certificate: Certificate, names: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError, match=r"names only .*make one with the name"):
        server_record(8443, [LAN], certificate(*names))


def test_a_machine_without_an_address_is_not_announced() -> None:
    with pytest.raises(ConfigurationError, match="no IPv4 address; give --http its IPv6 address"):
        server_record(8000, [], None)


def test_an_address_that_no_adapter_has_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "edge_sdk.discovery")
    record = ServerRecord("hub", ("2001:db8::1",), 9, tls=False)
    looks: list[float] = []

    def find() -> Announcement:
        looks.append(time.monotonic())
        return Announcement(record, ("2001:db8::1",))

    with announced(find, SERVICE, look_s=0.01):
        wait_until(lambda: len(looks) > 3, "more looks")
    what = "the server is not announced on the network (No adapter found"
    assert caplog.text.count(what) == 1


@pytest.mark.deadline
def test_a_machine_with_a_long_name_is_announced() -> None:
    service = f"_se{time.time_ns() % 10**9}._tcp.local."
    long = ServerRecord("h" * 63, ("127.0.0.1",), 9, tls=False)
    with announced(lambda: Announcement(long, ("127.0.0.1",)), service):
        (found,) = find_servers(service, wait_s=60, more_s=0)
    assert found.name == "h" * 53


@pytest.mark.deadline
def test_a_network_that_comes_up_later_and_an_address_that_changes_are_announced() -> None:
    """A server on Wi-Fi starts before its network, and a lease may bring another address."""
    service = f"_se{time.time_ns() % 10**9}._tcp.local."
    first, second = (ServerRecord("hub", (one,), 9, tls=False) for one in (LAN, "192.0.2.8"))
    now: list[ServerRecord] = []

    def find() -> Announcement:
        if not now:
            raise OSError("the network is down")
        return Announcement(now[-1], ("127.0.0.1",))

    with announced(find, service, look_s=0.05):
        for record in (first, second):
            now.append(record)
            wait_until(
                lambda: find_servers(service, wait_s=5, more_s=0) == now[-1:], "it is not found", 60
            )


def test_names_that_nobody_answers_for_hold_no_search() -> None:
    listener = _Listener()
    count = 10
    with closing(Zeroconf(interfaces=["127.0.0.1"])) as zeroconf:
        for number in range(count):
            listener.add_service(zeroconf, SERVICE, f"nobody-{number}.{SERVICE}")
        begun = time.monotonic()
        assert _details(zeroconf, SERVICE, listener, begun + 0.3) == {}
    assert time.monotonic() - begun < count * DETAILS_MS / 1000 / 2
