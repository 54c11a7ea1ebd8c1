"""Clients on the actors of a Ray cluster: the bits of one process, also when an actor is killed."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.memory_format import ChosenFormat
from edge_sdk.training.protocol.messages import EndRound, StartRound, Step
from server.errors import WorkerError
from server.training.cluster.ray_cluster import RayCluster, connected
from server.training.comparison.values import with_values
from server.training.recipe.recipe import Recipe, load_recipe, read_recipe
from server.training.simulation.build import build_simulation
from server.training.simulation.run import simulate
from server.training.simulation.worker import start_ray_workers
from server.training.simulation.workers.history import History
from server.training.simulation.workers.ray_pool import RayPool
from server.training.simulation.workers.work import Answered, Asked, Open, Train, Trained, Work
from tests.commands import Splitedge
from tests.reader import Document

pytestmark = pytest.mark.long

# One method whose clients are trained apart, and one whose clients meet in the server's half.
METHODS = {"splitgp": {"finetune_steps": 1}, "supersfl": {}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    """One cluster of two processors for the tests of this module: starting it takes seconds."""
    with connected(cpus=2, store_bytes=80 << 20) as found:
        yield found


def recipe_of(method: str, rounds: int = 2) -> Recipe:
    return read_recipe(
        {
            "method": method,
            "method_numbers": METHODS[method],
            "data": {"name": "digits", "clients": 5, "train_max": 300, "test_max": 100},
            "train": {
                "backbone": "tiny",
                "rounds": rounds,
                "batch": 16,
                "learning_rate": 0.1,
                "momentum": 0.5,
                "depths": [1, 2],
            },
        }
    )


class KillingPool(RayPool):
    """A pool of which a worker is killed once, while it has work of the round."""

    killed = 0

    def next(self) -> tuple[int, Trained | Answered]:
        found = super().next()
        hello = self.hellos[1]
        if not self.killed and hello is not None:
            self.killed = hello.pid
            os.kill(hello.pid, signal.SIGKILL)
        return found


@pytest.mark.parametrize("method", list(METHODS))
def test_an_actor_that_is_killed_in_a_round_changes_no_bit(
    method: str,
    cluster: RayCluster,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    pools: list[KillingPool] = []

    def start(recipe: Recipe, memory_format: ChosenFormat) -> KillingPool:
        plain = start_ray_workers(2, cluster)
        pools.append(KillingPool(*plain.args, recipe, memory_format))  # type: ignore[attr-defined,call-arg]  # a partial
        return pools[-1]

    alone = build_simulation(recipe_of(method))
    shared = build_simulation(recipe_of(method), start_workers=start)
    try:
        for number in (1, 2):
            expected, found = (run.loop.run_round(number, 0) for run in (alone, shared))
            assert found.participants == expected.participants
    finally:
        shared.close()

    assert pools[0].killed, "the kill came in a round"
    assert f"worker 1 of 2 (process {pools[0].killed} on " in caplog.text
    assert "raylet" not in "".join(capfd.readouterr())  # Ray prints nothing of its own
    weights = shared.state.read()
    for name, tensor in alone.state.read().items():
        assert torch.equal(tensor, weights[name]), name
    for name, personal in alone.personal().items():
        for key, tensor in personal.items():
            assert torch.equal(tensor, shared.personal()[name][key]), (name, key)


def test_one_actor_does_what_the_document_says_with_the_bits_of_one_process(
    cluster: RayCluster,  # which the command finds connected
    splitedge: Splitedge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.toml").write_text(Document("docs/training.md").snippet("recipe"))
    typed = Document("docs/training-speed.md").snippet("ray")
    words = shlex.split(typed.replace("--workers 2", "--workers 1"))
    called = splitedge(*words[1:])
    simulate(load_recipe(tmp_path / "digits.toml"), tmp_path / "alone")

    assert called.status == 0, called.err
    assert_same_weights(tmp_path / "run-on-ray", tmp_path / "alone")
    assert "Next: splitedge export --run run-on-ray" in called.out
    assert "ray" not in called.out.replace("run-on-ray", "")  # it prints nothing of its own


def test_a_sweep_on_the_cluster_is_that_of_processes(
    cluster: RayCluster,  # which the command finds connected
    splitedge: Splitedge,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits.toml").write_text(Document("docs/training.md").snippet("recipe"))
    words = ("sweep", "digits.toml", "--engine", "ray", "--jobs", 1, "--set", "train.rounds=1,2")
    called = splitedge(*words, "--out", "sweep")
    simulate(
        with_values(load_recipe(tmp_path / "digits.toml"), {"train.rounds": 2}), tmp_path / "alone"
    )

    assert called.status == 0, called.err
    assert "2 of 2: train.rounds=2, seed 0: held-out " in called.err
    assert_same_weights(tmp_path / "sweep" / "rounds=2-0", tmp_path / "alone")


def assert_same_weights(run: Path, other: Path) -> None:
    found, expected = (load_file(folder / "weights.safetensors") for folder in (run, other))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_a_recipe_that_fails_on_an_actor_says_why(cluster: RayCluster) -> None:
    tables = recipe_of("supersfl").to_dict()
    tables["data"]["name"] = "no-such-file.npz"
    pool = start_ray_workers(1, cluster)(read_recipe(tables), "contiguous")
    try:
        with pytest.raises(WorkerError, match=r"worker 0: .*no-such-file"):
            pool.next()
    finally:
        pool.close()


def test_more_workers_than_the_cluster_has_processors_are_refused(cluster: RayCluster) -> None:
    with pytest.raises(ConfigurationError, match="--workers 3: expected at most 2, the processors"):
        build_simulation(recipe_of("supersfl"), start_workers=start_ray_workers(3, cluster))


def test_a_cluster_listens_on_loopback_alone_and_only_to_its_token(cluster: RayCluster) -> None:
    assert cluster.address.startswith("127.0.0.1:")
    token = os.environ["RAY_AUTH_TOKEN"]
    kept = Path.home() / ".ray" / "auth_token"  # where Ray keeps one by itself
    assert len(token) == 64
    assert not kept.exists() or kept.read_text() != token


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        (["--ray-address", "127.0.0.1:6379"], "expected --engine ray beside it"),
        (["--engine", "ray", "--ray-address", "ray://a:1"], "expected HOST:PORT of a cluster"),
    ],
)
def test_addresses_that_name_no_cluster_are_refused(
    options: list[str], refusal: str, splitedge: Splitedge
) -> None:
    called = splitedge("simulate", "examples/recipes/fedavg-digits.toml", *options)

    assert refusal in called.refusal


def test_a_history_is_what_a_new_worker_needs_and_no_more() -> None:
    history: History[str] = History()

    def told(work: Work, kept: str) -> list[tuple[str, bool]]:
        history.add(work, kept)
        return [(sent.kept, sent.due) for sent in history.again()]

    opened = Open(1, True, {}, {})
    assert told(opened, "round 1") == [("round 1", False)]
    assert told(Train("a", {}), "a") == [("round 1", False), ("a", True)]
    history.came()  # so the client's round is over
    assert told(Train("b", {}), "b") == [("round 1", False), ("b", True)]
    assert told(opened, "round 2") == [("round 2", False)]

    start, step, end = (
        (Asked("a", request, None),)
        for request in (StartRound(3, None, {}), Step(3, 0, None, None), EndRound(3, None))  # type: ignore[arg-type]  # no plan is needed here
    )
    assert told(start, "start") == [("start", True)]
    history.came()
    assert told(step, "step") == [("start", False), ("step", True)]
    history.came()
    assert told(end, "end") == [("start", False), ("step", False), ("end", True)]
    history.came()
    assert told(start, "start") == [("start", True)]
