"""A user's own residual network: trained by real devices with the bits of a simulation, exported.

A device builds only the function that its own operator named.
"""

from __future__ import annotations

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from edge_sdk import api
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.manifest import BundleManifest
from edge_sdk.nets import build
from edge_sdk.settings import AgentSettings
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.device.background import BackgroundTraining
from exporters.cli import app as export_app
from profiles import DeviceProfile
from server.tokens import create_token
from server.training.recipe.recipe import Recipe, load_recipe
from server.training.rounds.loop import RoundLoop
from server.training.rounds.transport import LocalTransport
from server.training.run.build import build_network, load_data, plan_of, server_state
from tests.waiting import wait_until

NAMES, SAMPLES, DEPTH, ROUNDS = ("pi-0", "pi-1"), 48, 2, 2
EXAMPLES = Path(__file__).parents[3] / "examples" / "own_network"
# BatchNorm, residual blocks and dropout
BACKBONE = "own_residual:small"
MODULE = """
from residual import network

def small(classes, input_shape):
    return network(classes, input_shape, widths=(8, 16))
"""
RECIPE = f"""
method = "supersfl"
[method_numbers]
share_exits = true
[data]
name = "digits"
clients = 2
test_max = 100
[train]
backbone = "{BACKBONE}"
rounds = {ROUNDS}
iterations = 3
batch = 16
learning_rate = 0.05
momentum = 0.5
depth = {DEPTH}
[round]
robust = "none"
step_deadline_s = 60.0
round_deadline_s = 120.0
"""


def simulated(recipe: Recipe) -> dict[str, torch.Tensor]:
    """The server's weights after the recipe's rounds with the same devices in this process."""
    data, method = load_data(recipe), recipe.built_method
    clients = {
        name: TrainingClient(name, *samples_of(place), backbone=BACKBONE)
        for place, name in enumerate(NAMES)
    }
    plans = {name: plan_of(recipe, method, data, DEPTH) for name in NAMES}
    state = server_state(recipe, method, build_network(recipe, data))
    loop = RoundLoop(method, plans, state, LocalTransport(clients), recipe.round.with_devices())
    for number in range(1, ROUNDS + 1):
        loop.run_round(number, recipe.seed)
    return {name: tensor.detach() for name, tensor in state.net.state_dict().items()}


def samples_of(place: int) -> tuple[Any, Any]:
    data = load_dataset("digits")
    return data.x_train[place::2][:SAMPLES], data.y_train[place::2][:SAMPLES]


@pytest.mark.deadline
def test_an_own_network_is_trained_by_devices_as_in_a_simulation_exported_and_asked(
    tmp_path: Path,
    commands: Any,
    fork_server: Any,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copy(EXAMPLES / "residual.py", tmp_path)
    (tmp_path / "own_residual.py").write_text(MODULE)
    (tmp_path / "own.toml").write_text(RECIPE)
    state = tmp_path / "server"
    words = "--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"
    url = (
        commands("server", "server", "run", "--state", str(state), *words).until("(API)").split()[2]
    )
    profile = DeviceProfile("pi", "aarch64", 4, 4 * 2**30, 3 * 2**30, None, 5.0, 5.0, 100.0)
    for place, name in enumerate(NAMES):
        x, y = samples_of(place)
        # with a test part of their own, or a fifth of them would become one
        parts = {"x_train": x, "y_train": y, "x_test": x[:9], "y_test": y[:9]}
        if place:  # it numbers its classes in another order; the trainer's names bring them in line
            names = {"class_names": np.array(list("9876543210"))}
            parts |= {"y_train": 9 - y, "y_test": 9 - y[:9]} | names
        np.savez(tmp_path / f"{name}.npz", **parts)
        api.enroll(url, create_token(state), tmp_path / name, profile=profile, name=name)
    monkeypatch.chdir(tmp_path)
    trainer = fork_server.start(
        "trainer", state=str(state), recipe=str(tmp_path / "own.toml"), port=free_port, silence_s=60
    )
    at = {"trainer": f"http://127.0.0.1:{free_port}", "folder": str(tmp_path)}

    # an agent that trains when it is invited names it in the same way
    invited = BackgroundTraining(tmp_path / "pi-0", "pi-0.npz", backbone=BACKBONE)
    assert invited._command[-2:] == ["--backbone", BACKBONE]

    # a device whose operator named no network, or another one, takes no part and says why
    for given in (None, "own_residual:network"):
        refused = fork_server.start(
            "device", state=str(tmp_path / "pi-0"), data="pi-0.npz", backbone=given, **at
        )
        assert refused.wait() != 0
        assert f"splitedge agent train --backbone {BACKBONE}" in refused.log.read_text()
        allowed = f"of this device has allowed {given or 'none of its own'};"
        why = rf"pi-0 takes no part: client pi-0: .* {re.escape(allowed)}"
        wait_until(partial(lambda why: re.search(why, trainer.log.read_text()), why), why)

    agents = [
        fork_server.start(
            "device", state=str(tmp_path / name), data=f"{name}.npz", backbone=BACKBONE, **at
        )
        for name in NAMES
    ]
    for ended in (trainer, *agents):
        assert ended.wait() == 0, ended.log.read_text()
    report = orjson.loads((state / "training" / "own" / "report.json").read_bytes())
    assert [row["participants"] for row in report["rounds"]] == [[*NAMES]] * ROUNDS

    alone = simulated(load_recipe(tmp_path / "own.toml"))
    weights = load_file(report["weights"])
    assert {name for name in weights if name.startswith("stages.")}
    for name, tensor in weights.items():
        assert torch.equal(tensor, alone[name]), name

    export = f"--weights {report['weights']} --data digits --out models --name mine --int8 never"
    done = CliRunner().invoke(export_app, ["--backbone", BACKBONE, *export.split()])
    assert done.exit_code == 0, done.output
    bundle = tmp_path / "models" / "mine" / "1" / "bundles" / f"d{DEPTH}"
    manifest = BundleManifest.load(bundle)
    assert manifest.backbone == BACKBONE
    data = load_dataset("digits")
    net = build(BACKBONE, classes=10, input_shape=(1, 8, 8), mean=data.mean, std=data.std).eval()
    net.load_state_dict(net.state_dict() | weights)
    runner = BundleRunner(bundle, manifest, AgentSettings())
    for x in data.x_test[:8]:
        with torch.no_grad():
            expected = net.forward_exits(torch.from_numpy(x[None]))[0][DEPTH]
        decision, z, _ = runner.exit(x)
        probabilities = torch.softmax(expected[0], 0).numpy()
        np.testing.assert_allclose(decision.probabilities, probabilities, atol=1e-4)
        assert z is not None
        assert z.shape == (1, *net.shape_at(DEPTH))
