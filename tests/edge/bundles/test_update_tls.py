"""TLS with a pinned authority, and a clock that is plainly wrong."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from edge_sdk.bundles.update import update

if TYPE_CHECKING:
    from tests.edge.bundles.depot import Depot

NOW = datetime.now(UTC)


@dataclass(frozen=True)
class Authority:
    """An authority's certificate, and a server that has one of it for 127.0.0.1."""

    ca: Path
    context: ssl.SSLContext


def make_authority(folder: Path, valid_from: datetime) -> Authority:
    folder.mkdir()
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "splitedge test authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hub")])

    def build(name: x509.Name, public: ec.EllipticCurvePublicKey, *, ca: bool) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(valid_from)
            .not_valid_after(valid_from + timedelta(days=365))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        if not ca:
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
        return builder.sign(ca_key, hashes.SHA256())

    ca = folder / "ca.pem"
    ca.write_bytes(build(issuer, ca_key.public_key(), ca=True).public_bytes(Encoding.PEM))
    chain = folder / "server.pem"
    chain.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        + build(subject, key.public_key(), ca=False).public_bytes(Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    return Authority(ca, context)


@contextmanager
def depot_of(depot_class: type[Depot], folder: Path, context: ssl.SSLContext) -> Iterator[Depot]:
    depot = depot_class(folder, context)
    try:
        yield depot
    finally:
        depot.close()


@pytest.fixture
def depot_class(depot: Depot) -> type[Depot]:
    return type(depot)


def test_pinned_authority_is_trusted_and_no_other(depot_class: type[Depot], tmp_path: Path) -> None:
    ours = make_authority(tmp_path / "ours", NOW - timedelta(days=1))
    other = make_authority(tmp_path / "other", NOW - timedelta(days=1))
    state = tmp_path / "device"
    with depot_of(depot_class, tmp_path / "tls", ours.context) as hub:
        hub.enrol(state, ours.ca)
        assert update(state).status == "unchanged"
        for ca in (other.ca, None):
            hub.served.clear()
            hub.enrol(state, ca)
            outcome = update(state)
            assert outcome.status == "unreachable"
            assert "certificate verify failed" in outcome.reason
            assert hub.served == []  # the credential was not shown to it


def test_authority_file_that_is_none_is_named(depot: Depot, state: Path, tmp_path: Path) -> None:
    text = (state / "agent.json").read_text().replace("http://", "https://")
    (state / "agent.json").write_text(text.replace('"ca": null', f'"ca": "{tmp_path}/no.pem"'))
    outcome = update(state)
    assert outcome.status == "refused"
    assert "no.pem: cannot be used to verify the server" in outcome.reason


def test_clock_behind_the_last_time_seen_skips_only_the_dates_of_our_authority(
    depot_class: type[Depot], tmp_path: Path
) -> None:
    """The certificate is of tomorrow, or the clock is of yesterday: the device cannot tell, until
    it remembers a time later than its clock.
    """
    tomorrow = make_authority(tmp_path / "tomorrow", NOW + timedelta(days=1))
    other = make_authority(tmp_path / "other", NOW + timedelta(days=1))
    state = tmp_path / "device"
    with depot_of(depot_class, tmp_path / "tls", tomorrow.context) as hub:
        hub.enrol(state, tomorrow.ca)
        outcome = update(state)
        assert outcome.status == "unreachable"
        assert "not yet valid" in outcome.reason

        seen = NOW + timedelta(days=2)  # within the week that a timestamp lives
        (state / "tuf" / "fresh.json").write_bytes(orjson.dumps({"at": seen.isoformat()}))
        outcome = update(state)
        assert outcome.status == "unchanged"
        assert outcome.fresh_at == seen.isoformat(timespec="seconds")  # time does not go back

        hub.enrol(state, other.ca)
        assert "certificate verify failed" in update(state).reason


def test_metadata_expires_by_the_latest_time_known(depot: Depot, state: Path) -> None:
    """A clock set back does not bring expired metadata back to life."""
    seen = NOW + timedelta(days=8)  # a timestamp lives seven
    (state / "tuf" / "fresh.json").write_bytes(orjson.dumps({"at": seen.isoformat()}))
    outcome = update(state)
    assert outcome.status == "unreachable"
    assert "expired" in outcome.reason
