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
Artifacts = Annotated[
    str | None,
    typer.Option(
        "--artifacts",
        envvar="SPLITEDGE_ARTIFACTS",
        help="URL of a store, such as s3://BUCKET/PREFIX or file:///mnt/share: the API copies "
        "models and signed bundles there, backends elsewhere read them from there. Logins come "
        "from the environment, such as AWS_ACCESS_KEY_ID; s3:// needs the extra `s3`.",
    ),
]
STATE_DEFAULT: Final = Path("splitedge-server")
