"""A real run: server, trainer and four agents as processes; one is killed, one is frozen."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from safetensors.torch import load_file

from edge_sdk import api
from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.nets import build
from edge_sdk.training.data.load import load_dataset
from edge_sdk.wire.address import Address
from profiles import DeviceProfile
from server.registry.database import open_registry
from server.registry.operator import load_or_create_operator_secret
from server.registry.records import Device
from server.tokens import create_token
from server.training.fleet import trainer
from server.training.fleet.settings import TrainerSettings
from server.training.fleet.trainer import choose_depths, train
from server.training.fleet.waiting import waiting_line
from server.training.recipe.recipe import read_recipe

pytestmark = pytest.mark.long

RECIPE = """
method = "supersfl"
[data]
name = "digits"
clients = 4
[train]
backbone = "tiny"
rounds = 5
batch = 32
learning_rate = 0.05
depth = 2
[round]
quorum = 0.75
step_deadline_s = 1.5
round_deadline_s = 6.0
staleness_max = 3
"""


def profile(memory_gb: float, score: float, latency_ms: float | None = 5.0) -> DeviceProfile:
    return DeviceProfile(
        name="pi",
        arch="aarch64",
        cores=4,
        memory_total_bytes=int(memory_gb * 2**30),
        memory_available_bytes=int(memory_gb * 2**29),
        accelerator=None,
        compute_score_gflops=score,
        link_latency_ms=latency_ms,
        link_bandwidth_mbps=None if latency_ms is None else 100.0,
    )


@pytest.mark.deadline
def test_training_ends_though_one_device_is_killed_and_one_frozen(
    tmp_path: Path, commands: Any
) -> None:
    """FAULTS row 21."""
    state, data = tmp_path / "server", load_dataset("digits")
    free = "--http", "127.0.0.1:0"
    server = commands(
        "server", "server", "run", "--state", str(state), *free, "--mqtt", "embedded:127.0.0.1:0"
    )
    (tmp_path / "run.toml").write_text(RECIPE)
    url = server.until("(API)").split()[2]
    trainer = commands(
        "trainer", "train", "run.toml", "--state", str(state), *free, "--report", "report.json"
    )
    names = [f"pi-{number}" for number in range(4)]
    for place, name in enumerate(names):
        np.savez(
            tmp_path / f"{name}.npz",
            x_train=data.x_train[place::4],
            y_train=data.y_train[place::4],
            x_test=data.x_test[:40],
            y_test=data.y_test[:40],
        )
        token = create_token(state)
        api.enroll(url, token, tmp_path / name, profile=profile(4, 5), name=name)

    def agent(name: str) -> Any:
        return commands(name, "agent", "train", "--data", f"{name}.npz", "--state", name)

    agents = {name: agent(name) for name in names}
    trainer.until("round 1:")
    agents["pi-1"].end()
    agents["pi-1"] = agent("pi-1")
    trainer.until("round 2:")
    agents["pi-2"].process.send_signal(signal.SIGSTOP)
    trainer.until("round 4:")
    agents["pi-2"].process.send_signal(signal.SIGCONT)
    printed = trainer.rest()
    assert trainer.process.returncode == 0, trainer.log.read_text()
    assert "5 rounds with 4 devices" in printed

    report = orjson.loads((tmp_path / "report.json").read_bytes())
    rows = report["rounds"]
    assert [row["round"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0]["participants"] == names
    killed = rows[1]["missed"]["pi-1"]
    assert {entry["why"] for entry in killed} <= {
        "it is away",
        "no reply within 1.5 s",
        "no reply within 6 s",
        "it was restarted",
    }
    assert "pi-1" in rows[1]["missing"]
    assert rows[1]["missing_why"]["pi-1"] == killed[-1]["why"]
    assert rows[2]["missed"]["pi-2"]
    assert "pi-2" in rows[2]["missing"]
    assert rows[3]["merged"]
    assert rows[3]["participants"] == ["pi-0", "pi-1", "pi-3"]
    assert "pi-2" in rows[3]["missing"]
    for name in ("pi-0", "pi-1", "pi-3"):
        assert "training is over" in agents[name].rest()
        assert agents[name].process.returncode == 0
    scored = {row["client"]: row for row in report["each_client"]}
    assert scored.keys() >= {"pi-0", "pi-1", "pi-3"}
    assert {row["tested_id"] for row in scored.values()} == {40}
    accuracies = [row["accuracy_id"] for row in scored.values()]
    assert report["final"]["accuracy_id"] == pytest.approx(np.mean(accuracies))
    assert report["final"]["std"] == pytest.approx(np.std(accuracies))
    assert report["final"]["jain"] == pytest.approx(100.0)  # all were given the same 40 samples
    assert all(row["seconds"] > 0 for row in scored.values())
    log = (state / "training" / "run" / "log.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["participants"] for line in log] == [r["participants"] for r in rows]
    assert list((tmp_path / "pi-0" / "training").glob("*.safetensors"))
    weights, net = load_file(report["weights"]), build("tiny", mean=data.mean, std=data.std)
    heads = {name for name in net.state_dict() if name.startswith("exits.")}
    assert report["exits"] == []  # SuperSFL's stay on their devices
    assert weights.keys() == net.state_dict().keys() - heads


def test_trainer_says_which_devices_are_there_when_too_few_are(tmp_path: Path) -> None:
    settings = TrainerSettings(tmp_path, "run", Address("127.0.0.1", 0), join_s=0.1)
    recipe = read_recipe(tomllib.loads(RECIPE))
    with pytest.raises(ConfigurationError, match="not the state folder of a server"):
        train(recipe, settings, say=print, on_round=print)
    create_token(tmp_path)
    with pytest.raises(ConfigurationError, match=r"operator\.key"):
        train(recipe, settings, say=print, on_round=print)
    load_or_create_operator_secret(tmp_path)
    with pytest.raises(LinkError, match=r"expected 4 devices within 0.1 s, got 0 \(none\)"):
        train(recipe, settings, say=print, on_round=print)
    open_registry(tmp_path).close()  # and leaves nothing locked


@pytest.mark.deadline
def test_a_proxy_calls_a_trainer_by_a_name_that_it_was_given(tmp_path: Path) -> None:
    create_token(tmp_path)
    load_or_create_operator_secret(tmp_path)
    found: list[int] = []

    def ask(line: str) -> None:
        if not line.startswith("splitedge train: "):
            return
        url = line.split()[2].rstrip(",")
        found.extend(
            httpx.get(f"{url}/metrics", headers={"Host": name}, timeout=60).status_code
            for name in ("edge.example", "other.example", "localhost")
        )

    recipe, address = read_recipe(tomllib.loads(RECIPE)), Address("127.0.0.1", 0)
    for names, expected in (
        (("edge.example",), [401, 421, 401]),  # a proxy may send its own name for the trainer
        ((), [421, 421, 200]),
    ):
        found.clear()
        settings = TrainerSettings(tmp_path, "run", address, join_s=0.1, host_names=names)
        with pytest.raises(LinkError, match="got 0"):
            train(recipe, settings, say=ask, on_round=print)
        assert found == expected


def test_trainer_says_again_whom_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_create_operator_secret(tmp_path)
    registry = open_registry(tmp_path)
    for name in ("pi-0", "pi-1", "pi-2"):
        registry.redeem_token(registry.create_token(), name, profile(4, 5).to_dict())
    registry.touch("pi-1")
    registry.revoke("pi-2")
    registry.close()
    monkeypatch.setattr(trainer, "SAY_AGAIN_S", 0.2)
    lines: list[str] = []
    settings = TrainerSettings(tmp_path, "run", Address("127.0.0.1", 0), join_s=0.5)
    with pytest.raises(LinkError, match="got 0"):
        train(read_recipe(tomllib.loads(RECIPE)), settings, say=lines.append, on_round=print)
    assert len(lines) > 1
    for line in lines[1:]:
        head, _, away = line.partition("; joined: none; enrolled and not here: ")
        assert head == "splitedge train: waiting for 4 devices, 0 s left"
        assert away.startswith("pi-0 (the server has not heard of it since its enrolment), pi-1 (")
        assert away.endswith(", it has not joined)")
        assert "pi-2" not in away


def test_the_line_of_waiting_names_who_joined_who_did_not_and_why() -> None:
    def device(number: int) -> Device:
        return Device(f"pi-{number}", "default", "", {}, None, None, 0.0, None, time.time() - 200)

    line = waiting_line(
        2, 540.0, ["pi-0"], map(device, range(8)), {"pi-1": "takes no part: another network"}
    )
    assert line.startswith(
        "waiting for 2 devices, 9 min left; joined: pi-0; enrolled and not here: pi-1 (takes no"
        " part: another network), pi-2 (the server heard of it 3 minutes ago, it has not joined), "
    )
    assert line.endswith(" and 2 more")


def test_depths_follow_the_devices_profiles() -> None:
    net = build("tiny")
    devices = {
        "small": profile(1, 5),
        "large": profile(4, 5, 1.0),
        "unknown": profile(4, 5, None),
    }
    # Eq. 1 with a = 0.5 a GB and b = 4 for the fastest: 0 + 0, at least 1; min(2 + 4, L - 1);
    # 2 + 0, for a link that was never measured counts as the slowest
    assert choose_depths(None, net, devices) == {"small": 1, "large": 4, "unknown": 2}
    assert choose_depths(3, net, devices) == dict.fromkeys(devices, 3)
    with pytest.raises(ConfigurationError, match="1, 2, 3, 4"):
        choose_depths(9, net, devices)


@pytest.mark.deadline
def test_sigterm_ends_a_training_in_order(tmp_path: Path) -> None:
    """As systemd asks for it; 130 would be a failure there."""
    state, recipe = tmp_path / "server", tmp_path / "run.toml"
    recipe.write_text(RECIPE)
    create_token(state)
    load_or_create_operator_secret(state)
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", "train", str(recipe)]
    command += ["--state", str(state), "--http", "127.0.0.1:0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "waiting for 4 devices" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "continue with --resume" in said
    assert "Traceback" not in said
