"""Checkpoints: a run that is killed at any moment and continued ends with the same weights."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from edge_sdk.errors import ConfigurationError, FrameError, StorageError
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.run.checkpoint import (
    latest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds, simulate

ROUNDS = 3
# State for the next round: personal heads, personal prefixes, absent clients.
RECIPES: dict[str, dict[str, Any]] = {
    "supersfl": {"method": "supersfl", "round": {"participation": 0.75, "availability": 0.6}},
    "splitgp": {"method": "splitgp", "method_numbers": {"personal_share": 0.9}},
    "buffered": {"method": "splitfed-v1", "round": {"buffer": 2, "staleness_max": 3}},
    # a trunk of the server's own, last layers on the clients, noise
    "harmony": {"method": "harmony", "method_numbers": {"head": "client", "noise": 1.0}},
}
BASE: dict[str, Any] = {
    "data": {"name": "digits", "clients": 4, "partition": "iid", "train_max": 160, "test_max": 50},
    "train": {
        "backbone": "tiny",
        "rounds": ROUNDS,
        "learning_rate": 0.1,
        "batch": 16,
        "momentum": 0.9,
        "memory_gb": [1, 4],
    },
}

# Imports everything once and forks for each order, so that a kill costs no second of imports:
#   file N OUT RECIPE       killed just before the N-th thing it does to a file of OUT
#   batch N OUT RECIPE      killed just before the N-th message to a client
#   whole 0 OUT RECIPE      left alone
# and answers with the wait status: 9 killed, 0 done.
FORK_SERVER = """
import json, os, signal, sys, tempfile
from pathlib import Path
import torch
from server.training.recipe.recipe import read_recipe
from server.training.simulation.run import simulate
from server.training.rounds.transport import TrainingClient

torch.set_num_threads(1)
TOUCHES = {"open", "os.mkdir", "os.remove", "os.rename"}

def count_down(number):
    left = number
    def step():
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return step

def kill_at_file(number, out):
    step = count_down(number)
    def hook(event, arguments):
        if event in TOUCHES and out in str(arguments[:2]):
            step()
    sys.addaudithook(hook)

def kill_at_message(number):
    step, handle = count_down(number), TrainingClient.handle
    def counted(self, message):
        step()
        return handle(self, message)
    TrainingClient.handle = counted

with tempfile.TemporaryDirectory() as warm:  # what torch and others import when first used
    simulate(read_recipe(json.loads(sys.stdin.readline())), Path(warm))
for line in sys.stdin:
    how, amount, out, recipe = line.rstrip().split(" ", 3)
    child = os.fork()
    if child == 0:
        if how == "file":
            kill_at_file(int(amount), out)
        if how == "batch":
            kill_at_message(int(amount))
        simulate(read_recipe(json.loads(recipe)), Path(out), resume=True)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class ForkServer:
    """Forks runs that are killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", FORK_SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None
        print(json.dumps(RECIPES["splitgp"] | BASE), file=self._process.stdin, flush=True)

    def run(self, how: str, amount: int, out: Path, recipe: dict[str, Any]) -> bool:
        """Start or continue the simulation in `out`; return whether it finished."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(how, amount, out, json.dumps(recipe), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        assert status in {0, signal.SIGKILL}
        return status == 0

    def close(self) -> None:
        self._process.kill()  # it has nothing to put away, and torch takes seconds to leave
        self._process.communicate()


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    found = ForkServer()
    yield found
    found.close()


@pytest.fixture(scope="module")
def undisturbed(
    fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, torch.Tensor], Any]]:
    """The last checkpoint's tensors and the report of each recipe's run, by name."""
    found = {}
    for name, recipe in RECIPES.items():
        out = tmp_path_factory.mktemp(name)
        assert fork_server.run("whole", 0, out, recipe | BASE)
        found[name] = end_of(out)
    return found


def recipe_of(name: str = "supersfl", rounds: int = ROUNDS, **changed: Any) -> Recipe:
    train = BASE["train"] | {"rounds": rounds}
    return read_recipe(RECIPES[name] | BASE | {"train": train} | changed)


