"""A trainer that stops in the middle and is resumed ends in the weights of one that never did."""

from __future__ import annotations

import threading
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from edge_sdk.errors import ConfigurationError, LinkError, SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.device.session import TrainingSession
from edge_sdk.training.device.trainer_client import TrainerClient
from edge_sdk.training.protocol.plan import network_of
from edge_sdk.wire.address import Address
from server.registry.database import open_registry
from server.registry.operator import load_or_create_operator_secret
from server.training.fleet.settings import TrainerSettings
from server.training.fleet.trainer import train
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.rounds.loop import RoundLoop
from server.training.rounds.transport import LocalTransport
from server.training.run.build import build_network, load_data, plan_of, server_state
from tests.training import worlds

RECIPE = """
method = "splitfed-v1"
[data]
name = "digits"
clients = 2
[train]
backbone = "tiny"
rounds = 3
batch = 64
learning_rate = 0.05
momentum = 0.5
depth = 1
"""
PROFILE = worlds.PROFILE | {"memory_total_bytes": 4 * 2**30}
NAMES = ("pi-0", "pi-1")


class Stopped(Exception):  # noqa: N818 - stands for a kill, not for a fault
    """The trainer ends here."""


def clients_of(recipe: Recipe) -> dict[str, TrainingClient]:
    data = load_data(recipe)
    return {
        name: TrainingClient(name, data.x_train[at:600:2], data.y_train[at:600:2])
        for at, name in enumerate(NAMES)
    }


def undisturbed(recipe: Recipe) -> dict[str, torch.Tensor]:
    data, method = load_data(recipe), recipe.built_method
    plans = {name: plan_of(recipe, method, data, 1) for name in NAMES}
    network_of(plans[NAMES[0]])  # before devices in threads want it
    state = server_state(recipe, method, build_network(recipe, data))
    how = recipe.round.with_devices()
    loop = RoundLoop(method, plans, state, LocalTransport(clients_of(recipe)), how)
    for number in (1, 2, 3):
        loop.run_round(number, recipe.seed)
    return dict(state.net.state_dict())


def join(recipe: Recipe, state: Path, port: int) -> list[threading.Thread]:
    """Enrol two devices and have them train, each in a thread, until the training is over."""
    load_or_create_operator_secret(state)
    registry = open_registry(state)
    threads = []
    for name, client in clients_of(recipe).items():
        device, secret = registry.redeem_token(registry.create_token(), name, PROFILE)
        identity = Identity("http://127.0.0.1:1", device.id, device.fleet, secret)
        session = TrainingSession(client, TrainerClient(identity, f"http://127.0.0.1:{port}"))
        threads.append(threading.Thread(target=session.run, daemon=True))
        threads[-1].start()
    registry.close()
    return threads


def test_depths_stay_as_they_were_when_training_began(tmp_path: Path, free_port: int) -> None:
    """Eq. 1 with a = 0.5 a GB: 4 GB earn 2 stages, and 16 GB would earn 4 of 5."""
    recipe = read_recipe(tomllib.loads(RECIPE.replace("depth = 1", "")))
    assert recipe.train.depth is None
    network_of(plan_of(recipe, recipe.built_method, load_data(recipe), 1))
    threads = join(recipe, tmp_path, free_port)
    settings = TrainerSettings(tmp_path, "run", Address("127.0.0.1", free_port), join_s=30)

    def stop(_row: Mapping[str, Any]) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        train(recipe, settings, say=print, on_round=stop)
    registry = open_registry(tmp_path)
    registry.update_profile(
        "pi-0", PROFILE | {"memory_total_bytes": 16 * 2**30, "link_latency_ms": 1.0}
    )
    registry.close()
    report = train(recipe, replace(settings, resume=True), say=print, on_round=print)
    for thread in threads:
        thread.join(10)
    assert report["depths"] == {"pi-0": 2, "pi-1": 2}
    assert [row["participants"] for row in report["rounds"]] == [list(NAMES)] * 3


