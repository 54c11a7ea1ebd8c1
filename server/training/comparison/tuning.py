"""Equal tuning: every recipe gets the same trials, judged on held-out samples.

OUT/tuning/NAME.json    the trials of a recipe; those that are done are kept

A trial has a seed that the comparison has not, and never sees the test part.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError
from server.training.comparison.held_out import Measure, build_on_held_out, held_out_score
from server.training.comparison.values import combinations, with_values
from server.training.recipe.recipe import Recipe
from server.training.rounds.reply_checks import Fault
from server.training.run.run import Row
from server.training.simulation.run import run_rounds

# Comparisons have the seeds 0, 1, ...
SEED: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Trial:
    """One choice of values, trained and judged.

    Attributes:
        values: by dotted name.
        score: the measure on held-out samples; NaN of a training that diverged.
    """

    values: Mapping[str, Any]
    score: float


def tune(
    name: str,
    recipe: Recipe,
    grid: Mapping[str, Sequence[Any]],
    out: Path,
    *,
    measure: Measure = "accuracy",
    device: str = "cpu",
    on_round: Callable[[Mapping[str, Any], Row], None] = lambda _values, _row: None,
) -> list[Trial]:
    """Train by a recipe with every choice of the grid's values.

    Args:
        name: of the recipe, and so of its file in `out`.
        grid: by dotted name (server.training.comparison.values), the values to try.
        on_round: called with the values and each row of a trial.
    Returns: the trials, in the order of the grid.
    Raises: ConfigurationError where the recipe has no such value, or holds no samples out;
        StorageError.
    """
    if recipe.data.held_out == 0:
        raise ConfigurationError(
            f"{name}: --tune judges by held-out samples, and the recipe holds none out"
            " (data.held_out = 0)"
        )
    choices = [(values, with_values(recipe, values)) for values in combinations(grid)]
    path = out / "tuning" / f"{name}.json"
    known = _read(path)
    trials = []
    for values, chosen in choices:
        seeded = replace(chosen, seed=SEED)
        key = _key(seeded, measure)
        if key not in known:
            score = _score(seeded, out, measure, device, partial(on_round, values))
            known[key] = None if math.isnan(score) else score
            make_folder(path.parent)
            write_atomic(path, orjson.dumps(known, option=orjson.OPT_INDENT_2))
        found = known[key]
        trials.append(Trial(values, math.nan if found is None else found))
    return trials


def best(trials: Sequence[Trial]) -> Trial:
    """The trial with the highest score, the first of equals; one without a score is the worst."""
    return max(trials, key=lambda trial: -math.inf if math.isnan(trial.score) else trial.score)


def _score(
    recipe: Recipe, folder: Path, measure: Measure, device: str, on_round: Callable[[Row], None]
) -> float:
    with closing(build_on_held_out(recipe, device, folder)) as simulation:
        rows: list[Row] = []
        for row in run_rounds(simulation, rows):
            if _diverged(row):
                return math.nan
            on_round(row)
        return held_out_score(simulation, rows, measure)


def _diverged(row: Row) -> bool:
    """Whether a round ended in numbers that are not finite; simulated clients are never broken."""
    lost = row["loss"] is not None and not math.isfinite(row["loss"])
    return lost or (not row["merged"] and Fault.NOT_FINITE in row["faults"].values())


def _read(path: Path) -> dict[str, float | None]:
    try:
        found: dict[str, float | None] = orjson.loads(path.read_bytes())
    except (FileNotFoundError, orjson.JSONDecodeError):
        return {}  # no trial is done; or a damaged file, whose trials are trained again
    return found


def _key(recipe: Recipe, measure: Measure) -> str:
    """A trial by all that its score depends on."""
    raw = orjson.dumps([recipe.to_dict(), measure], option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(raw).hexdigest()[:16]
