"""`splitedge demo` as a user runs it, and the figures it reports."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from edge_sdk.cli.main import main
from edge_sdk.errors import LinkError
from edge_sdk.training.data.load import load_dataset
from server.demo.report import device_figures, outage
from server.demo.run import DEVICES, SETUPS
from server.demo.training import (
    READY,
    round_lines,
    share_out,
    start_member,
    start_trainer,
)

pytestmark = pytest.mark.long

DEVICE_KEYS = {
    "name", "depth", "exit_rate", "accuracy", "exit_accuracy", "offload_accuracy", "fallbacks",
    "p50_ms", "p99_ms", "bytes_per_offload",
}  # fmt: skip


# a demo takes one minute, and five where the machine is busy
WITHIN_S = 900
# of the real images where they are at hand, else of the committed 1,500
SAMPLES = 1500


def splitedge(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a session of its own; nothing of that session outlives it."""
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", *map(str, words)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=WITHIN_S)
        finally:
            left = of_session(process.pid)
            for one in left:
                one.kill()
    assert not left
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def of_session(session: int) -> list[psutil.Process]:
    """The processes of a session that still run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def demo(dataset: str, state: Path, report: Path, *more: object) -> dict[str, Any]:
    """Run the whole demo; what it reports."""
    run = splitedge("demo", "--dataset", dataset, "--state", state, "--report", report, *more)
    assert run.returncode == 0, run.stderr
    assert f"splitedge server run --state {state / 'server'}\n" in run.stdout
    found: dict[str, Any] = json.loads(report.read_bytes())
    assert [device["name"] for device in found["devices"]] == list(DEVICES)
    # what each trained is what each runs
    assert {d["name"]: d["depth"] for d in found["devices"]} == found["training"]["depths"]
    assert len(set(found["training"]["depths"].values())) == 3
    assert all(device.keys() >= DEVICE_KEYS for device in found["devices"])
    assert (found["outage"]["errors"], found["outage"]["late"]) == (0, 0)
    assert found["outage"]["predictions"] > 0
    assert found["outage"]["recovered_s"] <= 5
    return found


@pytest.fixture(scope="module")
def fashion(
    fashion_mnist_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """What a short demo on images leaves, and its report."""
    folder = tmp_path_factory.mktemp("demo")
    state = folder / "state"
    options = ("--data", fashion_mnist_folder, "--samples", SAMPLES)
    return state, demo("fashion-mnist", state, folder / "fashion.json", *options)


@pytest.mark.deadline
@pytest.mark.timeout(WITHIN_S)
def test_demo_on_images(fashion: tuple[Path, dict[str, Any]]) -> None:
    report = fashion[1]
    assert (report["dataset"], report["backbone"]) == ("fashion-mnist", "cnn8")
    assert report["trained_on"] == SAMPLES * 4 // 5  # every fifth sets the gate
    assert report["tested_on"] >= 500
    # four short passes over 1,200 images: far from trained, and as far from the 0.1 of guessing
    assert report["accuracy_all_on_server"] > 0.4
    assert report["accuracy_hybrid"] > 0.4


@pytest.mark.deadline
@pytest.mark.timeout(WITHIN_S)
def test_demo_on_digits_and_what_it_leaves(
    fashion: tuple[Path, dict[str, Any]], tmp_path: Path, run_server: Callable[..., Any]
) -> None:
    state = fashion[0]  # of an earlier demo: it is cleared
    report = demo("digits", state, tmp_path / "report.json")
    server = report["accuracy_all_on_server"]
    assert server > 0.95
    assert report["accuracy_all_on_device"] <= report["accuracy_hybrid"]
    assert report["accuracy_hybrid"] >= server - 0.01
    assert {path.name for path in (state / "server" / "models").iterdir()} == {"digits"}

    run_server(state / "server", ()).wait_ready()
    (name,) = [device["name"] for device in report["devices"] if device["depth"] == 1]
    predict = ("agent", "predict", state / "samples.npy", "--state", state / "devices" / name)
    answered = splitedge(*predict, "--deadline", 10, "--json")
    assert answered.returncode == 0, answered.stderr
    sources = [row["source"] for row in json.loads(answered.stdout)]
    assert len(sources) == report["tested_on"]
    assert sources.count("fallback") == 0
    exits = [d["exit_rate"] for d in report["devices"] if d["name"] == name]
    assert [sources.count("device") / len(sources)] == pytest.approx(exits)
    assert sources.count("server") > 0

    again = splitedge("demo", "--state", state)
    assert again.returncode == 1
    assert "already runs as server" in again.stderr
    assert (state / "server" / "models" / "digits").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dataset", "fashion-mnist"), "name it: --data fashion-mnist=DIR"),
        (
            ("--dataset", "fashion-mnist", "--data", "nowhere"),
            "nowhere: expected a folder there with the four IDX files of fashion-mnist",
        ),
        (("--report", "."), "--report .: expected a file at ., got a folder"),
    ],
)
def test_mistake_is_told_before_anything_is_touched(
    words: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(("demo", *words), monkeypatch, capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_foreign_state_is_left_alone(
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept = tmp_path / "thesis.txt"
    kept.write_text("years of work")
    state = tmp_path if kind == "folder" else kept
    refusal = refused(("demo", "--state", str(state)), monkeypatch, capsys)
    assert f"{state}: not empty and not made by a demo" in refusal
    assert [path.read_text() for path in tmp_path.iterdir()] == ["years of work"]


def refused(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """The one line of a command that refuses."""
    monkeypatch.setattr(sys, "argv", ["splitedge", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def test_training_sample_is_on_one_device() -> None:
    dataset = load_dataset("digits", held_out=1 / 3).head(66, 10, 34)
    shares = share_out(dataset, 3)
    assert dataset.sizes == {"train": 66, "held_out": 34, "test": 10}
    assert [len(rows) for rows in shares.devices] == [22, 22, 22]
    assert sorted(np.concatenate(shares.devices)) == list(range(66))


def test_device_that_cannot_train_says_why_and_where(tmp_path: Path) -> None:
    member = start_member(tmp_path / "pi", tmp_path / "pi.npz")
    try:
        with pytest.raises(LinkError, match=r"pi does not train: .*enroll.*pi\.log"):
            member.expect(READY, "does not train")
    finally:
        member.stop()


def test_training_that_fails_says_why_and_where(tmp_path: Path) -> None:
    recipe = shutil.copy(SETUPS["digits"].recipe, tmp_path)
    trainer = start_trainer(Path(recipe), tmp_path / "server")
    try:
        with pytest.raises(LinkError, match=r"not the state folder of a server.*digits\.log"):
            list(round_lines(trainer))
    finally:
        trainer.stop()


def test_figures_of_a_device_by_hand() -> None:
    truth = np.array([0, 1, 2, 3, 4])
    gated = {
        "labels": [0, 1, 0, 3, 0],  # right, right, wrong, right, wrong
        "sources": ["device", "device", "device", "server", "fallback"],
        "latencies_ms": [1.0, 1.0, 1.0, 5.0, 9.0],
        "bytes_up": 300,
    }
    figures = device_figures("pi", 2, truth, gated, [0, 1, 0, 0, 0])
    assert (figures.name, figures.depth) == ("pi", 2)
    assert figures.exit_rate == pytest.approx(3 / 5)
    assert figures.accuracy == pytest.approx(3 / 5)
    assert figures.accuracy_on_device == pytest.approx(2 / 5)
    assert figures.exit_accuracy == pytest.approx(2 / 3)
    assert (figures.offload_accuracy, figures.fallbacks) == (1.0, 1)
    assert figures.p50_ms == 1.0
    assert figures.bytes_per_offload == 150  # the unanswered query was sent too


def test_device_that_never_offloads_has_no_figures_of_it() -> None:
    gated = {"labels": [0], "sources": ["device"], "latencies_ms": [1.0], "bytes_up": 0}
    figures = device_figures("pi", 4, np.array([0]), gated, [0])
    assert (figures.offload_accuracy, figures.bytes_per_offload) == (None, None)


def stream(*rows: tuple[float, str, float], errors: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"rows": rows, "errors": errors, "deadline_ms": 1000.0}


def test_outage_by_hand() -> None:
    # away from 10 to 20; the second device waits longest for its first answer: until 22.5
    first = stream(
        (9, "server", 5),
        (10, "fallback", 1250),  # at the limit: not late
        (11, "fallback", 1251),
        (20.5, "server", 5),
        (21, "server", 5),
    )
    second = stream((9, "server", 5), (15, "device", 1), (21, "fallback", 2), (22.5, "server", 5))
    found = outage([first, second], stopped_at=10, back_at=20)
    assert (found.predictions, found.late, found.errors) == (3, 1, 0)
    assert found.recovered_s == pytest.approx(2.5)


def test_device_that_never_came_back_is_told() -> None:
    back = stream((9, "server", 5), (21, "server", 5), errors=("KeyError: 'z'",))
    lost = stream((9, "server", 5), (21, "fallback", 1))
    found = outage([back, lost], stopped_at=10, back_at=20)
    assert (found.recovered_s, found.errors) == (None, 1)


def test_device_that_never_asked_is_not_waited_for() -> None:
    asks = stream((9, "server", 5), (21, "server", 5))
    alone = stream((9, "device", 1), (21, "device", 1))
    assert outage([asks, alone], stopped_at=10, back_at=20).recovered_s == pytest.approx(1)
