"""`splitedge agent insecure` and `splitedge agent offloading`: what this device may send."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import typer

from edge_sdk.cli.agent_options import STATE_DEFAULT, AsJson, State
from edge_sdk.cli.output import print_json


class Rule(StrEnum):
    """Rule for connections to other machines without encryption."""

    allow = "allow"
    refuse = "refuse"


def insecure(
    rule: Annotated[Rule, typer.Argument(help="allow, or refuse, which is the default.")],
    state: State = STATE_DEFAULT,
) -> None:
    """Allow or refuse to send this device's credential to other machines without encryption."""
    from edge_sdk.identity import Identity
    from edge_sdk.membership.rotation import lock_credential
    from edge_sdk.state import is_held

    Identity.load(state)  # a mistyped folder is told before the lock makes it
    with lock_credential(state):
        identity = Identity.load(state, insecure=rule is Rule.allow)
        identity.save(state)
    typer.echo(
        f"{identity.device}: its credential may "
        + ("travel unencrypted" if identity.insecure else "leave this machine encrypted only")
    )
    if is_held(state, "agent"):
        typer.echo("an agent runs there and keeps its connections: restart it", err=True)


def offloading(
    turn: Annotated[
        Literal["on", "off"] | None,
        typer.Argument(help="on or off; without it, the command shows how the switch is."),
    ] = None,
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Turn offloading off or on: off, the device answers every input alone.

    A running agent follows at once. Off holds for later runs too, until it is turned on again.
    """
    from edge_sdk.errors import StorageError
    from edge_sdk.identity import Identity
    from edge_sdk.offload.switch import OffloadSwitch
    from edge_sdk.service.client import RunningAgent

    device = Identity.load(state).device
    running = RunningAgent.find(state)
    if turn is not None and running is not None:
        running.turn_offloading(turn == "on")
    elif turn is not None:
        try:
            OffloadSwitch(state).turn(turn == "on")
        except StorageError as err:  # no agent runs: nothing holds the switch but the disk
            raise StorageError(
                f"offloading was not turned {turn}: {err.__cause__ or err}",
                needed_bytes=err.needed_bytes,
                available_bytes=err.available_bytes,
            ) from err
    on = running.status()["offloading"] if running is not None else OffloadSwitch(state).on
    if as_json:
        print_json({"device": device, "offloading": on})
    elif on:
        typer.echo(f"{device}: offloading is on")
    else:
        typer.echo(f"{device}: offloading is off: the device answers every input alone")
