"""Comparison: the cost of each method to one accuracy, by hand-made curves and by a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.compare import Trial, cost_table, run_trial, shown
from benchmarks.training import app
from server.training.recipe.recipe import read_recipe


def run_of(name: str, seed: int, curve: list[float | None]) -> Trial:
    rows = [
        {
            "round": at,
            "accuracy": value,
            "seconds": 2.0,
            "processor_s": 1.5,
            "bytes_up": 600_000,
            "bytes_down": 400_000,
        }
        for at, value in enumerate(curve, start=1)
    ]
    return Trial(name, seed, rows, 0.5, {"accuracy_clients": 0.75}, None, None)


def test_cost_is_counted_to_the_first_round_that_reaches_the_target() -> None:
    run = run_of("a", 0, [0.2, None, 0.91, 0.8, 0.95])
    found = run.reached(0.9)
    assert found is not None
    assert (found.rounds, found.seconds, found.bytes_total) == (3, 6.0, 3_000_000)
    assert run.reached(0.96) is None


def test_a_seed_that_never_got_there_is_counted_and_not_averaged() -> None:
    table = cost_table([run_of("a", 0, [0.2, 0.9]), run_of("a", 1, [0.2, 0.3])], 0.9)
    (line,) = [line for line in table.splitlines() if line.startswith("| a ")]
    assert [cell.strip() for cell in line.split("|")[2:7]] == ["1 of 2", "2", "2", "4", "3"]
    assert line.endswith("| 50 ± 0 % | 75 ± 0 % |")


def test_nobody_got_there() -> None:
    assert "| a | 0 of 1 | - | - | - | - |" in cost_table([run_of("a", 0, [0.2])], 0.9)


def test_seconds_by_the_clock_are_of_the_seeds_that_had_the_machine_for_themselves() -> None:
    trials = [run_of("a", seed, [0.2, 0.9]) for seed in (0, 1)]
    for quiet, seconds in ((None, "4 ± 0"), (1, "4"), (0, "-")):
        (line,) = [line for line in cost_table(trials, 0.9, quiet).splitlines() if "| a |" in line]
        assert [cell.strip() for cell in line.split("|")[5:7]] == [seconds, "3 ± 0"]


def test_spread_is_the_t_interval() -> None:
    # s = 1, t(0.975, 2) = 4.303: 4.303 / sqrt(3) = 2.484
    assert shown([1.0, 2.0, 3.0]) == "2 ± 2.5"


def test_a_run_keeps_exits_beside_the_whole_network() -> None:
    recipe: dict[str, Any] = {
        "method": "supersfl",
        "data": {"name": "digits", "clients": 2, "train_max": 100, "test_max": 50},
        "train": {"backbone": "tiny", "rounds": 2, "learning_rate": 0.1, "batch": 16, "depth": 2},
        "seed": 1,
    }
    run = run_trial("ours", read_recipe(recipe))
    assert [row["round"] for row in run.rows] == [1, 2]
    mean = (run.rows[0]["accuracy"] + run.rows[1]["accuracy"]) / 2
    assert run.accuracy == pytest.approx(mean)
    # every client has every class: exits are tested on the whole test set both ways
    assert run.exits_global == pytest.approx(run.exits_own)
    assert run.to_dict()["rounds"][1]["supervised"]


def test_costs_of_methods_are_told_and_trainings_that_are_done_are_kept(tmp_path: Path) -> None:
    words = ["methods", "--method", "fedavg", "--rounds", "1", "--seeds", "1", "--target", "0.01"]
    places = ["--results", str(tmp_path), "--work", str(tmp_path / "work")]
    tables = []
    for _ in range(2):
        ran = CliRunner().invoke(app, [*words, *places])
        assert ran.exit_code == 0, ran.output
        tables.append((tmp_path / "training-digits.md").read_text().partition("| method")[2])
    assert "| fedavg | 1 of 1 | 1 |" in tables[0]
    # seconds too: nothing was trained again
    assert tables[0] == tables[1]
    ran = CliRunner().invoke(app, ["methods", "--method", "nosuch"])
    assert ran.exit_code == 2
    assert "expected some of fedavg" in " ".join(ran.output.replace("│", " ").split())
