"""`splitedge simulate`: a recipe, trained on this machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from edge_sdk.cli.output import check_report, resumable

if TYPE_CHECKING:  # torch takes seconds to import; --help shall not
    from server.training.recipe.recipe import Recipe

_EPILOG = "Example: splitedge simulate examples/recipes/supersfl-digits.toml --report supersfl.json"

app = typer.Typer(add_completion=False)


@app.command(epilog=_EPILOG)
def simulate(
    recipe: Annotated[Path, typer.Argument(help="A TOML file naming a method and its numbers.")],
    *,
    report: Annotated[Path | None, typer.Option(help="Also write the report there.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after the last round in OUT.")
    ] = False,
    device: Annotated[
        Literal["cpu", "cuda"], typer.Option(help="Where networks and batches are.")
    ] = "cpu",
    seed: Annotated[
        int | None, typer.Option(min=0, show_default="the recipe's", help="Of every random draw.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default="splitedge-runs/RECIPE-SEED",
            help="Folder for checkpoints, log, plots and report.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default="the recipe's", help="Folder of the data set."),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Of torch; another number changes the last bits of weights.")
    ] = 1,
) -> None:
    """Train by a recipe with simulated clients: rounds, checkpoints, a report and plots.

    Stopped at any point, --resume ends in the very weights of a run that was not.
    """
    check_report(report)
    console = Console()
    with console.status("loading torch"):
        import torch

        from server.training.recipe.recipe import load_recipe
        from server.training.report.report import write_report
        from server.training.simulation.run import simulate as run

    torch.set_num_threads(threads)
    plan = _changed(load_recipe(recipe), seed, data)
    folder = out or Path("splitedge-runs") / f"{recipe.stem}-{plan.seed}"
    with resumable(), _progress(console, plan.train.rounds) as on_round:
        result = run(plan, folder, resume=resume, device=device, on_round=on_round)
    if report is not None:
        write_report(report, result)
    _show(console, result, folder)


def _changed(recipe: Recipe, seed: int | None, data: Path | None) -> Recipe:
    if seed is not None:
        recipe = replace(recipe, seed=seed)
    if data is not None:
        recipe = replace(recipe, data=replace(recipe.data, folder=data))
    return recipe


@contextmanager
def _progress(console: Console, rounds: int) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """A line that follows the rounds."""
    columns = (
        TextColumn("round {task.completed}/{task.total}"),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=rounds, figures="")
        moved = 0
        accuracy = "-"

        def on_round(row: Mapping[str, Any]) -> None:
            nonlocal moved, accuracy
            moved += row["bytes_up"] + row["bytes_down"]
            if row["accuracy"] is not None:
                accuracy = f"{row['accuracy']:.1%}"
            loss = "-" if row["loss"] is None else f"{row['loss']:.3f}"
            figures = f"accuracy {accuracy}  loss {loss}  {moved / 1e6:.1f} MB"
            progress.update(task, completed=row["round"], figures=figures)

        yield on_round


def _show(console: Console, result: Mapping[str, Any], folder: Path) -> None:
    rows, final = result["rounds"], result["final"]
    up, down = (sum(row[f"bytes_{way}"] for row in rows) for way in ("up", "down"))
    seconds = sum(row["seconds"] for row in rows)
    asked_in_vain = sum(len(row["missing"]) + len(row["refused"]) for row in rows)
    how = "the clients' exits alone" if final["path"] == "exits" else "the whole network"
    console.print(
        f"[bold]{result['method']}[/] on {result['dataset']}, {result['clients']} clients, "
        f"{len(rows)} rounds in {seconds:.1f} s, {up / 1e6:.1f} MB up, {down / 1e6:.1f} MB down"
    )
    console.print(
        f"accuracy [bold]{final['accuracy']:.1%}[/] ({how}); of clients, "
        f"{_percent(final['accuracy_id'])} on their own classes, "
        f"{_percent(final['accuracy_ood'])} on others, spread {_percent(final['std'])}"
    )
    if final["exits"]:
        each = ", ".join(f"{depth}: {value:.1%}" for depth, value in final["exits"].items())
        console.print(f"exits by depth, on all classes: {each}")
    if asked_in_vain:
        console.print(f"[yellow]{asked_in_vain} updates missing or refused[/]; the report says why")
    idle = [row["round"] for row in rows if not row["merged"]]
    if idle:
        noise = "; [privacy] adds noise, which may be too much" if result["privacy"] else ""
        console.print(
            f"[yellow]{len(idle)} of {len(rows)} rounds did not merge[/] (first: {idle[0]}): too"
            f" few sound updates for round.quorum, so weights stayed as they were{escape(noise)}"
        )
    typer.echo(f"written to {folder}")


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"
