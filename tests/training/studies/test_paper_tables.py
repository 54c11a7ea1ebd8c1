"""Every table of the five papers runs at its smallest scale, and its report names its source."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from benchmarks.jobs.clock import Clock
from benchmarks.paper.__main__ import app
from benchmarks.paper.local_only import KeptAlone, local_only_accuracies
from benchmarks.paper.measures import (
    by_threshold,
    is_by_threshold,
    measured,
    of_clients,
)
from benchmarks.paper.recipes import job_of
from benchmarks.paper.tables.catalog import TABLES
from benchmarks.paper.tables.table import Scale, over
from benchmarks.tuning.report import changes_of
from benchmarks.tuning.sweep import SWEEP, trials_of
from edge_sdk.nets.registry import build
from server.training.recipe.recipe import read_recipe
from server.training.report.evaluate import Evaluator
from server.training.run.build import load_data
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds

pytestmark = pytest.mark.long

TUNED_NUMBERS = "benchmarks.paper.tables.table.tuned_numbers"

# `repeated` has a test of its own, which trains it once
SMOKE = [name for name in TABLES if "smoke" in TABLES[name].scales and name != "repeated"]


@pytest.mark.parametrize("name", SMOKE)
def test_a_table_runs_at_smoke_scale(name: str, tmp_path: Path) -> None:
    places = ["--results", str(tmp_path), "--work", str(tmp_path / "work")]
    ran = CliRunner().invoke(app, [name, "--seeds", "1", *places])
    assert ran.exit_code == 0, ran.output
    report = orjson.loads((tmp_path / f"{name}-smoke.json").read_bytes())
    table = TABLES[name]
    assert [run["row"] for run in report["runs"]] == [row.name for row in table.rows]
    for run in report["runs"]:
        measures = {name for name in run["measures"] if not is_by_threshold(name)}
        assert measures == set(table.measures)
        assert run["seconds"] > 0
        assert run["megabytes"] > 0
    assert report["command"].startswith(f"python -m benchmarks.paper {name} ")
    text = (tmp_path / f"{name}-smoke.md").read_text()
    for row in table.rows:
        assert f"| {row.name} |" in text
        for figure in row.paper.values():
            assert f"{figure:.2f}" in text
    _check_thresholds(name, report, text)


def _check_thresholds(table: str, report: dict[str, Any], text: str) -> None:
    """Gated rows have each client measure by three choices; others beside them say "no gate"."""
    tested = [name for name in TABLES[table].measures if of_clients(name)]
    built = {
        row.name: job_of(table, TABLES[table], row, "smoke").recipe.built_method
        for row in TABLES[table].rows
    }
    gated = {run["row"] for run in report["runs"] if any(map(is_by_threshold, run["measures"]))}
    for run in report["runs"]:
        found = run["measures"]
        assert (run["row"] in gated) == (built[run["row"]].share_exits and bool(tested))
        for name in tested if run["row"] in gated else ():
            own = [found[by_threshold(name, choice)] for choice in ("held_out", "fleet", "oracle")]
            assert own[0] == found[name]
            if name.startswith("rho ") or name == "clients":
                assert max(own) == own[2]
    for line in text.splitlines():
        row = line.split("|")[1].strip() if line.startswith("| ") else None
        if gated and row in {run["row"] for run in report["runs"]}:
            assert ("no gate" in line) == (row not in gated)
    assert (" held-out |" in text) == bool(gated)


def test_all_rows_of_a_table_with_a_gated_row_train_on_the_same_samples() -> None:
    for name, table in TABLES.items():
        scale = next(iter(table.scales))
        jobs = [job_of(name, table, row, scale) for row in table.rows]
        (share,) = {job.recipe.data.held_out for job in jobs}
        gated = any(job.recipe.built_method.share_exits for job in jobs)
        local = any(job.recipe.data.split == "local" for job in jobs)
        chosen = gated and not local and any(map(of_clients, table.measures))
        assert share == (0.1 if chosen else 0)
    harmony = TABLES["harmony"]
    assert job_of("harmony", harmony, harmony.rows[0], "cpu").recipe.data.held_out == 0.1
    besplit = TABLES["besplit"]
    assert job_of("besplit", besplit, besplit.rows[0], "cpu").recipe.data.held_out == 0


@pytest.mark.parametrize("name", TABLES)
def test_every_scale_of_every_row_is_a_recipe(name: str) -> None:
    for scale, row in product(TABLES[name].scales, TABLES[name].rows):
        assert job_of(name, TABLES[name], row, scale).recipe.train.rounds >= 2


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_cut_where_its_network_allows_it(name: str) -> None:
    shapes = {"digits": (1, 8, 8), "fashion-mnist": (1, 28, 28), "cifar-10": (3, 32, 32)}
    for scale, row in product(TABLES[name].scales, TABLES[name].rows):
        recipe = job_of(name, TABLES[name], row, scale).recipe
        train = recipe.train
        net = build(train.backbone, classes=10, input_shape=shapes[recipe.data.name])
        asked = {*(train.depths or ()), train.depth} - {None}
        assert asked <= {*net.cuts}, (scale, row.name)


def test_all_rows_of_a_table_train_on_as_many_samples_a_round() -> None:
    # by the sizes of the training parts: of the digits less a tenth, of Fashion-MNIST less a tenth
    sizes: dict[tuple[str, Scale], int] = {
        ("default", "cpu"): 2 * 1294,
        ("default", "full"): 54_000,
    }
    sizes |= {("scala", "cpu"): 10 * 160, ("scala-60", "full"): 20 * 320}
    for (name, scale), samples in sizes.items():
        for row in TABLES[name].rows:
            recipe = job_of(name, TABLES[name], row, scale).recipe
            numbers, found = recipe.train.training, samples
            if numbers.iterations is not None:
                sharers = round(recipe.data.clients * recipe.round.participation)
                sharers = 1 if recipe.built_method.batch_share else sharers
                found = numbers.iterations * numbers.batch * sharers
            assert found == pytest.approx(samples, rel=0.02), row.name
    default = TABLES["default"]
    recipe = job_of("default", default, default.rows[0], "cpu").recipe
    assert 2 * len(load_data(recipe).y_train) == sizes["default", "cpu"]
    assert recipe.train.training.epochs == 2


def test_the_fastest_worker_of_mergesfl_has_the_batch_of_the_other_rows() -> None:
    besplit = TABLES["besplit"]
    row = next(row for row in besplit.rows if row.name == "MergeSFL")
    numbers = job_of("besplit", besplit, row, "cpu").recipe.train.training
    assert numbers.batch == 32
    # as many samples as the epochs of the others, in batches of 32 * (1 + 0.75 + 0.5 + 0.25) / 4
    assert numbers.iterations == 12


def test_no_number_that_may_be_chosen_makes_two_rows_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (0, 1):  # trials take turns with the two values of a method's own number
        chosen = {method: changes_of(trials_of(method, "digits")[place]) for method in SWEEP}
        monkeypatch.setattr(TUNED_NUMBERS, lambda _, chosen=chosen: chosen)
        for name, table in TABLES.items():
            for scale in table.tuned:
                if scale in table.scales:
                    jobs = [job_of(name, table, row, scale) for row in table.rows]
                    for one, other in combinations(jobs, 2):
                        assert not one.is_of(other.content), (name, scale, one.row, other.row)


def test_the_printed_weights_of_splitlpf_have_no_dead_zone() -> None:
    table = TABLES["splitlpf-alpha"]
    printed = [row for row in table.rows if "as printed" in row.name]
    assert printed
    for row in printed:
        numbers = job_of("splitlpf-alpha", table, row, "cpu").recipe.method_numbers
        assert (numbers["signed"], numbers["dead_zone"]) == (False, 0)


def test_a_row_has_the_numbers_that_were_chosen_for_its_method(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"method_numbers": {"align_weight": 0.3, "margin": 0.5}}
    chosen = {
        "harmony": {"train": {"learning_rate": 0.3}, **own},
        "supersfl": {"train": {"learning_rate": 0.4}},
        "default": {
            "train": {"learning_rate": 0.5},
            "parts": {"server": {"numbers": {"strength": 0.25}}},
        },
    }
    monkeypatch.setattr(TUNED_NUMBERS, lambda _sweep: chosen)
    harmony, default = TABLES["harmony"], TABLES["default"]
    rows = {row.name: row for row in (*harmony.rows, *default.rows)}
    plain = job_of("harmony", harmony, rows["HARMONY"], "cpu").recipe
    assert plain.train.training.learning_rate == 0.3
    assert plain.method_numbers == {"align_weight": 0.3, "margin": 0.5}
    ablated = job_of("harmony", harmony, rows["no alignment"], "cpu").recipe
    assert ablated.method_numbers == {"align_weight": 0.0, "margin": 0.5}
    rate = job_of("harmony", harmony, rows["HARMONY"], "full").recipe.train.training.learning_rate
    assert rate == harmony.scales["full"]["train"]["learning_rate"]
    for name, expected in (("default", 0.5), ("SuperSFL, int8", 0.4), ("BESplit", 0.05)):
        job = job_of("default", default, rows[name], "cpu")
        assert job.recipe.train.training.learning_rate == expected

    # what the sweep chose for a part counts, though the row has a number of its own for it
    part = job_of("default", default, rows["default"], "cpu").recipe.parts["server"]
    assert isinstance(part, Mapping)
    assert part["numbers"]["strength"] == 0.25
    assert part["numbers"]["server"] == "in_turn"


def test_a_table_takes_the_sweep_of_its_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TUNED_NUMBERS, lambda sweep: {sweep: {}})
    assert list(TABLES["scala"].tuned_numbers("cpu")) == ["fashion-mnist-two-classes"]
    assert list(TABLES["besplit"].tuned_numbers("cpu")) == ["fashion-mnist-dirichlet"]
    assert list(TABLES["besplit-cnn6"].tuned_numbers("full")) == ["fashion-mnist"]
    assert TABLES["scala"].tuned_numbers("full") == {}  # the paper states its rate


def test_an_unknown_table_is_told_which_there_are() -> None:
    ran = CliRunner().invoke(app, ["nosuch"])
    assert ran.exit_code != 0
    assert "splitlpf-udd" in ran.output


def test_pearson_is_of_clients_alone_and_together_at_one_training_alone_a_seed(
    tmp_path: Path,
) -> None:
    table = TABLES["splitlpf-udds"]
    alone: list[list[float]] = []
    for row in table.rows[:2]:
        given = job_of("splitlpf-udds", table, row, "smoke").given
        recipe = read_recipe(over(given, {"train": {"memory_format": "contiguous"}}))
        simulation, rows = build_simulation(recipe), list[Any]()
        for _ in run_rounds(simulation, rows):
            pass
        kept = KeptAlone(recipe, "cpu", tmp_path / "alone", tmp_path, Clock())
        found = measured(simulation, rows, ["pearson"], kept.accuracies)["pearson"]
        alone.append(local_only_accuracies(recipe))
        scores = Evaluator(simulation).clients(supervised=True)
        together = [(s.inside + s.outside).accuracy for s in scores]
        assert found == pytest.approx(100 * np.corrcoef(alone[-1], together)[0, 1])
    assert alone[0] == alone[1]  # methods differ in nothing that one trains by alone
    assert len(list((tmp_path / "alone").iterdir())) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["scala", "--row", "nosuch"], "--row: expected some of SCALA"),
        (["scala", "--device", "toaster"], "expected cpu or cuda"),
        (["harmony-cnn6"], "--scale: harmony-cnn6: expected full, got smoke"),
        (["scala", "--scale", "cpu", "--data", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_one_sentence_and_no_report_is_touched(
    words: list[str], expected: str, tmp_path: Path
) -> None:
    places = ["--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    ran = CliRunner().invoke(app, [*words, "--seeds", "1", *places])
    assert ran.exit_code in {1, 2}
    assert expected in " ".join(ran.output.replace("│", " ").split())
    assert not isinstance(ran.exception, AssertionError | KeyError)
    assert not (tmp_path / "results").exists()
