"""`splitedge server alerts`: what someone may have to act on."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from edge_sdk.cli.output import print_json, print_table
from edge_sdk.cli.times import ago, seconds
from server.options import STATE_DEFAULT, AsJson, State

app = typer.Typer(
    help="Show what is wrong in the fleet, and silence it for a time.",
    epilog="Example: splitedge server alerts --state ./server",
    invoke_without_command=True,
)


@app.callback()
def show(
    context: typer.Context,
    closed: Annotated[
        bool, typer.Option("--closed", help="Show closed alerts too, newest first.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most alerts.")] = 100,
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Show the open alerts: what is wrong, since when, and what to do."""
    if context.invoked_subcommand is not None:
        return
    from server.state import existing_registry

    with existing_registry(state) as registry:
        alerts = registry.alerts
        found = alerts.recent(limit) if closed else alerts.open()[:limit]
    if as_json:
        print_json([asdict(one) for one in found])
        return
    if not found:
        typer.echo("no alerts" if closed else "no open alerts")
        return
    now = time.time()
    table = Table("level", "kind", "about", "since", "state", "what")
    for one in found:
        word = "open" if one.closed_at is None else f"closed {ago(one.closed_at, now)}"
        if one.closed_at is None and one.is_silenced(now):
            word = "silenced"
        table.add_row(one.level, one.kind, one.about, ago(one.opened_at, now), word, one.text)
    print_table(table)


@app.command(epilog="Example: splitedge server alerts silence pi-4 --for 8h --state ./server")
def silence(
    about: Annotated[str, typer.Argument(help="Device, or `server`.")],
    for_: Annotated[
        float,
        typer.Option("--for", metavar="TIME", parser=seconds, help="30m, 8h, 7d."),
    ],
    kind: Annotated[str, typer.Option(help="Only alerts of this kind; default: all.")] = "",
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Send the open alerts of a device to nobody for a time; they are still shown.

    The silence holds if one of them closes and opens again.
    """
    _silence(about, kind, for_, state, as_json=as_json)


@app.command(epilog="Example: splitedge server alerts hear pi-4 --state ./server")
def hear(
    about: Annotated[str, typer.Argument(help="Device, or `server`.")],
    kind: Annotated[str, typer.Option(help="Only alerts of this kind; default: all.")] = "",
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """End a silence."""
    _silence(about, kind, 0.0, state, as_json=as_json)


def _silence(about: str, kind: str, seconds_: float, state: State, *, as_json: bool) -> None:
    from server.state import existing_registry

    with existing_registry(state) as registry:
        found = registry.alerts.silence(kind, about, seconds_)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    word = "silenced" if seconds_ else "heard again"
    typer.echo("\n".join(f"{one.kind} of {one.about} is {word}" for one in found))
