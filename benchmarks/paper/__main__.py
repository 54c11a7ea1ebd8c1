"""A paper's table, trained at a stated scale and set beside what the paper prints.

    python -m benchmarks.paper harmony --scale cpu --data DIR --seeds 3

Writes NAME-SCALE.json and NAME-SCALE.md into benchmarks/results/paper/.
"""

from __future__ import annotations

import math
import platform
import shlex
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
import typer

from benchmarks.intervals import mean_interval
from benchmarks.paper.measures import measured, shown
from benchmarks.paper.tables import TABLES, Row, Scale, Table, over
from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import SplitedgeError
from edge_sdk.installation import __version__
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds

RESULTS = Path(__file__).parents[1] / "results" / "paper"

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, slots=True)
class Trained:
    """One row with one seed.

    Attributes:
        measures: in %, by name.
        seconds: of training, evaluation not counted. megabytes: up and down.
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
    tables: Annotated[list[str], typer.Argument(help=f"all, or some of {', '.join(TABLES)}.")],
    scale: Annotated[Scale, typer.Option(help="How much is trained.")] = "smoke",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seeds: Annotated[int, typer.Option(min=1, help="How many; they are 0, 1, ...")] = 3,
    data: Annotated[Path | None, typer.Option(help="Folder of the data set.")] = None,
    rows: Annotated[list[str] | None, typer.Option("--row", help="Some rows alone.")] = None,
    results: Annotated[Path, typer.Option(help="Where reports go.")] = RESULTS,
) -> None:
    """Train the tables of the five papers and write our figures beside theirs."""
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
    runs = []
    for seed in range(seeds):  # seed by seed, so that a busy spell touches all rows
        for row in chosen:
            runs.append(train(table, row, recipe_of(table, row, scale, seed, data), device))
            typer.echo(_told(name, runs[-1]))
    words = [name, "--scale", scale, "--seeds", str(seeds), "--device", device]
    for only in rows or []:
        words += ["--row", only]
    how = {"scale": scale, "command": f"python -m benchmarks.paper {shlex.join(words)}"}
    _write(results / f"{name}-{scale}", table, chosen, runs, how)


def recipe_of(table: Table, row: Row, scale: Scale, seed: int, data: Path | None) -> Recipe:
    """What is trained for a row at that scale."""
    said = over(over(table.scales[scale], row.recipe), {"seed": seed})
    if said["method"] != "scala" and "parts" not in said and "iterations" in said["train"]:
        # a joint batch is shared out by SCALA alone; the others' participants have as much together
        said = over(said, {"train": {"batch": _alone(said)}})
    if data is not None and said["data"]["name"] != "digits":
        said = over(said, {"data": {"folder": str(data)}})
    return read_recipe(said)


def train(table: Table, row: Row, recipe: Recipe, device: str = "cpu") -> Trained:
    """Train one row, in memory, and judge what came of it."""
    world = build_simulation(recipe, device)
    done: list[dict[str, Any]] = []
    for _ in run_rounds(world, done):
        pass
    return Trained(
        row.name,
        recipe.seed,
        measured(world, done, table.measures),
        sum(each["seconds"] for each in done),
        sum(each["bytes_up"] + each["bytes_down"] for each in done) / 1e6,
        [None if r["accuracy"] is None else round(100 * r["accuracy"], 2) for r in done],
    )


def _alone(said: Mapping[str, Any]) -> int:
    clients: int = said["data"]["clients"]
    share: float = said["round"]["participation"]
    participants = max(1, round(clients * share))
    batch: int = said["train"]["batch"]
    return max(1, batch // participants)


def _told(name: str, run: Trained) -> str:
    figures = ", ".join(f"{shown(k)} {v:.2f}" for k, v in run.measures.items())
    now = time.strftime("%H:%M:%S")
    return f"{now} {name}: {run.row}, seed {run.seed}: {figures} in {run.seconds:.0f} s"


def _write(
    path: Path, table: Table, rows: list[Row], runs: list[Trained], how: dict[str, Any]
) -> None:
    make_folder(path.parent)
    seeds = sorted({run.seed for run in runs})
    about = how | {
        "title": table.title,
        "source": table.source,
        "paper_data": table.data,
        "seeds": seeds,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "splitedge": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {platform.system()}",
        "recipe": table.scales[how["scale"]],
    }
    report = about | {
        "rows": [{"name": row.name, "recipe": row.recipe, "paper": row.paper} for row in rows],
        "runs": [asdict(run) for run in runs],
    }
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    write_atomic(path.with_suffix(".json"), orjson.dumps(report, option=options))
    printed = any(row.paper for row in rows)
    beside = f"the paper's figures are of {table.data}" if printed else table.data
    whose = (
        f"{table.source}; {beside}. Ours: scale `{how['scale']}`,"
        f" seeds {', '.join(map(str, seeds))}, mean ± half width of the 95 % interval, in %."
    )
    ran = f"`{about['command']}`; splitedge {__version__}, torch {torch.__version__}"
    lines = [f"# {table.title}", whose, f"{ran}, {about['when']}.", _markdown(table, rows, runs)]
    write_atomic(path.with_suffix(".md"), ("\n\n".join(lines) + "\n").encode())
    typer.echo(lines[-1])


def _cell(values: list[float]) -> str:
    """Mean ± half width; of those there are, and how many, where some are not."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "-"
    found = mean_interval(known)
    text = f"{found.mean:.2f}" if found.seeds == 1 else str(found)
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"


def _markdown(table: Table, rows: list[Row], runs: list[Trained]) -> str:
    printed = {name for row in rows for name in row.paper}
    heads = [h for m in table.measures for h in (shown(m), "paper")[: 1 + (m in printed)]]
    lines = [
        f"| | {' | '.join(heads)} | seconds | MB |",
        f"| --- |{' --- |' * (len(heads) + 2)}",
    ]
    for row in rows:
        own = [run for run in runs if run.row == row.name]
        cells = []
        for name in table.measures:
            cells.append(_cell([run.measures[name] for run in own]))
            if name in printed:
                cells.append(f"{row.paper[name]:.2f}" if name in row.paper else "-")
        seconds = statistics.median(run.seconds for run in own)
        megabytes = statistics.median(run.megabytes for run in own)
        lines.append(f"| {row.name} | {' | '.join(cells)} | {seconds:.0f} | {megabytes:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