def end_of(out: Path) -> tuple[dict[str, torch.Tensor], Any]:
    report = json.loads((out / "report.json").read_text())
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert lines == report["rounds"]
    for row in report["rounds"]:
        del row["seconds"], row["processor_s"]
    del report["training"]["seconds"], report["energy"]  # what this machine took
    assert report.pop("weights") == str(out / "weights.safetensors")
    last = read_checkpoint(out / "checkpoints" / f"round-{ROUNDS:06}.safetensors")
    return dict(last.tensors), report


def trained(rounds: int = 2, name: str = "supersfl") -> tuple[Simulation, list[dict[str, Any]]]:
    simulation, rows = build_simulation(recipe_of(name, rounds)), []  # type: Simulation, list[dict[str, Any]]
    for _ in run_rounds(simulation, rows):
        pass
    return simulation, rows


def saved(out: Path, rounds: int) -> None:
    """Run so many rounds and save each."""
    simulation, rows = build_simulation(recipe_of(rounds=rounds)), []  # type: Simulation, list[dict[str, Any]]
    for _ in run_rounds(simulation, rows):
        save_checkpoint(out, simulation, rows)


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        # one round is about 60 messages: in the first round, then in later ones
        ("supersfl", [("batch", 1)]),
        ("supersfl", [("batch", 17)]),
        ("supersfl", [("batch", 40), ("batch", 20), ("batch", 30)]),
        ("splitgp", [("batch", 50)]),
        ("splitgp", [("batch", 75)]),
        ("harmony", [("batch", 45), ("batch", 30)]),
        # with clients at work that began with weights of rounds before
        ("buffered", [("batch", 12)]),
        ("buffered", [("batch", 25), ("batch", 8)]),
        ("buffered", [("file", 20)]),
        *[("supersfl", [("file", number)]) for number in range(1, 50, 8)],
        *[("splitgp", [("file", number)]) for number in range(4, 50, 15)],
        # again and again at the same place: every start gets a little further, or none does harm
        ("supersfl", [("file", 12)] * 3),
    ],
)
def test_a_run_that_was_killed_ends_as_one_that_was_not(
    name: str,
    kills: list[tuple[str, int]],
    fork_server: ForkServer,
    undisturbed: dict[str, tuple[dict[str, torch.Tensor], Any]],
    tmp_path: Path,
) -> None:
    """FAULTS row 20."""
    recipe = RECIPES[name] | BASE
    for how, number in kills:
        if fork_server.run(how, number, tmp_path, recipe):
            break  # it did fewer things than that
    else:
        assert fork_server.run("whole", 0, tmp_path, recipe)
    tensors, report = end_of(tmp_path)
    expected, undisturbed_report = undisturbed[name]
    assert tensors.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensors[key], tensor), key
    assert report == undisturbed_report
    assert len(list((tmp_path / "checkpoints").glob("*.safetensors"))) == 2


def test_a_checkpoint_has_weights_and_what_clients_keep(tmp_path: Path) -> None:
    simulation, rows = trained(name="splitgp")
    minibatch = build_simulation(recipe_of(method="minibatch-sfl", method_numbers={}))
    stepped: list[dict[str, Any]] = []
    for _ in run_rounds(minibatch, stepped):
        pass
    for kept, rows_kept in ((simulation, rows), (minibatch, stepped)):
        path = save_checkpoint(tmp_path, kept, rows_kept)
        fresh = build_simulation(kept.recipe)
        read_checkpoint(path).restore(fresh)
        then, now = kept.state.read(), fresh.state.read()
        assert all(torch.equal(then[key], now[key]) for key in then)
        for name, client in kept.clients.items():
            personal = fresh.clients[name].personal
            assert client.personal.keys() == personal.keys()
            assert all(torch.equal(client.personal[key], personal[key]) for key in personal)
    assert any(client.personal for client in simulation.clients.values())


def test_a_checkpoint_is_one_file_of_tensors_and_json(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *trained())
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()["run"])
    assert metadata["recipe"]["method"] == "supersfl"
    assert [row["round"] for row in metadata["rows"]] == [1, 2]


def test_a_checkpoint_of_0_1_0_goes_on_without_its_momentum(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *trained())
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    save_file(tensors | {"momentum/4/0": torch.ones(32, 32, 3, 3)}, path, metadata)
    fresh = build_simulation(recipe_of(rounds=2))
    read_checkpoint(path).restore(fresh)
    assert all(
        torch.equal(fresh.state.read()[name[4:]], tensors[name])
        for name in tensors
        if name.startswith("net/")
    )


