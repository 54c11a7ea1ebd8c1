"""`splitedge server root …`: the keys that devices trust: show, renew, rotate, move, encrypt.

They work on the state folder, whether the server runs or not; a running server follows at once.
Only `encrypt-keys` needs it stopped: a running server has no passphrase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from edge_sdk.cli.output import print_json, print_table
from server.options import STATE_DEFAULT, AsJson, PassphraseFile, State

if TYPE_CHECKING:
    from server.signing.artifacts import ArtifactRepository

app = typer.Typer(
    help="The root and the keys of signed updates: show, renew, rotate, move, encrypt.",
    epilog="Example: splitedge server root show --state ./server",
    no_args_is_help=True,
)

RootKeyPlaces = Annotated[
    list[str] | None,
    typer.Option(
        "--root-key",
        metavar="offline:DIR",
        help="Folder with root keys that are not in the state; repeat it for several.",
    ),
]


OLD_BACKUPS = (
    "backups made before still hold the keys as they were: delete them and make a new one; if one"
    " may be in other hands, run `splitedge server root rotate`"
)


class Rotated(StrEnum):
    """Choice of the keys to replace."""

    ALL = "all"
    ONLINE = "online"
    ROOT = "root"


@app.command(epilog="Example: splitedge server root show --state ./server --json")
def show(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Show keys, end dates, and what someone has to act on."""
    from server.signing.report import signing_report

    report = signing_report(_repository(state))
    if as_json:
        print_json(asdict(report))
        return
    table = Table("role", "keys", "must sign", "in the state", "expires")
    for one in report.roles:
        kept = "no" if not one.keys_in_state else "encrypted" if one.encrypted else "in the clear"
        ends = "" if one.expires is None else f"{one.expires:%Y-%m-%d}"
        table.add_row(
            one.role, ", ".join(one.keys), f"{one.threshold} of {len(one.keys)}", kept, ends
        )
    typer.echo(f"root version {report.root_version or 'none'}")
    if report.roles:
        print_table(table)
    for line in report.problems:
        typer.echo(f"warning: {line}")


