"""Secrets of 256 random bits, the hashes that are stored, and enrolment tokens as text.

Plain SHA-256 is enough for these: a slow hash protects passwords that people choose, and 2**256
values cannot be tried.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

FINGERPRINT_CHARACTERS: Final = 32


def new_secret() -> str:
    """A new secret: 43 characters of `A-Za-z0-9_-`. Only its hash is stored."""
    return secrets.token_urlsafe(32)


def secret_sha256(secret: str) -> str:
    """The hash that is stored for `secret`, in hex; any text has one."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def is_secret(candidate: str, sha256: str) -> bool:
    """Whether `candidate` has that hash; the time taken does not tell where they differ."""
    return hmac.compare_digest(secret_sha256(candidate), sha256)


def token_text(secret: str, root: bytes) -> str:
    """An enrolment token to hand out: the secret, a dot, and the fingerprint of the TUF root.

    With the fingerprint a device checks the root that it is given, before it trusts it.
    """
    return f"{secret}.{hashlib.sha256(root).hexdigest()[:FINGERPRINT_CHARACTERS]}"


def token_secret(text: str) -> str:
    """The secret of a token, which is what the server redeems."""
    return text.partition(".")[0]
