"""`splitedge server …`: run it, make tokens, list and revoke devices, configure a broker.

Each command imports what it needs, so that `--help` is quick.
"""

from __future__ import annotations

import logging
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edge_sdk.cli.output import print_json, print_table
from edge_sdk.cli.times import ago
from edge_sdk.wire.topics import PAYLOAD_BYTES
from server.deployment.cli import STATE_DEFAULT, AsJson, State
from server.deployment.cli import app as models_app

if TYPE_CHECKING:
    from edge_sdk.mqtt import BrokerAddress
    from edge_sdk.wire.address import Address
    from server.deployment.overview import DeviceState
    from server.registry.records import FleetModel

app = typer.Typer(
    help="Run and manage the server: API, models, broker, devices.",
    epilog="Example: splitedge server run --state ./server",
    no_args_is_help=True,
)
token_app = typer.Typer(
    help="Make one-time tokens, each of which enrols a device.",
    epilog="Example: splitedge server token create --state ./server",
    no_args_is_help=True,
)
app.add_typer(token_app, name="token")
app.add_typer(models_app, name="models")


@app.command(epilog="Example: splitedge server run --http 127.0.0.1:8000 --state ./server")
def run(
    http: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of the API; default: as last time, else 127.0.0.1:8000."),
    ] = None,
    mqtt: Annotated[
        str | None,
        typer.Option(
            help="embedded[:HOST:PORT], or your broker's mqtt://[USER@]HOST:PORT (or mqtts://); "
            "default: as last time, else embedded:127.0.0.1:1883. mqtt://USER:PASSWORD@... works "
            "too, but other users of this machine can read the password with ps."
        ),
    ] = None,
    mqtt_password_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SPLITEDGE_MQTT_PASSWORD_FILE",
            help="File with one line, the password of the user in --mqtt.",
        ),
    ] = None,
    mqtt_public: Annotated[
        str | None,
        typer.Option(
            help="mqtt://HOST:PORT (or mqtts://) at which devices reach the broker, if not at "
            "--mqtt; default: as last time, else --mqtt."
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
    batch: Annotated[int, typer.Option(help="Largest batch of queries.")] = 32,
    queue: Annotated[
        int, typer.Option(help="Largest number of waiting queries; more are refused.")
    ] = 256,
    threads: Annotated[int, typer.Option(help="Compute threads; 0 means half the cores.")] = 0,
    tls_cert: Annotated[
        Path | None, typer.Option(help="PEM certificate for HTTPS and MQTTS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    mqtt_ca: Annotated[
        Path | None, typer.Option(help="PEM file to verify your own mqtts:// broker with.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow unencrypted connections from other machines.")
    ] = False,
) -> None:
    """Run the server until Ctrl-C: API, broker and models."""
    from edge_sdk.wire.address import Address
    from server.run import Addresses, serve
    from server.settings import EMBEDDED, HTTP_DEFAULT, ServerSettings, parse_broker

    last = Addresses.load(state)
    more: dict[str, Any] = {"threads": threads} if threads else {}
    settings = ServerSettings(
        state=state,
        http=Address.parse(http or (last.http if last else HTTP_DEFAULT), "--http"),
        broker=_with_password(
            parse_broker(mqtt or (last.mqtt if last else EMBEDDED)), mqtt_password_file
        ),
        mqtt_public=mqtt_public or (last.mqtt_public if last else None),
        batch_max=batch,
        queue_max=queue,
        allocation=allocation or (last.allocation if last else None) or "budget",
        max_packet_bytes=mqtt_packet_bytes,
        tls_cert=tls_cert,
        mqtt_ca=mqtt_ca,
        tls_key=tls_key,
        insecure=insecure,
        **more,
    )
    if logging.getLogger().level > logging.INFO:
        logging.getLogger("server").setLevel(logging.INFO)

    def announce(http_url: str, mqtt_url: str) -> None:
        typer.echo(f"splitedge server: {http_url} (API), {mqtt_url} (broker), state in {state}")

    serve(settings, announce)


@token_app.command("create", epilog="Example: splitedge server token create --state ./server")
def token_create(
    state: State = STATE_DEFAULT,
    fleet: Annotated[str, typer.Option(help="Fleet that the device joins.")] = "default",
    minutes: Annotated[float, typer.Option(help="Minutes until the token expires.")] = 60.0,
    note: Annotated[str, typer.Option(help="Note of your own, kept with the token.")] = "",
    as_json: AsJson = False,
) -> None:
    """Print a token that enrols one device, whether the server runs or not."""
    from server.registry.database import registry_file
    from server.state import check_not_a_device
    from server.tokens import create_token

    check_not_a_device(state)
    if not registry_file(state).exists():
        typer.echo(
            f"note: no server has run on {state} yet, so keys and a registry are made there; the"
            " token is for that new server",
            err=True,
        )
    token = create_token(state, fleet=fleet, ttl_s=60 * minutes, note=note)
    if as_json:
        print_json({"token": token, "fleet": fleet, "expires_in_s": 60 * minutes})
    else:
        typer.echo(token)


@app.command(epilog="Example: splitedge server devices --state ./server --fleet kitchen")
def devices(
    state: State = STATE_DEFAULT,
    fleet: Annotated[str | None, typer.Option(help="List the devices of this fleet only.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the enrolled devices: the bundle that each runs, wants and refused."""
    from server.deployment.overview import device_states
    from server.state import existing_registry

    with existing_registry(state) as registry:
        states = device_states(registry, fleet)
    if as_json:
        print_json([asdict(one) for one in states])
        return
    if not states:
        of = "" if fleet is None else f" in fleet {fleet}"
        typer.echo(f"no devices{of} yet; make a token with `splitedge server token create`")
        return
    table = Table("device", "fleet", "depth", "runs", "wants", "refused", "last seen")
    for one in states:
        table.add_row(
            one.device,
            one.fleet,
            "" if one.depth is None else str(one.depth),
            one.runs or "not reported",
            _wanted(one),
            one.refused or "",
            ago(one.last_seen) or "never",
        )
    print_table(table)
    for one in states:
        if one.refused is not None:
            typer.echo(f"{one.device} refused {one.refused}: {one.why}")


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
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow unencrypted connections from other machines.")
    ] = False,
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


def _wanted(state: DeviceState) -> str:
    """The bundle that a device should run, and whether it is pinned."""
    if state.revoked:
        return "revoked"
    pinned = "" if state.pinned is None else f" (pinned to {state.pinned})"
    return f"{state.wants or 'no model yet'}{pinned}"


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


def _with_password(broker: Address | BrokerAddress, file: Path | None) -> Address | BrokerAddress:
    from edge_sdk.errors import ConfigurationError
    from edge_sdk.mqtt import BrokerAddress
    from server.broker.config import read_password

    if file is None:
        return broker
    if not isinstance(broker, BrokerAddress) or broker.username is None or broker.password:
        raise ConfigurationError(
            "--mqtt-password-file needs --mqtt mqtt://USER@HOST:PORT; give both, or neither"
        )
    return replace(broker, password=read_password(file))
