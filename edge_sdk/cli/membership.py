"""`splitedge agent rotate` and `splitedge agent quarantine …`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from edge_sdk.cli.agent_options import STATE_DEFAULT, AsJson, State
from edge_sdk.cli.output import print_json, print_table, waiting

quarantine_app = typer.Typer(
    help="The bundles that failed on this device: list them, and let one be tried again.",
    epilog="Example: splitedge agent quarantine list --state ./pi",
    no_args_is_help=True,
)


def rotate(state: State = STATE_DEFAULT) -> None:
    """Replace this device's credential; an agent that runs here goes on with the new one.

    The old one is valid until the server has confirmed the new one, so a power cut at any moment
    leaves one that works.
    """
    from edge_sdk.identity import Identity
    from edge_sdk.membership import rotation
    from edge_sdk.service.client import RunningAgent

    identity = Identity.load(state)
    with waiting(f"asking {identity.server}"):
        running = RunningAgent.find(state)
        if running is None:
            rotation.rotate(state)
        else:
            running.rotate()
    typer.echo(f"{identity.device} has a new credential")


@quarantine_app.command("list", epilog="Example: splitedge agent quarantine list --state ./pi")
def list_(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """List the bundles that failed on this device, and why."""
    from edge_sdk.bundles.store import BundleStore
    from edge_sdk.identity import Identity

    Identity.load(state)  # where no device is enrolled, it says so
    found = BundleStore(state).quarantined()
    if as_json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        typer.echo("no bundle is quarantined")
        return
    from rich.table import Table

    table = Table("hash", "bundle", "since", "until", "why")
    for one in found:
        table.add_row(one.digest[:12], one.bundle, one.at, one.until or "for ever", one.why)
    print_table(table)


@quarantine_app.command(epilog="Example: splitedge agent quarantine lift 3fa9c1 --state ./pi")
def lift(
    name: Annotated[
        str,
        typer.Argument(
            metavar="HASH|MODEL/VERSION/VARIANT",
            help="Start of the hash, or the bundle.",
        ),
    ],
    state: State = STATE_DEFAULT,
) -> None:
    """Let a bundle be tried again: the next update may install it."""
    from edge_sdk.bundles.store import BundleStore
    from edge_sdk.errors import ConfigurationError
    from edge_sdk.identity import Identity

    Identity.load(state)
    lifted = BundleStore(state).lift(name)
    if not lifted:
        raise ConfigurationError(
            f"{name}: not quarantined here; `splitedge agent quarantine list` shows what is"
        )
    for one in lifted:
        typer.echo(f"{one.bundle} ({one.digest[:12]}) may be tried again")
