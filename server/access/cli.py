"""`splitedge server keys …`: API keys of programs that are no devices."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edge_sdk.cli.output import print_json, print_table
from edge_sdk.cli.times import ago, seconds
from server.options import STATE_DEFAULT, AsJson, State

if TYPE_CHECKING:
    from server.registry.records import ApiKey, Scope

app = typer.Typer(
    help="Make, list and revoke API keys, with which programs use the API from other machines.",
    epilog="Example: splitedge server keys create --scope infer --model digits --expires 90d",
    no_args_is_help=True,
)


@app.command(
    epilog="Example: splitedge server keys create --scope infer --model digits --name shop-app"
)
def create(
    scope: Annotated[
        list[str],
        typer.Option(
            help="infer: ask models; operate: manage devices, models and fleets; train: list "
            "devices and invite them to training. May be repeated."
        ),
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(help="Model that it may ask; may be repeated. Default: all."),
    ] = None,
    fleet: Annotated[
        list[str] | None,
        typer.Option(help="Fleet whose model it may ask, whichever it is; may be repeated."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name in lists and in the audit log; default: a random one.")
    ] = None,
    expires: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", parser=seconds, help="Valid for so long: 12h, 90d. Default: for ever."
        ),
    ] = None,
    limit_requests: Annotated[
        float | None,
        typer.Option(help="Most queries a second; default: as `server run` limits each device."),
    ] = None,
    limit_rows: Annotated[float | None, typer.Option(help="Most samples a second.")] = None,
    limit_bytes: Annotated[float | None, typer.Option(help="Most bytes a second.")] = None,
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Print a new key, which is shown this once; it is valid at once.

    Send it with each request as the header `Authorization: Bearer KEY`.
    """
    from server.state import existing_registry

    with existing_registry(state) as registry:
        made, key = registry.keys.create(
            _scopes(scope),
            name=name,
            models=model or (),
            fleets=fleet or (),
            ttl_s=expires,
            requests=limit_requests,
            rows=limit_rows,
            bytes=limit_bytes,
        )
        known = {version.name for version in registry.catalogue.versions()}
    unknown = sorted(set(made.models) - known)
    if unknown:
        typer.echo(f"note: no model {', '.join(unknown)} is published yet", err=True)
    if as_json:
        print_json({"key": key, **_shown(made)})
    else:
        typer.echo(key)


@app.command("list", epilog="Example: splitedge server keys list --state ./server")
def list_(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """List the keys: what each opens, until when, and how often it was used."""
    from server.state import existing_registry

    with existing_registry(state) as registry:
        keys = registry.keys.all()
    if as_json:
        print_json([_shown(key) for key in keys])
        return
    if not keys:
        typer.echo("no keys yet; make one with `splitedge server keys create --scope infer`")
        return
    table = Table("name", "scopes", "models", "state", "uses", "last used")
    for key in keys:
        may = [*key.models, *(f"that of fleet {fleet}" for fleet in key.fleets)]
        asked = (", ".join(may) or "all") if "infer" in key.scopes else ""
        last = ago(key.used_at) or "never"
        table.add_row(key.name, ", ".join(key.scopes), asked, _state(key), str(key.uses), last)
    print_table(table)


@app.command(epilog="Example: splitedge server keys revoke shop-app --state ./server")
def revoke(name: str, state: State = STATE_DEFAULT) -> None:
    """Revoke a key: requests with it are refused, queries within a second."""
    from server.state import existing_registry

    with existing_registry(state) as registry:
        registry.keys.revoke(name)
    typer.echo(f"{name} is revoked")


def _scopes(texts: list[str]) -> list[Scope]:
    """Raises: ConfigurationError."""
    from edge_sdk.errors import ConfigurationError
    from server.registry.records import SCOPES

    scopes = [scope for scope in SCOPES if scope in texts]
    unknown = sorted(set(texts) - set(SCOPES))
    if unknown:
        raise ConfigurationError(
            f"--scope: expected some of {', '.join(SCOPES)}, got {', '.join(unknown)}"
        )
    return scopes


def _shown(key: ApiKey) -> dict[str, Any]:
    shown = asdict(key)
    del shown["key_sha256"]
    return shown


def _state(key: ApiKey) -> str:
    if key.revoked_at is not None:
        return f"revoked {ago(key.revoked_at)}"
    if key.expires_at is None:
        return "valid"
    if key.expires_at <= time.time():
        return f"expired {ago(key.expires_at)}"
    return f"valid until {time.strftime('%Y-%m-%d %H:%M', time.localtime(key.expires_at))}"