def test_resumed_training_ends_in_the_weights_of_an_undisturbed_one(
    tmp_path: Path, free_port: int
) -> None:
    recipe = read_recipe(tomllib.loads(RECIPE))
    expected = undisturbed(recipe)
    threads = join(recipe, tmp_path, free_port)

    def stop_after_two(row: Mapping[str, Any]) -> None:
        if row["round"] == 2:
            raise Stopped

    def run(*, resume: bool, on_round: Any) -> dict[str, Any]:
        settings = TrainerSettings(
            tmp_path, "run", Address("127.0.0.1", free_port), join_s=30, resume=resume
        )
        return train(recipe, settings, say=print, on_round=on_round)

    with pytest.raises(Stopped):
        run(resume=False, on_round=stop_after_two)
    with pytest.raises(ConfigurationError, match="stopped after round 2 of 3"):
        run(resume=False, on_round=print)
    report = run(resume=True, on_round=print)
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert [row["round"] for row in report["rounds"]] == [1, 2, 3]
    assert [row["participants"] for row in report["rounds"]] == [list(NAMES)] * 3
    got = load_file(report["weights"])
    assert got.keys() == {name for name in expected if not name.startswith("exits.")}
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name
    assert report["final"]["accuracy"] == report["rounds"][-1]["accuracy"]
    assert len((tmp_path / "training" / "run" / "log.jsonl").read_bytes().splitlines()) == 3

    # it makes way for a new training only where that is asked for
    with pytest.raises(
        ConfigurationError, match=r"finished run of 3 rounds; .*another name.*--force"
    ):
        run(resume=False, on_round=print)
    assert load_file(report["weights"]).keys() == got.keys()
    settings = TrainerSettings(
        tmp_path, "run", Address("127.0.0.1", free_port), join_s=0.1, force=True
    )
    with pytest.raises(LinkError, match="got 0"):  # it waits for devices again
        train(recipe, settings, say=print, on_round=print)


def test_weights_have_the_exit_heads_that_were_trained_and_shared(
    tmp_path: Path, free_port: int
) -> None:
    text = RECIPE.replace("splitfed-v1", "multi-exit").replace("rounds = 3", "rounds = 1")
    recipe = read_recipe(tomllib.loads(text))
    network_of(plan_of(recipe, recipe.built_method, load_data(recipe), 1))
    threads = join(recipe, tmp_path, free_port)
    settings = TrainerSettings(tmp_path, "run", Address("127.0.0.1", free_port), join_s=30)
    report = train(recipe, settings, say=print, on_round=print)
    for thread in threads:
        thread.join(10)
    assert report["exits"] == [1]
    weights = load_file(report["weights"])
    assert {name.split(".")[1] for name in weights if name.startswith("exits.")} == {"1"}


def test_trainer_names_the_device_that_it_refused_and_why(tmp_path: Path, free_port: int) -> None:
    recipe = read_recipe(tomllib.loads(RECIPE))
    load_or_create_operator_secret(tmp_path)
    registry = open_registry(tmp_path)
    device, secret = registry.redeem_token(registry.create_token(), "pi-0", PROFILE)
    registry.close()
    identity = Identity("http://127.0.0.1:1", device.id, device.fleet, secret)
    link = TrainerClient(identity, f"http://127.0.0.1:{free_port}")
    lines: list[str] = []
    answers: list[str] = []

    def ask() -> None:
        for _ in range(2):
            with pytest.raises(SplitedgeError) as caught:
                link.join(30, (3, 4, 4))
            answers.append(str(caught.value))

    threads: list[threading.Thread] = []

    def say(line: str) -> None:
        lines.append(line)
        if "waiting for" in line:
            threads.append(threading.Thread(target=ask))
            threads[0].start()

    settings = TrainerSettings(tmp_path, "run", Address("127.0.0.1", free_port), join_s=3)
    why = "expected inputs (1, 8, 8), got (3, 4, 4); this is not the data of the recipe"
    with pytest.raises(LinkError) as caught:
        train(recipe, settings, say=say, on_round=print)
    threads[0].join(10)
    assert f"got 0 (none); pi-0 refused: {why}; start" in str(caught.value)
    assert [why in answer for answer in answers] == [True, True]
    assert lines[1:] == [f"splitedge train: pi-0 refused: {why}"]  # once
