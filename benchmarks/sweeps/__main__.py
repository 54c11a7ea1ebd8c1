"""Train a sweep, and write its tables.

    python -m benchmarks.sweeps participation --seeds 3
    python -m benchmarks.sweeps splitlpf-fashion-mnist --data DIR

Writes benchmarks/results/sweep-NAME.json and .md. Trainings that are done are kept below
splitedge-runs/sweeps, so that the same call goes on after a stop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final

import torch
import typer

from benchmarks.reports import RESULTS, ROOT, Data, Results, Seeds, Work
from benchmarks.sweeps.catalog import SWEEPS, Sweep
from benchmarks.sweeps.held_out import train_on_held_out
from benchmarks.sweeps.pretraining import write_first_weights
from benchmarks.sweeps.report import tables_of, write_sweep
from server.training.comparison.comparison import Training, Watcher, compare
from server.training.recipe.recipe import Recipe

WORK: Final = ROOT / "splitedge-runs" / "sweeps"


def main(  # noqa: PLR0917 - a command's options
    name: Annotated[str, typer.Argument(metavar="SWEEP", help=f"One of {', '.join(SWEEPS)}.")],
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of each training; the sweep's own by default.")
    ] = None,
    seeds: Seeds = 3,
    data: Data = None,
    results: Results = RESULTS,
    work: Work = WORK,
) -> None:
    """Train every line of the sweep with every seed."""
    if name not in SWEEPS:
        raise typer.BadParameter(f"expected one of {', '.join(SWEEPS)}, got {name}")
    sweep = SWEEPS[name]
    asked = rounds or sweep.rounds
    trainings = train(sweep, asked, seeds, data, work / f"{name}-{asked}")
    command = f"python -m benchmarks.sweeps {name}"
    if rounds is not None:
        command += f" --rounds {rounds}"
    command += f" --seeds {seeds}"
    if any(line.data != "digits" for line in sweep.lines.values()):
        command += " --data DIR"
    write_sweep(results / f"sweep-{name}", command, sweep, asked, trainings)
    typer.echo("\n\n".join(tables_of(sweep, trainings)))


def train(sweep: Sweep, rounds: int, seeds: int, data: Path | None, work: Path) -> list[Training]:
    """Every line of the sweep with every seed; lines of equal recipes are trained once.

    Args:
        data: folder of the data set's files.
    """
    recipes = _recipes(sweep, rounds, data, work)
    numbers = range(sweep.first_seed, sweep.first_seed + seeds)
    first: dict[str, str] = {}
    for name, recipe in recipes.items():
        first.setdefault(str(recipe.to_dict()), name)
    unlike = {name: recipes[name] for name in first.values()}
    if sweep.held_out:
        found = train_on_held_out(unlike, numbers, work, _tell)
    else:
        found = compare(unlike, numbers, work, watcher=Watcher(on_training=_tell))
    by_name = {(training.name, training.seed): training for training in found}
    return [
        replace(by_name[first[str(recipe.to_dict())], seed], name=name)
        for seed in numbers
        for name, recipe in recipes.items()
    ]


def _recipes(sweep: Sweep, rounds: int, data: Path | None, work: Path) -> Mapping[str, Recipe]:
    """The recipe of each line, by its name; the first weights of some are trained here."""
    curve = sweep.kind == "start"
    found = {}
    for name, line in sweep.lines.items():
        recipe = line.read(rounds, curve=curve, folder=data)
        if line.pretrained:
            start = work / f"first-weights-{line.recipe}.safetensors"
            if not start.is_file():
                write_first_weights(recipe, start)
            recipe = replace(recipe, train=replace(recipe.train, start=start))
        found[name] = recipe
    return found


def _tell(training: Training, before: bool) -> None:
    how = "done before" if before else f"{training.seconds:.0f} s"
    typer.echo(
        f"{time.strftime('%H:%M:%S')} {training.name}, seed {training.seed}:"
        f" {100 * training.accuracy:.2f} %, {how}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
