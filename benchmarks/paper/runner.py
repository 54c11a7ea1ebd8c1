"""One call of the tables' command: the rows that are left, in their order, until its time is over.

WORK/SCALE/TABLE/ROW-seed-N/    an unfinished row (benchmarks.jobs.training)
WORK/SCALE/estimates.json       seconds of rows that none has finished yet, by recipe
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import orjson

from benchmarks.jobs.clock import Clock
from benchmarks.jobs.job import Job
from benchmarks.jobs.lines import RoundTeller, duration, figures, say
from benchmarks.jobs.queue import Outcome, run_queue
from benchmarks.jobs.results import Trial, read_report
from benchmarks.paper.local_only import KeptAlone
from benchmarks.paper.measures import headlines
from benchmarks.paper.progress import write_progress
from benchmarks.paper.recipes import job_of
from benchmarks.paper.report import add_trial, report_path
from benchmarks.paper.tables.catalog import TABLES
from benchmarks.paper.tables.table import Row, Scale
from benchmarks.paper.work import estimate_seconds, train_row
from edge_sdk.durable import make_folder, write_atomic
from server.training.run.checkpoint import discard


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """One call of the command.

    Attributes:
        seeds: as many are asked of every row.
        work: holds unfinished rows.
        resume: whether results of earlier calls count, and unfinished rows go on.
        command: that the user gave, for the reports.
        began: this call, as reports write dates.
    """

    scale: Scale
    device: str
    seeds: int
    results: Path
    work: Path
    resume: bool
    clock: Clock
    command: str
    began: str = field(default_factory=_now)

    def run(self, jobs: Sequence[Job]) -> Outcome:
        """Do the rows that are left, until they are done or the time is over.

        Raises: SplitedgeError where the first of them cannot be done.
        """
        here: set[str] = set()

        def is_finished(job: Job) -> bool:
            found = self.trial_of(job)
            new = str(job) in here or (found is not None and found.made["when"] > self.began)
            return new or (found is not None and self.resume)

        def finish(job: Job, folder: Path) -> None:
            if not self.resume:
                discard(folder)
            trial = self._trial_elsewhere(job) if self.resume else None
            taken = " (another table's, of the same recipe)" if trial else ""
            trial = trial or train_row(
                job,
                folder,
                self.device,
                self.clock,
                command=self.command,
                on_round=RoundTeller(job),
                alone=self._alone(job),
            )
            add_trial(self.results, TABLES[job.table], self.scale, job, trial)
            here.add(str(job))
            found = figures(headlines(trial.measures))
            say(f"{job}: {found} in {duration(trial.clock_seconds)}{taken}")
            self.write_progress()

        try:
            return run_queue(
                jobs,
                self.work / self.scale,
                is_finished=is_finished,
                finish=finish,
                clock=self.clock,
            )
        finally:
            if here or self.clock.is_over():
                self.write_progress()

    def trial_of(self, job: Job) -> Trial | None:
        """The row's result, by its recipe as it is now."""
        report = read_report(report_path(self.results, job.table, self.scale))
        return report.trial_of(job, TABLES[job.table].measures)

    def _trial_elsewhere(self, job: Job) -> Trial | None:
        """The result of another table's row that has the same recipe, as one of this row."""
        for name in TABLES:
            report = read_report(report_path(self.results, name, self.scale))
            for trial in report.trials_of_recipe(job, TABLES[job.table].measures):
                # its digest may be of before a number that recipes have since
                return replace(trial, row=job.row, digest=job.digest)
        return None

    def write_progress(self) -> None:
        """Write the page of what is done and what is left.

        Raises: StorageError.
        """
        work = self.work / self.scale
        write_progress(self.results, self.scale, self.seeds, work, self.estimates())

    def estimates(self) -> Mapping[str, float]:
        """Seconds by recipe, as far as they were estimated."""
        try:
            found: dict[str, float] = orjson.loads(self._estimates.read_bytes())
        except FileNotFoundError:
            return {}
        return found

    def estimate(self, jobs: Sequence[Job]) -> Mapping[str, float]:
        """Seconds by recipe; those that no call has estimated are measured now, and kept.

        Raises: SplitedgeError.
        """
        known = dict(self.estimates())
        make_folder(self._estimates.parent)
        for job in jobs:
            if job.digest not in known and not self.clock.is_over():
                known[job.digest] = estimate_seconds(job.recipe, self.device)
                say(f"{job.table}: {job.row}: about {duration(known[job.digest])} a seed")
                write_atomic(self._estimates, orjson.dumps(known))
        return known

    def _alone(self, job: Job) -> KeptAlone:
        """The clients of a row alone, by the numbers of FedAvg: the same for all rows."""
        row = Row("alone", {"method": "fedavg"})
        data = job.recipe.data.folder
        recipe = job_of(job.table, TABLES[job.table], row, self.scale, job.seed, data).recipe
        folder = report_path(self.results, "alone", self.scale)
        return KeptAlone(recipe, self.device, folder, self.work / self.scale, self.clock)

    @property
    def _estimates(self) -> Path:
        return self.work / self.scale / "estimates.json"
