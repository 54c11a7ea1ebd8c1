"""`splitedge agent …`: enrol this device, run its agent, classify files, show its state."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from edge_sdk.cli.agent_options import (
    STATE_DEFAULT,
    AsJson,
    Backbone,
    State,
)
from edge_sdk.cli.data import data
from edge_sdk.cli.data_options import HELD_OUT, HeldOut, Resize
from edge_sdk.cli.kept import app as kept_app
from edge_sdk.cli.kept import correct
from edge_sdk.cli.output import print_json
from edge_sdk.cli.predict import predict
from edge_sdk.cli.run import run
from edge_sdk.cli.times import plural

if TYPE_CHECKING:
    from profiles.device import DeviceProfile

app = typer.Typer(
    help="The device: enrol it, run its agent, classify files.",
    epilog="Example: splitedge agent status --state ./pi",
    no_args_is_help=True,
)
app.add_typer(kept_app, name="kept")
app.command(epilog="Example: splitedge agent correct 5f0c... dog --state ./pi")(correct)

NO_BUNDLE = "no bundle yet: the server has no model for this device"


@app.command(
    epilog="Example: splitedge agent enroll --server http://127.0.0.1:8000 --token T --state ./pi"
)
def enroll(
    server: Annotated[str, typer.Option(help="URL of the server's API.")],
    token: Annotated[str, typer.Option(help="From `splitedge server token create`.")],
    state: State = STATE_DEFAULT,
    name: Annotated[
        str | None, typer.Option(help="Device id to ask for; default: the host name.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Use the profile of a catalogue device, for example raspberry-pi-4, in place of "
            "measuring this one."
        ),
    ] = None,
    ca: Annotated[
        Path | None, typer.Option(help="PEM file of the only certificate authority to trust.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Enrol this device with a token: measure it, get its identity and fetch its bundle."""
    from edge_sdk import api
    from edge_sdk.bundles import lifecycle
    from edge_sdk.errors import BundleError, LinkError, SplitedgeError
    from edge_sdk.identity import check_not_enrolled

    check_not_enrolled(state)
    console = Console(stderr=True)
    with console.status("measuring this device"):
        found = _profile(profile)
    with console.status(f"enrolling at {server}"):
        identity = api.enroll(server, token, state, profile=found, name=name, ca=ca)
        if profile is None:
            try:
                api.report_profile(identity, found.with_link(_measure_link(identity)))
            except LinkError as err:  # the token is used and the device enrolled: go on
                typer.echo(f"warning: the link was not measured: {err}", err=True)
    try:
        with console.status("fetching its bundle"):
            lifecycle.update(state)
    except SplitedgeError as err:
        raise BundleError(
            f"enrolled as {identity.device}, but without a bundle: {err}; then run"
            " `splitedge agent update`"
        ) from err
    bundle = _active_bundle(state)
    if as_json:
        print_json({"device": identity.device, "fleet": identity.fleet, "bundle": bundle})
    else:
        typer.echo(
            f"enrolled as {identity.device} in fleet {identity.fleet}: {bundle or NO_BUNDLE}"
        )


app.command(epilog="Example: splitedge agent run --state ./pi")(run)


