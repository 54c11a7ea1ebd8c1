"""`splitedge server backend`."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_sdk.tracing.options import TracesShare, TracesUrl, chosen_traces
from edge_sdk.wire.topics import PAYLOAD_BYTES
from server.options import (
    STATE_DEFAULT,
    Artifacts,
    Batch,
    Insecure,
    MqttPasswordFile,
    Provider,
    Queue,
    Threads,
    TlsKey,
)
from server.registry.options import RegistryPasswordFile, RegistryUrl

if TYPE_CHECKING:
    from server.roles.backend import Backend


def backend(
    http: Annotated[
        str,
        typer.Option(
            help="HOST:PORT for queries over HTTP, /v2/health and /metrics; port 0 takes a free "
            "one, which is printed."
        ),
    ] = "127.0.0.1:0",
    mqtt: Annotated[
        str | None,
        typer.Option(
            help="mqtt[s]://USER@HOST:PORT of the fleet's broker, a Mosquitto or an EMQX; default: "
            "the Mosquitto of the API on --state."
        ),
    ] = None,
    mqtt_password_file: MqttPasswordFile = None,
    mqtt_packet_bytes: Annotated[
        int, typer.Option(help="Longest MQTT message, as of the API.")
    ] = PAYLOAD_BYTES,
    state: Annotated[
        Path,
        typer.Option(
            "--state",
            help="State folder of the API on this machine, whose models and registry are read; with"
            " --artifacts and --registry, a folder of the backend's own.",
        ),
    ] = STATE_DEFAULT,
    batch: Batch = 32,
    queue: Queue = 256,
    limit_requests: Annotated[
        float | None, typer.Option(help="Most queries a second of one device at this backend.")
    ] = None,
    limit_rows: Annotated[
        float | None, typer.Option(help="Most samples a second of one device at this backend.")
    ] = None,
    limit_bytes: Annotated[
        float | None, typer.Option(help="Most bytes a second of one device at this backend.")
    ] = None,
    threads: Threads = 0,
    provider: Provider = "auto",
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate for HTTPS.")] = None,
    tls_key: TlsKey = None,
    mqtt_ca: Annotated[
        Path | None, typer.Option(help="PEM file to verify an mqtts:// broker with.")
    ] = None,
    insecure: Insecure = False,
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name by which requests may call an HTTP port on loopback, for a proxy in front "
            "of it; may be repeated. With it, inference needs a login."
        ),
    ] = None,
    artifacts: Artifacts = None,
    registry: RegistryUrl = None,
    registry_password_file: RegistryPasswordFile = None,
    traces: TracesUrl = None,
    traces_share: TracesShare = None,
) -> None:
    """Run a backend until Ctrl-C: it answers queries, and shares them with other backends.

    `splitedge server api` runs beside it, here or on another machine.
    """
    from server.stopping import Stopping

    stopping = Stopping()
    from edge_sdk.systemd.notify import Notifier
    from edge_sdk.wire.address import Address
    from server.backend.senders import SenderLimits
    from server.registry.options import registry_location
    from server.roles.run import broker_for, registry_for, serve_backend
    from server.settings import ServerSettings

    if logging.getLogger().level > logging.INFO:
        logging.getLogger("server").setLevel(logging.INFO)
    location = registry_for(
        registry_location(registry, registry_password_file),
        state,
        settled_elsewhere=artifacts is not None,
    )
    broker, pinned = broker_for(mqtt, mqtt_password_file, state)
    more: dict[str, Any] = {"threads": threads} if threads else {}
    settings = ServerSettings(
        state=state,
        http=Address.parse(http, "--http"),
        broker=broker,
        batch_max=batch,
        queue_max=queue,
        limits=SenderLimits(limit_requests, limit_rows, limit_bytes),
        provider=provider,
        max_packet_bytes=mqtt_packet_bytes,
        tls_cert=tls_cert,
        mqtt_ca=mqtt_ca,
        tls_key=tls_key,
        insecure=insecure,
        host_names=tuple(host_name or ()),
        traces=chosen_traces(traces, traces_share, None),
        artifacts=artifacts,
        role="backend",
        **more,
    )

    def announce(url: str, running: Backend) -> None:
        loaded = [f"{one.manifest.name}/{one.manifest.version}" for one in running.models.all()]
        place = artifacts or state / "models"
        models = ", ".join(loaded) or f"none yet in {place}, so it takes no queries"
        typer.echo(
            f"splitedge backend: {url} (HTTP), {running.broker_url} (broker), models {models}"
        )

    serve_backend(
        settings,
        location=location,
        pinned=pinned,
        stopping=stopping,
        announce=announce,
        notifier=Notifier.take(os.environ),
    )
