"""`splitedge agent run`: the agent as a service of its device."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_sdk.cli.agent_options import (
    STATE_DEFAULT,
    AgentOptions,
    Backbone,
    Codec,
    Deadline,
    Delta,
    Gate,
    LateAnswers,
    LearnFrom,
    Limit,
    Local,
    Personal,
    RawInputs,
    State,
    Threads,
    Threshold,
)
from edge_sdk.cli.main import stop_on_sigterm
from edge_sdk.cli.serve_options import (
    Insecure,
    Serve,
    ServeCert,
    ServeKey,
    ServeOptions,
    ServeSecret,
)
from edge_sdk.cli.stream_options import (
    Every,
    Home,
    Keep,
    Sinks,
    Smooth,
    Source,
    StreamOptions,
    home_address,
    open_keeper,
    report_home,
)
from edge_sdk.cli.times import length_in
from edge_sdk.tracing.options import TracesShare, TracesUrl

if TYPE_CHECKING:
    from edge_sdk.agent import EdgeAgent
    from edge_sdk.service.service import AgentService
    from edge_sdk.training.device.background import BackgroundTraining

logger = logging.getLogger(__name__)


def run(
    state: State = STATE_DEFAULT,
    update_minutes: Annotated[
        float,
        typer.Option(
            metavar="MINUTES",
            parser=length_in("m", least=1),
            help="Minutes (or 2h, 1d) between two checks for a new bundle.",
        ),
    ] = 60.0,
    data: Annotated[
        str | None,
        typer.Option(
            "--train",
            metavar="DATA",
            help="Also take part in training when the server invites this device, with these "
            "samples; see `splitedge agent train --data`. A device without a bundle trains first.",
        ),
    ] = None,
    backbone: Backbone = None,
    source: Source = None,
    sinks: Sinks = None,
    smooth: Smooth = None,
    every: Every = None,
    keep: Keep = None,
    home_assistant: Home = None,
    deadline: Deadline = None,
    gate: Gate = None,
    threshold: Threshold = None,
    budget: Limit = None,
    agreement: Delta = None,
    codec: Codec = None,
    raw_inputs: RawInputs = None,
    threads: Threads = None,
    late_answers: LateAnswers = None,
    learn: LearnFrom = None,
    local: Local = False,
    personal: Personal = None,
    serve: Serve = None,
    serve_cert: ServeCert = None,
    serve_key: ServeKey = None,
    serve_secret: ServeSecret = None,
    insecure: Insecure = False,
    traces: TracesUrl = None,
    traces_share: TracesShare = None,
) -> None:
    """Run the agent until Ctrl-C: answer programs and a source, send heartbeats, take new bundles.

    Programs of this user ask it over the socket agent.sock in the state folder, as `splitedge agent
    predict` does; with --serve, others ask it over HTTP. With a source that ends, such as standard
    input, the command ends when all is answered.
    """
    from edge_sdk import EdgeAgent
    from edge_sdk.errors import SplitedgeError
    from edge_sdk.service.service import AgentService
    from edge_sdk.settings_file.settings_file import SettingsFile
    from edge_sdk.systemd.notify import Notifier
    from edge_sdk.systemd.watchdog import Watchdog

    logging.getLogger("edge_sdk").setLevel(logging.INFO)
    stop_on_sigterm()
    file = SettingsFile.load(state)
    options = AgentOptions(
        deadline_s=deadline,
        gate=gate,
        threshold=threshold,
        limit=budget,
        delta=agreement,
        codec=codec,
        raw_inputs=raw_inputs,
        threads=threads,
        late_answers=late_answers,
        learn=learn,
        personal=personal,
        traces=traces,
        traces_share=traces_share,
        local=local,
    )
    settings = options.settings(file.agent)
    streaming = StreamOptions(source, tuple(sinks or ()), smooth, every)
    table = streaming.table(file.stream)
    serving = ServeOptions(serve, serve_cert, serve_key, serve_secret, insecure)
    home = home_address(home_assistant, file.home_assistant, state)
    ended = threading.Event()  # set by a part that comes to its end, such as a source
    notifier = Notifier.take(os.environ)

    def say_waiting(line: str) -> None:
        typer.echo(line, err=True)
        notifier.ready(line)  # it may take the operator days, and is no failed start

    # Ctrl-C is the normal end
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as parts:
        watchdog = parts.enter_context(Watchdog(notifier))
        # the port first: one that is taken is told before anything else begins
        service = parts.enter_context(AgentService(state, serving.table(file.serve)))
        watchdog.add(service.hangs)
        _wait_until_approved(state, say_waiting)
        on_command = None
        if data is not None:
            on_command = parts.enter_context(_training(state, data, backbone)).command
            _wait_for_first_bundle(state, on_command, say_waiting)
        agent = parts.enter_context(EdgeAgent.open(state, settings, on_command=on_command))
        keeper = open_keeper(keep, file.keep, state)
        if keeper is not None:
            agent.add_observer(keeper)
        parts.enter_context(service.answering(agent))
        on_row = report_home(home, agent, parts)
        stream = None
        if table.asked:
            stream = parts.enter_context(
                streaming.open(agent, file.stream, state, on_end=ended.set, on_row=on_row)
            )
            watchdog.add(stream.hangs)
        # further parts are entered here: they end before the agent does
        # a source's answers may go to standard output
        running = _announce(agent, service, err=table.asked)
        notifier.ready(running)
        parts.callback(notifier.stopping)
        while not ended.wait(60 * update_minutes):
            try:
                agent.refresh()
            except SplitedgeError as err:
                logger.warning("%s", err)
        if stream is not None:
            stream.check()


def _training(state: Path, data: str, backbone: str | None) -> BackgroundTraining:
    """The part that trains with this device's data when the server asks for it."""
    from edge_sdk.training.device.background import BackgroundTraining, check_data

    training = BackgroundTraining(state, data, backbone=backbone)
    typer.echo(check_data(data), err=True)
    return training


def _wait_for_first_bundle(
    state: Path, on_command: Callable[[Mapping[str, Any]], None], say: Callable[[str], None]
) -> None:
    from edge_sdk.training.device.first_bundle import wait_for_first_bundle

    wait_for_first_bundle(state, on_command, say)


def _announce(agent: EdgeAgent, service: AgentService, *, err: bool) -> str:
    """Print what runs and where it is asked.

    Returns: what runs, in a line.
    """
    status = agent.status()
    weights = f" with its personal weights from {status.personal}" if status.personal else ""
    running = f"{status.device} runs {status.bundle}{weights}"
    typer.echo(f"splitedge agent: {running}", err=err)
    if service.new_secret is not None:
        typer.echo(f"clients send the secret in {service.new_secret}, which is new", err=True)
    if service.url is not None:
        path = f"/v2/models/{agent.manifest.model}/infer"
        typer.echo(f"programs ask it at {service.url}{path}", err=err)
    return running


def _wait_until_approved(state: Path, say: Callable[[str], None]) -> None:
    """Wait for the operator, if this device has no bundle yet: it gets none before."""
    from edge_sdk.bundles.store import BundleStore
    from edge_sdk.errors import LinkError, NoBundleError
    from edge_sdk.identity import Identity
    from edge_sdk.membership.approval import wait_for_approval

    identity = Identity.load(state)
    try:
        BundleStore(state).active()
    except NoBundleError:
        with contextlib.suppress(LinkError):  # the update says so
            wait_for_approval(identity, say)
