"""The report of a simulation: its rounds, what its networks are worth, and what they cost."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final

import orjson
import torch

from edge_sdk.durable import make_folder, write_atomic
from server.training.recipe.privacy import privacy_of
from server.training.report.client_scores import (
    CHOSEN_ON,
    ClientScore,
    summary_of,
    threshold_figures,
)
from server.training.report.cost import answer_latency, training_cost
from server.training.report.evaluate import Evaluator
from server.training.report.rows import ever_supervised
from server.training.run.run import Row, Simulation

REPORT: Final = "report.json"

Report = dict[str, Any]


def report_of(simulation: Simulation, rows: list[Row]) -> Report:
    """A finished simulation's report.

    `final.accuracy` is on the test part, by the same path as the rounds', and
    `final.accuracy_by_class` on its samples of each class; the other figures are
    over clients, each tested on test samples of its own classes (ID) and, with `evaluate.rho`, of
    others (OOD), and answered as `final.answers` says. Those of gated pairs are by a threshold that
    each client chooses on its held-out samples, or, in a run that holds none out, on its test
    samples: `final.threshold_chosen_on` says so. `by_threshold` has them by each choice
    (server.training.report.thresholds).
    """
    recipe, method = simulation.recipe, simulation.method
    evaluator = Evaluator(simulation)
    supervised = ever_supervised(rows)
    clients = evaluator.clients(supervised=supervised)
    summary = summary_of(clients)
    answers = evaluator.answers(supervised=supervised)
    choice = clients[0].choice
    return {
        "method": method.name,
        "dataset": simulation.dataset,
        "seed": recipe.seed,
        "clients": len(simulation.clients),
        "memory_format": simulation.memory_format,
        "precision": recipe.train.training.precision,
        "rounds": rows,
        "final": {
            "accuracy": evaluator.accuracy(supervised=supervised),
            "accuracy_by_class": evaluator.by_class(supervised=supervised),
            "accuracy_id": summary.accuracy_id,
            "accuracy_ood": summary.accuracy_ood,
            "accuracy_ood_why": _no_ood(recipe.evaluate.rho, summary.accuracy_ood),
            "jain": summary.jain,
            "std": summary.std,
            "accuracy_clients": summary.accuracy,
            "path": evaluator.path(supervised=supervised),
            "answers": answers,
            "figures_of": "test",
            "threshold_chosen_on": None if choice is None else CHOSEN_ON[choice],
            "by_threshold": threshold_figures(clients),
            "exits": {str(depth): value for depth, value in evaluator.exits().items()},
            "auxiliary": evaluator.auxiliary(),
            "bmr": evaluator.benign_rate(),
            "local": rows[-1].get("local") if rows else None,
            "out_of_client": evaluator.drift(supervised=supervised),
        },
        "labels": method.labels,
        "privacy": privacy_of(method, simulation.plans, rows, recipe.privacy.delta),
        "each_client": [client.to_dict() for client in clients],
        "training": training_cost(rows),
        "latency": answer_latency(
            simulation,
            {c.client: c.inside.samples + c.outside.samples for c in clients},
            {c.client: _offload_rate(c, answers) for c in clients},
        ),
        "recipe": recipe.to_dict(),
        "device": simulation.device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def write_report(path: Path, report: Report) -> None:
    """Write a report as JSON; figures that are not defined are null.

    Raises: StorageError.
    """
    make_folder(path.parent)
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    write_atomic(path, orjson.dumps(report, option=options))


def _no_ood(rho: float, accuracy: float) -> str | None:
    """Why there is no accuracy on samples out of distribution; None where there is one."""
    if not math.isnan(accuracy):
        return None
    if rho == 0:
        return (
            "clients are tested on classes of their own alone (evaluate.rho = 0); a rho above 0"
            " adds samples of other classes"
        )
    return "no client was tested on samples of classes that it lacks: there are none"


def _offload_rate(client: ClientScore, answers: str) -> float:
    if answers == "exits":
        return 0.0
    return 1.0 if client.exit_rate is None else 1.0 - client.exit_rate
