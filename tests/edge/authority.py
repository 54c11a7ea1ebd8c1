"""A certificate authority as a user makes one, and a certificate of it for 127.0.0.1."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Authority:
    """An authority's certificate, and a server that has one of it for 127.0.0.1.

    Attributes:
        chain: PEM file of the server's key and certificate.
    """

    ca: Path
    chain: Path
    context: ssl.SSLContext


def make_authority(folder: Path, valid_from: datetime) -> Authority:
    """An authority of one's own, whose certificates are valid for a year from then."""
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
    return Authority(ca, chain, context)
