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
MqttPasswordFile = Annotated[
    Path | None,
    typer.Option(
        envvar="SPLITEDGE_MQTT_PASSWORD_FILE",
        help="File with one line, the password of the user in --mqtt.",
    ),
]
Batch = Annotated[int, typer.Option(help="Largest batch of queries.")]
Queue = Annotated[int, typer.Option(help="Largest number of waiting queries; more are refused.")]
Threads = Annotated[int, typer.Option(help="Compute threads; 0 means half of its cores.")]
Provider = Annotated[
    str,
    typer.Option(
        help="What runs the model: auto, cpu, cuda, openvino, xnnpack or tensorrt; auto takes CUDA "
        "if onnxruntime-gpu is installed and works, else the CPU."
    ),
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM key of the certificate.")]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Allow unencrypted connections from other machines.")
]
STATE_DEFAULT: Final = Path("splitedge-server")
