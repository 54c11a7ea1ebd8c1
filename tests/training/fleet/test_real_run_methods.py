"""The methods of the four later papers over real processes: a server, a trainer and two agents.

Each training loses an agent within its second round, which comes back too late for it, and the
trainer after it. The first round, which nothing disturbs, ends in the weights of the same round in
one process.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any, Final

import numpy as np
import orjson
import pytest
import torch

from edge_sdk import api
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.data.load import load_dataset
from profiles import DeviceProfile
from server.tokens import create_token
from server.training.commands import _of_devices
from server.training.core.server_state import ServerState
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.rounds.loop import RoundLoop
from server.training.rounds.transport import LocalTransport
from server.training.run.build import build_network, load_data, plan_of, server_state
from server.training.run.checkpoint import Checkpoint, read_checkpoint

NAMES: Final = ("pi-0", "pi-1")
SAMPLES: Final = 160
ROUNDS: Final = 3
BATCHES: Final = 8
DEPTH: Final = 2
# deadlines and silences that no stall of a busy machine comes to
RECIPE: Final = """
{method}
[data]
name = "digits"
clients = 2
test_max = 100
[train]
backbone = "tiny"
rounds = {rounds}
iterations = {batches}
learning_rate = 0.05
momentum = 0.5
depth = {depth}
{train}
[round]
quorum = 0.5
step_deadline_s = 60.0
round_deadline_s = 120.0
"""
SILENCE_S: Final = 60


@dataclass(frozen=True, slots=True)
class Case:
    """A method to train by.

    Attributes:
        method, train: lines of the recipe.
        messages: to a device for one batch.
        remembered: what its server keeps from round to round.
    """

    method: str
    train: str
    messages: int
    remembered: frozenset[str]

    @property
    def recipe(self) -> str:
        """The recipe as TOML."""
        numbers = {"rounds": ROUNDS, "batches": BATCHES, "depth": DEPTH}
        return RECIPE.format(method=self.method, train=self.train, **numbers)

    @property
    def amid_round_2(self) -> int:
        """The message before which a device has answered two batches of its second round."""
        a_round = 1 + BATCHES * self.messages + 1  # its start and its end
        return a_round + 1 + 2 * self.messages + 1


CASES: Final = {
    "besplit": Case(
        'method = "besplit"', "batch = 16", 1, frozenset({"record", "round", "weight"})
    ),
    "scala": Case('method = "scala"', "batch = 32", 1, frozenset()),
    # of these two the device scores the server's outputs
    "harmony": Case('method = "harmony"', 'batch = 16\ncodec = "fp16"', 2, frozenset()),
    "splitlpf": Case('method = "splitlpf"', "batch = 16", 2, frozenset({"previous gradient"})),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """A server that runs, and the folder of its state and its devices'."""

    folder: Path
    state: Path


@pytest.fixture(scope="module")
def fleet(lasting_commands: Any) -> Fleet:
    """Enrolled with a server of its own process; each device has samples that no other has."""
    folder = lasting_commands.folder
    state, data = folder / "server", load_dataset("digits")
    words = "--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"
    server = lasting_commands("server", "server", "run", "--state", str(state), *words)
    url = server.until("(API)").split()[2]
    profile = DeviceProfile("pi", "aarch64", 4, 4 * 2**30, 3 * 2**30, None, 5.0, 5.0, 100.0)
    for place, name in enumerate(NAMES):
        np.savez(
            folder / f"{name}.npz",
            x_train=data.x_train[place::2][:SAMPLES],
            y_train=data.y_train[place::2][:SAMPLES],
            x_test=data.x_test[:40],
            y_test=data.y_test[:40],
        )
        api.enroll(url, create_token(state), folder / name, profile=profile, name=name)
    return Fleet(folder, state)


def first_round(recipe: Recipe) -> ServerState:
    """The server after one round with the same devices in this process."""
    data, method = load_data(recipe), recipe.built_method
    x, y = load_dataset("digits").x_train, load_dataset("digits").y_train
    clients = {
        name: TrainingClient(name, x[place::2][:SAMPLES], y[place::2][:SAMPLES])
        for place, name in enumerate(NAMES)
    }
    plans = {name: plan_of(recipe, method, data, DEPTH) for name in NAMES}
    state = server_state(recipe, method, build_network(recipe, data))
    how = recipe.round.with_devices()
    RoundLoop(method, plans, state, LocalTransport(clients), how).run_round(1, recipe.seed)
    return state


