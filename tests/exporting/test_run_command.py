"""`splitedge export --run`: what it says where a run cannot be exported as asked."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from edge_sdk.errors import SplitedgeError
from edge_sdk.manifest import BundleManifest
from exporters.cli import app
from exporters.run.record import RECORD
from server.training.recipe.recipe import load_recipe, read_recipe
from server.training.simulation.run import simulate
from tests.training.worlds import SMALL_RUN

NETWORK = """
from torch import nn


def network(classes):
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, classes)),
    )
"""


def made(folder: Path, method: str, data: str = "") -> Path:
    text = f'method = "{method}"\n' + SMALL_RUN.replace("[train]", f"{data}\n[train]")
    simulate(read_recipe(tomllib.loads(text)), folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    made(folder / "harmony", "harmony")
    made(folder / "local", "multi-exit", 'split = "local"')
    made(folder / "none", "multi-exit", "held_out = 0.0")
    (folder / "stopped").mkdir()
    return folder


def error(words: list[str], out: Path) -> str:
    run = CliRunner().invoke(app, [*words, "--out", str(out), "--name", "digits"])
    assert isinstance(run.exception, SplitedgeError), (run.stderr, run.exception)
    text = str(run.exception)
    assert len(text.splitlines()) == 1
    assert not list(out.iterdir())
    return text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--run", "stopped"], "stopped: expected the folder of a finished run"),
        (["--run", "harmony", "--backbone", "tiny"], "no --backbone and no --weights"),
        (["--run", "harmony", "--depth", "2"], "--depth 2: expected one of 1, 3, at which"),
        (["--run", "local"], "--data: expected samples that no client trained on"),
        (["--run", "none"], "held none out"),
        (["--run", "none", "--data", "harmony"], "harmony"),
        (["--backbone", "tiny", "--data", "digits"], "expected --run DIR, or"),
        (
            ["--backbone", "tiny", "--weights", "w", "--data", "digits", "--train-exits", "digits"],
            "--train-exits goes with --run",
        ),
    ],
)
def test_what_does_not_go_together_is_told_in_one_line(
    runs: Path,
    tmp_path: Path,
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs)
    assert message in error(words, tmp_path)


def test_an_exit_at_another_depth_can_be_trained(runs: Path, tmp_path: Path) -> None:
    """A run without held-out samples takes the user's; depth 2 was never a client's."""
    words = ["--run", str(runs / "none"), "--data", "digits", "--depth", "2", "--int8", "never"]
    text = error(words, tmp_path)
    assert "no client trained an exit at depth 2" in text
    assert "--train-exits digits --data digits --depth 2 --int8 never" in text
    words += ["--train-exits", "digits", "--gate", "margin", "--json"]
    run = CliRunner().invoke(app, [*words, "--out", str(tmp_path), "--name", "digits"])
    assert run.exit_code == 0, (run.stderr, run.exception)
    assert "exit at depth 2 trained on" in run.stderr
    bundle = BundleManifest.load(Path(orjson.loads(run.stdout)["path"]) / "bundles" / "d2")
    assert bundle.gate.policy == "margin"


def test_other_samples_than_the_scored_ones_are_told(runs: Path, tmp_path: Path) -> None:
    path = runs / "harmony" / RECORD
    table = orjson.loads(path.read_bytes())
    table["scores"][0]["right"] += 1
    path.write_bytes(orjson.dumps(table))
    words = ["--run", str(runs / "harmony"), "--depth", "1", "--int8", "never"]
    run = CliRunner().invoke(app, [*words, "--out", str(tmp_path), "--name", "digits"])
    assert run.exit_code == 0, (run.stderr, run.exception)
    assert "after training: other samples, or other rounding" in run.stderr
    assert "Next: " in run.stdout


@pytest.mark.deadline
def test_a_run_of_an_own_network_is_rebuilt_from_its_record(
    tmp_path: Path,
) -> None:
    place = tmp_path / "recipes"
    place.mkdir()
    (place / "nets_of_run.py").write_text(NETWORK)
    text = 'method = "multi-exit"\n' + SMALL_RUN
    text = text.replace('"tiny"', '"nets_of_run:network"').replace("[1, 3]", "[1, 2]")
    (place / "own.toml").write_text(text)
    simulate(load_recipe(place / "own.toml"), tmp_path / "run")
    # another process, elsewhere: the record says where the module is
    words = ["export", "--run", str(tmp_path / "run"), "--out", "models", "--name", "own"]
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", *words, "--int8", "never", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [row["variant"] for row in orjson.loads(done.stdout)["bundles"]] == ["d1", "d2"]
    assert b"as scored after training" in done.stderr


def test_what_offloads_send_comes_from_the_recipe_and_flags_override_it(tmp_path: Path) -> None:
    text = SMALL_RUN + '[export]\ncodec = "int8-zstd"\nbottleneck = 4\n'
    simulate(read_recipe(tomllib.loads('method = "harmony"\n' + text)), tmp_path / "run")
    asked = orjson.loads((tmp_path / "run" / RECORD).read_bytes())["export"]
    assert asked == {"codec": "int8-zstd", "bottleneck": 4}
    words = ["--run", str(tmp_path / "run"), "--depth", "1", "--int8", "never", "--json"]
    sent = []
    for flags in ([], ["--codec", "fp16", "--bottleneck", "never"]):
        command = [*words, *flags, "--out", str(tmp_path / "models"), "--name", "digits"]
        run = CliRunner().invoke(app, command)
        assert run.exit_code == 0, (run.stderr, run.exception)
        path = Path(orjson.loads(run.stdout)["path"])
        bundle = BundleManifest.load(path / "bundles" / "d1")
        sent.append((bundle.smashed.codec, bundle.sent[1][0]))
    assert sent == [("int8-zstd", 4), ("fp16", bundle.smashed.shape[0])]


def test_a_run_of_a_recipe_without_the_table_asks_for_nothing(runs: Path) -> None:
    assert "export" not in orjson.loads((runs / "harmony" / RECORD).read_bytes())
