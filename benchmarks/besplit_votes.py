"""Power and cap of BESplit's votes, on held-out samples of few clients that differ much.

    python -m benchmarks.besplit_votes

Ten clients share the digits by Dirichlet 0.1, so a few of them earn most of the vote. Seeds and
samples are others than those of the tables. Writes besplit-votes.json and .md.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer

from benchmarks.paper.tables.table import over
from benchmarks.reports import RESULTS, Results, made_by, provenance, write
from edge_sdk.cli.times import plural
from server.training.comparison.held_out import build_on_held_out
from server.training.comparison.intervals import mean_interval
from server.training.recipe.recipe import read_recipe
from server.training.report.evaluate import Evaluator

FIRST_SEED: Final = 200  # the sweep has 100, tables have 0, 1, ...
LAST: Final = 5  # rounds whose mean is the figure
BASE: Final[Mapping[str, Any]] = {
    "method": "besplit",
    "method_numbers": {"auxiliary_head": "exit"},
    "data": {
        "name": "digits",
        "clients": 10,
        "partition": "dirichlet",
        "numbers": {"concentration": 0.1},
        "held_out": 0.3,
    },
    "train": {
        "backbone": "tiny",
        "depth": 2,
        "rounds": 30,
        "epochs": 2,
        "batch": 16,
        "learning_rate": 0.05,
        "momentum": 0.8,
    },
}
VOTES: Final[Mapping[str, Mapping[str, Any]]] = {
    "power 1": {"weight_power": 1.0},
    "power 0.5": {"weight_power": 0.5},
    "cap at twice the median": {"weight_cap": 2.0},
    "equal": {"ablation": "no_ea"},
}

app = typer.Typer(add_completion=False)


def trial(votes: Mapping[str, Any], seed: int) -> dict[str, float]:
    """Held-out accuracy in %, mean of the last rounds, and the mean of the largest vote in %."""
    recipe = read_recipe(over(BASE, {"seed": seed, "method_numbers": votes}))
    rounds, accuracies, largest = recipe.train.rounds, [], []
    with tempfile.TemporaryDirectory() as folder:
        run = build_on_held_out(recipe, "cpu", Path(folder))
        for number in range(1, rounds + 1):
            result = run.loop.run_round(number, seed)
            largest.append(max(result.weights.values()))
            if number > rounds - LAST:
                accuracies.append(Evaluator(run).accuracy(supervised=True))
    return {
        "accuracy": 100 * statistics.fmean(accuracies),
        "largest": 100 * statistics.fmean(largest),
    }


@app.command(epilog="Example: python -m benchmarks.besplit_votes --seeds 3")
def votes(
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds: 200, 201, ...")] = 3,
    results: Results = RESULTS,
) -> None:
    """Compare ways to hold back a client that earns much of the vote."""
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in VOTES}
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        for name, numbers in VOTES.items():
            found[name].append(trial(numbers, seed))
            figures = found[name][-1]
            typer.echo(
                f"seed {seed}, {name}: {figures['accuracy']:.1f} %, largest vote"
                f" {figures['largest']:.0f} %"
            )
    about = {"command": f"python -m benchmarks.besplit_votes --seeds {seeds}", **provenance()}
    head = ["| votes | held-out accuracy | each seed | largest vote |", "| --- | --- | --- | --- |"]
    lines = [
        f"| {name} | {mean_interval([each['accuracy'] for each in trials])} |"
        f" {', '.join(format(each['accuracy'], '.1f') for each in trials)} |"
        f" {statistics.fmean(each['largest'] for each in trials):.0f} % |"
        for name, trials in found.items()
    ]
    text = (
        f"Digits, ten clients, Dirichlet 0.1, 30 rounds, {plural(seeds, 'seed')}. The accuracy is"
        " of held-out samples, on which no client trained and no table tests, the mean of the last"
        f" {LAST} rounds, ± half of the 95 % interval. The largest vote is the mean over rounds of"
        " the largest weight of a client."
    )
    path = results / "besplit-votes"
    blocks = ["# BESplit: votes of few clients", text, "\n".join(head + lines), made_by(about)]
    write(path, about | {"recipe": BASE, "votes": VOTES, "trials": found}, blocks)
    typer.echo(f"see {path.with_suffix('.md')}")


if __name__ == "__main__":
    app()
