"""`splitedge server devices …` and `splitedge server quarantine …`: who is in the fleet, and how.

The commands change the registry; a running server follows within seconds and tells the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from edge_sdk.cli.output import print_json, print_table
from edge_sdk.cli.times import ago
from server.options import STATE_DEFAULT, AsJson, State

if TYPE_CHECKING:
    from server.deployment.overview import DeviceState
    from server.registry.database import Registry
    from server.registry.records import Device

devices_app = typer.Typer(
    help="The devices: list them, approve new ones, replace their credentials.",
    epilog="Example: splitedge server devices --state ./server --fleet kitchen",
)
quarantine_app = typer.Typer(
    help="The bundles that devices refused: list them, and let a device try one again.",
    epilog="Example: splitedge server quarantine list pi-4 --state ./server",
    no_args_is_help=True,
)


@devices_app.callback(invoke_without_command=True)
def devices(
    context: typer.Context,
    state: State = STATE_DEFAULT,
    fleet: Annotated[str | None, typer.Option(help="List the devices of this fleet only.")] = None,
    tag: Annotated[str | None, typer.Option(help="List the devices with this tag only.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the enrolled devices: the bundle that each runs, wants and refused."""
    if context.invoked_subcommand is not None:
        return
    from server.deployment.overview import device_states
    from server.state import existing_registry

    with existing_registry(state) as registry:
        states = device_states(registry, fleet, tag=tag)
    if as_json:
        print_json([asdict(one) for one in states])
        return
    if not states:
        if tag is not None:
            typer.echo(f"no device has the tag {tag}; give it with `splitedge server devices tag`")
            return
        of = "" if fleet is None else f" in fleet {fleet}"
        typer.echo(f"no devices{of} yet; make a token with `splitedge server token create`")
        return
    table = Table("device", "fleet", "tags", "depth", "runs", "wants", "refused", "last seen")
    for one in states:
        table.add_row(
            one.device if one.title is None else f"{one.device}\n{one.title}",
            one.fleet,
            " ".join(one.tags),
            "" if one.depth is None else str(one.depth),
            one.runs or "not reported",
            _wanted(one),
            one.refused or "",
            _seen(one),
        )
    print_table(table)
    for one in states:
        if one.refused is not None:
            typer.echo(f"{one.device} refused {one.refused}: {one.why}")


