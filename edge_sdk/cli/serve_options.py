"""Options of `splitedge agent run` that let other programs ask the agent over HTTP."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from edge_sdk.settings_file.serve_table import ServeTable

Serve = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="Answer programs over HTTP by the v2 protocol, for example at 127.0.0.1:8080; "
        "default: as agent.toml says, else not.",
    ),
]
ServeCert = Annotated[
    Path | None, typer.Option(help="PEM certificate for HTTPS, which other machines need.")
]
ServeKey = Annotated[Path | None, typer.Option(help="PEM key of the certificate.")]
ServeSecret = Annotated[
    Path | None,
    typer.Option(
        help="File with the secret that clients send as `Authorization: Bearer SECRET`; made where "
        "it is missing."
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Let other machines ask without HTTPS and without a secret."),
]


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options that replace settings of the table [serve]; None leaves the setting.

    Attributes:
        cert, key, secret: relative to the working folder.
    """

    address: str | None = None
    cert: Path | None = None
    key: Path | None = None
    secret: Path | None = None
    insecure: bool = False

    def table(self, file: ServeTable) -> ServeTable:
        """The table of the file with the options in their place.

        Raises: ConfigurationError for values that cannot be.
        """
        from dataclasses import replace

        from edge_sdk.errors import ConfigurationError

        given: dict[str, Any] = {"address": self.address, "insecure": self.insecure or None}
        for name in ("cert", "key", "secret"):
            path: Path | None = getattr(self, name)
            given[name] = path and path.resolve()
        changed = {name: value for name, value in given.items() if value is not None}
        try:
            return replace(file, **changed)
        except ConfigurationError as err:
            raise ConfigurationError(f"--serve: {err}") from err