@app.command(epilog="Example: splitedge server root renew --state ./server")
def renew(
    state: State = STATE_DEFAULT,
    root_key: RootKeyPlaces = None,
    key_passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Sign the next root with the same keys, valid for ten years from now.

    It needs root keys and the files tuf/metadata/*.root.json only, so it can be done on another
    machine: bring the file that it writes back to the same folder.
    """
    artifacts = _repository(state, key_passphrase_file)
    version = artifacts.rotate(folders=_folders(root_key))
    _audit(state, "root.renew", f"version {version}")
    _say(artifacts, version, "the keys are the same", as_json=as_json)


@app.command(epilog="Example: splitedge server root rotate --keys online --state ./server")
def rotate(
    keys: Annotated[
        Rotated, typer.Option(help="Keys to replace: those that the server signs with, or all.")
    ] = Rotated.ALL,
    state: State = STATE_DEFAULT,
    root_key: RootKeyPlaces = None,
    root_keys: Annotated[
        int | None, typer.Option(min=1, help="Number of new root keys; default: as many as now.")
    ] = None,
    root_threshold: Annotated[
        int | None, typer.Option(min=1, help="How many must sign a root; default: as many as now.")
    ] = None,
    key_passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Replace keys, in a root that the old root keys sign; devices follow by themselves.

    New offline root keys are written to the first DIR of --root-key.
    """
    from tuf.api.metadata import Root

    from server.signing.keys import ONLINE, RootKeys

    artifacts = _repository(state, key_passphrase_file)
    folders = _folders(root_key)
    roles = [] if keys is Rotated.ROOT else [*ONLINE]
    new = None
    if keys is not Rotated.ONLINE:
        roles.append(Root.type)
        now = artifacts.roots.newest().signed.roles[Root.type]
        new = RootKeys(
            _place(artifacts, folders),
            root_keys or len(now.keyids),
            root_threshold or now.threshold,
        )
    version = artifacts.rotate(roles, folders=folders, new_root_keys=new)
    _audit(state, "root.rotate", f"version {version}, new keys: {', '.join(roles)}")
    _say(artifacts, version, f"new keys: {', '.join(roles)}", as_json=as_json)
    if new is not None and new.folder is not None and not as_json:
        typer.echo(
            f"the new root keys are {new.folder}/root-v{version}-*.pem; destroy the older ones"
            " once a backup has the new"
        )


@app.command("move-offline", epilog="Example: splitedge server root move-offline /media/usb/root")
def move_offline(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the new root keys.")],
    state: State = STATE_DEFAULT,
    root_keys: Annotated[int, typer.Option(min=1, help="Number of root keys.")] = 1,
    root_threshold: Annotated[int, typer.Option(min=1, help="How many must sign a root.")] = 1,
    key_passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
) -> None:
    """Move the root out of the state: new root keys in DIR, and the old one loses its power.

    DIR is needed again for `root renew` and `root rotate` only.
    """
    from tuf.api.metadata import Root

    from server.signing.keys import RootKeys

    artifacts = _repository(state, key_passphrase_file)
    new = RootKeys(folder, root_keys, root_threshold)
    version = artifacts.rotate([Root.type], new_root_keys=new)
    _audit(state, "root.move-offline", f"version {version}")
    _say(artifacts, version, f"its keys are {folder}/root-v{version}-*.pem", as_json=as_json)
    if as_json:
        return
    if artifacts.keys.passphrase is not None:
        typer.echo(
            "they are encrypted with the server's own passphrase, which lies on the server: keep a"
            " copy of it with them, and keep them where who has the server cannot read them"
        )
    typer.echo(
        "backups made before still hold the old root key, which a device takes until it has seen"
        " the new root: delete them and make a new one"
    )


@app.command(
    "encrypt-keys",
    epilog="Example: splitedge server root encrypt-keys --key-passphrase-file ./passphrase",
)
def encrypt_keys(
    state: State = STATE_DEFAULT,
    root_key: RootKeyPlaces = None,
    key_passphrase_file: PassphraseFile = None,
    old_passphrase_file: Annotated[
        Path | None, typer.Option(help="File of the passphrase that the keys have now.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Encrypt the private keys in the state (and in --root-key), or change their passphrase."""
    from edge_sdk.errors import ConfigurationError, StateInUseError
    from edge_sdk.state import StateLock
    from server.signing import keys

    artifacts = _repository(state)
    passphrase = keys.read_passphrase(key_passphrase_file)
    if passphrase is None:
        raise ConfigurationError("encrypt-keys: give the passphrase by --key-passphrase-file FILE")
    folders = [artifacts.keys_folder, *_folders(root_key)]
    old = keys.read_passphrase(old_passphrase_file)
    try:
        lock = StateLock(state, "server")  # no server starts meanwhile, either
    except StateInUseError as err:
        raise ConfigurationError(
            f"{state}: a server runs here, which could sign nothing with keys that it cannot read;"
            " stop it, run this again, and start it with"
            f" --key-passphrase-file {key_passphrase_file}"
        ) from err
    with lock, artifacts.locked():
        written = keys.encrypt_keys(folders, passphrase, old)
    _audit(state, "root.encrypt-keys", f"{len(written)} keys")
    if as_json:
        print_json({"encrypted": [str(path) for path in written]})
    else:
        typer.echo(f"encrypted {', '.join(map(str, written))}")
        typer.echo("start the server with --key-passphrase-file from now on")
        typer.echo(OLD_BACKUPS)


@app.command("trust-clock", epilog="Example: splitedge server root trust-clock --state ./server")
def trust_clock(
    state: State = STATE_DEFAULT,
    key_passphrase_file: PassphraseFile = None,
) -> None:
    """Sign by this machine's clock although it is far ahead of the last signature."""
    artifacts = _repository(state, key_passphrase_file)
    artifacts.trust_clock()
    _audit(state, "root.trust-clock", f"{artifacts.last_signed:%Y-%m-%d}")
    typer.echo(f"signed on {artifacts.last_signed:%Y-%m-%d %H:%M} UTC")


def _repository(state: Path, passphrase_file: Path | None = None) -> ArtifactRepository:
    from edge_sdk.errors import ConfigurationError
    from server.signing.artifacts import ArtifactRepository
    from server.signing.keys import read_passphrase
    from server.state import check_not_a_device

    check_not_a_device(state)
    if not state.is_dir():
        raise ConfigurationError(f"{state}: not the state folder of a server; check --state")
    return ArtifactRepository(state, passphrase=read_passphrase(passphrase_file))


def _audit(state: Path, what: str, detail: str) -> None:
    """Note the use of a key in the audit log, if there is one; it has been used all the same."""
    from edge_sdk.errors import SplitedgeError
    from server.registry.location import has_registry
    from server.state import existing_registry

    if not has_registry(state):
        return  # a copy of the roots, without a server
    try:
        with existing_registry(state) as registry:
            registry.trail.record("operator", what, detail)
    except SplitedgeError as err:
        typer.echo(f"note: not in the audit log: {err}", err=True)


def _folders(places: Sequence[str] | None) -> list[Path]:
    from server.signing.keys import RootKeys

    return [folder for one in places or () if (folder := RootKeys.parse(one).folder) is not None]


def _place(artifacts: ArtifactRepository, folders: Sequence[Path]) -> Path | None:
    """The folder of new root keys: where the present ones lie."""
    return folders[0] if folders and not artifacts.keys.path("root").exists() else None


def _say(artifacts: ArtifactRepository, version: int, what: str, *, as_json: bool) -> None:
    expires = artifacts.roots.newest().signed.expires
    if as_json:
        print_json({"root_version": version, "expires": expires.isoformat()})
    else:
        typer.echo(f"root version {version}, valid until {expires:%Y-%m-%d}: {what}")
