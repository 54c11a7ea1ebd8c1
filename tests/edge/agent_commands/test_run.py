"""`splitedge agent run`: one agent for each state folder, which answers, updates and trains."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from edge_sdk.bundles.personal_weights import PersonalWeights
from edge_sdk.bundles.store import BundleStore
from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import BundleManifest
from edge_sdk.training.device.background import BackgroundTraining, check_data
from edge_sdk.wire.address import Address
from server.training.fleet.settings import TrainerSettings
from server.training.fleet.trainer import train
from server.training.recipe.recipe import read_recipe
from tests.commands import Splitedge
from tests.edge.agent_commands.samples import NEVER, SAMPLES


@pytest.mark.deadline
def test_running_agent_keeps_its_state_to_itself_and_ends_well(
    pi: Path, tmp_path: Path, splitedge: Splitedge
) -> None:
    file = tmp_path / "x.npy"
    np.save(file, SAMPLES)
    predict = ("agent", "predict", file, "--state", pi, "--json")
    alone = splitedge(*predict, "--local").json
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "run", "--state", str(pi)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert "pi-1 runs bench-tiny/1/d2" in run.stdout.readline()
        # the running agent answers for it
        asked = splitedge(*predict, "--local").json
        assert [(row["input"], row["probabilities"]) for row in asked] == [
            (row["input"], row["probabilities"]) for row in alone
        ]
        assert {row["source"] for row in splitedge(*predict, *NEVER, "--deadline", 10).json} == {
            "server"
        }
        status = splitedge("agent", "status", "--state", pi, "--json").json["agent"]
        assert (status["pid"], status["counters"]["device"]) == (run.pid, 5)
        assert status["counters"]["server"] == 5
        update = splitedge("agent", "update", "--state", pi, "--json").json
        assert update == {"device": "pi-1", "bundle": "bench-tiny/1/d2"}
        # settings of the agent as a whole, and a second agent, are refused
        assert "--threads: an agent runs here" in splitedge(*predict, "--threads", 2).refusal
        second = splitedge("agent", "run", "--state", pi).refusal
        assert f"process {run.pid} already runs as agent here" in second
        run.send_signal(signal.SIGTERM)
        _, err = run.communicate(timeout=20)
    assert run.returncode == 0
    assert "Traceback" not in err
    assert not (pi / "agent.sock").exists()
    assert splitedge("agent", "status", "--state", pi, "--json").json["agent"] is None


@pytest.mark.deadline
def test_running_agent_trains_when_it_is_invited(
    server: tuple[str, Path], pi: Path, tmp_path: Path, splitedge: Splitedge
) -> None:
    http, state = server
    own, training = tmp_path / "own.npz", state / "training" / "first"
    labels = np.arange(60) % 10
    x = np.repeat(SAMPLES, 12, axis=0)
    np.savez(own, x_train=x, y_train=labels, x_test=x[:10], y_test=labels[:10])
    recipe = read_recipe(
        {
            "method": "multi-exit",
            "data": {"name": own.name, "folder": tmp_path, "clients": 1},
            "train": {"backbone": "tiny", "rounds": 2, "batch": 20, "learning_rate": 0.01}
            | {"depth": 2},
        }
    )
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "agent", "run", "--state", str(pi)]
    log = tmp_path / "agent.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*command, "--train", str(own)], stdout=subprocess.PIPE, stderr=errors, text=True
        ) as run,
        ExitStack() as stack,
    ):
        stack.callback(lambda: print(log.read_text()))
        stack.callback(run.kill)  # or leaving would wait for it, and hide what failed
        assert run.stdout is not None
        assert "pi-1 runs bench-tiny/1/d2" in run.stdout.readline()
        refusal = splitedge("agent", "train", "--data", own, "--state", pi).refusal
        assert "splitedge agent run --train" in refusal
        # training runs at low priority: slow on a busy machine
        settings = TrainerSettings(state, "first", Address("127.0.0.1", 0), join_s=200, server=http)
        report = train(recipe, settings, say=print, on_round=print)
        assert [row["participants"] for row in report["rounds"]] == [["pi-1"]] * 2, log.read_text()
        assert "pi-1 trains first at" in run.stdout.readline()
        assert "training is over: 2 rounds here" in run.stdout.readline()
        run.send_signal(signal.SIGTERM)
        assert run.wait(timeout=20) == 0
    # its personal weights fit only the bundle that is exported from that run
    words = ("--backbone", "tiny", "--data", "digits", "--int8", "never", "--out", tmp_path)
    weights = training / "weights.safetensors"
    splitedge("export", *words, "--weights", weights, "--name", "first")
    manifest = BundleManifest.load(tmp_path / "first" / "1" / "bundles" / "d2")
    assert manifest.run == (training / "run.id").read_text().strip()
    kept = PersonalWeights.load(pi, "first")
    found = kept.overrides(manifest)
    assert found.keys() == {"exit"}
    assert found["exit"].keys() == set(manifest.graphs["exit"].overridable)
    with pytest.raises(ConfigurationError, match="bench-tiny/1/d2: does not name the training run"):
        kept.overrides(BundleStore(pi).active().manifest)


@pytest.mark.deadline
def test_an_invited_device_gives_a_lost_trainer_up_and_follows_another_invitation(
    pi: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_sdk.training.device.background.GIVE_UP_MINUTES", 0.001)
    monkeypatch.setattr("edge_sdk.training.device.background.PAUSE_S", 0.0)
    invitation = {"op": "train", "url": f"http://127.0.0.1:{free_port}"}
    with BackgroundTraining(pi, "digits") as trainee:
        trainee.command(invitation)
        first = trainee._process
        assert first is not None
        assert first.wait(200) == 1
        trainee.command(invitation)
        assert trainee._process not in (first, None)


def test_running_agent_takes_invitations_of_its_server_only(
    pi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with BackgroundTraining(pi, "digits") as trainee:
        trainee.command({"op": "train", "url": "http://192.0.2.1:8100"})
        trainee.command({"op": "update"})
        assert trainee._process is None
    monkeypatch.setattr("edge_sdk.training.device.background.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="torch"):
        BackgroundTraining(pi, "digits")


def test_run_refuses_samples_that_it_cannot_train_on_at_the_start(
    pi: Path, tmp_path: Path, splitedge: Splitedge
) -> None:
    refusal = splitedge("agent", "run", "--state", pi, "--train", tmp_path / "none.npz").refusal
    assert "none.npz: expected a file there; put it in" in refusal
    np.savez(tmp_path / "bare.npz", x_train=np.zeros((9, 1, 8, 8), np.float32))
    refusal = splitedge("agent", "run", "--state", pi, "--train", tmp_path / "bare.npz").refusal
    assert "bare.npz: expected labels to train with, there are none" in refusal


def test_samples_are_read_in_a_process_of_their_own() -> None:
    assert check_data("digits").endswith("1,294 train, 144 held-out, 359 test")


def test_samples_that_cannot_be_read_are_told_in_plain_words_under_a_json_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITEDGE_LOG", "json")
    missing = str(tmp_path / "none.npz")
    with pytest.raises(ConfigurationError, match="expected a file there") as raised:
        check_data(missing)
    assert "{" not in str(raised.value)
