"""`splitedge server …`: run it, make tokens, list and revoke devices, configure a broker.

Each command imports what it needs, so that `--help` is quick.
"""

from __future__ import annotations

import logging
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_sdk.cli.output import print_json
from edge_sdk.cli.times import length_in
from edge_sdk.discovery.record import SERVICE
from edge_sdk.tracing.options import TracesShare, TracesUrl, chosen_traces
from edge_sdk.wire.topics import PAYLOAD_BYTES
from server.access.cli import app as keys_app
from server.alerts.cli import app as alerts_app
from server.audit.cli import audit
from server.dashboard.cli import dashboard_link
from server.deployment.cli import app as models_app
from server.membership.cli import devices_app, quarantine_app
from server.membership.token_cli import app as token_app
from server.options import (
    STATE_DEFAULT,
    Artifacts,
    AsJson,
    Batch,
    Insecure,
    MqttPasswordFile,
    PassphraseFile,
    Provider,
    Queue,
    State,
    Threads,
    TlsKey,
)
from server.planning.cli import plan
from server.registry.options import RegistryPasswordFile, RegistryUrl
from server.roles.cli import backend
from server.roles.logins_cli import app as logins_app
from server.rollouts.cli import app as rollout_app
from server.signing.cli import app as root_app
from server.systemd.cli import mount as mount_service
from server.upkeep.cli import app as upkeep_app

if TYPE_CHECKING:
    from edge_sdk.wire.address import Address
    from edge_sdk.wire.broker_address import BrokerAddress
    from server.registry.records import FleetModel
    from server.run import Addresses

app = typer.Typer(
    help="Run and manage the server: API, models, broker, devices.",
    epilog="Example: splitedge server run --state ./server",
    no_args_is_help=True,
)
app.add_typer(token_app, name="token")
app.add_typer(models_app, name="models")
app.add_typer(keys_app, name="keys")
app.add_typer(logins_app, name="logins")
app.add_typer(rollout_app, name="rollout")
app.add_typer(alerts_app, name="alerts")
app.add_typer(upkeep_app)  # backup, restore, doctor
app.add_typer(devices_app, name="devices")
app.add_typer(quarantine_app, name="quarantine")
app.command(epilog="Example: splitedge server audit --since 1h --state ./server")(audit)
app.add_typer(root_app, name="root")
app.command(epilog="Example: splitedge server plan --devices 10000 --offload 20%")(plan)
app.command(
    "dashboard-link", epilog="Example: splitedge server dashboard-link --state ./server --name anna"
)(dashboard_link)


