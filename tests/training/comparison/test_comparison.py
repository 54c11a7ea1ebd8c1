"""Recipes side by side, with real trainings of a few seconds."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from edge_sdk.errors import ConfigurationError, StorageError
from server.training.comparison.comparison import Training, Watcher, compare
from server.training.comparison.figures import lines_of
from server.training.comparison.held_out import build_on_held_out
from server.training.comparison.report import Comparison
from server.training.comparison.tuning import SEED, Trial, best, tune
from server.training.comparison.values import with_values
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.run.run import Row
from server.training.simulation.run import run_rounds, simulate

TABLES: dict[str, Any] = {
    "data": {"name": "digits", "clients": 2, "train_max": 120, "test_max": 100, "held_out": 0.3},
    "train": {
        "backbone": "tiny",
        "rounds": 2,
        "learning_rate": 0.05,
        "momentum": 0.9,
        "batch": 16,
        "epochs": 3,
        "depth": 2,
    },
}


@pytest.fixture(scope="module")
def fedavg() -> Recipe:
    return read_recipe({"method": "fedavg", **TABLES})


@pytest.fixture(scope="module")
def splitfed() -> Recipe:
    return read_recipe({"method": "splitfed-v2", **TABLES})


class Told:
    """What a comparison told."""

    def __init__(self) -> None:
        self.rounds: list[tuple[str, int, int]] = []
        self.trainings: list[tuple[str, int, bool]] = []

    @property
    def watcher(self) -> Watcher:
        return Watcher(
            lambda name, seed, row: self.rounds.append((name, seed, row["round"])),
            lambda training, before: self.trainings.append((training.name, training.seed, before)),
        )


def test_a_recipe_beside_itself_differs_by_nothing(fedavg: Recipe, tmp_path: Path) -> None:
    found = compare({"one": fedavg, "same": fedavg}, range(2), tmp_path)
    assert [(each.name, each.seed) for each in found] == [
        ("one", 0),
        ("same", 0),
        ("one", 1),
        ("same", 1),
    ]
    second = lines_of(found)[1].difference
    assert second is not None
    assert (second.mean, second.half_width) == (0.0, 0.0)
    # the seeds are no copies of each other
    assert [row["loss"] for row in found[0].rows] != [row["loss"] for row in found[2].rows]


def test_trainings_that_are_done_are_kept_and_others_go_on(
    fedavg: Recipe, splitfed: Recipe, tmp_path: Path
) -> None:
    # one was stopped after its first round, before it had a report
    simulate(with_values(splitfed, {"train.rounds": 1}), tmp_path / "split-0")
    (tmp_path / "split-0" / "report.json").unlink()
    told = Told()
    recipes = {"avg": fedavg, "split": splitfed}
    found = compare(recipes, [0], tmp_path, watcher=told.watcher)
    assert told.trainings == [("avg", 0, False), ("split", 0, False)]
    alone = simulate(splitfed, tmp_path / "alone")
    assert found[1].accuracy == alone["final"]["accuracy"]
    assert [row["loss"] for row in found[1].rows] == [row["loss"] for row in alone["rounds"]]

    again = Told()
    assert compare(recipes, [0], tmp_path, watcher=again.watcher) == found
    assert again.trainings == [("avg", 0, True), ("split", 0, True)]
    assert again.rounds == []
    # more rounds go on from there
    longer = compare({"avg": with_values(fedavg, {"train.rounds": 3})}, [0], tmp_path)
    assert longer[0].rows[:2] == found[0].rows
    assert len(longer[0].rows) == 3


def test_a_folder_with_another_training_is_not_taken_for_this_one(
    fedavg: Recipe, tmp_path: Path
) -> None:
    compare({"avg": fedavg}, [0], tmp_path)
    faster = with_values(fedavg, {"train.learning_rate": 0.1})
    with pytest.raises(ConfigurationError, match=r"avg-0: holds .* another train.learning_rate"):
        compare({"avg": faster}, [0], tmp_path)
    with pytest.raises(ConfigurationError, match=r"avg-0: holds .* another train.rounds"):
        compare({"avg": with_values(fedavg, {"train.rounds": 1})}, [0], tmp_path)
    (found,) = compare({"avg": faster}, [0], tmp_path, force=True)
    assert found.report["recipe"]["train"]["learning_rate"] == 0.1
    (tmp_path / "avg-0" / "report.json").write_text("{")
    with pytest.raises(StorageError, match=r"report.json: expected the report.*--force"):
        compare({"avg": faster}, [0], tmp_path)


def test_trials_are_judged_by_held_out_samples(fedavg: Recipe, tmp_path: Path) -> None:
    grid = {"train.learning_rate": [1e9, 0.05]}
    told: list[tuple[float, int]] = []
    trials = tune(
        "avg",
        fedavg,
        grid,
        tmp_path,
        on_round=lambda values, row: told.append((values["train.learning_rate"], row["round"])),
    )
    assert [trial.values["train.learning_rate"] for trial in trials] == [1e9, 0.05]
    assert told == [(0.05, 1), (0.05, 2)]  # the other diverged in its first round
    assert math.isnan(trials[0].score)
    # a score is the accuracy on held-out samples after the last round, by a seed of its own
    recipe = replace(fedavg, seed=SEED)
    with closing(build_on_held_out(recipe, "cpu", tmp_path)) as simulation:
        rows: list[Row] = []
        accuracies = [row["accuracy"] for row in run_rounds(simulation, rows)]
    assert trials[1].score == accuracies[-1]
    # what is done is not done again
    (kept,) = (tmp_path / "tuning").iterdir()
    before = kept.read_bytes()
    again = tune("avg", fedavg, grid, tmp_path, on_round=lambda *_: pytest.fail("trained again"))
    assert best(again) == trials[1]
    assert kept.read_bytes() == before


def test_the_best_is_the_first_of_those_with_the_highest_score() -> None:
    trials = [Trial({"at": at}, score) for at, score in enumerate([math.nan, 0.3, 0.5, 0.5])]
    assert best(trials).values == {"at": 2}
    assert best(trials[:1]).values == {"at": 0}


def test_tuning_needs_held_out_samples_and_values_that_there_are(
    fedavg: Recipe, tmp_path: Path
) -> None:
    nothing = with_values(fedavg, {"data.held_out": 0})
    with pytest.raises(ConfigurationError, match=r"holds none out \(data.held_out = 0\)"):
        tune("avg", nothing, {"train.momentum": [0.0]}, tmp_path)
    with pytest.raises(ConfigurationError, match="fedavg takes none; got mu"):
        tune("avg", fedavg, {"method_numbers.mu": [0.1]}, tmp_path)
    assert not (tmp_path / "tuning").exists()


def test_a_report_has_every_figure_that_its_table_shows(
    fedavg: Recipe, splitfed: Recipe, tmp_path: Path
) -> None:
    recipes = {"avg": fedavg, "split": with_values(splitfed, {"train.batch": 8})}
    trainings = [
        Training(each.name, each.seed, each.report) for each in compare(recipes, [0], tmp_path)
    ]
    report = tmp_path / "deep" / "report.json"
    comparison = Comparison(recipes, trainings, target=0.01)
    comparison.write(tmp_path, report)
    found = orjson.loads(report.read_bytes())
    assert found == orjson.loads((tmp_path / "comparison.json").read_bytes())
    assert found["differing"] == {"train.batch": {"avg": 16, "split": 8}}
    assert found["recipes"]["split"]["accuracy"]["mean"] == trainings[1].accuracy
    assert found["recipes"]["split"]["each_seed"][0]["megabytes"] == trainings[1].megabytes > 0
    assert found["recipes"]["avg"]["reaching"]["seeds"] == 1
    text = (tmp_path / "comparison.md").read_text()
    assert f"| split | {100 * trainings[1].accuracy:.2f} |" in text
    assert "one seed says nothing about the spread" in text
    assert "Beside their methods, the recipes differ in train.batch." in text
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
