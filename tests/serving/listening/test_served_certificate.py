"""The certificate that a server shows is known, whatever has become of its file."""

from __future__ import annotations

import ssl
from pathlib import Path

from cryptography import x509
from fastapi import FastAPI

from benchmarks.mqtt.certificates import self_signed
from edge_sdk.service.listening import listen
from edge_sdk.wire.address import Address
from server.http_server import HttpServer
from server.listening.certificate import CertificateEnds, end_in_file


def test_a_renewed_file_does_not_hide_the_certificate_that_is_shown(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path, days=2)
    old = end_in_file(cert)
    assert old is not None
    listener = listen(Address("127.0.0.1", 0))
    address = listener.address.host, listener.address.port
    server = HttpServer(FastAPI(), listener, cert, key)
    assert server.certificate_ends() is None  # it shows none yet
    with server:
        assert server.certificate_ends() == CertificateEnds(old, old)
        self_signed(tmp_path, days=90)
        new = end_in_file(cert)
        assert new is not None
        assert new - old > 80 * 86_400
        assert server.certificate_ends() == CertificateEnds(old, new)
        shown = x509.load_pem_x509_certificate(ssl.get_server_certificate(address).encode())
        assert shown.not_valid_after_utc.timestamp() == old
        cert.write_text("half of a file")
        assert server.certificate_ends() == CertificateEnds(old, None)


def test_a_server_without_tls_shows_none() -> None:
    with HttpServer(FastAPI(), listen(Address("127.0.0.1", 0))) as server:
        assert server.certificate_ends() is None