@app.command(
    "api",
    help="Run the server without the queries over MQTT, which backends share, until Ctrl-C.\n\n"
    "Start it in place of `splitedge server run`, with the same options, and one or more"
    " `splitedge server backend` beside it. Its broker is Mosquitto, or an EMQX by URL.",
    epilog="Example: splitedge server api --mqtt mosquitto --state ./server",
)
@app.command(epilog="Example: splitedge server run --http 127.0.0.1:8000 --state ./server")
def run(
    ctx: typer.Context,
    http: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of the API; default: as last time, else 127.0.0.1:8000."),
    ] = None,
    mqtt: Annotated[
        str | None,
        typer.Option(
            help="auto (Mosquitto if it is installed, else the embedded broker), mosquitto or "
            "embedded, each also with :HOST:PORT, or your broker's mqtt://[USER@]HOST:PORT (or "
            "mqtts://); default: as last time, else auto at 127.0.0.1:1883. One with USER is not "
            "remembered, nor are --http, --mqtt-public and --allocation beside it. "
            "mqtt://USER:PASSWORD@... works too, but other users of this machine can read the "
            "password with ps."
        ),
    ] = None,
    mqtt_password_file: MqttPasswordFile = None,
    mqtt_public: Annotated[
        str | None,
        typer.Option(
            help="mqtt://HOST:PORT (or mqtts://) at which devices reach the broker, if not at "
            '--mqtt; default: as last time, else --mqtt; "" forgets that of last time.'
        ),
    ] = None,
    mqtt_packet_bytes: Annotated[
        int,
        typer.Option(
            help="Longest MQTT message; longer ones go over HTTP. If your own broker has a smaller "
            "limit, stay 1,000 below it: 130000 for AWS IoT, 1000000 for EMQX."
        ),
    ] = PAYLOAD_BYTES,
    state: State = STATE_DEFAULT,
    allocation: Annotated[
        str | None,
        typer.Option(
            help="Rule of depths: budget or supersfl; default: as last time, else budget."
        ),
    ] = None,
    batch: Batch = 32,
    queue: Queue = 256,
    limit_requests: Annotated[
        float | None,
        typer.Option(help="Most queries a second of one device; more are refused. Default: none."),
    ] = None,
    limit_rows: Annotated[
        float | None,
        typer.Option(help="Most samples a second of one device; more are refused. Default: none."),
    ] = None,
    limit_bytes: Annotated[
        float | None,
        typer.Option(help="Most bytes a second of one device; more are refused. Default: none."),
    ] = None,
    threads: Threads = 0,
    provider: Provider = "auto",
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate for HTTPS and MQTTS.")
    ] = None,
    tls_key: TlsKey = None,
    mqtt_ca: Annotated[
        Path | None, typer.Option(help="PEM file to verify your own mqtts:// broker with.")
    ] = None,
    insecure: Insecure = False,
    enrolment: Annotated[
        str | None,
        typer.Option(
            help="token: a token lets a device in; approve: it waits for `splitedge server devices "
            "approve` too; default: as last time, else token."
        ),
    ] = None,
    new_versions: Annotated[
        str | None,
        typer.Option(
            help="all: a new version of a model goes to all its devices at once; hold: it waits "
            "for `splitedge server rollout start`; default: as last time, else all."
        ),
    ] = None,
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Name by which requests may call an API on loopback, for a proxy in front of it; "
            "may be repeated. With it, inference needs a login. localhost, loopback addresses and "
            "the certificate's names may always."
        ),
    ] = None,
    audit_rows: Annotated[
        int, typer.Option(help="Most changes, and most logins and refusals, in the audit log.")
    ] = 100_000,
    audit_days: Annotated[
        float,
        typer.Option(
            metavar="DAYS",
            parser=length_in("d"),
            help="Days (or 12h, 2w) that the audit log goes back.",
        ),
    ] = 365.0,
    telemetry_points: Annotated[
        int,
        typer.Option(help="Most points in the devices' history, of about 600 bytes each."),
    ] = 400_000,
    artifacts: Artifacts = None,
    registry: RegistryUrl = None,
    registry_password_file: RegistryPasswordFile = None,
    root_key: Annotated[
        str | None,
        typer.Option(
            metavar="offline:DIR",
            help="Write the root keys of a new server to DIR, outside the state; only `server root "
            "renew` and `rotate` need them again.",
        ),
    ] = None,
    root_keys: Annotated[int, typer.Option(min=1, help="Number of offline root keys.")] = 1,
    root_threshold: Annotated[int, typer.Option(min=1, help="How many must sign a root.")] = 1,
    key_passphrase_file: PassphraseFile = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard/--no-dashboard", help="Pages for people at /.")
    ] = True,
    announce_: Annotated[
        bool,
        typer.Option(
            "--announce",
            help="Tell the local network where this server is, for `splitedge agent enroll"
            " --discover`; needs the extra `discovery`.",
        ),
    ] = False,
    service_type: Annotated[
        str, typer.Option(envvar="SPLITEDGE_SERVICE_TYPE", hidden=True)
    ] = SERVICE,
    traces: TracesUrl = None,
    traces_share: TracesShare = None,
) -> None:
    """Run the server until Ctrl-C: API, broker and models."""
    from server.stopping import Stopping

    stopping = Stopping()
    from edge_sdk.systemd.notify import Notifier
    from edge_sdk.wire.address import Address
    from server.backend.senders import SenderLimits
    from server.registry.options import registry_location
    from server.run import (
        Addresses,
        choose_broker,
        last_enrolment,
        last_new_versions,
        serve,
    )
    from server.settings import HTTP_DEFAULT, Role, ServerSettings
    from server.signing.keys import RootKeys
    from server.state import check_not_a_device

    check_not_a_device(state)
    if logging.getLogger().level > logging.INFO:
        logging.getLogger("server").setLevel(logging.INFO)
    role: Role = "api" if ctx.info_name == "api" else "all"
    last = Addresses.load(state)
    program, broker = choose_broker(mqtt, last)
    if role == "api" and program == "auto":
        program = "mosquitto"  # backends need one that shares queries out
    more: dict[str, Any] = {"threads": threads} if threads else {}
    settings = ServerSettings(
        state=state,
        http=Address.parse(http or (last.http if last else HTTP_DEFAULT), "--http"),
        broker=_with_password(broker, mqtt_password_file),
        broker_program=program,
        mqtt_public=_public(mqtt_public, last),
        batch_max=batch,
        queue_max=queue,
        limits=SenderLimits(limit_requests, limit_rows, limit_bytes),
        provider=provider,
        allocation=allocation or (last.allocation if last else None) or "budget",
        max_packet_bytes=mqtt_packet_bytes,
        tls_cert=tls_cert,
        mqtt_ca=mqtt_ca,
        tls_key=tls_key,
        insecure=insecure,
        enrolment=enrolment or last_enrolment(state),
        new_versions=new_versions or last_new_versions(state),
        host_names=tuple(host_name or ()),
        audit_rows=audit_rows,
        audit_days=audit_days,
        telemetry_points=telemetry_points,
        registry=registry_location(registry, registry_password_file),
        root_keys=RootKeys.parse(root_key, root_keys, root_threshold),
        key_passphrase_file=key_passphrase_file,
        dashboard=dashboard,
        announce=service_type if announce_ else None,
        traces=chosen_traces(traces, traces_share, None),
        artifacts=artifacts,
        role=role,
        **more,
    )

    def announce(http_url: str, mqtt_url: str, dashboard: str | None) -> None:
        typer.echo(f"splitedge server: {http_url} (API), {mqtt_url} (broker), state in {state}")
        if role == "api":
            typer.echo("queries over MQTT wait for backends: splitedge server backend --help")
        if dashboard is not None:
            typer.echo(f"dashboard: {dashboard}")

    serve(settings, stopping, announce, Notifier.take(os.environ))


