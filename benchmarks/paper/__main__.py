"""A paper's table, trained at a stated scale, with the paper's figures next to ours.

    python -m benchmarks.paper harmony --scale cpu --data DIR --seeds 3

Writes NAME-SCALE.json and NAME-SCALE.md into benchmarks/results/paper/.
"""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import compare
from benchmarks.paper.measures import measured, shown
from benchmarks.paper.recipes import recipe_of
from benchmarks.paper.report import RESULTS, Trial, write_report
from benchmarks.paper.tables import TABLES, Row, Scale, Table
from benchmarks.reports import Data, Results, Seeds
from edge_sdk.errors import SplitedgeError
from server.training.recipe.recipe import Recipe

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: python -m benchmarks.paper all --scale smoke")
def paper(  # noqa: PLR0917 - a command's options
    tables: Annotated[list[str], typer.Argument(help=f"`all`, or some of {', '.join(TABLES)}.")],
    scale: Annotated[Scale, typer.Option(help="Amount of training.")] = "smoke",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seeds: Seeds = 3,
    data: Data = None,
    rows: Annotated[
        list[str] | None, typer.Option("--row", help="Only this row; may be repeated.")
    ] = None,
    results: Results = RESULTS,
) -> None:
    """Train the tables of the five papers and write our figures next to theirs."""
    unknown = sorted(set(tables) - {"all", *TABLES})
    if unknown:
        raise typer.BadParameter(f"expected all or some of {', '.join(TABLES)}, got {unknown}")
    asked = {name: t for name, t in TABLES.items() if name in tables or "all" in tables}
    known = [row.name for table in asked.values() for row in table.rows]
    lacking = sorted(set(rows or []) - set(known))
    if lacking:
        raise typer.BadParameter(f"--row: expected some of {', '.join(known)}, got {lacking}")
    try:
        for name, table in asked.items():
            _report(name, table, rows, scale, device, seeds, data, results)
    except SplitedgeError as err:
        typer.echo(f"error: {err}", err=True)
        raise typer.Exit(1) from None


def _report(  # noqa: PLR0917 - the command's options
    name: str,
    table: Table,
    rows: list[str] | None,
    scale: Scale,
    device: str,
    seeds: int,
    data: Path | None,
    results: Path,
) -> None:
    """Train one table and write it."""
    chosen = [row for row in table.rows if not rows or row.name in rows]
    if not chosen:
        return
    trials = []
    for seed in range(seeds):  # seed by seed, so that a busy spell touches all rows
        for row in chosen:
            trials.append(train(table, row, recipe_of(table, row, scale, seed, data), device))
            typer.echo(_told(name, trials[-1]))
    words = [name, "--scale", scale, "--seeds", str(seeds), "--device", device]
    for only in rows or []:
        words += ["--row", only]
    how = {"scale": scale, "command": f"python -m benchmarks.paper {shlex.join(words)}"}
    typer.echo(write_report(results / f"{name}-{scale}", table, chosen, trials, how))


def train(table: Table, row: Row, recipe: Recipe, device: str = "cpu") -> Trial:
    """Train one row and measure the result."""
    simulation, rows = compare.train(recipe, device)
    return Trial(
        row.name,
        recipe.seed,
        measured(simulation, rows, table.measures),
        sum(each["seconds"] for each in rows),
        sum(each["bytes_up"] + each["bytes_down"] for each in rows) / 1e6,
        [None if r["accuracy"] is None else round(100 * r["accuracy"], 2) for r in rows],
    )


def _told(name: str, trial: Trial) -> str:
    figures = ", ".join(f"{shown(k)} {v:.2f}" for k, v in trial.measures.items())
    now = time.strftime("%H:%M:%S")
    return f"{now} {name}: {trial.row}, seed {trial.seed}: {figures} in {trial.seconds:.0f} s"


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
