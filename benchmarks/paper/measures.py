"""Measures of a trained simulation, in %: the columns of the papers' tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import orjson

from benchmarks.compare import LAST_ROUNDS
from benchmarks.paper.local_only import local_only_recipe, local_only_scores
from edge_sdk.errors import ConfigurationError
from server.training.report.client_scores import ClientScore
from server.training.report.evaluate import Evaluator
from server.training.report.metrics import ClientSummary, summarise_clients
from server.training.report.rows import ever_supervised
from server.training.run.run import Row, Simulation

# Accuracy of each client alone, by recipe: one training for all rows with the same budget.
_LOCAL_ONLY: Final[dict[bytes, list[float]]] = {}

Measure = Callable[[Simulation, list[Row]], float]


def measured(run: Simulation, rows: list[Row], names: Iterable[str]) -> dict[str, float]:
    """The named measures of a finished run.

    `rho X` is the clients' mean at that share of OOD samples; `MB to X` counts the bytes up to the
    first round with X % accuracy on the global test set, NaN where no round reached it.
    """
    return {name: _measured(run, rows, name) for name in names}


def pearson(alone: Sequence[float], together: Sequence[float]) -> float:
    """PC = 100 * Cov / (sd * sd) of the clients' stand-alone and collaborative accuracy.

    SplitLPF, 4.2 (scaled Pearson correlation): 100 where the clients that do well alone also do
    well together. NaN where either side is the same for all.
    """
    if len(alone) != len(together):
        raise ConfigurationError(f"PC: expected as many of both, got {len(alone)}, {len(together)}")
    a, b = np.asarray(alone, np.float64), np.asarray(together, np.float64)
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    return float(100 * (a @ b) / math.sqrt((a @ a) * (b @ b)))


def _measured(run: Simulation, rows: list[Row], name: str) -> float:
    if name.startswith("rho "):
        return 100 * _summary(run, rows, float(name.removeprefix("rho "))).accuracy
    if name.startswith("MB to "):
        return _megabytes_to(rows, float(name.removeprefix("MB to ")) / 100)
    return MEASURES[name](run, rows)


def _megabytes_to(rows: list[Row], target: float) -> float:
    total: int = 0
    for row in rows:
        total += int(row["bytes_up"]) + int(row["bytes_down"])
        if row["accuracy"] is not None and row["accuracy"] >= target:
            return total / 1e6
    return math.nan


def _accuracy(_run: Simulation, rows: list[Row]) -> float:
    """Mean accuracy of the last rounds on the global test set."""
    found = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    return 100 * statistics.fmean(found[-LAST_ROUNDS:])


def _exits(run: Simulation, _rows: list[Row]) -> float:
    """Accuracy of exits on the global test set, mean over clients."""
    if not run.method.client.exit_head:
        return math.nan
    return 100 * Evaluator(run).exit_accuracy()


def _clients(run: Simulation, rows: list[Row]) -> float:
    return 100 * _summary(run, rows).accuracy


def _ood(run: Simulation, rows: list[Row]) -> float:
    """Accuracy on test samples of classes that a client has never seen, mean over clients."""
    return 100 * _summary(run, rows).accuracy_ood


def _auxiliary(run: Simulation, _rows: list[Row]) -> float:
    """Accuracy of auxiliary models on the global test set, mean over clients (BESplit-A)."""
    found = Evaluator(run).auxiliary()
    return math.nan if found is None else 100 * float(found["accuracy"])


def _jain(run: Simulation, rows: list[Row]) -> float:
    return _summary(run, rows).jain


def _std(run: Simulation, rows: list[Row]) -> float:
    return 100 * _summary(run, rows).std


def _pearson(run: Simulation, rows: list[Row]) -> float:
    """PC of SplitLPF: clients trained together against each alone with the same budget."""
    recipe = local_only_recipe(run.recipe).to_dict() | {"device": run.device.type}
    key = orjson.dumps(recipe, option=orjson.OPT_SORT_KEYS)
    if key not in _LOCAL_ONLY:
        _LOCAL_ONLY[key] = _each(local_only_scores(run.recipe, run.device.type))
    together = Evaluator(run).clients(supervised=ever_supervised(rows))
    return pearson(_LOCAL_ONLY[key], _each(together))


def _each(scores: Sequence[ClientScore]) -> list[float]:
    return [(score.inside + score.outside).accuracy for score in scores]


def _summary(run: Simulation, rows: list[Row], rho: float | None = None) -> ClientSummary:
    """Over all clients, each on test samples of its own classes and some of others."""
    scores = Evaluator(run, rho).clients(supervised=ever_supervised(rows))
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
    """Head of the measure's column."""
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
