"""Secrets of 256 random bits, the hashes that are stored, and enrolment tokens as text.

Plain SHA-256 is enough for these: a slow hash protects passwords that people choose, and 2**256
values cannot be tried.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from typing import Final

FINGERPRINT_CHARACTERS: Final = 32
MOSQUITTO_SALT_BYTES: Final = 12  # Mosquitto 2.0 takes no other length
MOSQUITTO_ITERATIONS: Final = 101  # Mosquitto's own number


def new_secret() -> str:
    """A new secret: 43 characters of `A-Za-z0-9_-`. Only its hash is stored."""
    return secrets.token_urlsafe(32)


def secret_sha256(secret: str) -> str:
    """The hash that is stored for `secret`, in hex; any text has one."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def is_secret(candidate: str, sha256: str) -> bool:
    """Whether `candidate` has that hash; the time taken does not tell where they differ."""
    return hmac.compare_digest(secret_sha256(candidate), sha256)


def mosquitto_hash(secret: str, salt: bytes | None = None) -> str:
    """The hash of `secret` that Mosquitto keeps: `ITERATIONS$SALT$HASH`, the last two in base64.

    It is PBKDF2-HMAC-SHA512. Mosquitto cannot check a password against `secret_sha256`.

    Args:
        salt: of 12 bytes; None draws one.
    """
    salt = secrets.token_bytes(MOSQUITTO_SALT_BYTES) if salt is None else salt
    derived = hashlib.pbkdf2_hmac("sha512", secret.encode(), salt, MOSQUITTO_ITERATIONS)
    fields = (base64.b64encode(part).decode() for part in (salt, derived))
    return "$".join((str(MOSQUITTO_ITERATIONS), *fields))


def token_text(secret: str, root: bytes) -> str:
    """An enrolment token to hand out: the secret, a dot, and the fingerprint of the TUF root.

    With the fingerprint a device checks the root that it is given, before it trusts it.
    """
    return f"{secret}.{hashlib.sha256(root).hexdigest()[:FINGERPRINT_CHARACTERS]}"


def token_secret(text: str) -> str:
    """The secret of a token, which is what the server redeems."""
    return text.partition(".")[0]


def token_fingerprint(text: str) -> str:
    """The fingerprint in a token; empty where a device sent the secret alone."""
    return text.partition(".")[2]
