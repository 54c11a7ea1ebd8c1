"""Secrets of 256 random bits, the hashes kept in their place, and tokens as people carry them.

Plain SHA-256 is enough for these: a slow hash protects what people choose, and nobody can try
2**256 values.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final

FINGERPRINT_CHARACTERS: Final = 32


def new_secret() -> str:
    """43 characters of `A-Za-z0-9_-`; the only time it is seen in the clear."""
    return secrets.token_urlsafe(32)


def secret_sha256(secret: str) -> str:
    """The hash under which `secret` is kept, in hex; any text has one."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def is_secret(candidate: str, sha256: str) -> bool:
    """Whether `candidate` has that hash, in a time that tells nothing of where they differ."""
    return hmac.compare_digest(secret_sha256(candidate), sha256)


def token_text(secret: str, root: bytes) -> str:
    """An enrolment token to hand out: the secret, a dot, and the fingerprint of the TUF root.

    By the fingerprint a device checks the root it is given, before it trusts it.
    """
    return f"{secret}.{hashlib.sha256(root).hexdigest()[:FINGERPRINT_CHARACTERS]}"


def token_secret(text: str) -> str:
    """The part of a token that is redeemed."""
    return text.partition(".")[0]
