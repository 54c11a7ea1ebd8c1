"""The report of a comparison: a table with sentences, the figures as JSON, and a picture.

OUT/comparison.md, OUT/comparison.json, OUT/accuracy.png
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from edge_sdk.cli.times import plural
from edge_sdk.durable import make_folder, write_atomic
from server.training.comparison.comparison import Training
from server.training.comparison.figures import Line, cells, headings, lines_of
from server.training.comparison.tuning import Trial, best
from server.training.comparison.values import differing
from server.training.recipe.recipe import Recipe
from server.training.report.plots import plot_curves
from server.training.run.run import Row


@dataclass(frozen=True)  # without slots: `lines` is kept in the instance
class Comparison:
    """Recipes side by side.

    Attributes:
        recipes: by name, as they were trained; the first is the reference.
        trainings: every recipe with every seed.
        target: accuracy up to which costs are told, 0 to 1; None for none.
        trials: those of each recipe that was tuned.
    """

    recipes: Mapping[str, Recipe]
    trainings: Sequence[Training]
    target: float | None = None
    trials: Mapping[str, Sequence[Trial]] = field(default_factory=dict)

    @cached_property
    def lines(self) -> list[Line]:
        """A line for each recipe."""
        return lines_of(self.trainings, self.target)

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return len(self.trainings) // len(self.recipes)

    def table(self) -> list[list[str]]:
        """Headings and lines."""
        power = any(line.power is not None for line in self.lines)
        head = headings(self.lines[0].name, self.target, power=power)
        return [head, *(cells(line, self.seeds, power=power) for line in self.lines)]

    def notes(self) -> Iterator[str]:
        """Sentences that belong below the table."""
        spread = (
            "95 % intervals of Student's t; a difference is of trainings with the same seed"
            if self.seeds > 1
            else "one seed says nothing about the spread, more give intervals (--seeds 3)"
        )
        yield f"Means over {plural(self.seeds, 'seed')}; {spread}."
        for name, trials in self.trials.items():
            taken = best(trials)
            words = ", ".join(f"{key} = {value}" for key, value in taken.values.items())
            yield (
                f"{name}: {words}, the best of {plural(len(trials), 'trial')} on held-out samples"
                f" ({100 * taken.score:.2f} %)."
            )
        others = differing(self.recipes)
        if others:
            yield f"Beside their methods, the recipes differ in {', '.join(others)}."

    def to_dict(self) -> dict[str, Any]:
        """The comparison as JSON has it."""
        return {
            "seeds": self.seeds,
            "reference": self.lines[0].name,
            "target": self.target,
            "differing": differing(self.recipes),
            "recipes": {line.name: self._of_recipe(line) for line in self.lines},
        }

    def write(self, out: Path, report: Path | None = None) -> None:
        """Write the table, the figures and the picture into `out`, and the figures to `report` too.

        Raises: StorageError.
        """
        raw = orjson.dumps(self.to_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        text = "\n\n".join(["# Comparison", markdown_of(self.table()), *self.notes()])
        write_atomic(out / "comparison.md", f"{text}\n".encode())
        write_atomic(out / "comparison.json", raw)
        plot_curves(self._curves(), out / "accuracy.png")
        if report is not None:
            make_folder(report.parent)
            write_atomic(report, raw)

    def _of_recipe(self, line: Line) -> dict[str, Any]:
        recipe = self.recipes[line.name]
        trials = self.trials.get(line.name, ())
        return {
            "method": recipe.method,
            **line.to_dict(),
            "each_seed": [each.figures() for each in self.trainings if each.name == line.name],
            "tuning": [{"values": each.values, "held_out": each.score} for each in trials],
            "recipe": recipe.to_dict(),
        }

    def _curves(self) -> dict[str, list[Sequence[Row]]]:
        curves: dict[str, list[Sequence[Row]]] = {name: [] for name in self.recipes}
        for training in self.trainings:
            curves[training.name].append(training.rows)
        return curves


def markdown_of(table: Sequence[Sequence[str]]) -> str:
    """A table in markdown; its first row is the heading."""
    head, *rows = table
    return "\n".join(f"| {' | '.join(each)} |" for each in (head, ["---"] * len(head), *rows))
