"""`splitedge agent …`: enrol this device, run its agent, classify files, show its state."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from edge_sdk.cli.main import stop_on_sigterm
from edge_sdk.cli.membership import quarantine_app, rotate
from edge_sdk.cli.output import print_json, print_table, waiting
from edge_sdk.cli.permissions import insecure as insecure_rule
from edge_sdk.cli.permissions import offloading
from edge_sdk.cli.predict import predict
from edge_sdk.cli.run import run
from edge_sdk.cli.times import plural
from edge_sdk.discovery.record import SERVICE
from edge_sdk.systemd.cli import mount as mount_service

if TYPE_CHECKING:
    from edge_sdk.identity import Identity
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
    server: Annotated[
        str | None, typer.Option(help="URL of the server's API; or give --discover.")
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            help="From `splitedge server token create`. Other users of this machine can read it"
            " with ps until the command ends; --token-file keeps it from them."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="SPLITEDGE_TOKEN_FILE",
            help="File with one line, the token; - reads it from standard input.",
        ),
    ] = None,
    state: State = STATE_DEFAULT,
    name: Annotated[
        str | None, typer.Option(help="Device id to ask for; default: the host name.")
    ] = None,
    bundle: Annotated[
        bool,
        typer.Option(
            "--bundle/--no-bundle",
            help="Fetch and try the bundle now, or leave that to the agent's first start.",
        ),
    ] = True,
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
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Let token and credential travel to other machines unencrypted, now and later.",
        ),
    ] = False,
    discover: Annotated[
        bool,
        typer.Option(
            "--discover",
            help="Look for the server on the local network, where it announces itself with `server"
            " run --announce`; it has to show a certificate of --ca.",
        ),
    ] = False,
    service_type: Annotated[
        str, typer.Option(envvar="SPLITEDGE_SERVICE_TYPE", hidden=True)
    ] = SERVICE,
    as_json: AsJson = False,
) -> None:
    """Enrol this device with a token: measure it, get its identity and fetch its bundle."""
    if (token is None) == (token_file is None):
        raise typer.BadParameter("give --token-file FILE or --token, one of them")
    if (server is not None) == discover:
        raise typer.BadParameter("give --server URL or --discover, one of them")
    from edge_sdk import api
    from edge_sdk.errors import LinkError
    from edge_sdk.identity import check_not_enrolled, check_server_url
    from edge_sdk.wire.clear_text import clear_text_reason, is_clear, refuse_clear_text

    check_not_enrolled(state)
    if server is None:
        server = _discover(service_type, ca)
    check_server_url(server, "--server")  # both before the token is read, and the device measured
    refuse_clear_text(server, "--server", insecure=insecure)
    token = _read_token(token_file) if token is None else token
    with waiting("measuring this device"):
        measured = _profile(profile)
    with waiting(f"enrolling at {server}"):
        identity = api.enroll(
            server, token, state, profile=measured, name=name, ca=ca, insecure=insecure
        )
    broker = api.FleetBroker.known(state, identity).address(identity).url
    if is_clear(broker) and not insecure:
        typer.echo(f"warning: it answers alone: {clear_text_reason(broker)}", err=True)
    _wait_for_approval(identity)
    if profile is None:
        try:
            with waiting("measuring the link"):
                api.report_profile(identity, measured.with_link(_measure_link(identity)))
        except LinkError as err:  # the token is used and the device enrolled: go on
            typer.echo(f"warning: the link was not measured: {err}", err=True)
    if bundle:
        _fetch_bundle(identity, state)
    found = _active_bundle(state)
    if as_json:
        print_json({"device": identity.device, "fleet": identity.fleet, "bundle": found})
    else:
        later = NO_BUNDLE if bundle else "its agent fetches the bundle when it starts"
        typer.echo(f"enrolled as {identity.device} in fleet {identity.fleet}: {found or later}")


def _wait_for_approval(identity: Identity) -> None:
    """Wait for the operator; whoever ends the waiting is told how to go on without a new token."""
    from edge_sdk.errors import LinkError
    from edge_sdk.membership.approval import wait_for_approval

    try:
        wait_for_approval(identity, partial(typer.echo, err=True))
    except LinkError:  # the next steps say so
        pass
    except KeyboardInterrupt:
        typer.echo(
            f"{identity.device} is enrolled, and goes on without a new token: once it is approved,"
            " run `splitedge agent update` or `splitedge agent run`",
            err=True,
        )
        raise


app.add_typer(quarantine_app, name="quarantine")
app.command(epilog="Example: splitedge agent rotate --state ./pi")(rotate)
app.command(epilog="Example: splitedge agent offloading off --state ./pi")(offloading)
app.command(epilog="Example: splitedge agent run --state ./pi")(run)
app.command(epilog="Example: splitedge agent insecure allow --state ./pi")(insecure_rule)


mount_service(app, run)  # install-service, uninstall-service


@app.command(epilog="Example: splitedge agent update --state ./pi")
def update(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Fetch the bundle that the server assigns to this device.

    An agent that runs here fetches it itself, and switches to it at once.
    """
    from edge_sdk.bundles import lifecycle
    from edge_sdk.identity import Identity
    from edge_sdk.service.client import RunningAgent

    identity = Identity.load(state)
    with waiting(f"asking {identity.server}"):
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
    give_up: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="MINUTES",
            help="End if the trainer cannot be reached for so long; default: wait for it.",
        ),
    ] = None,
) -> None:
    """Take part in training until it ends, or until Ctrl-C.

    The inputs stay on this device; docs/privacy.md says what it sends.
    """
    from edge_sdk.training.data.load import with_resize
    from edge_sdk.training.device.participate import participate

    stop_on_sigterm()
    with contextlib.suppress(KeyboardInterrupt):
        counts = participate(
            state,
            with_resize(data, resize),
            held_out=held_out,
            trainer=trainer,
            threads=threads,
            backbone=backbone,
            give_up_s=None if give_up is None else 60 * give_up,
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
    """Show this device's identity and bundle, whether server and broker answer, and its agent.

    The server gives bundles and answers over HTTP. The broker carries the offloads: without it the
    device answers alone, even if the server is there.
    """
    from edge_sdk import api
    from edge_sdk.bundles.store import BundleStore
    from edge_sdk.errors import BundleError, LinkError
    from edge_sdk.identity import Identity
    from edge_sdk.installation import why_clock_is_untrusted
    from edge_sdk.offload.broker_check import broker_fault
    from edge_sdk.offload.switch import OffloadSwitch
    from edge_sdk.service.client import RunningAgent
    from edge_sdk.state import is_held

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
    waits = False
    try:
        fleet_broker = api.locate_broker(identity)
        fields["server_answers"] = True
    except LinkError as err:
        fleet_broker = api.FleetBroker.known(state, identity)  # as it was known last
        fields["server_answers"] = False
        fields["why_not"] = str(err)
        waits = "waits for approval" in fields["why_not"]
    if waits:  # until then no update can bring a bundle, and the broker lets it in no more
        fields.pop("problem", None)
    else:
        broker = fleet_broker.address(identity)
        with waiting(f"asking {broker.url}"):
            fault = broker_fault(identity, broker, in_use=is_held(state, "agent"))
        fields |= {"broker": broker.url, "broker_answers": not fault}
        if fault:
            fields["broker_why_not"] = fault
    if untrusted := why_clock_is_untrusted():
        fields["clock"] = untrusted
    running = RunningAgent.find(state)
    if running is None:
        fields |= {
            "offloading": OffloadSwitch(state).on,
            "agent": None if as_json else "does not run",
        }
    else:
        found = running.status()
        fields |= {"offloading": found["offloading"], "agent": found}
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


def _fetch_bundle(identity: Identity, state: Path) -> None:
    from edge_sdk.bundles import lifecycle
    from edge_sdk.errors import BundleError, SplitedgeError

    try:
        with waiting("fetching its bundle"):
            lifecycle.update(state)
    except SplitedgeError as err:
        raise BundleError(
            f"enrolled as {identity.device}, but without a bundle: {err}; then run"
            " `splitedge agent update`"
        ) from err


def _discover(service: str, ca: Path | None) -> str:
    """URL of the one server on this network that may be trusted.

    Raises: ConfigurationError; LinkError.
    """
    from edge_sdk.discovery.network import WAIT_S, find_servers, resolves
    from edge_sdk.discovery.record import chosen_server

    with waiting("looking for the server on this network"):
        found = find_servers(service)
        url = chosen_server(found, has_authority=ca is not None, waited_s=WAIT_S, reaches=resolves)
    typer.echo(f"found the server {found[0].name!r} at {url}", err=True)
    return url


def _read_token(file: Path | None) -> str:
    """The token in a file, or on standard input.

    Raises: ConfigurationError.
    """
    from edge_sdk.errors import ConfigurationError

    read_stdin = file is None or str(file) == "-"
    try:
        text = sys.stdin.read() if read_stdin else Path(str(file)).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigurationError(f"--token-file {file}: cannot be read ({err})") from err
    lines = text.split()
    if len(lines) != 1:
        raise ConfigurationError(
            f"--token-file {file}: expected one line with a token, got {len(lines)}; a token enrols"
            " one device, so give each device a line of its own"
        )
    return lines[0]


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
    from rich.table import Table

    table = Table(show_header=False)
    for key, value in _flat(fields):
        table.add_row(key.replace("_", " "), _written(value))
    print_table(table)


def _written(value: Any) -> str:
    """A value as people write it."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
        case _:
            return str(value)


def _flat(fields: Mapping[str, Any], owner: str = "") -> Iterator[tuple[str, Any]]:
    """The fields, those of tables within them by the names of both."""
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{owner}{key}: ")
        else:
            yield f"{owner}{key}", value
