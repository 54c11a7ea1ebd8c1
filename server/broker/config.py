"""`splitedge server broker-config`: files for your own Mosquitto, and the commands to run then."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError
from edge_sdk.wire.broker_address import BrokerAddress
from server.broker.mosquitto_files import BACKEND, write_config

BACKEND_FILE: Final = "backend.password"
ANYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - read from the user, not bound


@dataclass(frozen=True, slots=True)
class BrokerFiles:
    """The written files, and the URL for `splitedge server run --mqtt`.

    Attributes:
        config: for `mosquitto -c`.
        password_file: password of the server's own user, which `url` names without the password.
    """

    config: Path
    password_file: Path
    url: str


def write_broker(
    folder: Path,
    *,
    host: str,
    port: int,
    certificate: Path | None = None,
    key: Path | None = None,
    insecure: bool = False,
    password_file: Path | None = None,
) -> BrokerFiles:
    """Write a Mosquitto configuration into `folder`, and a new password if there is none.

    Args:
        password_file: password of the server's own user; by default a file in `folder`.
    Raises: ConfigurationError as `write_config`; StorageError.
    """
    password_file = password_file or folder / BACKEND_FILE
    # first: a configuration without a known password would lock the server out
    credential = read_or_make_password(password_file)
    config = write_config(
        folder,
        credential=credential,
        host=host,
        port=port,
        certificate=certificate,
        key=key,
        insecure=insecure,
    )
    reached = "HOST" if host in ANYWHERE else host
    address = BrokerAddress(reached, port, certificate is not None)
    return BrokerFiles(config, password_file, address.url.replace("://", f"://{BACKEND}@"))


def read_or_make_password(file: Path) -> str:
    """The password in a file of one line; a new one if there is no such file.

    Raises: ConfigurationError; StorageError.
    """
    if not file.exists():
        make_folder(file.parent, mode=0o700)
        write_atomic(file, f"{secrets.token_urlsafe(32)}\n".encode(), mode=0o600)
    return read_password(file)


def read_password(file: Path) -> str:
    """The password in a file of one line.

    Raises: ConfigurationError.
    """
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigurationError(f"{file}: the password cannot be read ({err})") from err
    if not text or "\n" in text:
        raise ConfigurationError(f"{file}: expected one line with a password, got another text")
    return text
