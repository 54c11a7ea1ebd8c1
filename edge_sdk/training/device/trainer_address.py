"""Where a trainer is: what of an invitation a device takes. No torch: a running agent asks too."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from edge_sdk.errors import ConfigurationError
from edge_sdk.identity import Identity

INVITATION: Final = "train"  # the server's command {"op": "train", "url": ...}
ANYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - read from an invitation, not bound


def resolve_trainer_url(identity: Identity, invited: str) -> str:
    """The trainer's address out of an invitation.

    The credential goes there, so it has to be the server's own host, and no less protected than
    the server; one that listens everywhere is where the server is.

    Raises: ConfigurationError saying why the invitation is not taken.
    """
    server, url = urlsplit(identity.server), urlsplit(invited)
    if url.scheme not in ("http", "https") or not url.hostname or url.path not in ("", "/"):
        raise ConfigurationError(f"trainer: expected http(s)://HOST:PORT, got {invited!r}")
    if server.scheme == "https" and url.scheme != "https":
        raise ConfigurationError(f"trainer {invited}: expected https, as the server has it")
    host = server.hostname if url.hostname in ANYWHERE else url.hostname
    if host != server.hostname:
        raise ConfigurationError(
            f"trainer {invited}: expected the server's host, {server.hostname};"
            " give --trainer if another one is meant"
        )
    shown = f"[{host}]" if host is not None and ":" in host else host
    return f"{url.scheme}://{shown}" + ("" if url.port is None else f":{url.port}")
