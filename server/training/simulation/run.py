"""A whole simulated run: rounds, checkpoints, a log, and what they amount to.

OUT/checkpoints/    the last two rounds; --resume goes on from there
OUT/log.jsonl       one line a round
OUT/report.json     written at the end, with accuracy.png, loss.png and bytes.png beside it
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import orjson
import torch

from edge_sdk.durable import make_folder, write_atomic
from edge_sdk.errors import ConfigurationError
from edge_sdk.state import StateLock
from profiles.energy import EnergyMeter
from server.training.recipe.privacy import privacy_of
from server.training.recipe.recipe import Recipe
from server.training.report.cost import answer_latency, energy_report, training_cost
from server.training.report.evaluate import ClientScore, Evaluator
from server.training.report.evaluate_answers import auxiliary_report, benign_rate_of
from server.training.report.evaluate_drift import drift_report
from server.training.report.metrics import summarise_clients
from server.training.report.plots import plot_rounds
from server.training.rounds.round import RoundResult
from server.training.run.checkpoint import (
    Row,
    check_same_recipe,
    discard,
    latest_checkpoint,
    prune,
    save_checkpoint,
)
from server.training.simulation.build import World, build_world

logger = logging.getLogger(__name__)

Report = dict[str, Any]
OnRound = Callable[[Row], None]

REPORT: Final = "report.json"
LOG: Final = "log.jsonl"


def simulate(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    device: str = "cpu",
    on_round: OnRound | None = None,
) -> Report:
    """Run a recipe to its last round and write everything into `out`.

    Args:
        resume: go on after the last round in `out`; from the beginning where there is none, which
            is logged. The
            weights at the end are, bit for bit, those of a run that was never stopped, on the same
            kind of machine and with the same number of torch threads.
        on_round: called with each row of the report as it comes, those of an earlier run included.
    Returns: what `report.json` holds.
    Raises: ConfigurationError where recipe, data and `out` do not go together; StateInUseError if
        another process runs there; StorageError.
    """
    with StateLock(out, "simulation"):
        rows: list[Row] = []
        checkpoint = latest_checkpoint(out)
        if checkpoint is not None and not resume:
            rounds = checkpoint.recipe["train"]["rounds"]
            if checkpoint.round < rounds:
                raise ConfigurationError(
                    f"{out}: holds a run that stopped after round {checkpoint.round} of {rounds};"
                    " add --resume to go on, or choose another --out"
                )
        world = build_world(recipe, device, out)
        if checkpoint is not None and resume:
            check_same_recipe(checkpoint, world)
            checkpoint.restore(world)
            rows = checkpoint.rows
            prune(out)  # a kill may have come between writing one and removing another
        else:
            if resume:
                logger.warning("%s: no round to go on from; beginning anew", out)
            discard(out)
        tell = on_round or _nothing
        log = out / LOG
        # the checkpoint is what counts: a line that was logged and not saved is logged again
        write_atomic(log, b"".join(map(line_of, rows)))
        for row in rows:
            tell(row)
        before = len(rows)
        with EnergyMeter(declared=recipe.energy.model()) as meter:
            for row in run_rounds(world, rows):
                save_checkpoint(out, world, rows)
                with log.open("ab") as file:
                    file.write(line_of(row))
                tell(row)
        report = report_of(world, rows)
        report["energy"] = energy_report(meter.read(), "clients and server", len(rows) - before)
        write_report(out / REPORT, report)
        plot_rounds(rows, out)
        return report


def run_rounds(world: World, rows: list[Row]) -> Iterator[Row]:
    """Run the rounds that are left, one an iteration, and append their rows to `rows`."""
    evaluator = Evaluator(world)
    recipe = world.recipe
    last = recipe.train.rounds
    for number in range(len(rows) + 1, last + 1):
        world.failures.clear()
        result = world.loop.run_round(number, recipe.seed)
        measured = number % recipe.evaluate.every == 0 or number == last
        supervised = _supervised(result) or _ever_supervised(rows)
        accuracy = evaluator.accuracy(supervised=supervised) if measured else None
        path = evaluator.path(supervised=supervised)
        rows.append(row_of(result, accuracy, path, world.failures))
        yield rows[-1]


def report_of(world: World, rows: list[Row]) -> Report:
    """What a finished run amounts to.

    `final.accuracy` is on the global test set, by the same path as the rounds'; the other figures
    are over clients, each tested on samples of its own classes (ID) and of others (OOD) and
    answered as `final.answers` says.
    """
    recipe = world.recipe
    evaluator = Evaluator(world)
    supervised = _ever_supervised(rows)
    clients = evaluator.clients(supervised=supervised)
    summary = summarise_clients([c.inside for c in clients], [c.outside for c in clients])
    answers = evaluator.answers(supervised=supervised)
    return {
        "method": world.method.name,
        "dataset": world.dataset,
        "seed": recipe.seed,
        "clients": len(world.clients),
        "rounds": rows,
        "final": {
            "accuracy": evaluator.accuracy(supervised=supervised),
            "accuracy_id": summary.accuracy_id,
            "accuracy_ood": summary.accuracy_ood,
            "jain": summary.jain,
            "std": summary.std,
            "accuracy_clients": summary.accuracy,
            "path": evaluator.path(supervised=supervised),
            "answers": answers,
            "exits": {str(depth): value for depth, value in evaluator.exits().items()},
            "auxiliary": auxiliary_report(world),
            "bmr": benign_rate_of(world),
            "out_of_client": drift_report(world, supervised=supervised),
        },
        "labels": world.method.labels,
        "privacy": privacy_of(world.method, world.plans, rows, recipe.privacy.delta),
        "each_client": [client.to_dict() for client in clients],
        "training": training_cost(rows),
        "latency": answer_latency(
            world,
            {c.client: c.inside.samples + c.outside.samples for c in clients},
            {c.client: _offload_rate(c, answers) for c in clients},
        ),
        "recipe": recipe.to_dict(),
        "device": world.device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _offload_rate(client: ClientScore, answers: str) -> float:
    if answers == "exits":
        return 0.0
    return 1.0 if client.exit_rate is None else 1.0 - client.exit_rate


def write_report(path: Path, report: Report) -> None:
    """As JSON; figures that are not defined are null.

    Raises: StorageError.
    """
    make_folder(path.parent)
    options = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    write_atomic(path, orjson.dumps(report, option=options))


def row_of(
    result: RoundResult,
    accuracy: float | None,
    path: str,
    failures: Mapping[str, str] | None = None,
) -> Row:
    """A round as the report has it.

    Args:
        path: what its accuracy is of.
        failures: why clients gave no reply, as far as they said.
    """
    known = failures or {}
    return {
        "round": result.round,
        "accuracy": accuracy,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "seconds": result.seconds,
        "participants": list(result.participants),
        "missing": list(result.missing),
        "missing_why": {name: known[name] for name in result.missing if name in known},
        "loss": result.loss,
        "path": path,
        "supervised": _supervised(result),
        "merged": result.merged,
        "refused": dict(result.refused),
        "missed_steps": dict(result.missed_steps),
        "bytes_by_kind": dict(result.bytes_by_kind),
        "suspects": dict(result.suspects),
        "stale": dict(result.stale),
        "simulated_s": result.simulated_s,
        "update_coding": dict(result.coding),
        "samples": dict(result.samples),
        # whose update counted for nothing, by the method's own rule
        "zeroed": [name for name, weight in result.weights.items() if weight == 0],
    }


def _supervised(result: RoundResult) -> bool:
    """Whether the server answered any client's features."""
    return "down gradients" in result.bytes_by_kind


def _ever_supervised(rows: list[Row]) -> bool:
    return any(row["supervised"] for row in rows)


def line_of(row: Row) -> bytes:
    """A row as the log has it."""
    return orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)


def _nothing(_row: Row) -> None:
    pass
