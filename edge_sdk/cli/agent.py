"""`splitedge agent …`: enrol this device, run its agent, classify files, show its state."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from edge_sdk.cli.output import print_json

if TYPE_CHECKING:
    from edge_sdk.answers.prediction import Prediction
    from profiles.device import DeviceProfile

app = typer.Typer(
    help="The device: enrol it, run its agent, classify files.",
    epilog="Example: splitedge agent status --state ./pi",
    no_args_is_help=True,
)

State = Annotated[Path, typer.Option("--state", help="Folder with all files of this device.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Personal = Annotated[
    str | None,
    typer.Option(
        metavar="TRAINING",
        help="Use this device's personal weights from that training (exit head, auxiliary model or "
        "last layer) in place of the bundle's. The bundle must be exported from the same run.",
    ),
]
STATE_DEFAULT = Path("splitedge-agent")
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


@app.command(epilog="Example: splitedge agent run --state ./pi")
def run(
    state: State = STATE_DEFAULT,
    update_minutes: Annotated[
        float, typer.Option(min=1, help="Minutes between two checks for a new bundle.")
    ] = 60.0,
    data: Annotated[
        str | None,
        typer.Option(
            "--train",
            metavar="DATA",
            help="Also take part in training when the server invites this device, with these "
            "samples; see `splitedge agent train --data`.",
        ),
    ] = None,
    personal: Personal = None,
) -> None:
    """Run the agent until Ctrl-C: send heartbeats and install new bundles."""
    from edge_sdk import AgentSettings, EdgeAgent
    from edge_sdk.errors import SplitedgeError

    logging.getLogger("edge_sdk").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Ctrl-C is the normal end
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        on_command = None
        if data is not None:
            from edge_sdk.training.device.background import BackgroundTraining

            on_command = stack.enter_context(BackgroundTraining(state, data)).command
        settings = AgentSettings(personal=personal)
        agent = stack.enter_context(EdgeAgent.open(state, settings, on_command=on_command))
        status = agent.status()
        name = status.personal
        personal = "" if name is None else f" with its personal weights from {name}"
        typer.echo(f"splitedge agent: {status.device} runs {status.bundle}{personal}")
        while True:
            time.sleep(60 * update_minutes)
            try:
                agent.refresh()
            except SplitedgeError as err:
                logging.getLogger(__name__).warning("%s", err)


@app.command(epilog="Example: splitedge agent update --state ./pi")
def update(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Fetch the bundle that the server assigns to this device.

    A running agent switches to it at its next check.
    """
    from edge_sdk.bundles import lifecycle
    from edge_sdk.identity import Identity

    identity = Identity.load(state)
    with Console(stderr=True).status(f"asking {identity.server}"):
        lifecycle.update(state)
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
            metavar="NAME_OR_DIR_OR_NPZ",
            help="This device's samples (their training part): digits, a folder of images or IDX "
            "files, module:function, or an .npz file with x_train (N, C, H, W), raw and in the "
            "scale of the recipe's data, y_train (N,), and for a score x_test and y_test. They "
            "stay on this device.",
        ),
    ],
    state: State = STATE_DEFAULT,
    trainer: Annotated[
        str | None,
        typer.Option(help="URL of the trainer; default: wait for the server's invitation."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 1,
) -> None:
    """Take part in training until it ends, or until Ctrl-C. The data stay on this device."""
    from edge_sdk.training.device.participate import participate

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        counts = participate(state, data, trainer=trainer, threads=threads, say=typer.echo)
        typer.echo(
            f"training is over: {counts.updates} rounds here,"
            f" {counts.alone} of them without the server"
        )


@app.command(epilog="Example: splitedge agent predict image.png samples.npy --state ./pi --json")
def predict(
    files: Annotated[
        list[Path],
        typer.Argument(help=".npy arrays (one sample or several), or images (pixels 0..255)."),
    ],
    state: State = STATE_DEFAULT,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for the server.")] = 1.0,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Answer on the device if the uncertainty is below this; default: the bundle's."
        ),
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Never ask the server.")] = False,
    personal: Personal = None,
    as_json: AsJson = False,
) -> None:
    """Classify files: on the device if it is sure, else on the server."""
    from edge_sdk import AgentSettings, EdgeAgent
    from edge_sdk.pipeline.samples import read_samples

    settings = AgentSettings(
        deadline_s=deadline, threshold=threshold, offload=not local, personal=personal
    )
    with EdgeAgent.open(state, settings) as agent:
        named = [named for file in files for named in read_samples(file, agent.manifest.input)]
        answers = agent.predict_many(sample for _, sample in named)
        rows = [_row(name, answer) for (name, _), answer in zip(named, answers, strict=True)]
    if as_json:
        print_json(rows)
        return
    table = Table("input", "label", "class", "source", "uncertainty", "threshold", "ms", "reason")
    for row in rows:
        table.add_row(
            row["input"],
            str(row["label"]),
            row["class_name"],
            row["source"],
            f"{row['uncertainty']:.4f}",
            f"{row['threshold']:.4f}",
            f"{row['latency_ms']:.3f}",
            row["reason"],
        )
    Console().print(table)


@app.command(epilog="Example: splitedge agent status --state ./pi --json")
def status(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """Show this device's identity and bundle, and whether its server answers."""
    from edge_sdk import api
    from edge_sdk.bundles.store import BundleStore
    from edge_sdk.errors import BundleError, LinkError
    from edge_sdk.identity import Identity

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
    _show(fields, as_json)


@app.command(epilog="Example: splitedge agent profile --json")
def profile(
    name: Annotated[
        str | None,
        typer.Option("--reference", help="Show a catalogue device in place of this one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this device: memory, cores, compute score."""
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


def _row(name: str, answer: Prediction) -> dict[str, Any]:
    return {"input": name, **asdict(answer), "probabilities": answer.probabilities.tolist()}


def _show(fields: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(fields)
        return
    table = Table(show_header=False)
    for key, value in fields.items():
        table.add_row(key.replace("_", " "), "none" if value is None else str(value))
    Console().print(table)
