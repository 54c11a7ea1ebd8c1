"""The sweeps of benchmarks/sweeps: their recipes, and the tables of a short one."""

from __future__ import annotations

import math
from pathlib import Path

import orjson
import pytest
import torch
import typer

from benchmarks.sweeps.__main__ import main, train
from benchmarks.sweeps.catalog import SWEEPS, Group, Line, Sweep
from benchmarks.sweeps.pretraining import write_first_weights
from benchmarks.sweeps.report import tables_of, write_sweep
from edge_sdk.nets.supernet import Supernet
from server.training.comparison.comparison import Training, compare
from server.training.recipe.recipe import Recipe
from server.training.run.build import build_network, load_data
from server.training.run.first_weights import load_first_weights


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


SMALL = {"data.train_max": 300, "data.test_max": 99}


def right(net: Supernet, recipe: Recipe) -> float:
    """Share of the held-out samples that the whole network answers rightly."""
    data = load_data(recipe)
    with torch.no_grad():
        answers = net.eval()(torch.from_numpy(data.x_held_out).float()).argmax(1)
    return float((answers == torch.from_numpy(data.y_held_out)).float().mean())


def test_first_weights_are_trained_on_held_out_samples_without_exit_heads(tmp_path: Path) -> None:
    recipe = Line("supersfl", {"data.held_out": 0.1}).read(1)
    path = tmp_path / "first.safetensors"
    write_first_weights(recipe, path)
    drawn = build_network(recipe, load_data(recipe))
    net = build_network(recipe, load_data(recipe))
    load_first_weights(net, path)
    assert right(drawn, recipe) < 0.4
    assert right(net, recipe) > 0.9
    exits = [name for name in net.state_dict() if name.startswith("exits.")]
    assert exits
    assert all(torch.equal(net.state_dict()[n], drawn.state_dict()[n]) for n in exits)


def test_a_pre_trained_start_is_compared_with_a_random_one(tmp_path: Path) -> None:
    values = SMALL | {"data.held_out": 0.5}  # first weights of few samples say nothing
    lines = [Line("fedavg", values, pretrained=started) for started in (False, True)]
    sweep = Sweep("title", "start", 5, [Group("fedavg", lines)], "about")
    trainings = train(sweep, 5, 1, None, tmp_path)
    random, started = [training.rows[0]["accuracy"] for training in trainings]
    assert started > random + 0.2
    (table,) = tables_of(sweep, trainings)
    assert "| setting | after 1 round, % | after 5 rounds, % |" in table
    rows = [line.split(" | ") for line in table.splitlines()[-2:]]
    assert [row[0] for row in rows] == ["| random", "| pre-trained"]
    assert float(rows[1][1]) == pytest.approx(100 * started, abs=0.05)


def test_rounds_to_an_accuracy_are_of_the_seeds_that_got_there() -> None:
    sweep = Sweep("", "start", 5, [Group("a", [Line("fedavg", {"seed": 0})])], "")
    trainings = [
        Training(
            "fedavg_seed-0",
            seed,
            {
                "final": {"accuracy": last, "accuracy_clients": last},
                "rounds": [
                    {"accuracy": a, "seconds": 1.0, "bytes_up": 0, "bytes_down": 0}
                    for a in (0.1, 0.2, 0.75, 0.8, last)
                ],
            },
        )
        for seed, last in enumerate((0.9, 0.85))
    ]
    (table,) = tables_of(sweep, trainings)
    assert table.endswith("| 3 | 5 (1 of 2) |")


def test_a_start_of_few_rounds_has_no_figure_of_a_later_one() -> None:
    sweep = Sweep("", "start", 5, [Group("a", [Line("fedavg", {"seed": 0})])], "")
    report = {
        "final": {"accuracy": 0.5, "accuracy_clients": 0.5},
        "rounds": [{"accuracy": 0.5, "seconds": 1.0, "bytes_up": 0, "bytes_down": 0}],
    }
    (table,) = tables_of(sweep, [Training("fedavg_seed-0", 0, report)])
    assert table.endswith("| random | 50 | never | 50 | never | never |")


def test_a_sweep_that_chooses_is_judged_on_held_out_samples(tmp_path: Path) -> None:
    lines = [Line("fedprox", SMALL | {"method_numbers.mu": mu}) for mu in (0.0, 0.5)]
    # the same recipe under another name is not trained again
    lines += [Line("fedprox", SMALL | {"method_numbers.mu": 0.0}, world="again")]
    sweep = Sweep("", "plain", 1, [Group("g", lines)], "", first_seed=7, held_out=True)
    trainings = train(sweep, 1, 1, None, tmp_path)
    assert [training.seed for training in trainings] == [7, 7, 7]
    assert trainings[0].report is trainings[2].report
    assert len(list(tmp_path.iterdir())) == 2
    # a share of the held-out samples, which is no share of the test samples
    recipe = lines[0].read(1)
    held_out, test = len(load_data(recipe).y_held_out), len(load_data(recipe).y_test)
    right = trainings[0].accuracy * held_out
    assert right == pytest.approx(round(right))
    assert math.gcd(held_out, test) == 1
    assert train(sweep, 1, 1, None, tmp_path)[1].report == trainings[1].report


def test_a_sweep_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match="expected one of participation, besplit"):
        main("nosuch", results=tmp_path, work=tmp_path)
