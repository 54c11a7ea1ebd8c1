"""Requests that are refused before their body is read: without the secret, or from web pages.

A web page in a browser on this device can send requests to its loopback ports. It can read answers
too, once the name of its server is made to point to 127.0.0.1 (DNS rebinding). Both show: the first
in the header Origin, the second in the header Host.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError
from edge_sdk.service.exchange import Head
from edge_sdk.service.messages import RequestError

SECRET_CHARACTERS_MIN: Final = 16
# what a program that watches the agent needs, and what tells a stranger nothing
OPEN_PATHS: Final = ("/v2/health/live", "/v2/health/ready")


@dataclass(frozen=True, slots=True)
class Guard:
    """Checks of a request's head.

    Attributes:
        secret: what clients send as bearer token; None asks for none.
        loopback: whether the agent listens on loopback, where only its own names are asked for.
    """

    secret: str | None = None
    loopback: bool = True

    def check(self, head: Head) -> None:
        """Let the request pass.

        Raises: RequestError with status 401 or 403.
        """
        if "origin" in head.headers or head.headers.get("sec-fetch-site", "none") != "none":
            raise RequestError(403, "web pages may not ask this agent; ask from a program")
        if self.loopback and not _is_own_name(head.headers.get("host", "")):
            raise RequestError(
                403, "Host: expected localhost or a loopback address; use http://127.0.0.1:PORT"
            )
        if self.secret is not None and head.path not in OPEN_PATHS:
            scheme, _, given = head.headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode(), self.secret.encode())
            if scheme.lower() != "bearer" or not same:
                raise RequestError(401, "expected the header Authorization: Bearer SECRET")


def read_secret(path: Path) -> tuple[str, bool]:
    """The secret in a file with one line; a file that is not there is made.

    Returns: the secret; whether it is new.
    Raises: ConfigurationError for a file that holds no secret; StorageError.
    """
    try:
        secret = path.read_text("ascii").strip()
    except FileNotFoundError:
        secret = secrets.token_urlsafe(32)
        write_atomic(path, f"{secret}\n".encode(), mode=0o600)
        return secret, True
    except (OSError, UnicodeDecodeError) as err:
        reason = getattr(err, "strerror", None) or "it is not ASCII text"
        raise ConfigurationError(f"{path}: cannot be read as a secret ({reason})") from err
    if len(secret) < SECRET_CHARACTERS_MIN or len(secret.split()) != 1:
        raise ConfigurationError(
            f"{path}: expected one line of at least {SECRET_CHARACTERS_MIN} characters without"
            " blanks; remove the file, and the agent makes one"
        )
    return secret, False


def _is_own_name(host: str) -> bool:
    """Whether the header Host names this device's loopback interface."""
    in_brackets = host.startswith("[")
    name = host[1:].partition("]")[0] if in_brackets else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
