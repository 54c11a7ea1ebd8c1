"""`splitedge server backup`, `restore` and `doctor`: looking after a server's state."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from edge_sdk.cli.output import print_json
from server.options import STATE_DEFAULT, AsJson, State
from server.registry.options import RegistryPasswordFile, RegistryUrl

app = typer.Typer()


@app.command(epilog="Example: splitedge server backup monday.tar --state ./server")
def backup(
    out: Annotated[
        Path, typer.Argument(metavar="OUT", help="A new file OUT.tar, or a new folder.")
    ],
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Write registry, keys, signed bundles and models to OUT, whether the server runs or not.

    The backup holds the server's secret keys: its files are readable by you only.
    """
    from server.upkeep.backup import back_up

    saved = back_up(state, out)
    if as_json:
        print_json({"backup": str(out), **asdict(saved)})
        return
    typer.echo(f"{out}: {saved.files} files, {saved.devices} devices")
    for version in saved.incomplete:
        typer.echo(
            f"warning: {version} is not complete on this server; see `splitedge server doctor`"
        )
    typer.echo("It holds the server's secret keys: keep it where nobody else can read it.")


@app.command(epilog="Example: splitedge server restore monday.tar --state ./server")
def restore(
    backup: Annotated[Path, typer.Argument(metavar="BACKUP", help="A backup's file or folder.")],
    state: State = STATE_DEFAULT,
    registry: RegistryUrl = None,
    registry_password_file: RegistryPasswordFile = None,
    as_json: AsJson = False,
) -> None:
    """Make a server's state from a backup, in a folder that is empty or does not exist.

    With --registry the devices go into that empty database: so a registry moves from SQLite to
    PostgreSQL, and back without it.
    """
    from server.registry.options import registry_location
    from server.upkeep.backup import restore as restore_state

    done = restore_state(backup, state, registry_location(registry, registry_password_file))
    if as_json:
        print_json({"state": str(state), **asdict(done)})
        return
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(done.made_at))
    typer.echo(f"{state}: {done.devices} devices as of {at}, registry {done.registry}")
    typer.echo(
        "Devices that were enrolled since then must enrol again; those that were revoked since then"
        " are let in again: revoke them again."
    )
    typer.echo(
        f"The root has version {done.root_version}. If a newer one was made since then (root renew,"
        " rotate, move-offline), devices that saw it refuse what this server signs, at once or"
        " after its next root: restore a backup made after that, or enrol them again."
    )


@app.command(epilog="Example: splitedge server doctor --state ./server")
def doctor(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Check a server's state: keys, registry, bundles, models, disk, clock, descriptors.

    A line each: ok, warning or problem, and what to do. With a problem the exit status is 1.
    """
    from server.upkeep.doctor import examine

    found = examine(state)
    if as_json:
        print_json([asdict(one) for one in found])
    else:
        for one in found:
            typer.echo(f"{one.verdict:8} {one.check}: {one.text}")
    if any(one.verdict == "problem" for one in found):
        raise typer.Exit(1)
