"""`splitedge train`: a recipe, trained with the enrolled devices."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from edge_sdk.cli.output import check_report, resumable

_EPILOG = "Example: splitedge train examples/recipes/supersfl-digits.toml --state ./server"

app = typer.Typer(add_completion=False)


@app.command(epilog=_EPILOG)
def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file naming a method and its numbers.")],
    *,
    state: Annotated[Path, typer.Option(help="Folder of the server whose devices train.")] = Path(
        "splitedge-server"
    ),
    report: Annotated[Path | None, typer.Option(help="Also write the report there.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after the last round that was saved.")
    ] = False,
    min_devices: Annotated[
        int | None,
        typer.Option(min=1, show_default="the recipe's clients", help="To begin with."),
    ] = None,
    join_minutes: Annotated[
        float, typer.Option(help="How long to wait for devices before giving up.")
    ] = 10.0,
    silence: Annotated[
        float, typer.Option(help="Seconds; a device not heard of for so long is not waited for.")
    ] = 15.0,
    http: Annotated[str, typer.Option(help="HOST:PORT of the trainer.")] = "127.0.0.1:8100",
    threads: Annotated[int, typer.Option(min=1, help="Of torch.")] = 1,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate, the server's.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of the certificate.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow unencrypted connections from other machines.")
    ] = False,
) -> None:
    """Train by a recipe with the enrolled devices, on data that stay with them.

    They are invited by the running server; on each, `splitedge agent train` waits for that.
    """
    check_report(report)
    console = Console(stderr=True)
    with console.status("loading torch"):
        import torch

        from server.run import Addresses
        from server.settings import Address
        from server.training.fleet.settings import TrainerSettings
        from server.training.fleet.trainer import train as run
        from server.training.recipe.recipe import load_recipe
        from server.training.report.report import write_report

    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if logging.getLogger().level > logging.INFO:
        logging.getLogger("server").setLevel(logging.INFO)
    known = Addresses.load(state)
    scheme = "http" if tls_cert is None else "https"
    settings = TrainerSettings(
        state=state,
        name=recipe.stem,
        http=Address.parse(http, "--http"),
        min_devices=min_devices,
        join_s=60 * join_minutes,
        silence_s=silence,
        resume=resume,
        server=None if known is None else f"{scheme}://{known.http}",
        tls_cert=tls_cert,
        tls_key=tls_key,
        insecure=insecure,
    )
    with resumable():
        result = run(load_recipe(recipe), settings, say=typer.echo, on_round=_show)
    if report is not None:
        write_report(report, result)
    typer.echo(
        f"{len(result['rounds'])} rounds with {result['clients']} devices,"
        f" accuracy {result['final']['accuracy']:.1%}: {result['weights']}"
    )


def _show(row: dict[str, Any]) -> None:
    accuracy = "" if row["accuracy"] is None else f", accuracy {row['accuracy']:.1%}"
    missing = f", missing {', '.join(row['missing'])}" if row["missing"] else ""
    stale = f", late from {', '.join(row['stale'])}" if row["stale"] else ""
    typer.echo(
        f"round {row['round']}: {len(row['participants'])} devices{accuracy},"
        f" {row['seconds']:.1f} s{missing}{stale}"
    )
