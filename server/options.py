"""Options that commands of `splitedge server` share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

State = Annotated[Path, typer.Option("--state", help="Folder of all that the server stores.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        "--key-passphrase-file",
        envvar="SPLITEDGE_KEY_PASSPHRASE_FILE",
        help="File with one line, the passphrase of the private keys.",
    ),
]
STATE_DEFAULT: Final = Path("splitedge-server")
