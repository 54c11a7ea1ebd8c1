"""What a trained world is judged by, in %."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import orjson

from benchmarks.compare import LAST_ROUNDS
from benchmarks.paper.local_only import by_itself, stand_alone
from edge_sdk.errors import ConfigurationError
from server.training.report.evaluate import ClientScore, Evaluator
from server.training.report.metrics import ClientSummary, summarise_clients
from server.training.run.run import Row, Simulation

# of each client alone, by its recipe: one training for all rows that leave it the same budget
_ALONE: Final[dict[bytes, list[float]]] = {}

Measure = Callable[[Simulation, list[Row]], float]


def measured(world: Simulation, rows: list[Row], names: Iterable[str]) -> dict[str, float]:
    """The measures asked for by name.

    `rho X` is the clients' mean at that share of OOD samples; `MB to X` what travelled until the
    global test set was first answered with X % right, NaN where it never was.
    """
    return {name: _measured(world, rows, name) for name in names}


def pearson(alone: Sequence[float], together: Sequence[float]) -> float:
    """PC = 100 * Cov / (sd * sd) of the clients' stand-alone and collaborative accuracy.

    SplitLPF, 4.2 (scaled Pearson correlation): 100 where who does well alone does well together.
    NaN where either side is the same for all.
    """
    if len(alone) != len(together):
        raise ConfigurationError(f"PC: expected as many of both, got {len(alone)}, {len(together)}")
    a, b = np.asarray(alone, np.float64), np.asarray(together, np.float64)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    return float(100 * (a @ b) / math.sqrt((a @ a) * (b @ b)))


def _measured(world: Simulation, rows: list[Row], name: str) -> float:
    if name.startswith("rho "):
        return _at_rho(world, rows, float(name.removeprefix("rho ")))
    if name.startswith("MB to "):
        return _megabytes_to(rows, float(name.removeprefix("MB to ")) / 100)
    return MEASURES[name](world, rows)


def _megabytes_to(rows: list[Row], target: float) -> float:
    total: int = 0
    for row in rows:
        total += int(row["bytes_up"]) + int(row["bytes_down"])
        if row["accuracy"] is not None and row["accuracy"] >= target:
            return total / 1e6
    return math.nan


def _accuracy(_world: Simulation, rows: list[Row]) -> float:
    """Of the last rounds, on the global test set."""
    found = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    return 100 * statistics.fmean(found[-LAST_ROUNDS:])


def _exits(world: Simulation, _rows: list[Row]) -> float:
    """Mean over clients of their exits, on the global test set."""
    if not world.method.client.exit_head:
        return math.nan
    return 100 * Evaluator(world).exit_accuracy()


def _clients(world: Simulation, rows: list[Row]) -> float:
    return 100 * _summary(world, rows).accuracy


def _ood(world: Simulation, rows: list[Row]) -> float:
    """Mean over clients, each on test samples of classes it has never seen."""
    return 100 * _summary(world, rows).accuracy_ood


def _auxiliary(world: Simulation, _rows: list[Row]) -> float:
    """Mean over clients of their auxiliary models, on the global test set (BESplit-A)."""
    found = Evaluator(world).auxiliary()
    return math.nan if found is None else 100 * float(found["accuracy"])


def _jain(world: Simulation, rows: list[Row]) -> float:
    return _summary(world, rows).jain


def _std(world: Simulation, rows: list[Row]) -> float:
    return 100 * _summary(world, rows).std


def _pearson(world: Simulation, rows: list[Row]) -> float:
    """PC of SplitLPF: with the others against alone, each client with the same budget."""
    said = by_itself(world.recipe).to_dict() | {"device": world.device.type}
    key = orjson.dumps(said, option=orjson.OPT_SORT_KEYS)
    if key not in _ALONE:
        _ALONE[key] = _each(stand_alone(world.recipe, world.device.type))
    together = Evaluator(world).clients(supervised=any(row["supervised"] for row in rows))
    return pearson(_ALONE[key], _each(together))


def _each(scores: Sequence[ClientScore]) -> list[float]:
    return [(score.inside + score.outside).accuracy for score in scores]


def _at_rho(world: Simulation, rows: list[Row], rho: float) -> float:
    evaluate = replace(world.recipe.evaluate, rho=rho)
    return _clients(replace(world, recipe=replace(world.recipe, evaluate=evaluate)), rows)


def _summary(world: Simulation, rows: list[Row]) -> ClientSummary:
    """Of all clients, each on the test samples of its own classes and some of others."""
    scores = Evaluator(world).clients(supervised=any(row["supervised"] for row in rows))
    return summarise_clients([s.inside for s in scores], [s.outside for s in scores])


MEASURES: Final[Mapping[str, Measure]] = {
    "accuracy": _accuracy,
    "exits": _exits,
    "clients": _clients,
    "ood": _ood,
    "auxiliary": _auxiliary,
    "jain": _jain,
    "std": _std,
    "pearson": _pearson,
}


def shown(name: str) -> str:
    """As a column's head."""
    heads: Mapping[str, Any] = {
        "accuracy": "accuracy",
        "exits": "exits",
        "clients": "mean of clients",
        "ood": "unseen classes",
        "auxiliary": "auxiliary models",
        "jain": "JFI",
        "std": "Std",
        "pearson": "PC",
    }
    return str(heads.get(name, name))