def saved(training: Path, number: int) -> Checkpoint:
    """The checkpoint after that round."""
    return read_checkpoint(training / "checkpoints" / f"round-{number:06}.safetensors")


def tensors(checkpoint: Checkpoint, kind: str) -> dict[str, torch.Tensor]:
    found = checkpoint.tensors.items()
    return {k.removeprefix(kind): tensor for k, tensor in found if k.startswith(kind)}


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("accuracy", "own", "said"),
    [
        (0.5, 0.75, "accuracy on the test part 50.0%"),
        (None, 0.75, "mean accuracy of devices on their own test samples 75.0%"),
        (None, math.nan, "no accuracy, since devices keep the last layer and did not score"),
    ],
)
def test_a_training_says_whose_accuracy_it_ends_with(
    accuracy: float | None, own: float, said: str
) -> None:
    final = {"accuracy": accuracy, "accuracy_id": own}
    result = {"rounds": [{}, {}], "clients": 1, "final": final, "weights": "w.safetensors"}
    assert _of_devices(result) == f"2 rounds with 1 device, {said}: w.safetensors"


@pytest.mark.deadline
@pytest.mark.parametrize("name", CASES)
def test_a_method_trains_on_though_an_agent_and_the_trainer_are_killed(
    name: str, fleet: Fleet, tmp_path: Path, fork_server: Any, free_port: int, attempt: int
) -> None:
    case = CASES[name]
    recipe = tmp_path / f"{name}-{attempt}.toml"
    recipe.write_text(case.recipe)
    training = fleet.state / "training" / recipe.stem

    def trainer(**more: Any) -> Any:
        words = {"state": str(fleet.state), "recipe": str(recipe)}
        return fork_server.start("trainer", port=free_port, silence_s=SILENCE_S, **words, **more)

    def agent(device: str, **more: Any) -> Any:
        own = {"state": str(fleet.folder / device), "data": str(fleet.folder / f"{device}.npz")}
        return fork_server.start("device", trainer=f"http://127.0.0.1:{free_port}", **own, **more)

    first = trainer(kill=("save", ROUNDS))
    agents = [agent("pi-0")]
    killed = agent("pi-1", kill=("handle", case.amid_round_2))
    assert killed.wait() == SIGKILL, killed.log.read_text()
    agents.append(agent("pi-1"))
    assert first.wait() == SIGKILL, first.log.read_text()
    one, two = (saved(training, number) for number in (1, 2))
    second = trainer(resume=True)
    for ended in (second, *agents):
        assert ended.wait() == 0, ended.log.read_text()
    three = saved(training, 3)

    report = orjson.loads((training / "report.json").read_bytes())
    rows = report["rounds"]
    assert rows[:2] == two.rows
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert [row["merged"] for row in rows] == [True] * 3
    assert [row["missing"] for row in rows] == [[], ["pi-1"], []]
    assert [row["participants"] for row in rows] == [[*NAMES], ["pi-0"], [*NAMES]]
    assert not any(row["refused"] for row in rows)
    # the last layer of the server is untrained where devices keep theirs, and they score alone
    own = read_recipe(tomllib.loads(case.recipe)).built_method.client.own_back
    assert [row["accuracy"] is None for row in rows] == [own] * 3
    assert (report["final"]["accuracy"] is None) == own
    assert report["final"]["accuracy_id"] > 0
    assert [[*row["missed"]] for row in rows] == [[], ["pi-1"], []]
    assert rows[1]["missed"]["pi-1"][0]["why"] == "it was restarted"
    assert {device["client"] for device in report["each_client"]} == set(NAMES)

    alone = first_round(read_recipe(tomllib.loads(case.recipe)))
    same(tensors(one, "net/"), dict(alone.read()))
    same(tensors(one, "memory/"), dict(alone.memory))
    assert {entry.partition("/")[0] for entry in alone.memory} == case.remembered

    before = tensors(one, "net/")
    for checkpoint in (two, three):
        after = tensors(checkpoint, "net/")
        assert all(bool(torch.isfinite(tensor).all()) for tensor in after.values())
        assert any(not torch.equal(after[key], before[key]) for key in after)
        before = after
