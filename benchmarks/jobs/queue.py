"""The next unfinished job, and the next: several processes may work on one queue.

Each job has a folder. The process that works on it holds the folder's lock, which the kernel
releases when the process ends for any reason: a job of a process that was killed is free at once,
and goes on from its last checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.jobs.clock import Clock, OutOfTimeError
from benchmarks.jobs.job import Job
from edge_sdk.errors import SplitedgeError, StateInUseError
from edge_sdk.state import StateLock

# So many different rows that fail alike tell of a mistake of the command.
_ALIKE: Final = 3


@dataclass(slots=True)
class Outcome:
    """One call of a runner.

    Attributes:
        done: number of jobs that it finished.
        failed: messages of jobs that cannot be done.
        stopped: whether its time ended before the queue did.
        elsewhere: jobs that other processes are at work on.
    """

    done: int = 0
    failed: list[str] = field(default_factory=list)
    stopped: bool = False
    elsewhere: list[Job] = field(default_factory=list)


def run_queue(
    jobs: Sequence[Job],
    work: Path,
    *,
    is_finished: Callable[[Job], bool],
    finish: Callable[[Job, Path], None],
    clock: Clock,
) -> Outcome:
    """Finish the jobs in their order, until they are done or the time is over.

    An error ends a job and not the queue, unless some different rows, or all there are, fail alike
    before any job was finished: that is mostly a mistake of the command.

    Args:
        work: holds the folder of each job.
        is_finished: asked again once the job is this process's, since another may have finished it.
        finish: does the job in its folder and records its result; it raises OutOfTimeError where
            it leaves the job at a checkpoint.
    Raises: SplitedgeError of rows that fail alike, where nothing was finished before.
    """
    outcome = Outcome()
    while True:
        before, outcome.elsewhere, outcome.failed = outcome.done, [], []
        errors: dict[tuple[str, str], SplitedgeError] = {}
        for job in jobs:
            if clock.is_over():
                outcome.stopped = True
                return outcome
            if is_finished(job):
                continue
            try:
                outcome.done += _finish_alone(job, folder_of(job, work), is_finished, finish)
            except StateInUseError:
                outcome.elsewhere.append(job)
            except OutOfTimeError:
                outcome.stopped = True
                return outcome
            except SplitedgeError as err:
                outcome.failed.append(f"{job}: {err}")
                errors[job.table, job.row] = err
                if len(errors) == _ALIKE:
                    _check_unlike(errors.values(), outcome)
        # another process may have been killed meanwhile, and left its job
        if not outcome.elsewhere or outcome.done == before:
            _check_unlike(errors.values(), outcome)
            return outcome


def folder_of(job: Job, work: Path) -> Path:
    """Folder of a job's unfinished work."""
    return work / job.table / job.slug


def _finish_alone(
    job: Job,
    folder: Path,
    is_finished: Callable[[Job], bool],
    finish: Callable[[Job, Path], None],
) -> bool:
    """Finish a job that no other process is at; False where another has just finished it."""
    with StateLock(folder, "simulation"):
        found = is_finished(job)
        if not found:
            finish(job, folder)
        # another process may ask for the lock in there just now
        shutil.rmtree(folder, ignore_errors=True)
    return not found


def _check_unlike(errors: Collection[SplitedgeError], outcome: Outcome) -> None:
    """Check that a queue in which nothing was done yet did not fail for one reason.

    Raises: SplitedgeError, the reason.
    """
    if not outcome.done and len({str(err) for err in errors}) == 1:
        raise next(iter(errors))
