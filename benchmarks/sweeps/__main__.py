"""Train a sweep on the digits, and write its tables.

    python -m benchmarks.sweeps participation --seeds 3

Writes benchmarks/results/sweep-NAME.json and .md. Trainings that are done are kept below
splitedge-runs/sweeps, so that the same call goes on after a stop.
"""

from __future__ import annotations

import time
from typing import Annotated, Final

import torch
import typer

from benchmarks.reports import RESULTS, ROOT, Results, Seeds, Work
from benchmarks.sweeps.catalog import SWEEPS
from benchmarks.sweeps.report import tables_of, write_sweep
from server.training.comparison.comparison import Training, Watcher, compare

WORK: Final = ROOT / "splitedge-runs" / "sweeps"


def main(
    name: Annotated[str, typer.Argument(metavar="SWEEP", help=f"One of {', '.join(SWEEPS)}.")],
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of each training; the sweep's own by default.")
    ] = None,
    seeds: Seeds = 3,
    results: Results = RESULTS,
    work: Work = WORK,
) -> None:
    """Train every line of the sweep with every seed."""
    if name not in SWEEPS:
        raise typer.BadParameter(f"expected one of {', '.join(SWEEPS)}, got {name}")
    sweep = SWEEPS[name]
    asked = rounds or sweep.rounds
    lines = {line.name: line for group in sweep.groups for line in group.lines}
    recipes = {key: line.read(asked) for key, line in lines.items()}
    watcher = Watcher(on_training=_tell)
    trainings = compare(recipes, range(seeds), work / f"{name}-{asked}", watcher=watcher)
    command = f"python -m benchmarks.sweeps {name}"
    if rounds is not None:
        command += f" --rounds {rounds}"
    write_sweep(results / f"sweep-{name}", f"{command} --seeds {seeds}", sweep, asked, trainings)
    typer.echo("\n\n".join(tables_of(sweep, trainings)))


def _tell(training: Training, before: bool) -> None:
    how = "done before" if before else f"{training.seconds:.0f} s"
    typer.echo(
        f"{time.strftime('%H:%M:%S')} {training.name}, seed {training.seed}:"
        f" {100 * training.accuracy:.2f} %, {how}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
