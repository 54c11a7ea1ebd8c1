"""`splitedge server audit`: the audit log on the command line."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from edge_sdk.cli.output import print_json, print_table
from edge_sdk.cli.times import seconds
from server.options import STATE_DEFAULT, AsJson, State

if TYPE_CHECKING:
    from server.registry.database import Registry
    from server.registry.records import AuditEntry

LOOK_S = 1.0


def audit(
    since: Annotated[
        float | None,
        typer.Option(
            metavar="TIME", parser=seconds, help="Only entries of this time: 90s, 30m, 1h, 7d."
        ),
    ] = None,
    who: Annotated[
        str | None,
        typer.Option(help="Only what this device, operator or server did itself."),
    ] = None,
    about: Annotated[
        str | None,
        typer.Option(help="What this device (or model) did, and what was done to it or names it."),
    ] = None,
    what: Annotated[
        str | None,
        typer.Option(help="Only of this kind: device.revoke; `device.` takes all that begin so."),
    ] = None,
    outcome: Annotated[
        Literal["done", "refused"] | None, typer.Option(help="done or refused.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Most entries.")] = 100,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on with new entries, until Ctrl-C.")
    ] = False,
    state: State = STATE_DEFAULT,
    as_json: AsJson = False,
) -> None:
    """Show who did what, from where, with which outcome: logins, refusals, and every change.

    Entries are oldest first. Refusals of one address within a minute are one entry with a count.
    """
    from server.state import existing_registry

    begin = None if since is None else time.time() - since
    with existing_registry(state) as registry:
        look = partial(registry.trail.entries, who=who, about=about, what=what, outcome=outcome)
        entries = look(limit, since=begin)[::-1]
        if not follow:
            show(entries, as_json=as_json)
            return
        last = _newest(registry)
        for entry in entries:
            _print_line(entry, as_json)
        while True:
            time.sleep(LOOK_S)
            new = look(10_000, after=last)
            for entry in new[::-1]:
                _print_line(entry, as_json)
            last = max([last, *(entry.id for entry in new)])


def _newest(registry: Registry) -> int:
    return next((entry.id for entry in registry.trail.entries(1)), 0)


def show(entries: tuple[AuditEntry, ...], *, as_json: bool) -> None:
    """Print entries."""
    if as_json:
        print_json([asdict(entry) for entry in entries])
        return
    if not entries:
        typer.echo("no such entries")
        return
    table = Table("time (UTC)", "who", "what", "outcome", "times", "from", "detail")
    for entry in entries:
        table.add_row(*_cells(entry))
    print_table(table)


def _print_line(entry: AuditEntry, as_json: bool) -> None:
    if as_json:
        import orjson

        typer.echo(orjson.dumps(asdict(entry)).decode())
    else:
        typer.echo("  ".join(_cells(entry)))


def _cells(entry: AuditEntry) -> tuple[str, ...]:
    at = datetime.fromtimestamp(entry.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return (
        *(at, entry.who, entry.what, entry.outcome, str(entry.count), entry.source),
        entry.detail,
    )
