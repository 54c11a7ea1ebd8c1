"""The trainer's address out of an invitation. No torch: a running agent needs it too."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from edge_sdk.errors import ConfigurationError
from edge_sdk.identity import Identity

INVITATION: Final = "train"  # the server's command {"op": "train", "url": ...}
ANYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - read from an invitation, not bound


def resolve_trainer_url(identity: Identity, invited: str) -> str:
    """The trainer's URL out of an invitation.

    The device sends its credential there. So the trainer must be on the server's own host, and use
    https where the server does. A trainer that listens everywhere has the server's host.

    Raises: ConfigurationError saying why the invitation is refused.
    """
    server, url = urlsplit(identity.server), urlsplit(invited)
    if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/"):
        raise ConfigurationError(f"trainer: expected http(s)://HOST:PORT, got {invited!r}")
    if server.scheme == "https" and url.scheme != "https":
        raise ConfigurationError(
            f"trainer {invited}: expected https, which the server uses; start the trainer with TLS"
        )
    host = server.hostname if url.hostname in ANYWHERE else url.hostname
    if host != server.hostname:
        raise ConfigurationError(
            f"trainer {invited}: expected the server's host, {server.hostname};"
            " give --trainer to train elsewhere"
        )
    shown = f"[{host}]" if host is not None and ":" in host else host
    return f"{url.scheme}://{shown}" + ("" if url.port is None else f":{url.port}")
