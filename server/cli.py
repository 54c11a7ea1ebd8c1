"""`splitedge server …`: run it, make tokens, see and revoke devices, configure a broker.

What is heavy is imported by the command that needs it, so that `--help` is quick.
"""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from server.registry.database import Registry

app = typer.Typer(help="The server: API, models, broker.", no_args_is_help=True)
token_app = typer.Typer(help="One-time tokens that enrol a device.", no_args_is_help=True)
app.add_typer(token_app, name="token")

State = Annotated[Path, typer.Option("--state", help="Folder of everything the server keeps.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
STATE_DEFAULT = Path("splitedge-server")


@app.command(epilog="Example: splitedge server run --http 127.0.0.1:8000 --state ./server")
def run(
    http: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of the API; default the last one, or 127.0.0.1:8000."),
    ] = None,
    mqtt: Annotated[
        str | None,
        typer.Option(
            help="embedded[:HOST:PORT], or mqtt://[USER:PASSWORD@]HOST:PORT of your own broker; "
            "default the last one, or embedded:127.0.0.1:1883."
        ),
    ] = None,
    state: State = STATE_DEFAULT,
    allocation: Annotated[str, typer.Option(help="budget or supersfl.")] = "budget",
    batch: Annotated[int, typer.Option(help="Queries run at once, at most.")] = 32,
    queue: Annotated[int, typer.Option(help="Queries waiting before one is refused.")] = 256,
    threads: Annotated[int, typer.Option(help="Compute threads; 0 takes half the cores.")] = 0,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate: HTTPS, MQTTS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen off loopback in the clear all the same.")
    ] = False,
) -> None:
    """Run the server: API, broker and engine, until Ctrl-C."""
    from server.run import Addresses, serve
    from server.settings import (
        EMBEDDED,
        HTTP_DEFAULT,
        Address,
        ServerSettings,
        parse_broker,
    )

    last = Addresses.load(state)
    more: dict[str, Any] = {"threads": threads} if threads else {}
    settings = ServerSettings(
        state=state,
        http=Address.parse(http or (last.http if last else HTTP_DEFAULT), "--http"),
        broker=parse_broker(mqtt or (last.mqtt if last else EMBEDDED)),
        batch_max=batch,
        queue_max=queue,
        allocation=allocation,
        tls_cert=tls_cert,
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
    fleet: Annotated[str, typer.Option(help="The fleet the device joins.")] = "default",
    minutes: Annotated[float, typer.Option(help="How long the token is good for.")] = 60.0,
    note: Annotated[str, typer.Option(help="For your own memory.")] = "",
    as_json: AsJson = False,
) -> None:
    """Print a token that enrols one device."""
    from server.tokens import create_token

    token = create_token(state, fleet=fleet, ttl_s=60 * minutes, note=note)
    if as_json:
        _print_json({"token": token, "fleet": fleet, "expires_in_s": 60 * minutes})
    else:
        typer.echo(token)


@app.command(epilog="Example: splitedge server devices --state ./server --json")
def devices(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """List the enrolled devices."""
    with _registry(state) as registry:
        rows = [
            {
                "device": device.id,
                "fleet": device.fleet,
                "depth": device.depth,
                "bundle": device.bundle,
                "last_seen": device.last_seen,
                "revoked": device.revoked_at is not None,
            }
            for device in registry.devices()
        ]
    if as_json:
        _print_json(rows)
        return
    if not rows:
        typer.echo("no devices yet; make a token with `splitedge server token create`")
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console().print(table)


@app.command(epilog="Example: splitedge server revoke pi-4 --state ./server")
def revoke(device: str, state: State = STATE_DEFAULT) -> None:
    """Shut a device out; a running server cuts its connection within seconds."""
    with _registry(state) as registry:
        registry.revoke(device)
    typer.echo(f"{device} is revoked")


def _registry(state: Path) -> closing[Registry]:
    from edge_sdk.errors import ConfigurationError
    from server.registry.database import Registry

    if not (state / "registry.db").is_file():
        raise ConfigurationError(f"{state}: no server has kept its state there; check --state")
    return closing(Registry.open(f"sqlite:///{state / 'registry.db'}"))


def _print_json(value: object) -> None:
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())
