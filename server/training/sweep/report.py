"""The report of a sweep: a table, the choice that held-out samples make, and figures as JSON.

OUT/sweep.md, OUT/sweep.json
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import orjson

from edge_sdk.cli.times import plural
from edge_sdk.durable import make_folder, write_atomic
from server.training.comparison.figures import Line, cells, headings, lines_of, shown
from server.training.comparison.held_out import Measure
from server.training.comparison.intervals import Interval, mean_interval
from server.training.comparison.report import markdown_of
from server.training.comparison.tuning import Trial, best
from server.training.recipe.recipe import Recipe
from server.training.sweep.grid import Choice
from server.training.sweep.run import Result
from server.training.sweep.sweep import REPORT

MEASURES: dict[Measure, str] = {
    "accuracy": "accuracy",
    "accuracy_clients": "mean accuracy over clients",
}


@dataclass(frozen=True)  # without slots: `lines` is kept in the instance
class SweepReport:
    """All runs of a sweep.

    Attributes:
        recipe: without the choices' values.
        results: every choice with every seed.
    """

    recipe: Recipe
    choices: Sequence[Choice]
    results: Sequence[Result]
    measure: Measure

    @property
    def seeds(self) -> int:
        """Number of seeds."""
        return len({each.task.seed for each in self.results})

    @cached_property
    def lines(self) -> dict[str, Line]:
        """Figures of the choices of which no training diverged, by their names."""
        lost = {each.task.choice.name for each in self.results if each.training is None}
        order = [choice.name for choice in self.choices if choice.name not in lost]
        trainings = [each.training for each in self.results if each.training is not None]
        kept = [each for each in trainings if each.name in order]
        kept.sort(key=lambda each: (order.index(each.name), each.seed))
        return {line.name: line for line in lines_of(kept)} if kept else {}

    @property
    def chosen(self) -> Choice:
        """The choice with the highest mean score on held-out samples, the first of equals."""
        trials = [Trial(each.values, self.score(each).mean) for each in self.choices]
        taken = best(trials)
        return self.choices[[trial is taken for trial in trials].index(True)]

    @property
    def is_made(self) -> bool:
        """Whether there is a choice: some values with which no training diverged."""
        return not math.isnan(self.score(self.chosen).mean)

    def score(self, choice: Choice) -> Interval:
        """The choice's score on held-out samples over the seeds; NaN where one diverged."""
        return mean_interval([each.score for each in self.of(choice)])

    def of(self, choice: Choice) -> list[Result]:
        """The results of a choice, by seed."""
        found = [each for each in self.results if each.task.choice.name == choice.name]
        return sorted(found, key=lambda each: each.task.seed)

    def table(self) -> list[list[str]]:
        """The table: a row for each choice, headings first."""
        names = list(self.choices[0].values)
        figures = headings("the first", None)[1:]
        rows = [[*names, "held-out, %", *figures]]
        for choice in self.choices:
            line = self.lines.get(choice.name)
            texts = ["diverged", *["-"] * (len(figures) - 1)]
            if line is not None:
                texts = cells(line, self.seeds)[1:]
            values = [str(value) for value in choice.values.values()]
            rows.append([*values, shown(self.score(choice), 100), *texts])
        return rows

    def notes(self) -> Iterator[str]:
        """Sentences that belong below the table."""
        spread = (
            "95 % intervals of Student's t"
            if self.seeds > 1
            else "one seed says nothing about the spread, more give intervals (--seeds 3)"
        )
        yield f"Means over {plural(self.seeds, 'seed')}; {spread}."
        chosen = self.chosen
        score = self.score(chosen).mean
        if not self.is_made:
            yield "No choice is made: in each, a training diverged."
        else:
            words = ", ".join(f"{name} = {value}" for name, value in chosen.values.items())
            yield (
                f"Chosen: {words}, with the highest {MEASURES[self.measure]} on held-out samples"
                f" ({100 * score:.2f} %), on which no client trained. The test part was not used to"
                " choose, so the figures of this line are those to report."
            )
        for each in self.results:
            if each.diverged:
                yield f"{each.task.name}: {each.diverged}."

    def to_dict(self) -> dict[str, Any]:
        """The sweep as JSON has it."""
        chosen = self.chosen
        return {
            "seeds": self.seeds,
            "measure": self.measure,
            "chosen_on": "held-out samples",
            "chosen": dict(chosen.values) if self.is_made else None,
            "choices": [self._of_choice(choice) for choice in self.choices],
            "recipe": self.recipe.to_dict(),
        }

    def write(self, out: Path, report: Path | None = None) -> None:
        """Write the table and the figures into `out`, and the figures to `report` too.

        Raises: StorageError.
        """
        raw = orjson.dumps(self.to_dict(), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        text = "\n\n".join(["# Sweep", markdown_of(self.table()), *self.notes()])
        write_atomic(out / "sweep.md", f"{text}\n".encode())
        write_atomic(out / REPORT, raw)
        if report is not None:
            make_folder(report.parent)
            write_atomic(report, raw)

    def _of_choice(self, choice: Choice) -> dict[str, Any]:
        line, score = self.lines.get(choice.name), self.score(choice)
        return {
            "values": dict(choice.values),
            "held_out": {"mean": score.mean, "half_width": score.half_width, "seeds": score.seeds},
            **({} if line is None else line.to_dict()),
            "each_seed": [
                {
                    "held_out": each.score,
                    "folder": each.task.folder.name,
                    "diverged": each.diverged,
                    **(
                        {"seed": each.task.seed}
                        if each.training is None
                        else each.training.figures()
                    ),
                }
                for each in self.of(choice)
            ],
        }
