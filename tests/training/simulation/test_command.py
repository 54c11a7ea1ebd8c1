"""`splitedge simulate`: one command from a recipe to a report, stopped and resumed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from edge_sdk.errors import ConfigurationError, StateInUseError
from edge_sdk.state import StateLock
from edge_sdk.training.data.load import load_dataset
from exporters.run.record import read_run
from server.training.commands import simulate_app as app
from server.training.run.checkpoint import read_checkpoint
from tests.commands import Splitedge
from tests.waiting import wait_until

SMALL = """
method = "{method}"
[data]
name = "digits"
clients = 4
partition = "dirichlet"
train_max = 200
test_max = 100
[train]
backbone = "tiny"
rounds = {rounds}
learning_rate = 0.05
momentum = 0.5
batch = 16
memory_gb = [1, 4]
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def recipe_at(folder: Path, method: str = "supersfl", rounds: int = 2) -> Path:
    path = folder / f"{method}-small.toml"
    path.write_text(SMALL.format(method=method, rounds=rounds))
    return path


def report_of(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_report_has_what_the_next_program_reads(tmp_path: Path) -> None:
    report_path = tmp_path / "report.json"
    run = CliRunner().invoke(app, [str(recipe_at(tmp_path)), "--report", str(report_path)])
    assert run.exit_code == 0, run.output
    report = report_of(report_path)
    facts = {key: report[key] for key in ("method", "dataset", "seed", "clients")}
    assert facts == {"method": "supersfl", "dataset": "digits", "seed": 0, "clients": 4}
    assert [row["round"] for row in report["rounds"]] == [1, 2]
    for row in report["rounds"]:
        assert 0 <= row["accuracy"] <= 1
        assert row["seconds"] > 0
        assert row["processor_s"] > 0
        assert (len(row["participants"]), row["missing"]) == (4, [])
        by_way = {"up": 0, "down": 0}
        for kind, size in row["bytes_by_kind"].items():
            by_way[kind.split()[0]] += size
        assert by_way == {"up": row["bytes_up"], "down": row["bytes_down"]}
    final = report["final"]
    assert {"accuracy", "accuracy_id", "accuracy_ood", "jain", "std"} <= final.keys()
    assert final["accuracy"] == report["rounds"][-1]["accuracy"]
    assert "supersfl on digits, 4 clients, 2 rounds" in run.output.replace("\n", " ")


@pytest.mark.parametrize("held_out", [0.1, 0])
def test_the_thresholds_of_gated_clients_are_told(held_out: float, tmp_path: Path) -> None:
    recipe = recipe_at(tmp_path, "multi-exit")
    recipe.write_text(recipe.read_text().replace("[data]", f"[data]\nheld_out = {held_out}"))
    run = CliRunner().invoke(app, [str(recipe), "--report", str(tmp_path / "report.json")])
    assert run.exit_code == 0, run.output
    text = " ".join(run.output.split())
    found = report_of(tmp_path / "report.json")["final"]["by_threshold"]
    if not held_out:
        assert list(found) == ["oracle"]
        assert "the recipe holds nothing out to choose by (held_out = 0)" in text
        return
    own, fleet, best = (f"{found[c]['accuracy_clients']:.1%}" for c in found)
    assert f"accuracy of the gated clients: {own} with thresholds" in text
    assert f"{fleet} with one threshold for all, {best} with the best for the test" in text


def test_a_run_leaves_log_plots_and_report_in_its_folder(tmp_path: Path) -> None:
    recipe = recipe_at(tmp_path, "fedavg")
    run = CliRunner().invoke(app, [str(recipe), "--seed", "5"])
    assert run.exit_code == 0, run.output
    folder = tmp_path / "splitedge-runs" / "fedavg-small-5"
    report = report_of(folder / "report.json")
    assert report["seed"] == 5
    lines = (folder / "log.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == report["rounds"]
    for name in ("accuracy", "loss", "bytes"):
        with Image.open(folder / f"{name}.png") as plot:
            assert len(plot.convert("L").getcolors() or []) > 10  # more than an empty sheet


def test_bytes_are_those_of_weights_alone_where_nothing_else_is_sent(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, [str(recipe_at(tmp_path, "fedavg")), "--out", "run"])
    assert run.exit_code == 0, run.output
    for row in report_of(tmp_path / "run" / "report.json")["rounds"]:
        # tiny has 34,282 weights of 4 bytes, for 4 clients
        assert row["bytes_up"] == row["bytes_down"] == 4 * 4 * 34_282


def test_help_comes_without_torch_and_shows_an_example() -> None:
    code = (
        "import sys; from typer.testing import CliRunner;"
        "from server.training.commands import simulate_app as app;"
        "run = CliRunner().invoke(app, ['--help']); print(run.stdout);"
        "sys.exit(run.exit_code or 'torch' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert "Example: splitedge simulate" in " ".join(run.stdout.split())


def test_noise_that_drowns_all_learning_is_named(tmp_path: Path) -> None:
    recipe = recipe_at(tmp_path, "fedavg", rounds=3)
    # 34,282 weights, each with noise of 1e30: the second round squares it beyond float32
    recipe.write_text(recipe.read_text() + "[privacy]\nupdate_clip = 1.0\nupdate_sigma = 1e30\n")
    run = CliRunner().invoke(app, [str(recipe), "--out", "run"])
    assert run.exit_code == 1, run.output
    assert "round 2 diverged" in str(run.exception)
    assert "lower the noise of [privacy], which may be too strong" in str(run.exception)


def test_resuming_nothing_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = [str(recipe_at(tmp_path, "fedavg", rounds=1)), "--out", "run", "--resume"]
    for is_logged in (True, False):  # the second time there is a round to continue from
        caplog.clear()
        run = CliRunner().invoke(app, command)
        assert run.exit_code == 0, run.output
        assert ("run: no round to continue from; starting with round 1" in caplog.text) is is_logged


def test_clients_are_tested_on_classes_of_their_own_unless_rho_is_given(tmp_path: Path) -> None:
    """A run may go on with another rho and another codec of its export: neither is trained."""
    recipe = recipe_at(tmp_path, "fedavg", rounds=1)
    recipe.write_text(recipe.read_text().replace('"dirichlet"', '"udd"'))
    command = [str(recipe), "--out", "run", "--resume"]
    run = CliRunner().invoke(app, command)
    assert run.exit_code == 0, run.output
    assert "of other classes" not in " ".join(run.output.split())
    report = report_of(tmp_path / "run" / "report.json")
    assert report["final"]["accuracy_ood"] is None
    assert "evaluate.rho = 0" in report["final"]["accuracy_ood_why"]
    assert report["final"]["accuracy_clients"] == report["final"]["accuracy_id"]
    assert {client["tested_ood"] for client in report["each_client"]} == {0}
    recipe.write_text(recipe.read_text() + '[evaluate]\nrho = 0.2\n[export]\ncodec = "smallest"\n')
    run = CliRunner().invoke(app, command)
    assert run.exit_code == 0, run.output
    assert read_run(tmp_path / "run").export.codec == "smallest"
    assert "of other classes" in " ".join(run.output.split())
    final = report_of(tmp_path / "run" / "report.json")["final"]
    assert final["accuracy_id"] == report["final"]["accuracy_id"]
    assert final["accuracy_ood"] is not None
    assert final["accuracy_ood_why"] is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "cannot be read"),
        ("method = ", "not TOML"),
        (SMALL.format(method="magic", rounds=1), "method 'magic': expected one of fedavg"),
        (SMALL.format(method="fedavg", rounds=1) + "colour = 1", "train: unknown colour"),
        (
            SMALL.format(method="fedavg", rounds=1).replace("digits", "fashion-mnist"),
            "fashion-mnist: expected a folder with the four IDX files; name it: --data fash",
        ),
    ],
)
def test_a_recipe_that_cannot_run_is_one_line(line: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    if line:
        path.write_text(line)
    run = CliRunner().invoke(app, [str(path)])
    assert isinstance(run.exception, ConfigurationError)
    assert message in str(run.exception)


def test_a_report_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    run = CliRunner().invoke(app, [str(recipe_at(tmp_path)), "--report", "file/r.json"])
    assert isinstance(run.exception, ConfigurationError)
    assert not (tmp_path / "splitedge-runs").exists()


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with StateLock(tmp_path / "run", "simulation"):
        run = CliRunner().invoke(app, [str(recipe_at(tmp_path)), "--out", "run"])
    assert isinstance(run.exception, StateInUseError)


def test_data_may_lie_anywhere(tmp_path: Path, fashion_mnist_fixture: Path) -> None:
    recipe = tmp_path / "fashion.toml"
    text = SMALL.format(method="fedavg", rounds=1).replace("tiny", "cnn6")
    recipe.write_text(text.replace("digits", "fashion-mnist"))
    run = CliRunner().invoke(app, [str(recipe), "--data", str(fashion_mnist_fixture)])
    assert run.exit_code == 0, run.output


@pytest.mark.deadline
@pytest.mark.parametrize(
    ("method", "how", "status", "printed"),
    [
        ("supersfl", signal.SIGKILL, -signal.SIGKILL, b""),
        ("besplit", signal.SIGINT, 130, b"continue with --resume"),
    ],
)
def test_a_stopped_command_goes_on_to_the_same_weights(
    tmp_path: Path, method: str, how: signal.Signals, status: int, printed: bytes
) -> None:
    digits = load_dataset("digits").head(200, 100)
    names = ("x_train", "y_train", "x_test", "y_test")
    # four processes read this at once; scikit-learn would take two seconds in each
    np.savez(tmp_path / "digits.npz", **{name: getattr(digits, name) for name in names})
    recipe = recipe_at(tmp_path, method, rounds=12)  # far more than until the signal
    recipe.write_text(recipe.read_text().replace('"digits"', '"digits.npz"'))
    # a shell starts what runs in its background with SIGINT ignored, and the tests may be that
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    starter = f"{heed}; from edge_sdk.cli.main import main; main()"
    command = [sys.executable, "-P", "-c", starter, "simulate", str(recipe), "--out"]
    with subprocess.Popen([*command, "killed"], stderr=subprocess.PIPE) as process:
        first = tmp_path / "killed" / "checkpoints" / "round-000002.safetensors"
        wait_until(first.exists, "the second round's checkpoint", 60)
        process.send_signal(how)
        assert printed in process.communicate(timeout=60)[1]
    assert process.returncode == status
    refused = subprocess.run([*command, "killed"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: killed: holds a run that stopped after round ")
    assert refused.stderr.count("\n") == 1
    subprocess.run([*command, "killed", "--resume"], check=True, capture_output=True)
    subprocess.run([*command, "whole"], check=True, capture_output=True)
    ended, expected = (
        read_checkpoint(tmp_path / folder / "checkpoints" / "round-000012.safetensors").tensors
        for folder in ("killed", "whole")
    )
    assert ended.keys() == expected.keys()
    assert all(torch.equal(ended[key], expected[key]) for key in expected)


def test_a_learning_rate_of_500_stops_at_the_first_round_that_diverged(
    tmp_path: Path, splitedge: Splitedge
) -> None:
    """The digits whole: enough steps for the weights to leave the numbers."""
    recipe = tmp_path / "digits.toml"
    recipe.write_text(
        'method = "splitfed-v2"\n[data]\nname = "digits"\nclients = 4\n[train]\n'
        'backbone = "tiny"\nrounds = 50\nbatch = 16\nlearning_rate = 500.0\nmomentum = 0.9\n'
    )
    called = splitedge("simulate", recipe, "--out", tmp_path / "run")
    assert called.status == 1
    (said,) = [line for line in called.err.splitlines() if line.startswith("error: ")]
    assert re.match(r"error: round [12] diverged: .* reached infinity or NaN, with \[train\]", said)
    assert "learning_rate = 500; try a tenth of it" in said