app.command(epilog="Example: splitedge server backend --state ./server --threads 2")(backend)
mount_service(app, run)  # install-service, uninstall-service


@app.command(epilog="Example: splitedge server revoke pi-4 --state ./server")
def revoke(device: str, state: State = STATE_DEFAULT) -> None:
    """Revoke a device; a running server cuts its connection within seconds."""
    from server.state import existing_registry

    with existing_registry(state) as registry:
        registry.revoke(device)
    typer.echo(f"{device} is revoked")


@app.command(epilog="Example: splitedge server pin pi-4 --depth 2 --state ./server")
def pin(
    device: str,
    depth: Annotated[int | None, typer.Option(min=1, help="Stages that it runs.")] = None,
    bundle: Annotated[
        str | None, typer.Option(metavar="MODEL/VERSION/VARIANT", help="Bundle that it runs.")
    ] = None,
    state: State = STATE_DEFAULT,
) -> None:
    """Fix a device's depth or bundle, whatever it measures; a running server calls it at once."""
    from edge_sdk.errors import ConfigurationError

    if (depth is None) == (bundle is None):
        raise ConfigurationError("pin: expected --depth or --bundle, and only one of them")
    from server.state import existing_registry

    with existing_registry(state) as registry:
        if depth is not None:
            model = registry.catalogue.wanted(registry.device(device).fleet)
            _check_depth(state, depth, model)
        elif bundle is not None:
            _check_published(state, bundle)
        pinned = registry.capabilities.pin(device, depth=depth, bundle=bundle)
    typer.echo(f"{device} is pinned to {pinned}")


