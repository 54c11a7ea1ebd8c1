"""A sweep: every choice of values is trained with every seed, and judged on held-out samples.

OUT/CHOICE-SEED/    each run (server.training.sweep.run)
OUT/sweep.md, OUT/sweep.json    the report (server.training.sweep.report)
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from edge_sdk.cli.times import plural
from edge_sdk.errors import ConfigurationError, StorageError
from server.errors import WorkerError
from server.training.comparison.held_out import Measure
from server.training.run.checkpoint import differing_key, latest_checkpoint
from server.training.run.record import LOG
from server.training.sweep.grid import Task
from server.training.sweep.places import Places
from server.training.sweep.run import Result, forget, result_of

logger = logging.getLogger(__name__)

REPORT: Final = "sweep.json"
# Losses of one run's process, after which the sweep ends.
LOSSES_MOST: Final = 3
# Progress of runs that are under way is told so often.
TELL_S: Final = 1.0


def prepare(
    tasks: Sequence[Task], out: Path, measure: Measure, *, resume: bool, force: bool
) -> list[Result]:
    """The results that are there already; nothing is trained or removed that the user did not mean.

    Args:
        resume: keep what is done, and go on with what was stopped.
        force: train everything again.
    Raises: ConfigurationError where `out` holds runs and neither is given, or those of another
        recipe.
    """
    if force:
        for task in tasks:
            forget(task.folder)
        return []
    begun = [task for task in tasks if latest_checkpoint(task.folder) is not None]
    found = [done for task in tasks if (done := result_of(task, measure)) is not None]
    if (begun or found or (out / REPORT).exists()) and not resume:
        raise ConfigurationError(
            f"{out}: holds a sweep, with {len(found)} of these {plural(len(tasks), 'run')}"
            " finished; add --resume to go on, --force to train all again, or choose another --out"
        )
    for task in begun:
        checkpoint = latest_checkpoint(task.folder)
        key = None if checkpoint is None else differing_key(checkpoint, task.recipe)
        if key is not None:
            raise ConfigurationError(
                f"{task.folder}: holds a run with another {key}; choose another --out, or add"
                " --force to train all again"
            )
    return found


def run_tasks(
    tasks: Sequence[Task],
    places: Places,
    measure: Measure,
    *,
    on_result: Callable[[Result], None],
    on_wait: Callable[[Sequence[Task]], None] = lambda _: None,
) -> None:
    """Do the runs, as many at a time as there are places.

    A run whose process is killed or lost is started again, and goes on from its last round.

    Args:
        on_result: called with each result as it comes.
        on_wait: called about once a second with the runs that are under way.
    Raises: ConfigurationError for a recipe and data that do not go together; WorkerError for a run
        that is lost time and again.
    """
    waiting, under_way = deque(tasks), list[Task]()
    losses: Counter[Path] = Counter()
    while waiting or under_way:
        while waiting and len(under_way) < places.count:
            under_way.append(waiting.popleft())
            places.start(under_way[-1])
        ended = places.next(TELL_S)
        if ended is None:
            on_wait(under_way)
            continue
        under_way.remove(ended.task)
        if ended.error:
            raise ConfigurationError(f"{ended.task.name}: {ended.error}")
        if ended.lost:
            losses[ended.task.folder] += 1
            _check_losses(ended.task, losses[ended.task.folder], ended.lost)
            waiting.appendleft(ended.task)
            continue
        on_result(_result(ended.task, measure))


def rounds_done(task: Task) -> int:
    """Rounds of a run so far, by the lines of its log."""
    try:
        return (task.folder / LOG).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _check_losses(task: Task, losses: int, how: str) -> None:
    if losses == LOSSES_MOST:
        raise WorkerError(
            f"{task.name}: {how}, for the {losses}rd time, possibly for lack of memory; give the"
            " same command with --resume and fewer --jobs"
        )
    logger.warning("%s: %s; it goes on from its last round", task.name, how)


def _result(task: Task, measure: Measure) -> Result:
    found = result_of(task, measure)
    if found is None:
        raise StorageError(
            f"{task.folder}: expected the files of a finished run, found none; with a Ray cluster"
            " of several machines, --out must be a folder that all of them share"
        )
    return found
