"""The runner of the papers' tables: stopped, killed, shared, and told of a changed recipe."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from benchmarks.jobs.clock import Clock, OutOfTimeError
from benchmarks.jobs.job import Job
from benchmarks.jobs.lines import duration
from benchmarks.jobs.queue import folder_of, run_queue
from benchmarks.jobs.results import Trial, read_report
from benchmarks.jobs.training import Trained, rounds_done, train_resumable
from benchmarks.paper.plan import FOR_GPU, FULL, OF_PAPERS, groups_of, jobs_of
from benchmarks.paper.progress import write_progress
from benchmarks.paper.recipes import job_of
from benchmarks.paper.report import add_trial, report_path
from benchmarks.paper.runner import Runner
from benchmarks.paper.tables.catalog import TABLES
from benchmarks.paper.tables.table import over
from benchmarks.reports import child_environment, provenance
from edge_sdk.errors import ConfigurationError, SplitedgeError
from edge_sdk.state import StateLock
from tests.waiting import wait_until

pytestmark = pytest.mark.long

TABLE = TABLES["scala"]
ROUNDS = 6


@pytest.fixture(scope="module")
def job() -> Job:
    """A row whose clients keep weights of their own, so that a checkpoint has all there can be."""
    smoke = job_of("splitlpf-udd", TABLES["splitlpf-udd"], TABLES["splitlpf-udd"].rows[0], "smoke")
    return Job(
        "none",
        "a row",
        over(smoke.given, {"train": {"rounds": ROUNDS, "memory_format": "contiguous"}}),
    )


@pytest.fixture(scope="module")
def whole(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The job, trained without a stop."""
    return train_resumable(job.recipe, tmp_path_factory.mktemp("whole"), "cpu", Clock())


def weights_of(trained: Trained) -> dict[str, bytes]:
    simulation = trained.simulation
    found = {name: t.numpy().tobytes() for name, t in simulation.state.read().items()}
    for client, own in simulation.personal().items():
        found |= {f"{client}/{name}": t.numpy().tobytes() for name, t in own.items()}
    return found


def test_a_row_that_is_stopped_after_each_round_ends_in_the_same_weights(
    job: Job, whole: Trained, tmp_path: Path
) -> None:
    for stopped in range(1, ROUNDS):
        with pytest.raises(OutOfTimeError):
            train_resumable(job.recipe, tmp_path, "cpu", Clock(hours=0))
        assert rounds_done(tmp_path) == stopped
    trained = train_resumable(job.recipe, tmp_path, "cpu", Clock(hours=0))
    assert weights_of(trained) == weights_of(whole)
    assert [row["round"] for row in trained.rows] == list(range(1, ROUNDS + 1))
    assert trained.progress.commits == whole.progress.commits


def test_a_row_whose_process_is_killed_ends_in_the_same_weights(
    job: Job, whole: Trained, tmp_path: Path
) -> None:
    (tmp_path / "recipe.json").write_bytes(orjson.dumps(job.given))
    program = f"""
import orjson, signal, torch
from pathlib import Path
from benchmarks.jobs import training
from benchmarks.jobs.clock import Clock
from server.training.recipe.recipe import read_recipe
torch.set_num_threads({torch.get_num_threads()})
training.SAVE_EVERY_S = 0.0
folder = Path({str(tmp_path)!r})
def on_round(row):
    if row["round"] == 4:
        signal.raise_signal(signal.SIGKILL)
recipe = read_recipe(orjson.loads((folder / "recipe.json").read_bytes()))
training.train_resumable(recipe, folder, "cpu", Clock(), on_round=on_round)
"""
    killed = subprocess.run([sys.executable, "-c", program], env=child_environment(), check=False)
    assert killed.returncode == -signal.SIGKILL
    assert rounds_done(tmp_path) == 3
    rounds: list[int] = []
    trained = train_resumable(
        job.recipe, tmp_path, "cpu", Clock(), on_round=lambda row: rounds.append(row["round"])
    )
    assert rounds == [4, 5, 6]
    assert weights_of(trained) == weights_of(whole)


