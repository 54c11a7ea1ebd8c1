"""From a training with real devices to answers, for every method: what is deployed is what was
scored.

A server as a process, a trainer, and two devices that train over HTTP. The run is exported with the
command line, each device fetches its bundle, and an agent answers. Two scores are repeated:

    shared     the record's, on the recipe's test samples, with the bundle's own weights
    personal   the device's own, on its held-out samples, with the weights that it kept
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from edge_sdk import api
from edge_sdk.agent import EdgeAgent
from edge_sdk.answers.observer import Answered, AnswerObserver
from edge_sdk.bundles.store import BundleStore
from edge_sdk.bundles.update import update
from edge_sdk.settings import AgentSettings
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.device.participate import participate
from edge_sdk.wire.address import Address
from exporters.cli import app
from exporters.errors import ExportError
from exporters.run.record import RunRecord, read_run
from profiles import DeviceProfile
from server.processes import ServerProcess
from server.tokens import create_token
from server.training.fleet.settings import TrainerSettings
from server.training.fleet.trainer import train
from server.training.recipe.recipe import load_recipe
from tests.waiting import wait_until

pytestmark = pytest.mark.long

TESTED: Final = 60
HELD_OUT: Final = 40
RECIPE: Final = """
{method}
[data]
name = "digits"
clients = 2
train_max = 400
test_max = {tested}
[train]
backbone = "tiny"
rounds = 3
iterations = 6
batch = 32
learning_rate = 0.1
momentum = 0.5
{depth}
"""


@dataclass(frozen=True, slots=True)
class Case:
    """A method to train, export and deploy.

    Attributes:
        method: lines of the recipe. depths: of the two devices.
        trained: whether exits have to be trained for the export.
        personal: paths by which a device answers with weights of its own.
    """

    method: str
    depths: tuple[int, int] = (2, 2)
    trained: bool = False
    personal: frozenset[str] = frozenset()


WHOLE, EXIT = frozenset({"whole"}), frozenset({"exit"})
CASES: Final = {
    "fedavg": Case('method = "fedavg"', trained=True),
    "fedprox": Case('method = "fedprox"', trained=True),
    "splitfed-v1": Case('method = "splitfed-v1"', trained=True),
    "splitfed-v2": Case('method = "splitfed-v2"', trained=True),
    "minibatch-sfl": Case('method = "minibatch-sfl"', trained=True),
    "scala": Case('method = "scala"', trained=True),
    "multi-exit": Case('method = "multi-exit"'),
    "splitgp": Case(
        'method = "splitgp"\nmethod_numbers = { personal_share = 0.5, finetune_steps = 3 }',
        personal=WHOLE | EXIT,
    ),
    "supersfl": Case('method = "supersfl"', trained=True, personal=EXIT),
    "harmony": Case('method = "harmony"', (1, 4), personal=WHOLE | EXIT),
    "besplit": Case('method = "besplit"', (1, 4)),
    "besplit-personal": Case(
        'method = "besplit"\nmethod_numbers = { auxiliary = "personal" }',
        trained=True,
        personal=EXIT,
    ),
    "splitlpf": Case(
        'method = "splitlpf"\nmethod_numbers = { refit_epochs = 1 }', trained=True, personal=WHOLE
    ),
    "combined": Case(
        'method = "supersfl"\nmethod_numbers = { share_exits = true }\n[parts]\n'
        'gate = "besplit"\nserver = "splitfed-v2"\nalign = "harmony"',
        (1, 4),
    ),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """A server that runs, its state, and the devices' folders."""

    state: Path
    devices: tuple[Path, Path]
    server: ServerProcess


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    state, data = folder / "server", load_dataset("digits")
    server = ServerProcess(state)
    server.start(("--http", "127.0.0.1:0", "--mqtt", "embedded:127.0.0.1:0"))
    devices = folder / "pi-0", folder / "pi-1"
    for place, device in enumerate(devices):
        # by SuperSFL's Eq. 1 the first trains at depth 1, the second at depth 4
        memory, latency = ((1, 50.0), (4, 1.0))[place]
        profile = DeviceProfile(
            "pi", "aarch64", 4, memory * 2**30, memory * 2**29, None, 5.0, latency, 100.0
        )
        api.enroll(server.http, create_token(state), device, profile=profile, name=device.name)
        mine = slice(place, 2 * HELD_OUT, 2)
        np.savez(
            folder / f"{device.name}.npz",
            x_train=data.x_train[place::2][:160],
            y_train=data.y_train[place::2][:160],
            x_test=data.x_test[mine],
            y_test=data.y_test[mine],
        )
    yield Fleet(state, devices, server)
    server.stop()


class Labels(AnswerObserver):
    """The labels of exits and of answers."""

    def __init__(self) -> None:
        self.exits: list[int] = []
        self.answers: list[int] = []

    def answered(self, answered: Answered) -> None:
        assert answered.prediction.source == "server"
        self.exits.append(answered.decision.label)
        self.answers.append(answered.prediction.label)


