"""Measures of a trained simulation, in %: the columns of the papers' tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.compare import LAST_ROUNDS
from benchmarks.paper.local_only import local_only_accuracies
from edge_sdk.errors import ConfigurationError
from server.training.report.client_scores import ClientScore, by_choice, summary_of
from server.training.report.evaluate import Evaluator
from server.training.report.rows import ever_supervised
from server.training.report.thresholds import Choice
from server.training.run.run import Row, Simulation

Measure = Callable[[Simulation, list[Row]], float]
ClientMeasure = Callable[[Simulation, Sequence[ClientScore]], float]
# Accuracy of each client alone (benchmarks.paper.local_only).
Alone = Callable[[], list[float]]

# Choices of a gated pair's threshold, as columns name them.
CHOICE_NAMES: Final[Mapping[Choice, str]] = {
    "held_out": "held-out",
    "fleet": "fleet",
    "oracle": "oracle",
}


def measured(
    run: Simulation, rows: list[Row], names: Iterable[str], alone: Alone | None = None
) -> dict[str, float]:
    """The named measures of a finished run.

    `rho X` is the clients' mean at that share of OOD samples; `MB to X` counts the bytes up to the
    first round with X % accuracy on the global test set, NaN where no round reached it.

    A measure of clients with gated pairs comes four times: by its name and as `NAME held-out`,
    which are the same, and as `NAME fleet` and `NAME oracle` (server.training.report.thresholds). A
    run that holds nothing out has the last alone, also by its name.

    Args:
        alone: trains the clients one by one, for `pearson` and `local pearson`; None trains them by
            the run's recipe.
    """
    found: dict[str, float] = {}
    by_default = partial(local_only_accuracies, run.recipe, run.device.type)
    against_alone = _Pearson(alone or by_default)
    together: Mapping[str, ClientMeasure] = {**CLIENT_MEASURES, PEARSON: against_alone}
    tested: dict[float | None, list[ClientScore]] = {}  # by rho
    for name in names:
        if name == LOCAL_PEARSON:
            found[name] = against_alone.local(run, rows)
            continue
        if not of_clients(name):
            found[name] = _measured(run, rows, name)
            continue
        rho = float(name.removeprefix(_RHO)) if name.startswith(_RHO) else None
        if rho not in tested:
            tested[rho] = Evaluator(run, rho).clients(supervised=ever_supervised(rows))
        measure = together["clients" if rho is not None else name]
        found[name] = measure(run, tested[rho])
        for choice, scores in by_choice(tested[rho]).items():
            found[by_threshold(name, choice)] = measure(run, scores)
    return found


def of_clients(name: str) -> bool:
    """Whether a measure is of clients on test samples of their own, where a gate may answer."""
    return name.startswith(_RHO) or name in {*CLIENT_MEASURES, PEARSON}


def is_accuracy_of_clients(name: str) -> bool:
    """Whether a measure of clients is an accuracy; the others are of their spread."""
    return name.startswith(_RHO) or name in {"clients", "ood"}


def headlines(measures: Mapping[str, float]) -> dict[str, float]:
    """The measures that are not of a choice of thresholds, by the heads of their columns."""
    return {shown(name): each for name, each in measures.items() if not is_by_threshold(name)}


def is_by_threshold(name: str) -> bool:
    """Whether a measure's name says how thresholds were chosen."""
    return name.endswith(tuple(f" {choice}" for choice in CHOICE_NAMES.values()))


def by_threshold(name: str, choice: Choice) -> str:
    """Name of a measure with that choice of gated pairs' thresholds."""
    return f"{name} {CHOICE_NAMES[choice]}"


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


def _refitted(run: Simulation, rows: list[Row]) -> float:
    """The clients' mean with each own last layer refitted for one pass behind the average."""
    if run.method.client.back is None:
        return math.nan
    refitted = replace(run, method=replace(run.method, refit_epochs=1))
    scores = Evaluator(refitted).clients(supervised=ever_supervised(rows))
    return 100 * summary_of(scores).accuracy


def _local(_run: Simulation, rows: list[Row]) -> float:
    """Accuracy of clients' networks before the last average, mean over clients."""
    found = rows[-1].get("local")
    return math.nan if found is None else 100 * float(found["accuracy_clients"])


def _zeroed(_run: Simulation, rows: list[Row]) -> float:
    """Share of the participants that the method's rule gave no weight, mean over rounds."""
    return 100 * statistics.fmean(
        len(row["zeroed"]) / len(row["participants"]) for row in rows if row["participants"]
    )


def _clients(_run: Simulation, scores: Sequence[ClientScore]) -> float:
    return 100 * summary_of(scores).accuracy


def _ood(_run: Simulation, scores: Sequence[ClientScore]) -> float:
    """Accuracy on test samples of classes that a client has never seen, mean over clients."""
    return 100 * summary_of(scores).accuracy_ood


def _auxiliary(run: Simulation, _rows: list[Row]) -> float:
    """Accuracy of auxiliary models on the global test set, mean over clients (BESplit-A)."""
    found = Evaluator(run).auxiliary()
    return math.nan if found is None else 100 * float(found["accuracy"])


def _jain(_run: Simulation, scores: Sequence[ClientScore]) -> float:
    return summary_of(scores).jain


def _std(_run: Simulation, scores: Sequence[ClientScore]) -> float:
    return 100 * summary_of(scores).std


class _Pearson:
    """PC of SplitLPF: clients trained together against each alone with the same budget."""

    def __init__(self, alone: Alone) -> None:
        self._train_alone = alone
        self._alone: list[float] | None = None

    def __call__(self, _run: Simulation, scores: Sequence[ClientScore]) -> float:
        """PC of these scores; the clients are trained alone for the first of them."""
        return self._against(_each(scores))

    def local(self, run: Simulation, rows: list[Row]) -> float:
        """PC of the clients' networks before the last average; NaN where not all were scored."""
        found = rows[-1].get("local")
        if found is None or found["each"].keys() != run.clients.keys():
            return math.nan
        return self._against([float(found["each"][name]) for name in run.clients])

    def _against(self, together: Sequence[float]) -> float:
        if self._alone is None:
            self._alone = self._train_alone()
        return pearson(self._alone, together)


def _each(scores: Sequence[ClientScore]) -> list[float]:
    return [score.accuracy for score in scores]


_RHO: Final = "rho "
PEARSON: Final = "pearson"
LOCAL_PEARSON: Final = "local pearson"
MEASURES: Final[Mapping[str, Measure]] = {
    "accuracy": _accuracy,
    "exits": _exits,
    "auxiliary": _auxiliary,
    "refitted": _refitted,
    "local": _local,
    "zeroed": _zeroed,
}
CLIENT_MEASURES: Final[Mapping[str, ClientMeasure]] = {
    "clients": _clients,
    "ood": _ood,
    "jain": _jain,
    "std": _std,
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
        "refitted": "back refitted",
        "local": "before averaging",
        "local pearson": "PC before averaging",
        "zeroed": "without a vote",
    }
    for choice in CHOICE_NAMES.values():
        if name.endswith(f" {choice}"):
            return f"{shown(name.removesuffix(f' {choice}'))} {choice}"
    return str(heads.get(name, name))
