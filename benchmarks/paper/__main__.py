"""A paper's table, trained at a stated scale, with the paper's figures next to ours.

    python -m benchmarks.paper harmony --scale cpu --data DIR --seeds 3

Writes NAME-SCALE.json and NAME-SCALE.md into benchmarks/results/paper/.
"""

from __future__ import annotations

import math
import shlex
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer

from benchmarks import compare, reports
from benchmarks.intervals import mean_interval
from benchmarks.paper.measures import measured, shown
from benchmarks.paper.tables import TABLES, Row, Scale, Table, over
from benchmarks.reports import Data, Results, Seeds
from edge_sdk.errors import SplitedgeError
from server.training.recipe.recipe import Recipe, read_recipe

RESULTS: Final = reports.RESULTS / "paper"

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Trial:
    """One row, trained with one seed.

    Attributes:
        measures: in %, by name.
        seconds: of training, without evaluation. megabytes: up and down.
        curve: accuracy by round, in %.
    """

    row: str
    seed: int
    measures: Mapping[str, float]
    seconds: float
    megabytes: float
    curve: list[float | None]


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
    _write(results / f"{name}-{scale}", table, chosen, trials, how)


def recipe_of(table: Table, row: Row, scale: Scale, seed: int, data: Path | None) -> Recipe:
    """Recipe of a row at that scale."""
    recipe = over(over(table.scales[scale], row.recipe), {"seed": seed})
    if recipe["method"] != "scala" and "parts" not in recipe and "iterations" in recipe["train"]:
        # SCALA alone shares a joint batch out; the participants of the others have as much together
        recipe = over(recipe, {"train": {"batch": _share_of_batch(recipe)}})
    if data is not None and recipe["data"]["name"] != "digits":
        recipe = over(recipe, {"data": {"folder": str(data)}})
    # as in the papers: nothing is chosen after training, so clients train on all training samples
    return read_recipe(over(recipe, {"data": {"held_out": 0}}))


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


def _share_of_batch(recipe: Mapping[str, Any]) -> int:
    """A participant's share of a joint batch."""
    clients: int = recipe["data"]["clients"]
    share: float = recipe["round"]["participation"]
    participants = max(1, round(clients * share))
    batch: int = recipe["train"]["batch"]
    return max(1, batch // participants)


def _told(name: str, trial: Trial) -> str:
    figures = ", ".join(f"{shown(k)} {v:.2f}" for k, v in trial.measures.items())
    now = time.strftime("%H:%M:%S")
    return f"{now} {name}: {trial.row}, seed {trial.seed}: {figures} in {trial.seconds:.0f} s"


def _write(
    path: Path, table: Table, rows: list[Row], trials: list[Trial], how: dict[str, Any]
) -> None:
    seeds = sorted({trial.seed for trial in trials})
    about = (
        how
        | reports.provenance()
        | {
            "title": table.title,
            "source": table.source,
            "paper_data": table.data,
            "seeds": seeds,
            "recipe": table.scales[how["scale"]],
        }
    )
    report = about | {
        "rows": [{"name": row.name, "recipe": row.recipe, "paper": row.paper} for row in rows],
        "runs": [asdict(trial) for trial in trials],
    }
    printed = any(row.paper for row in rows)
    data = f"the paper's figures are of {table.data}" if printed else table.data
    source = (
        f"{table.source}; {data}. Ours: scale `{how['scale']}`,"
        f" seeds {', '.join(map(str, seeds))}, mean ± half width of the 95 % interval, in %."
    )
    blocks = [f"# {table.title}", source, reports.made_by(about), _markdown(table, rows, trials)]
    reports.write(path, report, blocks)
    typer.echo(blocks[-1])


def _cell(values: list[float]) -> str:
    """Mean ± half width of the values that are defined, and how many are where some are not."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    found = mean_interval(known)
    text = f"{found.mean:.2f}" if found.seeds == 1 else str(found)
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def _markdown(table: Table, rows: list[Row], trials: list[Trial]) -> str:
    printed = {name for row in rows for name in row.paper}
    heads = [h for m in table.measures for h in (shown(m), "paper")[: 1 + (m in printed)]]
    lines = [
        f"| | {' | '.join(heads)} | seconds | MB |",
        f"| --- |{' --- |' * (len(heads) + 2)}",
    ]
    for row in rows:
        own = [trial for trial in trials if trial.row == row.name]
        cells = []
        for name in table.measures:
            cells.append(_cell([trial.measures[name] for trial in own]))
            if name in printed:
                cells.append(f"{row.paper[name]:.2f}" if name in row.paper else "-")
        seconds = statistics.median(trial.seconds for trial in own)
        megabytes = statistics.median(trial.megabytes for trial in own)
        lines.append(f"| {row.name} | {' | '.join(cells)} | {seconds:.0f} | {megabytes:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
