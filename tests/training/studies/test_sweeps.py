"""The sweeps of benchmarks/sweeps: their recipes, and the tables of a short one."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
import typer

from benchmarks.sweeps.__main__ import main
from benchmarks.sweeps.catalog import SWEEPS, Group, Line, Sweep
from benchmarks.sweeps.report import tables_of, write_sweep
from server.training.comparison.comparison import Training, compare


@pytest.mark.parametrize("name", SWEEPS)
def test_every_line_is_a_recipe_of_its_own(name: str) -> None:
    lines = [line for group in SWEEPS[name].groups for line in group.lines]
    for line in lines:
        assert line.read(1).train.rounds == 1
    assert len({line.name for line in lines}) == len(lines)


def test_a_sweep_is_trained_and_told(tmp_path: Path) -> None:
    power = {"energy.idle_w": 10.0, "energy.busy_w": 20.0, "data.train_max": 200}
    lines = [Line(name, power | {"energy.co2_g_kwh": 100.0}) for name in ("fedavg", "splitfed-v1")]
    sweep = Sweep("title", "cost", 1, [Group("group", lines)], "about")
    trainings = compare({line.name: line.read(1) for line in lines}, range(2), tmp_path / "work")
    write_sweep(tmp_path / "sweep", "command", sweep, 1, trainings)
    report = orjson.loads((tmp_path / "sweep.json").read_bytes())
    assert len(report["trials"]) == 4
    for trial in report["trials"]:
        energy = trial["energy"]
        assert 10 * energy["seconds"] <= energy["joules"] <= 20 * energy["seconds"]
        assert energy["co2_g"] == pytest.approx(energy["joules"] / 36_000)
        assert len(trial["by_class"]) == 10
    text = (tmp_path / "sweep.md").read_text()
    assert "| setting | accuracy, % | clients, % | worst class, % |" in text
    assert "## Accuracy by class, %" in text


def test_a_figure_that_a_seed_lacks_is_none() -> None:
    sweep = Sweep(
        "", "privacy", 1, [Group("noise", [Line("fedavg", {"privacy.update_sigma": 1})])], ""
    )
    final = {"accuracy": 0.5, "accuracy_clients": 0.5}
    rows = [{"merged": True}, {"merged": False}]
    trainings = [
        Training("fedavg_update_sigma-1", 0, {"final": final, "rounds": rows, "privacy": None}),
        Training("fedavg_update_sigma-1", 1, {"final": final, "rounds": rows, "privacy": None}),
    ]
    (table,) = tables_of(sweep, trainings)
    assert table.splitlines()[-1] == "| 1 | 50 | none | 1 |"


def test_besplits_sweep_is_told_by_its_auxiliary_models() -> None:
    sweep = Sweep(
        "", "auxiliary", 1, [Group("tau", [Line("besplit", {"method_numbers.tau": 2})])], ""
    )
    trainings = [
        Training("besplit_tau-2", seed, {"final": {"accuracy": 0.9, "auxiliary": {"accuracy": a}}})
        for seed, a in enumerate((0.5, 0.7))
    ]
    (table,) = tables_of(sweep, trainings)
    head, _, line = table.splitlines()[-3:]
    assert head == "| setting | BESplit-G, % | BESplit-A, % |"
    # of 50 and 70 the deviation is 14.1, t for two values 12.7: 12.7 * 14.1 / 1.41
    assert line == "| 2 | 90 | 60 ± 1.3e+02 |"


def test_a_sweep_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="expected one of participation, besplit"):
        main("nosuch", results=tmp_path, work=tmp_path)
