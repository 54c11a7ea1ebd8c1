"""The sweep is the same for every method, and what it chooses depends on held-out samples only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from benchmarks.jobs.job import Job
from benchmarks.jobs.results import Report, Trial
from benchmarks.paper import tuned
from benchmarks.paper.measures import measured
from benchmarks.paper.tables.catalog import TABLES
from benchmarks.paper.tables.table import over
from benchmarks.reports import provenance
from benchmarks.tuning.__main__ import app
from benchmarks.tuning.report import changes_of, chosen
from benchmarks.tuning.sweep import (
    SWEEP,
    WORLDS,
    WorldName,
    method_of,
    methods_of,
    trials_of,
)
from server.training.comparison.held_out import build_on_held_out
from server.training.recipe.recipe import METHODS, load_recipe
from server.training.report.evaluate import Evaluator
from server.training.run.build import load_data

EXAMPLES = Path(__file__).parents[3] / "examples" / "recipes"


@pytest.mark.parametrize("world", get_args(WorldName))
def test_every_method_has_eight_trials_on_as_many_samples(world: WorldName) -> None:
    clients = WORLDS[world].recipe["data"]["clients"]
    share = WORLDS[world].recipe.get("round", {}).get("participation", 1)
    for method in methods_of(world):
        jobs = trials_of(method, world)
        assert len({job.row for job in jobs}) == 8
        assert len({job.slug for job in jobs}) == len(jobs) == 8 * len(WORLDS[world].seeds)
        assert {job.seed for job in jobs} == set(WORLDS[world].seeds)
        assert {method_of(job.row) for job in jobs} == {method}
        for job in jobs:
            numbers = job.recipe.train.training
            if numbers.iterations is None:
                assert numbers.epochs == (2 if world == "digits" else 1)
            else:  # SCALA has joint batches; MergeSFL's clients have parts of the fastest's
                merged = {10: 6.75, 20: 12.5}.get(clients)
                batches = {"scala": 1.0, "mergesfl": merged}.get(method, clients * share)
                samples = numbers.iterations * numbers.batch * batches
                assert samples == pytest.approx(WORLDS[world].samples, rel=0.05)
    worlds = {
        # SplitFedV2's clients come one after another
        str((of.data, replace(of.round, cohort=None), of.train.rounds, of.train.depth))
        for method in methods_of(world)
        if method != "default"
        for of in (job.recipe for job in trials_of(method, world))
    }
    assert len(worlds) == 1


def test_splitfed_v2_goes_client_after_client_wherever_it_is_compared() -> None:
    recipes = [load_recipe(file) for file in EXAMPLES.glob("splitfed-v2-*.toml")]
    rows = [row.recipe for table in TABLES.values() for row in table.rows]
    trials = [job.recipe for world in WORLDS for job in trials_of("splitfed-v2", world)]
    cohorts = [recipe.round.cohort for recipe in (*recipes, *trials)]
    cohorts += [
        row.get("round", {}).get("cohort") for row in rows if row.get("method") == "splitfed-v2"
    ]
    assert len(recipes) == 2
    assert set(cohorts) == {1}


def test_every_method_is_swept_on_both_data_sets_and_those_of_a_table_on_its_clients() -> None:
    assert set(METHODS) <= set(methods_of("digits")) == set(methods_of("fashion-mnist"))
    swept: dict[str, WorldName] = {
        "besplit": "fashion-mnist-dirichlet",
        "scala": "fashion-mnist-two-classes",
        "scala-cut": "fashion-mnist-two-classes",
    }
    for name, world in swept.items():
        table = TABLES[name]
        assert table.sweep == world
        methods = {over(table.scales["cpu"], row.recipe)["method"] for row in table.rows}
        assert methods <= set(methods_of(world))


@pytest.mark.parametrize("world", get_args(WorldName))
def test_no_table_has_a_seed_that_chose_its_numbers(world: WorldName) -> None:
    assert min(WORLDS[world].seeds) > 50


def test_trials_of_the_digits_train_on_as_many_samples_as_is_said() -> None:
    data = load_data(trials_of("fedavg", "digits")[0].recipe)
    assert 2 * len(data.y_train) == WORLDS["digits"].samples


def test_a_trial_sets_what_its_name_says() -> None:
    job = trials_of("splitgp", "digits")[1]
    assert job.row == "splitgp: rate 0.2, momentum 0, personal_share 0.9"
    assert changes_of(job) == {
        "train": {"learning_rate": 0.2, "momentum": 0.0},
        "method_numbers": {"personal_share": 0.9},
    }
    part = changes_of(trials_of("default", "digits")[1])["parts"]
    assert part == {"server": {"numbers": {"strength": 0.25}}}
    assert changes_of(trials_of("fedavg", "digits")[7])["train"]["momentum"] == 0.9


def test_a_trial_is_judged_without_the_test_part(tmp_path: Path) -> None:
    job = trials_of("fedavg", "digits")[0]
    recipe = job.recipe
    data, run = load_data(recipe), build_on_held_out(recipe, "cpu", tmp_path)
    assert len(run.y_test) == len(data.y_held_out) > 400
    assert np.array_equal(run.x_test, data.x_held_out)
    tested = {row.tobytes() for row in data.x_test}
    assert not tested & {row.tobytes() for row in run.x_test}
    # evaluation is of these samples: with wrong labels for them, no answer is right
    wrong = replace(run, y_test=(Evaluator(run).labels(run.state.net) + 1) % 10)
    assert measured(wrong, [{"accuracy": 0.0}], ["accuracy"])["accuracy"] == 0
    assert Evaluator(wrong).accuracy(supervised=True) == 0


def test_a_client_is_not_judged_by_what_its_threshold_is_chosen_on(tmp_path: Path) -> None:
    run = build_on_held_out(trials_of("splitgp", "digits")[0].recipe, "cpu", tmp_path)
    for name, client in run.clients.items():
        test, own = run.tests[name], set(run.held_out[name].tolist())
        assert own
        judged = set(test.id.tolist())
        assert not own & judged
        # all others of its classes judge it, and none of them counts as unseen
        assert judged | own == set(np.flatnonzero(np.isin(run.y_test, client.y)).tolist())
        assert not np.isin(run.y_test[test.ood], client.y).any()


def a_report(figures: dict[str, float]) -> Report:
    """The trials of two methods; those that are not named have 50 %."""
    jobs = [job for method in ("fedavg", "splitgp") for job in trials_of(method, "digits")]
    made = {"command": "none", "device": "cpu", **provenance()}
    trials = [
        Trial(j.row, j.seed, {measure: figures.get(j.row, 50.0)}, 1, 1, [], 1, j.digest, made)
        for j in jobs
        for measure in [SWEEP[method_of(j.row)].measure]
    ]
    return Report(trials, {job.digest: job.content for job in jobs})


def test_the_best_trial_is_chosen_and_only_once_all_are_done() -> None:
    best = "splitgp: rate 0.02, momentum 0.9, personal_share 0.2"
    report = a_report({best: 71.0, "fedavg: rate 0.2, momentum 0": float("nan")})
    assert chosen(report, "digits") == {
        "splitgp": (best, 71.0),
        "fedavg": ("fedavg: rate 0.02, momentum 0.9", 50.0),  # the first of equals
    }
    assert "splitgp" not in chosen(Report(report.trials[:-1], report.recipes), "digits")


def test_the_best_mean_over_seeds_is_chosen_where_there_are_several() -> None:
    world: WorldName = "fashion-mnist-two-classes"
    lucky, steady = trials_of("fedlc", world)[0].row, trials_of("fedlc", world)[3].row
    figures = {lucky: (99.0, 10.0, 10.0), steady: (60.0, 61.0, 62.0)}
    made = {"command": "none", "device": "cpu", **provenance()}
    jobs = trials_of("fedlc", world)
    trials = [
        Trial(j.row, j.seed, {"accuracy": figures.get(j.row, (30, 30, 30))[j.seed - 100]},
              1, 1, [], 1, j.digest, made)
        for j in jobs
    ]  # fmt: skip
    recipes = {job.digest: job.content for job in jobs}
    assert chosen(Report(trials, recipes), world) == {"fedlc": (steady, 61.0)}
    assert chosen(Report(trials[1:], recipes), world) == {}


def test_a_sweep_is_a_report_and_a_finished_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trials_of

    def short(method: str, world: WorldName) -> list[Job]:
        small: dict[str, Any] = {"data": {"train_max": 200}, "train": {"rounds": 1}}
        return [Job(job.table, job.row, over(job.given, small)) for job in whole(method, world)]

    for module in ("__main__", "report"):
        monkeypatch.setattr(f"benchmarks.tuning.{module}.trials_of", short)
    words = ["digits", "--method", "scala"]
    places = ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    ran = CliRunner().invoke(app, [*words, *places])
    assert ran.exit_code == 0, ran.output
    assert "8 trials done, 0 left" in ran.output
    report = orjson.loads((tmp_path / "results" / "tuning-digits.json").read_bytes())
    assert set(report["chosen"]) == {"scala"}
    assert report["chosen"]["scala"]["method_numbers"]["strength"] in {1.0, 0.5}
    assert not report["complete"]
    text = (tmp_path / "results" / "tuning-digits.md").read_text()
    assert "Trials are left of fedavg, fedprox, " in text
    for job in trials_of("scala", "digits"):
        assert f"| {job.row} | " in text
    ran = CliRunner().invoke(app, [*words, *places])
    assert "0 trials done, 0 left" in ran.output


def test_an_unknown_method_is_told_which_there_are() -> None:
    ran = CliRunner().invoke(app, ["digits", "--method", "nosuch"])
    assert ran.exit_code == 2
    assert "minibatch-sfl" in ran.output


@pytest.mark.parametrize("complete", [True, False, None])
def test_tables_take_the_numbers_of_a_complete_sweep_alone(
    complete: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"scala": {"train": {"learning_rate": 0.2}}}
    report: dict[str, Any] = {"complete": complete, "chosen": chosen}
    if complete is None:  # of a sweep that began before reports said so
        del report["complete"]
    (tmp_path / "tuning-none.json").write_bytes(orjson.dumps(report))
    monkeypatch.setattr(tuned, "RESULTS", tmp_path)
    assert tuned.tuned_numbers.__wrapped__("none") == (chosen if complete else {})
    assert tuned.tuned_numbers.__wrapped__("another") == {}
