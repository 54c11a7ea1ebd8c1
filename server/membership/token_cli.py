"""`splitedge server token …`: tokens with which devices enrol."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from edge_sdk.cli.output import print_json, print_table
from edge_sdk.cli.times import ago, length_in, seconds
from server.options import STATE_DEFAULT, AsJson, PassphraseFile, State
from server.registry.options import RegistryPasswordFile, RegistryUrl

if TYPE_CHECKING:
    from server.registry.records import Token

HOUR_S = 3_600.0

app = typer.Typer(
    help="Make one-time tokens, each of which enrols a device, and list them.",
    epilog="Example: splitedge server token create --state ./server",
    no_args_is_help=True,
)


@app.command(
    epilog="Example: splitedge server token create --count 200 --fleet yard --expires 7d"
    " --out tokens.txt --state ./server"
)
def create(
    state: State = STATE_DEFAULT,
    count: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of tokens, one for each device.")
    ] = 1,
    fleet: Annotated[
        str | None,
        typer.Option(show_default="default", help="Fleet that the devices join."),
    ] = None,
    expires: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=seconds,
            show_default="1h",
            help="Time until the tokens expire, at most 30d: 10m, 1h, 7d.",
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(hidden=True, parser=length_in("m"), metavar="MINUTES")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="An enrolled device that comes back, on a new disk, say: with this token it keeps"
            " its name, its fleet, its tags and its pin."
        ),
    ] = None,
    note: Annotated[str, typer.Option(help="Note of your own, kept with the tokens.")] = "",
    approve: Annotated[
        bool, typer.Option("--approve", help="The devices wait for your approval.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a token a line to this new file, for you only."),
    ] = None,
    key_passphrase_file: PassphraseFile = None,
    as_json: AsJson = False,
    registry: RegistryUrl = None,
    registry_password_file: RegistryPasswordFile = None,
) -> None:
    """Print tokens, each of which enrols one device, whether the server runs or not."""
    from edge_sdk.errors import ConfigurationError
    from server.registry.options import registry_location
    from server.signing.keys import read_passphrase
    from server.state import check_server_or_models
    from server.tokens import create_tokens

    if expires is not None and minutes is not None:
        raise typer.BadParameter("give --expires or --minutes, one of them")
    ttl_s = 60 * minutes if minutes is not None else HOUR_S if expires is None else expires
    if out is not None and out.exists():
        raise ConfigurationError(f"--out {out}: it exists already; give the name of a new file")
    passphrase = read_passphrase(key_passphrase_file)
    if not check_server_or_models(state):
        typer.echo(
            f"note: no server has run on {state} yet, so keys and a registry are made there; the"
            " token is for that new server",
            err=True,
        )
    tokens = create_tokens(
        state,
        count,
        fleet=fleet,
        ttl_s=ttl_s,
        note=note,
        approve=approve,
        device=device,
        location=registry_location(registry, registry_password_file),
        passphrase=passphrase,
    )
    if out is not None:
        _write(out, tokens)
    made: dict[str, Any] = {"token": tokens[0]} if count == 1 else {"tokens": tokens}
    made |= {"device": device} if device else {"fleet": fleet or "default"}
    made["expires_in_s"] = ttl_s
    if as_json:
        print_json(made)
    elif out is None:
        typer.echo("\n".join(tokens))
    else:
        typer.echo(f"{out}: {len(tokens)} tokens, one a line; a device takes one")


@app.command("list", epilog="Example: splitedge server token list --state ./server --json")
def list_(state: State = STATE_DEFAULT, as_json: AsJson = False) -> None:
    """List the tokens that still enrol a device; a token itself is shown once, when it is made."""
    from server.state import existing_registry

    with existing_registry(state) as registry:
        found = [one for one in registry.tokens() if one.used_at is None]
    now = time.time()
    valid = [one for one in found if one.expires_at > now]
    if as_json:
        print_json([_fields(one) for one in valid])
        return
    if not valid:
        typer.echo("no token is valid; make one with `splitedge server token create`")
        return
    groups: dict[tuple[str, ...], int] = {}
    for one in valid:
        ends = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.expires_at))
        row = (one.fleet, one.device or "", ago(one.created_at), ends, one.note)
        groups[row] = groups.get(row, 0) + 1
    table = Table("tokens", "fleet", "for", "made", "valid until", "note")
    for shown, number in groups.items():
        table.add_row(str(number), *shown)
    print_table(table)


def _fields(token: Token) -> dict[str, Any]:
    return {
        "fleet": token.fleet,
        "device": token.device,
        "note": token.note,
        "created_at": token.created_at,
        "expires_at": token.expires_at,
        "approve": token.approve,
    }


def _write(out: Path, tokens: list[str]) -> None:
    """Write tokens for their owner only.

    Raises: StorageError.
    """
    from edge_sdk.durable import make_folder, write_atomic

    make_folder(out.absolute().parent)
    write_atomic(out, "".join(f"{token}\n" for token in tokens).encode(), mode=0o600)