@app.command(epilog="Example: splitedge server unpin pi-4 --state ./server")
def unpin(device: str, state: State = STATE_DEFAULT) -> None:
    """Let the fleet's rule choose the device's bundle again."""
    from server.state import existing_registry

    with existing_registry(state) as registry:
        was = registry.capabilities.unpin(device)
    typer.echo(f"{device} is {'no longer' if was else 'not'} pinned")


@app.command("broker-config", epilog="Example: splitedge server broker-config --out ./mosquitto")
def broker_config(
    out: Annotated[Path, typer.Option(help="Folder for the configuration and Mosquitto's data.")],
    host: Annotated[str, typer.Option(help="Address on which Mosquitto listens.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=1, max=65_535, help="Port on which Mosquitto listens.")
    ] = 1883,
    cert: Annotated[Path | None, typer.Option(help="PEM certificate for MQTTS.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    password_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the server's password on the broker; default OUT/backend.password, "
            "which is created if it is missing."
        ),
    ] = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Write a Mosquitto configuration that keeps devices apart.

    Mosquitto 2.0 or newer with its dynamic security plugin is needed. The server adds and removes
    devices while Mosquitto runs; running this command again keeps them.
    """
    from server.broker.config import write_broker

    written = write_broker(
        out,
        host=host,
        port=port,
        certificate=cert,
        key=key,
        insecure=insecure,
        password_file=password_file,
    )
    broker = ["mosquitto", "-c", str(written.config)]
    server = ["splitedge", "server", "run", "--mqtt", written.url]
    server += ["--mqtt-password-file", str(written.password_file)]
    if as_json:
        print_json({"config": str(written.config), "broker": broker, "server": server})
    else:
        typer.echo(f"{shlex.join(broker)}\n{shlex.join(server)}")


def _published(state: Path) -> list[str]:
    """The bundles `MODEL/VERSION/VARIANT` in a server's state folder."""
    manifests = sorted((state / "models").glob("*/*/bundles/*/manifest.json"))
    return ["/".join(path.parts[i] for i in (-5, -4, -2)) for path in manifests]


def _check_published(state: Path, bundle: str) -> None:
    """Raises: ConfigurationError naming the bundles that there are."""
    from edge_sdk.errors import ConfigurationError

    there = _published(state)
    if bundle not in there:
        raise ConfigurationError(
            f"{bundle}: no model of this server has it; there are {', '.join(there) or 'none'}"
        )


def _check_depth(state: Path, depth: int, model: FleetModel) -> None:
    """Check that the model of a device's fleet has a bundle of the depth.

    Raises: ConfigurationError naming the bundles that it has.
    """
    from edge_sdk.errors import ConfigurationError

    version = f"{model.model}/{model.version}"
    there = [each for each in _published(state) if each.rpartition("/")[0] == version]
    if f"{version}/d{depth}" not in there:
        raise ConfigurationError(
            f"--depth {depth}: the fleet {model.fleet} runs"
            f" {version if model.model else 'no model yet'}, which has no bundle of that depth;"
            f" there are {', '.join(there) or 'none'}"
        )


def _public(given: str | None, last: Addresses | None) -> str | None:
    if given is None:
        return last.mqtt_public if last else None
    return given or None


def _with_password(broker: Address | BrokerAddress, file: Path | None) -> Address | BrokerAddress:
    from edge_sdk.errors import ConfigurationError
    from edge_sdk.wire.broker_address import BrokerAddress
    from server.broker.config import read_password

    if file is None:
        return broker
    if not isinstance(broker, BrokerAddress) or broker.username is None or broker.password:
        raise ConfigurationError(
            "--mqtt-password-file needs --mqtt mqtt://USER@HOST:PORT; give both, or neither"
        )
    return replace(broker, password=read_password(file))
