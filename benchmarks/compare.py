"""Methods side by side: the cost of each to the same accuracy, over several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from server.training.comparison.comparison import Training
from server.training.comparison.cost import Reached, cost_to
from server.training.comparison.intervals import mean_interval
from server.training.recipe.recipe import Recipe
from server.training.report.evaluate import Evaluator
from server.training.report.report import report_of
from server.training.run.run import Row, Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds

# Where clients differ, the accuracy of one round swings by points; papers smooth their curves too.
LAST_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class Trial:
    """One recipe, trained with one seed.

    Attributes:
        rows: the report's rounds.
        accuracy: on the global test set, mean over the last rounds.
        final: the report's `final`.
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

    @classmethod
    def of(cls, training: Training) -> Trial:
        """A finished training of a comparison, without figures of exits."""
        measured = [row["accuracy"] for row in training.rows if row["accuracy"] is not None]
        accuracy = statistics.fmean(measured[-LAST_ROUNDS:])
        final: Mapping[str, Any] = training.report["final"]
        return cls(training.name, training.seed, training.rows, accuracy, final, None, None)

    def reached(self, target: float) -> Reached | None:
        """Cost up to the first round that measured at least `target`; None where none did."""
        return cost_to(target, self.rows)

    @property
    def seconds(self) -> float:
        """Seconds of training, without evaluation."""
        return math.fsum(row["seconds"] for row in self.rows)

    def processor_s(self, rounds: int) -> float:
        """Seconds of the processor up to that round, without evaluation."""
        return math.fsum(row["processor_s"] for row in self.rows[:rounds])

    def to_dict(self) -> dict[str, Any]:
        """The trial for a report: its curve, without the names of participants."""
        kept = (
            "round", "accuracy", "loss", "bytes_up", "bytes_down", "seconds", "processor_s",
            "supervised",
        )  # fmt: skip
        return {
            "name": self.name,
            "seed": self.seed,
            "accuracy": self.accuracy,
            "exits_global": self.exits_global,
            "exits_own": self.exits_own,
            "final": self.final,
            "rounds": [{key: row[key] for key in kept} for row in self.rows],
        }


def train(recipe: Recipe, device: str = "cpu") -> tuple[Simulation, list[Row]]:
    """Train by a recipe, in memory."""
    simulation = build_simulation(recipe, device)
    rows: list[Row] = []
    for _ in run_rounds(simulation, rows):
        pass
    return simulation, rows


def run_trials(
    recipes: Mapping[str, Recipe],
    seeds: Sequence[int],
    on_trial: Callable[[Trial], None] | None = None,
) -> list[Trial]:
    """Train by every recipe with every seed, seed by seed: a busy spell affects all recipes."""
    trials = []
    for seed in seeds:
        for name, recipe in recipes.items():
            trials.append(run_trial(name, replace(recipe, seed=seed)))
            if on_trial is not None:
                on_trial(trials[-1])
    return trials


def run_trial(name: str, recipe: Recipe) -> Trial:
    """Train by one recipe and evaluate the result."""
    simulation, rows = train(recipe)
    exits_global, exits_own = None, None
    if simulation.method.client.exit_head:
        evaluator = Evaluator(simulation)
        exits_global = evaluator.exit_accuracy()
        own = [client.inside.accuracy for client in evaluator.clients(supervised=False)]
        exits_own = statistics.fmean(own)
    measured = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    return Trial(
        name,
        recipe.seed,
        rows,
        statistics.fmean(measured[-LAST_ROUNDS:]),
        report_of(simulation, rows)["final"],
        exits_global,
        exits_own,
    )


def cost_table(trials: Iterable[Trial], target: float, quiet: int | None = None) -> str:
    """Markdown: rounds, bytes and seconds to the target by name, mean ± 95 % interval.

    `clients` is the mean over the clients at the end, each on its own classes.

    Args:
        quiet: seconds by the clock are of seeds below this alone; None for all seeds.
    """
    heads = [
        "method",
        f"reached {target:.0%}",
        "rounds",
        "MB",
        "seconds",
        "processor, s",
        "accuracy of the last rounds",
        "clients",
    ]
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for name, group in by_name(trials).items():
        found = [(trial, cost) for trial in group if (cost := trial.reached(target)) is not None]
        cells = [
            shown([float(cost.rounds) for _, cost in found]),
            shown([cost.bytes_total / 1e6 for _, cost in found]),
            shown([cost.seconds for trial, cost in found if quiet is None or trial.seed < quiet]),
            shown([trial.processor_s(cost.rounds) for trial, cost in found]),
            shown([100 * trial.accuracy for trial in group]) + " %",
            shown([100 * trial.final["accuracy_clients"] for trial in group]) + " %",
        ]
        lines.append(f"| {name} | {len(found)} of {len(group)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def by_name(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    """Trials by name, in the order in which names first occur."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.name, []).append(trial)
    return groups


def shown(values: Sequence[float]) -> str:
    """Mean ± half width of the 95 % interval; the mean alone for one value, `-` for none."""
    if not values:
        return "-"
    found = mean_interval(values)
    return f"{found.mean:.4g}" if found.seeds == 1 else str(found)
