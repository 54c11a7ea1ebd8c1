"""The end of a certificate: of the one in a file, and of the one that a listener serves."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509


@dataclass(frozen=True, slots=True)
class CertificateEnds:
    """Ends of validity, UTC seconds since 1970.

    Attributes:
        served: of the certificate that peers are shown.
        on_disk: of the one in the file, which a restart would serve; None if it cannot be read.
    """

    served: float
    on_disk: float | None = None


def first_certificate(path: Path) -> x509.Certificate:
    """The first certificate of a PEM file.

    Raises: OSError, ValueError if the file cannot be read.
    """
    return x509.load_pem_x509_certificates(path.read_bytes())[0]


def end_in_file(path: Path) -> float | None:
    """End of the first certificate in a PEM file, UTC seconds since 1970; None if unreadable."""
    try:
        return first_certificate(path).not_valid_after_utc.timestamp()
    except (OSError, ValueError):
        return None


def end_served(context: ssl.SSLContext) -> float:
    """End of the certificate that a listener with this context shows, UTC seconds since 1970.

    A handshake in memory asks it: the context was filled from a file that may be another one now.

    Raises: ssl.SSLError if the context has no certificate.
    """
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname, asking.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(to_client, to_server)
    server = context.wrap_bio(to_server, to_client, server_side=True)
    while not _shakes(client):
        _shakes(server)
    shown = client.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).not_valid_after_utc.timestamp()


def _shakes(end: ssl.SSLObject) -> bool:
    """Go on with the handshake; whether this end is done."""
    try:
        end.do_handshake()
    except ssl.SSLWantReadError:
        return False
    return True