def test_a_row_whose_recipe_changed_starts_again(job: Job, tmp_path: Path) -> None:
    with pytest.raises(OutOfTimeError):
        train_resumable(job.recipe, tmp_path, "cpu", Clock(hours=0))
    other = Job("none", "a row", over(job.given, {"train": {"learning_rate": 0.04}}))
    rounds: list[int] = []
    train_resumable(
        other.recipe, tmp_path, "cpu", Clock(), on_round=lambda row: rounds.append(row["round"])
    )
    assert rounds == list(range(1, ROUNDS + 1))


def test_a_row_whose_default_changed_starts_again(job: Job, tmp_path: Path) -> None:
    # a recipe does not name the numbers that it leaves at their defaults; a digest has them all
    def rounds_of_a_call(digest: str | None, hours: float | None) -> list[int]:
        rounds: list[int] = []
        with contextlib.suppress(OutOfTimeError):
            train_resumable(
                job.recipe,
                tmp_path,
                "cpu",
                Clock(hours),
                digest=digest,
                on_round=lambda row: rounds.append(row["round"]),
            )
        return rounds

    assert rounds_of_a_call("before", 0) == [1]
    assert rounds_of_a_call("before", 0) == [2]
    assert rounds_of_a_call("after", 0) == [1]


def test_a_time_ends_before_a_step_that_it_does_not_hold() -> None:
    assert not Clock().is_over(1e9)
    assert not Clock(hours=1).is_over(3500)
    assert Clock(hours=1).is_over(3700)
    assert [duration(s) for s in (45, 720, 12_600)] == ["45 s", "12 min", "3.5 h"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_time_and_a_second_one_the_program(number: signal.Signals) -> None:
    clock, before = Clock(), signal.getsignal(number)
    with clock.ended_by_signals():
        signal.raise_signal(number)
        assert clock.is_over()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


@pytest.mark.deadline
def test_a_command_that_is_told_to_end_says_how_far_it_came(tmp_path: Path) -> None:
    # nine rows of thirty rounds on the digits: it cannot be done before the signal
    words = ["splitlpf-alpha", "--scale", "cpu", "--seeds", "1", "--resume"]
    places = ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    command = [sys.executable, "-m", "benchmarks.paper", *words, *places]
    with subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        first = folder_of(jobs_of([["splitlpf-alpha"]], "cpu", 1)[0], tmp_path / "work" / "cpu")
        wait_until((first / "simulation.lock").exists, "the first row", 60)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "stopped in time; the same command with --resume goes on" in output
    page = (tmp_path / "results" / "progress-cpu.md").read_text()
    assert "| | alpha 0.1 | round " in page or "| | alpha 0.1 | done" in page
    assert "| | alpha 0.2 | left |" in page


def jobs_in_turn(count: int) -> list[Job]:
    return [job_of("scala", TABLE, TABLE.rows[0], "smoke", seed) for seed in range(count)]


def test_two_runners_share_a_queue_and_a_dead_ones_job_is_taken_over(tmp_path: Path) -> None:
    jobs, done = jobs_in_turn(3), list[int]()

    def finish(job: Job, folder: Path) -> None:
        done.append(job.seed)
        if job.seed == 1:
            other.release()  # the other process ends without having finished its job

    other = StateLock(folder_of(jobs[0], tmp_path), "simulation")
    outcome = run_queue(
        jobs, tmp_path, is_finished=lambda job: job.seed in done, finish=finish, clock=Clock()
    )
    assert done == [1, 2, 0]
    assert (outcome.done, outcome.stopped, outcome.elsewhere) == (3, False, [])
    assert not any(folder_of(job, tmp_path).exists() for job in jobs)

    with StateLock(folder_of(jobs[2], tmp_path), "simulation"):
        done.clear()
        outcome = run_queue(
            jobs, tmp_path, is_finished=lambda job: job.seed in done, finish=finish, clock=Clock()
        )
    assert outcome.elsewhere == [jobs[2]]


def test_a_row_that_cannot_be_done_does_not_end_the_queue(tmp_path: Path) -> None:
    jobs, done = jobs_in_turn(3), list[int]()

    def finish(job: Job, folder: Path) -> None:
        if job.seed == bad:
            raise ConfigurationError("no such data")
        done.append(job.seed)

    bad = 1
    outcome = run_queue(
        jobs, tmp_path, is_finished=lambda job: job.seed in done, finish=finish, clock=Clock()
    )
    assert done == [0, 2]
    assert outcome.failed == ["scala: SCALA, seed 1: no such data"]
    # as first of those that are left neither, so that a later call goes on behind it
    bad = 0
    done.clear()
    outcome = run_queue(
        jobs, tmp_path, is_finished=lambda job: job.seed in done, finish=finish, clock=Clock()
    )
    assert done == [1, 2]
    assert outcome.failed == ["scala: SCALA, seed 0: no such data"]


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_rows_that_all_fail_alike_are_a_mistake_of_the_command(rows: int, tmp_path: Path) -> None:
    tried: list[str] = []

    def finish(job: Job, folder: Path) -> None:
        tried.append(job.row)
        raise ConfigurationError("no such data")

    jobs = [job_of("scala", TABLE, row, "smoke") for row in TABLE.rows[:rows]]
    with pytest.raises(SplitedgeError, match="no such data"):
        run_queue(jobs, tmp_path, is_finished=lambda _: False, finish=finish, clock=Clock())
    assert len(tried) == min(rows, 3)


def test_a_folder_that_is_asked_for_as_it_is_removed_ends_nothing(tmp_path: Path) -> None:
    job, done = jobs_in_turn(1)[0], list[Job]()

    def finish(job: Job, folder: Path) -> None:
        shutil.rmtree(folder)  # by the other process, which had finished the job
        done.append(job)

    outcome = run_queue(
        [job], tmp_path, is_finished=lambda job: job in done, finish=finish, clock=Clock()
    )
    assert outcome.done == 1


def test_a_row_that_another_table_has_too_is_trained_once(tmp_path: Path) -> None:
    def run(table: str, row: str, *, resume: bool = True) -> Trial:
        chosen = next(each for each in TABLES[table].rows if each.name == row)
        job = job_of(table, TABLES[table], chosen, "smoke")
        runner = Runner(
            scale="smoke",
            device="cpu",
            seeds=1,
            results=tmp_path / "results",
            work=tmp_path / "work",
            resume=resume,
            clock=Clock(),
            command=f"--resume {resume}",
        )
        assert runner.run([job]).failed == []
        found = runner.trial_of(job)
        assert found is not None
        return found

    first = run("supersfl", "SuperSFL")
    shared = run("supersfl-fusion", "depth and loss")
    assert shared == replace(first, row="depth and loss")
    anew = run("supersfl-fusion", "depth and loss", resume=False)
    assert (anew.made["command"], anew.curve) == ("--resume False", first.curve)
    other = run("supersfl-fusion", "no loss")
    assert other.digest != first.digest


def a_trial(job: Job, **changes: Any) -> Trial:
    made = {"command": "none", "device": "cpu", **provenance()}
    trial = Trial(job.row, job.seed, {"accuracy": 50.0}, 1.0, 2.0, [None], 60.0, job.digest, made)
    return replace(trial, **changes)


def test_results_add_up_and_those_of_a_changed_recipe_are_dropped(tmp_path: Path) -> None:
    scala, local = (job_of("scala", TABLE, row, "smoke") for row in TABLE.rows[:2])
    second = job_of("scala", TABLE, TABLE.rows[0], "smoke", 1)
    path = report_path(tmp_path, "scala", "smoke")
    for job in (second, local, scala):
        add_trial(tmp_path, TABLE, "smoke", job, a_trial(job))
    report = read_report(path)
    assert [(t.row, t.seed) for t in report.trials] == [
        ("SCALA", 0),
        ("local adjustment only", 0),
        ("SCALA", 1),
    ]
    assert len(report.recipes) == 2  # seeds of a row share one
    assert report.trial_of(scala, ["accuracy"]) is not None
    assert report.trial_of(scala, ["accuracy", "another measure"]) is None

    faster = over(TABLE.scales["smoke"], {"train": {"learning_rate": 0.1}})
    changed = replace(TABLE, scales={**TABLE.scales, "smoke": faster})
    row = job_of("scala", changed, TABLE.rows[1], "smoke")
    assert report.trial_of(row, ["accuracy"]) is None
    add_trial(tmp_path, changed, "smoke", row, a_trial(row, measures={"accuracy": math.nan}))
    report = read_report(path)
    assert [(t.row, t.seed) for t in report.trials] == [("local adjustment only", 0)]
    assert math.isnan(report.trials[0].measures["accuracy"])
    text = path.with_suffix(".md").read_text()
    assert "| local adjustment only | - | 1 | 2 |" in text
    assert "--row 'local adjustment only'" in text


def test_a_row_with_fewer_seeds_than_others_says_so(tmp_path: Path) -> None:
    for row, seed in ((0, 0), (0, 1), (1, 0)):
        job = job_of("scala", TABLE, TABLE.rows[row], "cpu", seed)
        add_trial(tmp_path, TABLE, "cpu", job, a_trial(job))
    text = report_path(tmp_path, "scala", "cpu").with_suffix(".md").read_text()
    assert "| local adjustment only (1 of 2 seeds) | 50.00 | 1 | 2 |" in text
    assert "| SCALA | " in text
    assert "--seeds 2 --data DIR --row" in text


def test_a_number_that_is_added_later_leaves_results_valid_where_it_is_not_set() -> None:
    job = job_of("scala", TABLE, TABLE.rows[1], "smoke")  # it sets `adjust`
    before = dict(job.content)
    del before["train.weight_decay"]
    assert job.is_of(before)
    del before["method_numbers.adjust"]
    assert not job.is_of(before)
    assert not job.is_of({**job.content, "method_numbers.strength": 0.5})
    assert not job.is_of({**job.content, "train.no_longer": 1})


@pytest.mark.parametrize(("row", "same"), [("HARMONY", False), ("SplitFed", True)])
def test_a_result_of_embeddings_as_they_were_is_none_at_length_1(row: str, same: bool) -> None:
    """Recipes of before do not have the number, whose default is not what was so before."""
    table = TABLES["harmony"]
    (wanted,) = (one for one in table.rows if one.name == row)
    job = job_of("harmony", table, wanted, "cpu")
    before = {k: v for k, v in job.content.items() if not k.endswith("normalise_embeddings")}
    assert job.is_of(before) == same


def test_a_default_of_a_method_is_part_of_a_result() -> None:
    assert job_of("scala", TABLE, TABLE.rows[0], "smoke").content["method_numbers.strength"] == 1


def test_tables_of_a_scale_are_done_in_the_order_that_is_stated() -> None:
    names = [name for group in groups_of(list(TABLES), "cpu") for name in group]
    assert names == list(OF_PAPERS)
    assert ["repeated"] in list(groups_of(list(TABLES), "smoke"))


def test_rows_have_folders_of_their_own_and_full_tables_a_priority() -> None:
    jobs = jobs_of(list(groups_of(list(TABLES), "smoke")), "smoke", 3)
    assert len({folder_of(job, Path()) for job in jobs}) == len(jobs)
    ordered = [name for group in FULL for name in group]
    assert sorted(ordered) == sorted(name for name in TABLES if "full" in TABLES[name].scales)
    assert set(ordered) >= FOR_GPU
    assert sorted(OF_PAPERS) == sorted(name for name in TABLES if "cpu" in TABLES[name].scales)
    assert all(TABLES[name].scales.keys() >= {"smoke", "cpu"} for name in OF_PAPERS)


def test_the_page_says_what_is_done_and_what_is_left(tmp_path: Path) -> None:
    scala, local = (job_of("scala", TABLE, row, "smoke") for row in TABLE.rows[:2])
    add_trial(tmp_path, TABLE, "smoke", scala, a_trial(scala))
    with pytest.raises(OutOfTimeError):
        train_resumable(local.recipe, folder_of(local, tmp_path), "cpu", Clock(hours=0))
    other = job_of("scala", TABLE, TABLE.rows[2], "smoke")
    write_progress(tmp_path, "smoke", 2, tmp_path, {other.digest: 7200.0})
    page = (tmp_path / "progress-smoke.md").read_text()
    assert "| | SCALA | done, 60 s | left, about 60 s |" in page
    assert "| | local adjustment only | round 1 of 2 | left |" in page
    assert "| | concatenation only | left, about 2.0 h | left, about 2.0 h |" in page
    total = len(jobs_of(list(groups_of(list(TABLES), "smoke")), "smoke", 2))
    assert f"1 of {total} trainings are done" in page
