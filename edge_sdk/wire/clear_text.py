"""Credentials never leave for another machine unencrypted, unless the user allowed it."""

from __future__ import annotations

from urllib.parse import urlsplit

from edge_sdk.errors import ConfigurationError
from edge_sdk.wire.address import is_loopback

_ENCRYPTED = {"http": "https", "mqtt": "mqtts"}


def is_clear(url: str) -> bool:
    """Whether what is sent to `http://...` or `mqtt://...` crosses a network unencrypted."""
    parts = urlsplit(url)
    return parts.scheme in _ENCRYPTED and not is_loopback(parts.hostname or "")


def clear_text_reason(url: str) -> str:
    """Why nothing secret is sent to `url`, which `is_clear`, and what to do."""
    scheme = urlsplit(url).scheme
    return (
        f"{url} is another machine without encryption, which would see this device's credential;"
        f" have the server offer {_ENCRYPTED[scheme]}:// (its options --tls-cert and --tls-key), or"
        " allow it with --insecure at `splitedge agent enroll`, or `splitedge agent insecure allow`"
    )


def refuse_clear_text(url: str, what: str, *, insecure: bool) -> None:
    """Refuse to send a credential to `url`.

    Raises: ConfigurationError naming `what`, unless the user allowed it by `insecure`.
    """
    if not insecure and is_clear(url):
        raise ConfigurationError(f"{what}: {clear_text_reason(url)}")