@devices_app.command(epilog="Example: splitedge server devices pending --state ./server")
def pending(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """List the devices that wait for approval."""
    from server.state import existing_registry

    with existing_registry(state) as registry:
        waiting = _waiting(registry)
    if as_json:
        print_json(
            [
                {
                    "device": one.id,
                    "fleet": one.fleet,
                    "enrolled_at": one.enrolled_at,
                    "profile": dict(one.profile),
                }
                for one in waiting
            ]
        )
        return
    if not waiting:
        typer.echo("no device waits for approval")
        return
    table = Table("device", "fleet", "enrolled", "hardware")
    for one in waiting:
        hardware = f"{one.profile.get('name', '')} {one.profile.get('arch', '')}".strip()
        table.add_row(one.id, one.fleet, ago(one.enrolled_at), hardware)
    print_table(table)


@devices_app.command(epilog="Example: splitedge server devices approve pi-4 --state ./server")
def approve(device: str, state: State = STATE_DEFAULT) -> None:
    """Let a device in that waits for approval; it goes on by itself."""
    from server.errors import ConflictError
    from server.state import existing_registry

    with existing_registry(state) as registry:
        if not registry.membership.approve(device):
            # a device that asked for a name that is taken waits under another one
            waiting = ", ".join(one.id for one in _waiting(registry)) or "none"
            raise ConflictError(f"{device} needs no approval; waiting: {waiting}")
    typer.echo(f"{device} is approved")


@devices_app.command(epilog="Example: splitedge server devices reject pi-4 --state ./server")
def reject(device: str, state: State = STATE_DEFAULT) -> None:
    """Refuse a device that waits for approval, for good."""
    from server.state import existing_registry

    with existing_registry(state) as registry:
        registry.membership.reject(device)
    typer.echo(f"{device} is rejected")


@devices_app.command(epilog="Example: splitedge server devices rotate pi-4 --state ./server")
def rotate(device: str, state: State = STATE_DEFAULT) -> None:
    """Replace the credential of a device, at once or when it comes back.

    The old credential is valid until the device has confirmed the new one. If the old one may be in
    other hands, revoke the device instead and enrol it again.
    """
    from server.state import existing_registry

    with existing_registry(state) as registry:
        registry.membership.ask_to_rotate(device)
    typer.echo(f"{device} is asked to replace its credential")


@devices_app.command(epilog="Example: splitedge server devices remove pi-4 --state ./server")
def remove(
    device: Annotated[list[str], typer.Argument(metavar="DEVICE")],
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Forget devices that will not come back; a running server cuts their connections.

    Their names are free then: a device that enrols under one keeps it. To shut a device out and
    keep its name and history, use `splitedge server revoke`.
    """
    from server.state import existing_registry

    with existing_registry(state) as registry:
        for one in device:  # a name that is not there is told before anything is done
            registry.device(one)
        for one in device:
            registry.membership.remove(one)
    if as_json:
        print_json({"removed": device})
    else:
        typer.echo(f"removed {', '.join(device)}")


@devices_app.command(epilog="Example: splitedge server devices tag pi-4 canary outdoors")
def tag(
    device: str,
    tags: Annotated[list[str], typer.Argument(metavar="TAG", help="a-z, 0-9 and '-' each.")],
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Give a device tags, by which lists and roll-outs choose devices."""
    from server.state import existing_registry

    with existing_registry(state) as registry:
        _print_tags(device, registry.tags.add(device, tags), as_json)


@devices_app.command(epilog="Example: splitedge server devices untag pi-4 canary")
def untag(
    device: str,
    tags: Annotated[list[str], typer.Argument(metavar="TAG")],
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Take tags from a device."""
    from server.state import existing_registry

    with existing_registry(state) as registry:
        _print_tags(device, registry.tags.remove(device, tags), as_json)


@devices_app.command(epilog='Example: splitedge server devices rename pi-4 "Kitchen camera"')
def rename(
    device: str,
    title: Annotated[str, typer.Argument(help='What people call it; "" takes the title away.')],
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Give a device a title, which lists, the dashboard and alerts show beside its name.

    The name stays: with it the device logs in, and commands mean it.
    """
    from server.state import existing_registry

    with existing_registry(state) as registry:
        given = registry.titles.give(device, title)
    if as_json:
        print_json({"device": device, "title": given})
    else:
        typer.echo(f"{device} has {'no title' if given is None else f'the title {given}'}")


@quarantine_app.command("list", epilog="Example: splitedge server quarantine list pi-4")
def list_(
    device: Annotated[
        str | None, typer.Argument(help="One device; all of them if it is left out.")
    ] = None,
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """List the bundles that devices refused or had to leave, and why."""
    from server.state import existing_registry

    with existing_registry(state) as registry:
        names = [one.id for one in registry.devices() if one.active] if device is None else [device]
        found = {name: registry.membership.refused_bundles(name) for name in names}
    rows = [
        {"device": name, "bundle": bundle, "why": why}
        for name, bundles in found.items()
        for bundle, why in bundles.items()
    ]
    if as_json:
        print_json(rows)
        return
    if not rows:
        typer.echo("no device has refused a bundle")
        return
    table = Table("device", "bundle", "why")
    for row in rows:
        table.add_row(row["device"], row["bundle"], row["why"])
    print_table(table)


@quarantine_app.command(epilog="Example: splitedge server quarantine lift pi-4 digits/2/d1")
def lift(
    device: str,
    bundle: Annotated[str, typer.Argument(metavar="MODEL/VERSION/VARIANT")],
    state: State = STATE_DEFAULT,
) -> None:
    """Let a device try a bundle again that it refused; a device that is away does so later."""
    from server.state import existing_registry

    with existing_registry(state) as registry:
        registry.membership.lift(device, bundle)
    typer.echo(f"{device} is told to try {bundle} again")


def _print_tags(device: str, tags: Sequence[str], as_json: bool) -> None:
    if as_json:
        print_json({"device": device, "tags": list(tags)})
    else:
        typer.echo(f"{device} has {'the tags ' + ', '.join(tags) if tags else 'no tags'}")


def _waiting(registry: Registry) -> list[Device]:
    """The devices that wait for approval."""
    return [one for one in registry.devices() if not one.active and one.revoked_at is None]


def _seen(state: DeviceState) -> str:
    """Whether a device is there, and when it was last heard."""
    last = ago(state.last_seen) or "never"
    return f"{state.presence}, {last}" if state.presence in ("online", "offline") else last


def _wanted(state: DeviceState) -> str:
    """The bundle that a device should run, and whether it is pinned."""
    if state.revoked:
        return "revoked"
    if not state.approved:
        return "waits for approval"
    pinned = "" if state.pinned is None else f" (pinned to {state.pinned})"
    return f"{state.wants or 'no model yet'}{pinned}"
