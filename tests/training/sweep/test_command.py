"""`splitedge sweep`, as docs/sweeps.md has it: held-out samples choose, a kill costs nothing."""

from __future__ import annotations

import shlex
import signal
import subprocess
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
from torch import nn

from edge_sdk.training.data.load import labelled_dataset, open_data
from exporters.run.network import load_run
from server.training.comparison.comparison import Training
from server.training.recipe.recipe import load_recipe, read_recipe
from server.training.sweep.grid import choices_of, tasks_of
from server.training.sweep.report import SweepReport
from server.training.sweep.run import Result
from tests.commands import Splitedge
from tests.reader import Document, Reader, environment
from tests.waiting import wait_until

DOCUMENT = Document("docs/sweeps.md")
RECIPE = Document("docs/training.md").snippet("recipe")


@pytest.mark.deadline
def test_a_sweep_goes_on_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "digits.toml").write_text(RECIPE)
    out = tmp_path / "sweep"
    first, second = (out / f"learning_rate={value}-0" for value in (0.05, 0.1))
    words = [*shlex.split(DOCUMENT.snippet("sweep")), "--jobs", "1"]
    with subprocess.Popen(words, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE) as sweep:
        try:
            wait_until(
                lambda: any((second / "checkpoints").glob("round-*.safetensors")),
                "the second run's first round",
                timeout_s=240,
            )
        finally:
            sweep.send_signal(signal.SIGKILL)
    assert not (second / "report.json").exists()
    before = (first / "report.json").stat()

    printed = Reader(tmp_path).shell(DOCUMENT.snippet("resume"))

    assert (first / "report.json").stat() == before  # not trained again
    assert orjson.loads((second / "report.json").read_bytes())["energy"]["rounds"] < 8  # went on
    found = orjson.loads((out / "sweep.json").read_bytes())
    chosen = found["chosen"]["train.learning_rate"]
    assert (
        f"Chosen: train.learning_rate = {chosen}, with the highest accuracy on held-out" in printed
    )
    assert f"Next: splitedge export --run sweep/learning_rate={chosen}-0" in printed
    scores = {each["values"]["train.learning_rate"]: each for each in found["choices"]}
    assert scores[chosen]["held_out"]["mean"] == max(s["held_out"]["mean"] for s in scores.values())
    right, samples = held_out_answers(first)
    assert scores[0.05]["held_out"]["mean"] == right / samples
    table = (out / "sweep.md").read_text()
    for heading in ("held-out, %", "against the first, points", "clients, %"):
        assert heading in table
        assert heading in DOCUMENT.text


def held_out_answers(run: Path) -> tuple[int, int]:
    """Right answers of the network that a run has left, on the held-out digits, and their count."""
    data = labelled_dataset(open_data("digits"), held_out=0.1)
    net = load_run(run).halves.device
    depth = net.cuts[0]
    with torch.no_grad():
        logits = nn.Sequential(net.prefix(depth), net.suffix(depth))(torch.tensor(data.x_held_out))
    answers = logits.argmax(dim=1).numpy()
    return int((answers == data.y_held_out).sum()), len(answers)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--set", "train.lr=1"], "--set: train: unknown lr; known are backbone, "),
        (["--set", "training.lr=1"], "--set: recipe: unknown training; known are data, "),
        (["--set", "method_numbers.mu=1"], "method_numbers: supersfl takes "),
        (["--set", "train.rounds=1.5"], "train: rounds: expected a whole number"),
        (["--set", "seed=1,2"], "expected --seeds N"),
        (["--set", "train.rounds=2,2"], "expected values that differ, got rounds=2 twice"),
        (["--set", "data.held_out=0"], "the recipe holds none out"),
        (["--set", "train.rounds=1", "--set", "train.rounds=2"], "in one option"),
        (["--set", "train.rounds=1", "--ray-address", "127.0.0.1:1"], "expected --engine ray"),
        ([], "expected values to try, as in --set train.learning_rate=0.05,0.1"),
    ],
)
def test_what_cannot_be_tried_is_told_before_anything_is_trained(
    words: list[str],
    refusal: str,
    splitedge: Splitedge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.toml").write_text(RECIPE)

    called = splitedge("sweep", "digits.toml", *words)

    assert refusal in called.err.splitlines()[-1]
    assert called.status == 1
    assert not (tmp_path / "splitedge-runs").exists()


@pytest.mark.deadline
def test_a_sweep_is_not_overwritten_and_a_diverged_run_is_a_result(
    splitedge: Splitedge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.toml").write_text(RECIPE)
    words = ("sweep", "digits.toml", "--set", "train.learning_rate=1e30", "--out", "sweep")
    told = splitedge(*words)
    assert "No choice is made: in each, a training diverged." in told.out
    report = (tmp_path / "sweep" / "sweep.json").read_bytes()

    assert "holds a sweep, with 1 of these 1 run finished" in splitedge(*words).err
    again = splitedge(*words, "--resume")
    assert "diverged (was done before)" in again.err
    assert (tmp_path / "sweep" / "sweep.json").read_bytes() == report


def test_held_out_samples_choose_and_not_the_test_part(tmp_path: Path) -> None:
    recipe = read_recipe(load_recipe(_written(tmp_path)).to_dict())
    choices = choices_of(recipe, {"train.momentum": [0.0, 0.5, 0.9]})
    held_out = {0.0: (0.7, 0.8), 0.5: (0.8, 0.9), 0.9: (0.99, float("nan"))}  # the last diverged
    on_test = {0.0: 0.95, 0.5: 0.6, 0.9: 0.99}
    results = []
    for task in tasks_of(choices, 2, tmp_path):
        momentum = task.choice.values["train.momentum"]
        score = held_out[momentum][task.seed]
        rows = [{"accuracy": None, "bytes_up": 1, "bytes_down": 1, "seconds": 1.0}]
        final = {"accuracy": on_test[momentum], "accuracy_clients": None}
        energy = {"rounds": 0, "watts_per_point": None}
        training = Training(
            task.choice.name, task.seed, {"rounds": rows, "final": final, "energy": energy}
        )
        lost = bool(np.isnan(score))
        results.append(Result(task, score, None if lost else training, "too fast" if lost else ""))

    report = SweepReport(recipe, choices, results, "accuracy")

    assert report.chosen.values == {"train.momentum": 0.5}
    assert report.score(report.chosen).mean == pytest.approx(0.85)
    assert [row[:3] for row in report.table()[1:]][2] == ["0.9", "-", "diverged"]
    assert any("0.9, seed 1: too fast" in note for note in report.notes())


def _written(folder: Path) -> Path:
    path = folder / "digits.toml"
    path.write_text(RECIPE)
    return path
