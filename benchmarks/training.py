"""The cost of training methods to the same accuracy.

    python -m benchmarks.training methods        all methods, on the digits
    python -m benchmarks.training availability   SuperSFL with a server that is often away

Each writes a report (JSON) and a table (markdown) into benchmarks/results/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import torch
import typer

from benchmarks.compare import Trial, by_name, cost_table, run_trials, shown
from benchmarks.reports import (
    RECIPES,
    RESULTS,
    ROOT,
    Data,
    Results,
    Seeds,
    Work,
    provenance,
    write,
)
from server.training.comparison.comparison import Watcher, compare
from server.training.recipe.recipe import METHODS, Recipe, load_recipe

# the trainings of `methods` that are done are kept here, so that the same call goes on after a stop
WORK: Final = ROOT / "splitedge-runs" / "training"
AVAILABILITIES = (0.0, 0.1, 0.2, 0.5, 0.7, 1.0)
# SuperSFL, Table III: CIFAR-10, accuracy in % by availability
PAPER = {0.0: 86.36, 0.1: 89.77, 0.2: 91.03, 0.5: 93.12, 0.7: 93.81, 1.0: 95.58}


app = typer.Typer(add_completion=False, help=__doc__.partition("\n")[0] if __doc__ else None)


@app.command(epilog="Example: python -m benchmarks.training methods --dataset digits")
def methods(  # noqa: PLR0917 - a command's options
    dataset: Annotated[
        Literal["digits", "fashion-mnist"], typer.Option(help="Data set of the recipes.")
    ] = "digits",
    seeds: Seeds = 3,
    target: Annotated[
        list[float] | None, typer.Option(help="Accuracy to reach; may be repeated.")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, show_default="the recipes'", help="Rounds of training."),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--method", help="Only this one; may be repeated.", show_default="all"),
    ] = None,
    quiet: Annotated[
        int | None,
        typer.Option(
            "--quiet-seeds",
            min=0,
            show_default="all",
            help="Seeds that were trained without other work: seconds by the clock are of these.",
        ),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the report.", show_default="training-DATASET"),
    ] = None,
    data: Data = None,
    results: Results = RESULTS,
    work: Work = WORK,
) -> None:
    """All methods and baselines with their recipes of examples/recipes: same data and training."""
    targets = target or [0.9, 0.95]
    unknown = sorted(set(names or []) - set(METHODS))
    if unknown:
        raise typer.BadParameter(
            f"--method: expected some of {', '.join(METHODS)}, got {', '.join(unknown)}"
        )
    recipes = {
        name: _of_length(_recipe(f"{name}-{dataset}", data), rounds) for name in names or METHODS
    }
    watcher = Watcher(on_training=lambda training, _before: _tell(Trial.of(training)))
    trainings = compare(recipes, range(seeds), work / dataset, watcher=watcher)
    trials = [Trial.of(training) for training in trainings]
    tables = [cost_table(trials, goal, quiet) for goal in targets]
    title = f"Rounds, bytes and seconds to the same accuracy: {dataset}"
    if quiet is not None:
        tables = [_of_quiet_seeds(quiet), *tables]
    extra = {"targets": targets, "quiet_seeds": quiet}
    _write(results / (report or f"training-{dataset}"), title, tables, trials, extra)


@app.command(epilog="Example: python -m benchmarks.training availability --seeds 1")
def availability(seeds: Seeds = 3, results: Path = RESULTS) -> None:
    """SuperSFL on the digits with a server available in 0 to 100 % of rounds (its Table III)."""
    recipe = _recipe("supersfl-digits", None)
    recipes = {
        f"{share:.0%}": replace(recipe, round=replace(recipe.round, availability=share))
        for share in AVAILABILITIES
    }
    trials = run_trials(recipes, range(seeds), _tell)
    title = "SuperSFL with a server that supervises some rounds only: digits"
    _write(results / "training-availability", title, [_availability_table(trials)], trials, {})


def _recipe(name: str, data: Path | None) -> Recipe:
    recipe = load_recipe(RECIPES / f"{name}.toml")
    folder = recipe.data.folder if data is None else data
    return replace(recipe, data=replace(recipe.data, folder=folder, held_out=0))


def _of_length(recipe: Recipe, rounds: int | None) -> Recipe:
    """The recipe with another number of rounds; its own for None."""
    if rounds is None:
        return recipe
    return replace(recipe, train=replace(recipe.train, rounds=rounds))


def _of_quiet_seeds(quiet: int) -> str:
    """Sentence on the seeds whose seconds by the clock the tables show."""
    whose = f"{quiet} of the seeds alone, the first" if quiet else "no seed"
    return (
        f"Seconds by the clock are of {whose}: the machine had other work while the others were"
        " trained. Rounds, MB and accuracies do not depend on that, and processor time hardly does."
    )


def _availability_table(trials: Sequence[Trial]) -> str:
    heads = [
        "server available",
        "rounds supervised",
        "whole network, %",
        "exits, all classes, %",
        "exits, own classes, %",
        "paper, CIFAR-10, %",
    ]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- | --- | --- | --- |"]
    for share, (name, group) in zip(AVAILABILITIES, by_name(trials).items(), strict=True):
        supervised = [float(sum(row["supervised"] for row in run.rows)) for run in group]
        whole = [100 * run.accuracy for run in group if run.final["path"] == "full"]
        cells = [
            shown(supervised),
            shown(whole),
            shown([100 * run.exits_global for run in group if run.exits_global is not None]),
            shown([100 * run.exits_own for run in group if run.exits_own is not None]),
            f"{PAPER[share]}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _tell(run: Trial) -> None:
    typer.echo(f"{run.name} seed {run.seed}: {run.accuracy:.1%} in {run.seconds:.0f} s")


def _write(
    path: Path,
    title: str,
    tables: Sequence[str],
    trials: Sequence[Trial],
    extra: dict[str, Any],
    *,
    values: str = "mean ± half width of the 95 % interval over seeds",
) -> None:
    about = {"title": title} | provenance()
    facts = f"splitedge {about['splitedge']}, torch {about['torch']}, {about['when']}; {values}."
    report = about | extra | {"runs": [trial.to_dict() for trial in trials]}
    write(path, report, [f"# {title}", facts, *tables], indent=False)
    typer.echo("\n\n".join(tables))


if __name__ == "__main__":
    torch.set_num_threads(1)
    app()
