"""Options of commands that say where the registry is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edge_sdk.errors import ConfigurationError

if TYPE_CHECKING:
    from server.registry.location import RegistryLocation

RegistryUrl = Annotated[
    str | None,
    typer.Option(
        "--registry",
        envvar="SPLITEDGE_REGISTRY",
        help="postgresql://USER@HOST/NAME of the database of devices, tokens and models; default: "
        "as last time, else a SQLite file in the state folder. The password comes from "
        "--registry-password-file, PGPASSWORD or ~/.pgpass; one in the URL works too, but other "
        "users of this machine can read it with ps.",
    ),
]
RegistryPasswordFile = Annotated[
    Path | None,
    typer.Option(
        envvar="SPLITEDGE_REGISTRY_PASSWORD_FILE",
        help="File with one line, the password of the user in --registry.",
    ),
]


def registry_location(url: str | None, password_file: Path | None) -> RegistryLocation | None:
    """The registry that the options name; None if they name none.

    Raises: ConfigurationError.
    """
    from server.registry.location import RegistryLocation  # noqa: PLC0415 - SQLAlchemy is heavy

    if url is None:
        if password_file is not None:
            raise ConfigurationError(
                "--registry-password-file needs --registry; give both, or neither"
            )
        return None
    return RegistryLocation.parse(url, password_file)
