"""`splitedge agent run`: the agent as a service of its device."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from functools import partial
from typing import Annotated

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
    State,
    Threads,
    Threshold,
)
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
    Keep,
    Sinks,
    Smooth,
    Source,
    StreamOptions,
    open_keeper,
)

logger = logging.getLogger(__name__)


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
            "samples; see `splitedge agent train --data`. A device without a bundle trains first.",
        ),
    ] = None,
    backbone: Backbone = None,
    source: Source = None,
    sinks: Sinks = None,
    smooth: Smooth = None,
    every: Every = None,
    keep: Keep = None,
    deadline: Deadline = None,
    gate: Gate = None,
    threshold: Threshold = None,
    budget: Limit = None,
    agreement: Delta = None,
    codec: Codec = None,
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

    logging.getLogger("edge_sdk").setLevel(logging.INFO)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    file = SettingsFile.load(state)
    options = AgentOptions(
        deadline_s=deadline,
        gate=gate,
        threshold=threshold,
        limit=budget,
        delta=agreement,
        codec=codec,
        threads=threads,
        late_answers=late_answers,
        learn=learn,
        personal=personal,
        local=local,
    )
    settings = options.settings(file.agent)
    streaming = StreamOptions(source, tuple(sinks or ()), smooth, every)
    table = streaming.table(file.stream)
    serving = ServeOptions(serve, serve_cert, serve_key, serve_secret, insecure)
    ended = threading.Event()  # set by a part that comes to its end, such as a source
    # Ctrl-C is the normal end
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as parts:
        # the port first: one that is taken is told before anything else begins
        service = parts.enter_context(AgentService(state, serving.table(file.serve)))
        on_command = None
        if data is not None:
            from edge_sdk.training.device.background import BackgroundTraining, check_data
            from edge_sdk.training.device.first_bundle import wait_for_first_bundle

            training = BackgroundTraining(state, data, backbone=backbone)
            typer.echo(check_data(data), err=True)
            on_command = parts.enter_context(training).command
            wait_for_first_bundle(state, on_command, partial(typer.echo, err=True))
        agent = parts.enter_context(EdgeAgent.open(state, settings, on_command=on_command))
        keeper = open_keeper(keep, file.keep, state)
        if keeper is not None:
            agent.add_observer(keeper)
        parts.enter_context(service.answering(agent))
        stream = None
        if table.asked:
            stream = parts.enter_context(streaming.open(agent, file.stream, state, ended.set))
        # further parts are entered here: they end before the agent does
        status = agent.status()
        weights = f" with its personal weights from {status.personal}" if status.personal else ""
        # a source's answers may go to standard output
        typer.echo(
            f"splitedge agent: {status.device} runs {status.bundle}{weights}", err=table.asked
        )
        if service.new_secret is not None:
            typer.echo(f"clients send the secret in {service.new_secret}, which is new", err=True)
        if service.url is not None:
            path = f"/v2/models/{agent.manifest.model}/infer"
            typer.echo(f"programs ask it at {service.url}{path}", err=table.asked)
        while not ended.wait(60 * update_minutes):
            try:
                agent.refresh()
            except SplitedgeError as err:
                logger.warning("%s", err)
        if stream is not None:
            stream.check()
