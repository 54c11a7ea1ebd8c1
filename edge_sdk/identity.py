"""A device's identity: written once at enrolment, read by everything that connects."""

from __future__ import annotations

import platform
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import orjson

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError, EnrolmentError
from edge_sdk.wire.clear_text import is_clear, refuse_clear_text
from edge_sdk.wire.topics import check_id

IDENTITY_NAME: Final = "agent.json"


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of an enrolled device, with which it connects.

    Attributes:
        server: base URL, `https://host:port`; http only where the server allows it.
        device, fleet: ids as in topics.
        credential: 256 bits, for HTTP and MQTT alike; kept out of `repr`, so out of logs.
        ca: PEM file of the only authority to trust for `server`; None for the system's.
        insecure: whether the user lets the credential travel to other machines unencrypted.
    Raises: ConfigurationError naming the field that is wrong, or for a `server` on another machine
        without encryption unless `insecure`.
    """

    server: str
    device: str
    fleet: str
    credential: str = field(repr=False)
    ca: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        check_id(self.device, "device")
        check_id(self.fleet, "fleet")
        check_server_url(self.server)
        refuse_clear_text(self.server, "server", insecure=self.insecure)
        if not self.credential or not self.credential.isascii() or ":" in self.credential:
            raise ConfigurationError("credential: expected ASCII without ':'; enrol again")

    @property
    def authorization(self) -> str:
        """The value of the HTTP header `Authorization`."""
        return f"Bearer {self.device}:{self.credential}"

    def url(self, path: str) -> str:
        """The server's URL for a path such as `api/v1/devices`."""
        return f"{self.server.rstrip('/')}/{path}"

    def save(self, state: Path) -> None:
        """Write the identity to the state folder, readable by its owner only.

        Raises: StorageError.
        """
        make_folder(state, mode=0o700)
        fields = asdict(self)
        if self.ca is not None:  # found from any working folder: a service may start in /
            fields["ca"] = self.ca.name if self.ca.parent == state else str(self.ca.resolve())
        raw = orjson.dumps(fields, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        write_atomic(state / IDENTITY_NAME, raw, mode=0o600)

    @classmethod
    def load(cls, state: Path, *, insecure: bool | None = None) -> Identity:
        """Read the identity from the state folder.

        A device that an earlier release enrolled without encryption goes on so: its credential has
        crossed the network already.

        Args:
            insecure: in place of what the file says.
        Raises: EnrolmentError if this device was never enrolled; ConfigurationError naming what is
            wrong with the file.
        """
        path = state / IDENTITY_NAME
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            raise EnrolmentError(
                f"{path}: not found, this device is not enrolled; run `splitedge agent enroll`"
            ) from None
        except OSError as err:
            raise ConfigurationError(f"{path}: cannot be read ({err.strerror})") from err
        try:
            data = orjson.loads(raw)
            ca, server = data["ca"], str(data["server"])
            if insecure is None:
                insecure = bool(data.get("insecure", is_clear(server)))
            return cls(
                server=server,
                device=str(data["device"]),
                fleet=str(data["fleet"]),
                credential=str(data["credential"]),
                ca=None if ca is None else state / str(ca),
                insecure=insecure,
            )
        except (orjson.JSONDecodeError, KeyError, TypeError) as err:
            raise ConfigurationError(f"{path}: {err}; enrol again") from err


def host_id() -> str | None:
    """The name of this machine as a device id; None for a name that says nothing."""
    name = re.sub(r"[^a-z0-9]+", "-", platform.node().partition(".")[0].lower()).strip("-")
    return None if name in ("", "localhost") else name[:63].rstrip("-")


def check_not_enrolled(state: Path) -> None:
    """Refuse a state folder that has an identity: a new one would replace it.

    Raises: ConfigurationError.
    """
    if (state / IDENTITY_NAME).exists():
        raise ConfigurationError(
            f"{state}: a device is enrolled there already; to go on with it, run `splitedge agent"
            " update` or `splitedge agent run`; for another device, give another --state"
        )


def check_server_url(text: str, name: str = "server") -> str:
    """Return `text` if it can be a server's base URL.

    Raises: ConfigurationError, which begins with `name`.
    """
    try:
        url = urlsplit(text)
        fits = url.scheme in ("http", "https") and bool(url.hostname) and (url.port or 1) > 0
    except ValueError:
        fits = False
    if not fits or url.query or url.fragment:
        raise ConfigurationError(f"{name}: expected http(s)://HOST[:PORT], got {text!r}")
    return text
