"""A table of a paper: its rows, and its recipe at each scale.

`smoke` shows that a table runs, on the digits. `cpu` is for two cores and shows orderings, on
Fashion-MNIST. `full` has the paper's numbers, as far as it states them, and is for a GPU, or for
hours of a CPU where the title says what was made smaller.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarks.paper.tuned import tuned_numbers

Scale = Literal["smoke", "cpu", "full"]
Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        recipe: its changes to the scale's recipe.
        paper: the paper's figures in %, by measure (benchmarks.paper.measures).
    """

    name: str
    recipe: Changes
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """One table of a paper; equal to itself alone.

    Attributes:
        source: where in the paper. data: data set of its figures.
        measures: reported for every row (benchmarks.paper.measures).
        scales: the recipe of each scale, which rows change.
        tuned: scales at which methods have the numbers that the sweep chose for them
            (benchmarks.paper.tuned); at the others they have the paper's.
        sweep: its clients (benchmarks.tuning.sweep); None for those of the table's data set.
    """

    title: str
    source: str
    data: str
    measures: Sequence[str]
    rows: Sequence[Row]
    scales: Mapping[Scale, Changes]
    tuned: Sequence[Scale] = ("cpu",)
    sweep: str | None = None

    def tuned_numbers(self, scale: Scale) -> Mapping[str, Changes]:
        """Changes to a recipe by method, that its sweep chose; none at scales that have none."""
        if scale not in self.tuned:
            return {}
        return tuned_numbers(self.sweep or self.scales[scale]["data"]["name"])


def over(base: Changes, changes: Changes) -> dict[str, Any]:
    """`base` with `changes` laid over it, table by table."""
    merged = dict(base)
    for name, value in changes.items():
        inner = merged.get(name)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[name] = over(inner, value)
        else:
            merged[name] = value
    return merged
