"""Results of a training with real devices: weights for `splitedge export`, and a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_sdk.records import table_of
from exporters.run.record import WEIGHTS
from server.training.fleet.box import Missed
from server.training.fleet.started_rounds import Samples
from server.training.recipe.privacy import privacy_of
from server.training.report.cost import answer_latency, training_cost
from server.training.report.device_scores import NO_OOD, DeviceScore, fleet_energy, summarise
from server.training.report.outcome import write_outcome
from server.training.report.report import REPORT, Report, write_report
from server.training.report.rows import ever_supervised
from server.training.run.run import Row, Run

MissedByDevice = dict[str, list[dict[str, str]]]


@dataclass(frozen=True, slots=True)
class Scored:
    """Reports of devices after the last round.

    Attributes:
        missed: devices without scores, and why. bytes_down: the weights sent for it.
    """

    devices: list[DeviceScore]
    missed: MissedByDevice
    bytes_down: int
    seconds: float


def write_results(
    folder: Path,
    run: Run,
    run_id: str,
    *,
    rows: list[Row],
    scored: Scored,
    interrupted: Sequence[Samples],
) -> Report:
    """Write weights and report of a finished training into its folder.

    Args:
        interrupted: n_k by device, of each round under noise that is in no row.
    Returns: the content of `report.json`.
    Raises: StorageError.
    """
    recipe, method = run.recipe, run.method
    outcome = write_outcome(folder, run, rows, run_id)
    alone = method.server_step is not None and not ever_supervised(rows)
    summary = summarise(scored.devices, alone=alone)
    report: Report = {
        "method": method.name,
        "dataset": run.dataset,
        "seed": recipe.seed,
        "clients": len(run.plans),
        "memory_format": run.memory_format,
        "precision": recipe.train.training.precision,
        "rounds": rows,
        "final": {
            "accuracy": rows[-1]["accuracy"],
            "accuracy_id": summary.accuracy_id,
            "accuracy_ood": None,
            "accuracy_ood_why": NO_OOD,
            "jain": summary.jain,
            "std": summary.std,
            "answers": "exits" if alone else "full",
            # devices score the whole network and their exit, each by itself: no gate answers
            "threshold_chosen_on": None,
            "by_threshold": None,
            "figures_of": "test",
        },
        "each_client": [score.to_dict() for score in scored.devices],
        "not_scored": scored.missed,
        "training": training_cost(rows),
        "latency": answer_latency(
            run,
            {score.device: score.whole.samples for score in scored.devices},
            {score.device: 0.0 if alone else 1.0 for score in scored.devices},
        ),
        "energy": fleet_energy(scored.devices),
        "evaluation": {"bytes_down": scored.bytes_down, "seconds": scored.seconds},
        "labels": method.labels,
        "privacy": privacy_of(method, run.plans, rows, recipe.privacy.delta, interrupted),
        "depths": {name: plan.depth for name, plan in run.plans.items()},
        "exits": list(outcome.exits),
        "weights": str(folder / WEIGHTS),
        "scores": [table_of(score) for score in outcome.scores],
        "recipe": recipe.to_dict(),
    }
    write_report(folder / REPORT, report)
    return report


def missed_by_device(missed: list[Missed]) -> MissedByDevice:
    """Messages that each device did not answer, and why, in the order asked."""
    by_device: MissedByDevice = {}
    for entry in missed:
        by_device.setdefault(entry.device, []).append({"what": entry.what, "why": entry.why})
    return by_device
