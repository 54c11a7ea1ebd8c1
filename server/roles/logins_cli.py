"""`splitedge server logins …`: logins of backends at Mosquitto, which take queries and reply only.

The server's own login, `backend`, may hear all that devices say and change their logins. A backend
needs neither. Mosquitto keeps these logins itself, as it keeps those of devices.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from edge_sdk.cli.output import print_json
from server.options import STATE_DEFAULT, AsJson, Insecure, MqttPasswordFile, State

if TYPE_CHECKING:
    from edge_sdk.wire.broker_address import BrokerAddress
    from server.broker.mosquitto import MosquittoAdmin

PASSWORD_BYTES: Final = 32

Mqtt = Annotated[
    str | None,
    typer.Option(
        help="mqtt[s]://backend@HOST:PORT of a Mosquitto of your own; default: that of the server"
        " on --state."
    ),
]
MqttCa = Annotated[Path | None, typer.Option(help="PEM file to verify an mqtts:// broker with.")]
Name = Annotated[str, typer.Argument(help="Name of the login: a-z, 0-9 and '-'.")]

app = typer.Typer(
    help="Make, list and revoke logins of backends at Mosquitto: they take queries and reply, and"
    " may do nothing else there.",
    epilog="Example: splitedge server logins create gpu-1 --out gpu-1.password --state ./server",
    no_args_is_help=True,
)


@app.command(
    epilog="Example: splitedge server logins create gpu-1 --out gpu-1.password --state ./server"
)
def create(
    name: Name,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the password there; default: print it."),
    ] = None,
    mqtt: Mqtt = None,
    mqtt_password_file: MqttPasswordFile = None,
    mqtt_ca: MqttCa = None,
    insecure: Insecure = False,
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Make a login for one or more backends; its password is shown this once.

    Backends log in with it by --mqtt mqtt[s]://backend.NAME@HOST:PORT and --mqtt-password-file.
    """
    from edge_sdk.durable import write_atomic
    from edge_sdk.errors import ConfigurationError
    from server.broker.mosquitto_files import LOGIN_PREFIX

    if out is not None and out.exists():
        raise ConfigurationError(f"--out {out}: exists already; give another file, or remove it")
    password = secrets.token_urlsafe(PASSWORD_BYTES)
    with _admin(mqtt, mqtt_password_file, state, mqtt_ca, insecure=insecure) as (admin, address):
        admin.add_backend(name, password)
    user = f"{LOGIN_PREFIX}{name}"
    told: dict[str, Any] = {"name": name, "user": user}
    if out is None:
        told["password"] = password
    else:
        write_atomic(out, f"{password}\n".encode(), mode=0o600)
        told["password_file"] = str(out)
    if as_json:
        print_json(told)
    elif out is None:
        typer.echo(password)
    else:
        url = address.url.replace("://", f"://{user}@")
        words = ["splitedge", "server", "backend", "--mqtt", url, "--mqtt-password-file", str(out)]
        if mqtt is None:
            words += ["--state", str(state)]
        typer.echo(f"Next: {shlex.join(words)}")


@app.command("list", epilog="Example: splitedge server logins list --state ./server")
def list_(
    mqtt: Mqtt = None,
    mqtt_password_file: MqttPasswordFile = None,
    mqtt_ca: MqttCa = None,
    insecure: Insecure = False,
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """List the logins of backends, by name."""
    with _admin(mqtt, mqtt_password_file, state, mqtt_ca, insecure=insecure) as (admin, _):
        names = admin.backends()
    if as_json:
        print_json(names)
    else:
        none = "no logins yet; make one with `splitedge server logins create NAME`"
        typer.echo("\n".join(names) or none)


@app.command(epilog="Example: splitedge server logins revoke gpu-1 --state ./server")
def revoke(
    name: Name,
    mqtt: Mqtt = None,
    mqtt_password_file: MqttPasswordFile = None,
    mqtt_ca: MqttCa = None,
    insecure: Insecure = False,
    state: State = STATE_DEFAULT,
) -> None:
    """Revoke a login: its backends are cut at once, and others take their share of the queries."""
    with _admin(mqtt, mqtt_password_file, state, mqtt_ca, insecure=insecure) as (admin, _):
        admin.remove_backend(name)
    typer.echo(f"{name} is revoked")


@contextlib.contextmanager
def _admin(
    mqtt: str | None, password_file: Path | None, state: Path, ca: Path | None, *, insecure: bool
) -> Iterator[tuple[MosquittoAdmin, BrokerAddress]]:
    """The broker's administration, connected, and the broker's address.

    Raises: ConfigurationError where the login is not the server's own; LinkError.
    """
    from edge_sdk.errors import ConfigurationError
    from server.broker.mosquitto import MosquittoAdmin
    from server.broker.mosquitto_files import BACKEND
    from server.roles.run import broker_for
    from server.state import check_server_state

    if mqtt is None:
        check_server_state(state)
    address, pinned = broker_for(mqtt, password_file, state)
    if address.username != BACKEND or not address.password:
        raise ConfigurationError(
            f"--mqtt {address.url}: expected the server's own login, which may change others; give"
            f" --mqtt mqtt[s]://{BACKEND}@HOST:PORT and --mqtt-password-file"
        )
    admin = MosquittoAdmin(
        replace(address, username=None, password=None),
        credential=address.password,
        ca=None if ca is None else str(ca),
        pinned=None if pinned is None else str(pinned),
        insecure=insecure,
    )
    admin.start()
    try:
        yield admin, address
    finally:
        admin.stop()
