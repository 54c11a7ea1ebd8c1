"""A whole simulated run: rounds, checkpoints, a log, and a report.

OUT/checkpoints/    the last two rounds; --resume continues from there
OUT/log.jsonl       one line a round
OUT/report.json     written at the end, with accuracy.png, loss.png and bytes.png next to it
OUT/weights.safetensors, OUT/run.json   for `splitedge export --run OUT`
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from edge_sdk.records import table_of
from edge_sdk.state import StateLock
from exporters.run.record import WEIGHTS
from profiles.energy import EnergyMeter
from server.training.cluster.ray_cluster import RayCluster
from server.training.recipe.recipe import Recipe
from server.training.report.client_scores import ClientScore
from server.training.report.cost import energy_report
from server.training.report.evaluate import Evaluator
from server.training.report.local_models import local_figures, local_scores
from server.training.report.outcome import write_outcome
from server.training.report.plots import plot_rounds
from server.training.report.report import REPORT, Report, report_of, write_report
from server.training.report.rows import ever_supervised, has_gradients, is_supervised, row_of
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundResult, RoundUnderWay
from server.training.run.checkpoint import continue_run, find_checkpoint
from server.training.run.record import OnRound, record_rounds
from server.training.run.run import Row, Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.worker import start_ray_workers, start_workers

logger = logging.getLogger(__name__)


def simulate(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    device: str = "cpu",
    workers: int = 0,
    cluster: RayCluster | None = None,
    on_round: OnRound | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Report:
    """Run a recipe to its last round and write everything into `out`.

    Args:
        resume: continue after the last round in `out`, or start from the beginning where there is
            none, which is logged. The weights at the end are, bit for bit, those of a run that was
            never stopped, on the same kind of machine and with the same number of torch threads.
        force: begin again where `out` holds a finished run; its files are replaced.
        workers: processes that train the clients; 0 for this process alone. The weights are the
            same, bit for bit.
        cluster: has the workers as its actors; None for processes of this machine.
        on_round: called with each row of the report as it comes, those of an earlier run included.
        note: called with a line about the data that were read.
    Returns: the content of `report.json`.
    Raises: ConfigurationError where recipe, data and `out` do not go together; StateInUseError if
        another process runs there; StorageError.
    """
    with StateLock(out, "simulation"):
        checkpoint = find_checkpoint(
            out, resume=resume, force=force, otherwise="choose another --out"
        )
        if resume and checkpoint is None:
            logger.warning("%s: no round to continue from; starting with round 1", out)
        before = None if checkpoint is None else checkpoint.memory_format
        start = start_workers(workers) if cluster is None else start_ray_workers(workers, cluster)
        simulation = build_simulation(recipe, device, out, before, start_workers=start, note=note)
        with closing(simulation):
            rows = continue_run(out, simulation, checkpoint)
            resumed = len(rows)
            with EnergyMeter(declared=recipe.energy.model(), cpu_clock=_cpu_seconds) as meter:
                rounds = run_rounds(simulation, rows)
                record_rounds(out, simulation, rows, rounds, on_round or _ignore)
                simulation.close()  # the time of workers is known once they have ended
        report = report_of(simulation, rows)
        report["energy"] = energy_report(
            meter.read(),
            "clients and server",
            len(rows) - resumed,
            accuracy=report["final"]["accuracy"],
            co2_g_kwh=recipe.energy.co2_g_kwh,
        )
        outcome = write_outcome(out, simulation, rows)
        report["weights"] = str(out / WEIGHTS)
        report["scores"] = [table_of(score) for score in outcome.scores]
        write_report(out / REPORT, report)
        plot_rounds(rows, out)
        return report


def run_rounds(simulation: Simulation, rows: list[Row]) -> Iterator[Row]:
    """Run the rounds that are left, one at each iteration, and append their rows to `rows`."""
    evaluator = Evaluator(simulation)
    recipe = simulation.recipe
    for number in range(len(rows) + 1, recipe.train.rounds + 1):
        simulation.failures.clear()
        local: list[ClientScore] = []
        result = _run_round(simulation, number, rows, local)
        supervised = is_supervised(result) or ever_supervised(rows)
        accuracy = (
            evaluator.accuracy(supervised=supervised) if simulation.measures(number) else None
        )
        path = evaluator.path(supervised=supervised)
        rows.append(row_of(result, accuracy, path, simulation.failures))
        if local:
            rows[-1]["local"] = local_figures(local)
        yield rows[-1]


def _run_round(
    simulation: Simulation, number: int, rows: list[Row], local: list[ClientScore]
) -> RoundResult:
    """Run a round; `local` gets the scores of clients' networks before the last merge."""
    recipe, loop = simulation.recipe, simulation.loop
    last = number == recipe.train.rounds
    if not (last and recipe.evaluate.local and isinstance(loop, RoundLoop)):
        return loop.run_round(number, recipe.seed)

    def score(now: RoundUnderWay) -> None:
        supervised = has_gradients(now.traffic.by_kind) or ever_supervised(rows)
        local.extend(local_scores(simulation, now, supervised=supervised))

    return loop.run_round(number, recipe.seed, before_merge=score)


def _cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _ignore(_row: Row) -> None:
    pass
