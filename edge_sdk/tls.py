"""TLS contexts of a device: trust the system, one authority of its own, or one certificate."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from edge_sdk.errors import ConfigurationError
from edge_sdk.installation import clock_is_wrong

_NO_CHECK_TIME: Final = 0x200000  # X509_V_FLAG_NO_CHECK_TIME, which ssl does not name


def tls_context(ca: Path | None, *, check_dates: bool | None = None) -> ssl.SSLContext:
    """A context that verifies peers against the authorities in the PEM file `ca` only.

    Args:
        ca: None for the system's authorities.
        check_dates: False ignores the dates of certificates, and only where `ca` is given; None
            ignores them while this device's clock is plainly wrong.
    Raises: ConfigurationError if the file is missing or holds no certificate.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as err:  # an SSLError is one too
        raise _unusable(ca, err) from err
    if ca is not None:
        set_date_checks(context, not clock_is_wrong() if check_dates is None else check_dates)
    return context


def set_date_checks(context: ssl.SSLContext, check_dates: bool) -> None:
    """Make a context check the dates of certificates, or ignore them, from the next handshake on.

    Ignore them only for an authority of our own, and only while the clock is plainly wrong.
    """
    if check_dates:
        context.verify_flags &= ~_NO_CHECK_TIME
    else:
        context.verify_flags |= _NO_CHECK_TIME


def tls_context_for(
    url: str, ca: Path | None, *, check_dates: bool | None = None
) -> ssl.SSLContext | None:
    """The same for the server at `url`; None where that is no https URL, whatever `ca` names."""
    return tls_context(ca, check_dates=check_dates) if urlsplit(url).scheme == "https" else None


def pinned_tls_context(pinned: Path) -> ssl.SSLContext:
    """A context that accepts the first certificate of the PEM file `pinned`, under any host name.

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