@app.command(epilog="Example: splitedge agent update --state ./pi")
def update(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Fetch the bundle that the server assigns to this device.

    An agent that runs here fetches it itself, and switches to it at once.
    """
    from edge_sdk.bundles import lifecycle
    from edge_sdk.identity import Identity
    from edge_sdk.service.client import RunningAgent

    identity = Identity.load(state)
    with Console(stderr=True).status(f"asking {identity.server}"):
        running = RunningAgent.find(state)
        if running is None:
            lifecycle.update(state)
        else:
            running.refresh()
    bundle = _active_bundle(state)
    if as_json:
        print_json({"device": identity.device, "bundle": bundle})
    else:
        typer.echo(f"{identity.device}: {bundle or NO_BUNDLE}")


@app.command(epilog="Example: splitedge agent train --data digits --state ./pi")
def train(
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="This device's labelled samples, in the scale of the recipe's data: a folder of "
            "pictures with a folder for each class, FILE.npz, csv:FILE?window=..., digits, "
            "fashion-mnist=DIR, module:function (docs/data.md). Their training part is trained on, "
            "their test part gives the score, and they stay on this device.",
        ),
    ],
    state: State = STATE_DEFAULT,
    held_out: HeldOut = HELD_OUT,
    resize: Resize = None,
    trainer: Annotated[
        str | None,
        typer.Option(help="URL of the trainer; default: wait for the server's invitation."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
    backbone: Backbone = None,
) -> None:
    """Take part in training until it ends, or until Ctrl-C. The data stay on this device."""
    from edge_sdk.training.data.load import with_resize
    from edge_sdk.training.device.participate import participate

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        counts = participate(
            state,
            with_resize(data, resize),
            held_out=held_out,
            trainer=trainer,
            threads=threads,
            backbone=backbone,
            say=typer.echo,
            note=partial(typer.echo, err=True),
        )
        typer.echo(
            f"training is over: {plural(counts.updates, 'round')} here,"
            f" {counts.alone} of them without the server"
        )


app.command(epilog="Example: splitedge agent data 'csv:motion.csv?window=128&label=activity'")(data)

app.command(epilog="Example: splitedge agent predict image.png samples.npy --state ./pi --json")(
    predict
)


@app.command(epilog="Example: splitedge agent status --state ./pi --json")
def status(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Show this device's identity and bundle, whether its server answers, and the running agent."""
    from edge_sdk import api
    from edge_sdk.bundles.store import BundleStore
    from edge_sdk.errors import BundleError, LinkError
    from edge_sdk.identity import Identity
    from edge_sdk.service.client import RunningAgent

    identity = Identity.load(state)
    fields: dict[str, Any] = {
        "device": identity.device,
        "fleet": identity.fleet,
        "server": identity.server,
    }
    try:
        manifest = BundleStore(state).active().manifest
        fields |= {
            "bundle": manifest.bundle,
            "depth": manifest.depth,
            "gate": manifest.gate.policy,
            "threshold": manifest.gate.threshold,
        }
    except BundleError as err:
        fields["bundle"] = None
        fields["problem"] = str(err)
    try:
        fields["broker"] = api.locate_broker(identity).broker
        fields["server_answers"] = True
    except LinkError as err:
        fields["server_answers"] = False
        fields["why_not"] = str(err)
    running = RunningAgent.find(state)
    if running is None:
        fields["agent"] = None
    else:
        fields["agent"] = running.status()
    _show(fields, as_json)


@app.command(epilog="Example: splitedge agent profile --bundle --state ./pi")
def profile(
    name: Annotated[
        str | None,
        typer.Option("--reference", help="Show a catalogue device in place of this one."),
    ] = None,
    bundle: Annotated[
        bool,
        typer.Option(
            "--bundle", help="Measure the device's bundle: time and memory of each of its graphs."
        ),
    ] = False,
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Measure this device: memory, cores, compute score; or the bundle that it runs."""
    if bundle:
        from edge_sdk.cli.bundle_profile import show_bundle_profile
        from edge_sdk.errors import ConfigurationError

        if name is not None:
            raise ConfigurationError(
                "--bundle measures this device, so it goes without --reference"
            )
        show_bundle_profile(state, as_json=as_json)
        return
    _show(_profile(name).to_dict(), as_json)


def _profile(reference: str | None) -> DeviceProfile:
    from profiles.device import probe
    from profiles.reference import load_reference

    return probe() if reference is None else load_reference(reference)


def _active_bundle(state: Path) -> str | None:
    from edge_sdk.bundles.store import BundleStore
    from edge_sdk.errors import NoBundleError

    try:
        return BundleStore(state).active().manifest.bundle
    except NoBundleError:
        return None


def _measure_link(identity: Any) -> Any:
    from edge_sdk.api import Echo
    from profiles.link import measure_link

    with Echo(identity) as echo:
        return measure_link(echo)


def _show(fields: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(fields)
        return
    table = Table(show_header=False)
    for key, value in _flat(fields):
        table.add_row(key.replace("_", " "), "none" if value is None else str(value))
    Console().print(table)


def _flat(fields: Mapping[str, Any], owner: str = "") -> Iterator[tuple[str, Any]]:
    """The fields, those of tables within them by the names of both."""
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{owner}{key}: ")
        else:
            yield f"{owner}{key}", value