def test_only_the_last_two_rounds_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, rounds=4)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["round-000003.safetensors", "round-000004.safetensors"]


@pytest.mark.parametrize("damage", ["truncated", "emptied", "other"])
def test_a_damaged_checkpoint_is_passed_over(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, rounds=3)
    path = tmp_path / "checkpoints" / "round-000003.safetensors"
    raw = path.read_bytes()
    changed = {"truncated": raw[:-100], "emptied": b"", "other": b"\x00" * 100}
    path.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        found = latest_checkpoint(tmp_path)
    assert found is not None
    assert found.round == 2
    assert "round-000003.safetensors" in caplog.text


def test_checkpoints_that_are_all_damaged_are_not_silently_lost(tmp_path: Path) -> None:
    saved(tmp_path, rounds=2)
    for path in (tmp_path / "checkpoints").iterdir():
        path.write_bytes(b"")
    with pytest.raises(StorageError, match="found 2 that cannot; remove the folder"):
        simulate(recipe_of(rounds=2), tmp_path, resume=True)


def test_more_rounds_may_be_asked_for_and_nothing_else(tmp_path: Path) -> None:
    simulate(recipe_of(rounds=2), tmp_path / "long")
    longer = simulate(recipe_of(rounds=3), tmp_path / "long", resume=True)
    assert [row["round"] for row in longer["rounds"]] == [1, 2, 3]
    whole = simulate(recipe_of(rounds=3), tmp_path / "whole")
    # as text: some figures are not defined here, and NaN is not NaN
    assert json.dumps(whole["final"]) == json.dumps(longer["final"])
    with pytest.raises(ConfigurationError, match="--resume: seed: expected 0 as this run began"):
        simulate(recipe_of(rounds=3, seed=1), tmp_path / "long", resume=True)
    fixed = BASE["train"] | {"depth": 2}
    with pytest.raises(ConfigurationError, match=r"--resume: train\.depth: expected None"):
        simulate(recipe_of(rounds=3, train=fixed), tmp_path / "long", resume=True)


def test_an_unfinished_run_is_not_overwritten(tmp_path: Path) -> None:
    simulation, rows = trained(rounds=3)
    save_checkpoint(tmp_path, simulation, rows[:1])
    with pytest.raises(ConfigurationError, match="stopped after round 1 of 3; add --resume"):
        simulate(recipe_of(), tmp_path)
    # a finished one makes way for a new run only where that is asked for
    shutil.rmtree(tmp_path / "checkpoints")
    first = simulate(recipe_of(rounds=1), tmp_path)
    report = (tmp_path / "report.json").read_bytes()
    with pytest.raises(ConfigurationError, match=r"holds a finished run of 1 round; .*--force"):
        simulate(recipe_of(rounds=2), tmp_path)
    assert (tmp_path / "report.json").read_bytes() == report
    again = simulate(recipe_of(rounds=2), tmp_path, force=True)
    assert [row["round"] for row in again["rounds"]] == [1, 2]
    assert again["rounds"][0]["loss"] == first["rounds"][0]["loss"]


def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, *trained())
    train = BASE["train"] | {"backbone": "tiny"}
    fewer = build_simulation(recipe_of(train=train, data=BASE["data"] | {"clients": 2}))
    with pytest.raises(FrameError, match="client client-2: the recipe has no such client"):
        read_checkpoint(path).restore(fewer)


def test_averaged_auxiliary_models_are_in_a_checkpoint_and_one_without_them_is_refused(
    tmp_path: Path,
) -> None:
    recipe = read_recipe({"method": "besplit", **BASE})
    run = build_simulation(recipe)
    rows: list[dict[str, Any]] = []
    next(run_rounds(run, rows))
    checkpoint = read_checkpoint(save_checkpoint(tmp_path, run, rows))
    again = build_simulation(recipe)
    checkpoint.restore(again)
    for depth, model in run.state.auxiliaries.items():
        for name, tensor in again.state.auxiliaries[depth].state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name])
    tensors = {k: t for k, t in checkpoint.tensors.items() if not k.startswith("net/auxiliary")}
    assert len(tensors) < len(checkpoint.tensors)
    with pytest.raises(
        FrameError, match=r"expected auxiliary\d\..* which besplit trains now.*finish"
    ):
        replace(checkpoint, tensors=tensors).restore(again)
