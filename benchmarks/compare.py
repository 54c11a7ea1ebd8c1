"""Methods side by side: what each takes to the same accuracy, over several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.intervals import mean_interval
from server.training.recipe.recipe import Recipe
from server.training.report.evaluate import Evaluator
from server.training.report.report import report_of
from server.training.run.run import Row
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds

# a single round's accuracy swings by points where clients differ; papers' curves are as smooth
LAST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class RoundPoint:
    """What one round cost and where it led; `accuracy` is None where it was not measured."""

    round: int
    accuracy: float | None
    seconds: float
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class Reached:
    """What it took to reach a target."""

    rounds: int
    seconds: float
    bytes_up: int
    bytes_down: int

    @property
    def bytes_total(self) -> int:
        """Both ways."""
        return self.bytes_up + self.bytes_down


def cost_to(target: float, points: Iterable[RoundPoint]) -> Reached | None:
    """Rounds, seconds and bytes up to the first round that measured at least `target`.

    Returns: None where no round did.
    """
    seconds, up, down = 0.0, 0, 0
    for rounds, point in enumerate(points, start=1):
        seconds += point.seconds
        up += point.bytes_up
        down += point.bytes_down
        if point.accuracy is not None and point.accuracy >= target:
            return Reached(rounds, seconds, up, down)
    return None


@dataclass(frozen=True, slots=True)
class Run:
    """One recipe with one seed.

    Attributes:
        rows: as in a report.
        accuracy: mean of the last five rounds' on the global test set.
        final: the report's.
        exits_global, exits_own: mean accuracy of the clients' exits on the whole test set and on
            their own classes; None without exits.
    """

    name: str
    seed: int
    rows: Sequence[Row]
    accuracy: float
    final: Mapping[str, Any]
    exits_global: float | None
    exits_own: float | None

    def reached(self, target: float) -> Reached | None:
        """What it took to the first round of at least `target`; None where none was."""
        return cost_to(
            target,
            [
                RoundPoint(r["round"], r["accuracy"], r["seconds"], r["bytes_up"], r["bytes_down"])
                for r in self.rows
            ],
        )

    @property
    def seconds(self) -> float:
        """Of training, evaluation not counted."""
        return math.fsum(row["seconds"] for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """For a report: the curve, without the names of all who took part."""
        kept = ("round", "accuracy", "loss", "bytes_up", "bytes_down", "seconds", "supervised")
        return {
            "name": self.name,
            "seed": self.seed,
            "accuracy": self.accuracy,
            "exits_global": self.exits_global,
            "exits_own": self.exits_own,
            "final": self.final,
            "rounds": [{key: row[key] for key in kept} for row in self.rows],
        }


def run_all(
    recipes: Mapping[str, Recipe],
    seeds: Sequence[int],
    on_run: Callable[[Run], None] | None = None,
) -> list[Run]:
    """Every recipe with every seed, seed by seed, so that a busy spell touches all recipes."""
    runs = []
    for seed in seeds:
        for name, recipe in recipes.items():
            runs.append(run_one(name, replace(recipe, seed=seed)))
            if on_run is not None:
                on_run(runs[-1])
    return runs


def run_one(name: str, recipe: Recipe) -> Run:
    """Train by one recipe, in memory, and judge what came of it."""
    world = build_simulation(recipe)
    rows: list[Row] = []
    for _ in run_rounds(world, rows):
        pass
    exits_global, exits_own = None, None
    if world.method.client.exit_head:
        evaluator = Evaluator(world)
        exits_global = evaluator.exit_accuracy()
        own = [client.inside.accuracy for client in evaluator.clients(supervised=False)]
        exits_own = statistics.fmean(own)
    measured = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    return Run(
        name,
        recipe.seed,
        rows,
        statistics.fmean(measured[-LAST_ROUNDS:]),
        report_of(world, rows)["final"],
        exits_global,
        exits_own,
    )


def cost_table(runs: Iterable[Run], target: float) -> str:
    """Markdown: rounds, bytes and seconds to the target by name, mean ± 95 % interval."""
    lines = [
        f"| method | reached {target:.0%} | rounds | MB | seconds | accuracy of the last rounds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, group in by_name(runs).items():
        reached = [cost for run in group if (cost := run.reached(target)) is not None]
        cells = [
            shown([float(cost.rounds) for cost in reached]),
            shown([cost.bytes_total / 1e6 for cost in reached]),
            shown([cost.seconds for cost in reached]),
            shown([100 * run.accuracy for run in group]) + " %",
        ]
        lines.append(f"| {name} | {len(reached)} of {len(group)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_name(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs of one name together, in the order in which names first come."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    return groups


def shown(values: Sequence[float]) -> str:
    """Mean ± half width of the 95 % interval; the mean alone of one value, `-` of none."""
    if not values:
        return "-"
    found = mean_interval(values)
    return f"{found.mean:.4g}" if found.seeds == 1 else str(found)