def right(state: Path, x: np.ndarray, y: np.ndarray, personal: str | None) -> dict[str, int]:
    """Right answers of device and server together, and of the exit alone.

    Nothing exits, so that both answer every sample; z travels as it is.
    """
    settings = AgentSettings(threshold=-1.0, codec="fp32", deadline_s=20.0, personal=personal)
    seen = Labels()
    with EdgeAgent.open(state, settings, observers=[seen]) as agent:
        assert agent.status().personal == personal
        list(agent.predict_many(x))
    assert len(seen.answers) == len(y)
    return {
        "whole": int((np.array(seen.answers) == y).sum()),
        "exit": int((np.array(seen.exits) == y).sum()),
    }


def installed(device: Path, bundle: str) -> bool:
    return update(device, bundle).status == "installed"


def trained(name: str, run: str, fleet: Fleet, folder: Path) -> dict[str, Any]:
    """The report of a training with both devices, each in a thread with connections of its own.

    Args:
        name: of the case. run: of the training.
    """
    case = CASES[name]
    depth = f"depth = {case.depths[0]}" if case.depths[0] == case.depths[1] else ""
    text = RECIPE.format(method=case.method, depth=depth, tested=TESTED)
    if "[parts]" in case.method:  # a table in the middle would take the keys behind it
        head, _, parts = case.method.partition("[parts]")
        text = RECIPE.format(method=head, depth=depth, tested=TESTED) + "[parts]" + parts
    recipe = folder / f"{name}.toml"
    recipe.write_text(text)
    settings = TrainerSettings(fleet.state, run, Address("127.0.0.1", 0), silence_s=60.0)
    threads: list[threading.Thread] = []

    def begin(line: str) -> None:
        if threads:
            return
        url = line.split()[2].rstrip(",")
        for device in fleet.devices:
            data = str(device.parent / f"{device.name}.npz")
            words = {"trainer": url, "say": str}
            thread = threading.Thread(target=participate, args=(device, data), kwargs=words)
            threads.append(thread)
            thread.start()

    report = train(load_recipe(recipe), settings, say=begin, on_round=lambda _: None)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert [row["merged"] for row in report["rounds"]] == [True] * 3
    return report


def exported(name: str, run_name: str, fleet: Fleet) -> tuple[RunRecord, str]:
    """Export the run; a method without exits says which command trains them, and that works."""
    run = fleet.state / "training" / run_name
    words = ["--run", str(run), "--out", str(fleet.state / "models"), "--name", run_name]
    words += ["--int8", "never", "--json"]
    if CASES[name].trained:
        if not read_run(run).depths:
            words += ["--depth", "2"]
        refused = CliRunner().invoke(app, words)
        assert isinstance(refused.exception, ExportError)
        command = shlex.split(str(refused.exception).partition("splitedge export ")[2])
        assert command[:4] == ["--run", str(run), "--train-exits", "digits"]
        words = [*command, "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, (done.stderr, done.exception)
    assert "as scored after training" in done.stderr or not read_run(run).scores
    assert "after training:" not in done.stderr
    result = orjson.loads(done.stdout)
    assert result["figures_of"] == "test"
    return read_run(run), result["version"]


@pytest.mark.deadline
@pytest.mark.parametrize("name", CASES)
def test_what_is_deployed_is_what_was_scored(
    name: str, fleet: Fleet, tmp_path: Path, attempt: int
) -> None:
    case, data, run = CASES[name], load_dataset("digits"), f"{name}-{attempt}"
    report = trained(name, run, fleet, tmp_path)
    record, version = exported(name, run, fleet)
    assert record.method == report["method"]
    scores = {row["client"]: row for row in report["each_client"]}
    for place, (device, depth) in enumerate(zip(fleet.devices, case.depths, strict=True)):
        if place and case.depths[0] == depth:
            continue  # the second device runs the very same bundle
        bundle = f"{run}/{version}/d{depth}"
        wait_until(partial(installed, device, bundle), bundle, 60)
        graphs = BundleStore(device).active().manifest.graphs
        assert ("prefix" in graphs) == name.startswith("besplit")
        assert ("back" in graphs) == (name == "splitlpf")
        shared = right(device, data.x_test[:TESTED], data.y_test[:TESTED], None)
        for path in ("whole", "exit"):
            score = record.score(path, depth)
            if name in ("fedavg", "fedprox") and path == "whole":
                score = record.score("whole", 5)  # the whole network, wherever it is cut
            left = name != "splitlpf" if path == "whole" else not case.trained
            assert (score is not None) == left
            assert score is None or shared[path] == score.right, path
        own = scores[device.name]
        mine = slice(place, 2 * HELD_OUT, 2)
        x, y = data.x_test[mine], data.y_test[mine]
        assert own["tested_id"] == len(y) == HELD_OUT
        found = right(device, x, y, run if case.personal else None)
        assert found["whole"] == pytest.approx(own["accuracy_id"] * len(y))
        if "exit" in case.personal or not case.trained:
            assert found["exit"] == pytest.approx(own["accuracy_exit"] * len(y))
