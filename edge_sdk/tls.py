"""Whom this device believes over TLS: an authority of its own, one certificate, or the system."""

from __future__ import annotations

import ssl
from pathlib import Path

from edge_sdk.errors import ConfigurationError


def trusting(ca: Path | None) -> ssl.SSLContext:
    """Verifies peers against the authorities in the PEM file `ca` only; None for the system's.

    Raises: ConfigurationError if the file is missing or holds no certificate.
    """
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as err:  # an SSLError is one too
        raise _unusable(ca, err) from err


def trusting_only(pinned: Path) -> ssl.SSLContext:
    """Accepts the first certificate of the PEM file `pinned`, whatever its names, and no other.

    Raises: ConfigurationError if the file is missing or holds no certificate.
    """
    try:
        # the first of the file is the peer's own; those of its issuers may follow
        first, end, _ = pinned.read_text("ascii", "replace").partition(ssl.PEM_FOOTER)
        context = ssl.create_default_context(cadata=first + end)
    except (OSError, ValueError) as err:
        raise _unusable(pinned, err) from err
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def _unusable(path: Path | None, err: Exception) -> ConfigurationError:
    why = "holds no certificate" if isinstance(err, ssl.SSLError | ValueError) else _text(err)
    return ConfigurationError(
        f"{path}: cannot be used to verify the server ({why}); name a PEM file of its authority"
    )


def _text(err: Exception) -> str:
    return getattr(err, "strerror", None) or str(err)
