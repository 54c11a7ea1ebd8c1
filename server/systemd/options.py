"""Needs of a server that its options tell: files that it can read, a broker that others reach."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edge_sdk.systemd.cli import values_of
from edge_sdk.systemd.unit import HIDDEN, ServiceUnit
from edge_sdk.systemd.users import SystemUser
from edge_sdk.wire.address import Address
from edge_sdk.wire.broker_address import BrokerAddress
from server.run import Addresses
from server.settings import AUTO, HTTP_DEFAULT, parse_broker

# options whose file the running server reads
FILES: Final = (
    "--tls-cert",
    "--tls-key",
    "--mqtt-ca",
    "--mqtt-password-file",
    "--registry-password-file",
    "--key-passphrase-file",
)
PRIVATE: Final = ("/tmp/", "/var/tmp/")  # noqa: S108 - PrivateTmp shows the service others


def unreadable_files(
    unit: ServiceUnit, words: Sequence[str], user: SystemUser, root: Path
) -> list[str]:
    """A sentence for each file of the options that the service could not read; [] if there is none.

    Args:
        words: options of `server run`.
        user: user of the service, as the system that is installed into knows it.
        root: of that system.
    """
    found = []
    for option, value in values_of(words, FILES):
        path = str(Path(unit.state) / value)
        if path.startswith((*HIDDEN, *PRIVATE)):
            why = "the service cannot see that folder"
        elif not (place := _place(path, root)).exists():
            why = "there is no such file"
        elif not user.reads(place, root):
            why = f"its user {unit.user} may not read it"
        else:
            continue
        found.append(f"{option} {path}: {why}")
    return found


def broker_note(words: Sequence[str], state: Path) -> str:
    """A sentence on a broker that only this machine reaches beside an API that others reach, or "".

    Args:
        words: options of `server run`.
        state: the state folder, whose last start says what options do not.
    """
    last = Addresses.load(state)
    given = dict(values_of(words, ("--http", "--mqtt")))
    http = given.get("--http") or (last.http if last else HTTP_DEFAULT)
    if Address.parse(http, "--http").loopback:
        return ""
    address = parse_broker(given.get("--mqtt") or (last.mqtt if last else AUTO))[1]
    if isinstance(address, BrokerAddress):
        return ""
    if address is None and last is not None:  # a broker of our own stays where it was
        address = parse_broker(last.mqtt)[1]
    if isinstance(address, Address) and not address.loopback:
        return ""
    return (
        "the broker listens on this machine alone, so devices elsewhere can enrol and update, but"
        " ask the server nothing: add --mqtt auto:0.0.0.0:8883 to the options"
    )


def _place(path: str, root: Path) -> Path:
    """The file as it is reached from here; on this machine behind its links."""
    return Path(path).resolve() if root == Path("/") else root / path.lstrip("/")
