"""Rounds without a common beginning: who waits for whom, what counts, and going on after a kill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.nets import build
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import Reply, Request, StartRound, Update, Weights
from edge_sdk.training.protocol.plan import ClientPart, Plan
from edge_sdk.training.protocol.training import Training
from server.training.core.server_state import ServerState
from server.training.core.weighted_mean import Contribution
from server.training.methods.fedavg import fedavg
from server.training.recipe.recipe import read_recipe
from server.training.rounds.buffered import BufferedLoop
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundResult, RoundSettings
from server.training.rounds.staleness import rebase_update
from server.training.rounds.transport import LocalTransport, Transport
from server.training.rounds.workers import SimulatedWorkers
from server.training.run.checkpoint import latest_checkpoint, save_checkpoint
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation, round_seconds
from server.training.simulation.run import run_rounds, simulate

NAMES = [f"client-{number}" for number in range(4)]
EQUAL = dict.fromkeys(NAMES, 1.0)
ONE_SLOW = EQUAL | {"client-3": 3.5}


def recipe_of(method: str = "splitfed-v1", rounds: int = 4, **round_numbers: Any) -> dict[str, Any]:
    return {
        "method": method,
        "data": {"name": "digits", "clients": 4, "train_max": 48, "test_max": 20},
        "train": {
            "backbone": "tiny",
            "rounds": rounds,
            "learning_rate": 0.05,
            "momentum": 0.9,
            "batch": 8,
            "memory_gb": [1, 4],
        },
        "round": round_numbers,
    }


def world(method: str = "splitfed-v1", **round_numbers: Any) -> Simulation:
    return build_simulation(read_recipe(recipe_of(method, **round_numbers)))


def paced(
    here: Simulation, seconds: Mapping[str, float], transport: Transport | None = None
) -> BufferedLoop:
    transport = transport or LocalTransport(here.clients)
    return BufferedLoop(
        here.method,
        here.plans,
        here.state,
        transport,
        here.recipe.round,
        workers=SimulatedWorkers(seconds),
    )


def run(engine: RoundLoop | BufferedLoop, rounds: int, first: int = 1) -> list[RoundResult]:
    return [engine.run_round(number, 0) for number in range(first, first + rounds)]


def assert_same(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


class Watcher:
    """Remembers what clients start from and what they make of it."""

    def __init__(self, here: Simulation) -> None:
        self._inner = LocalTransport(here.clients)
        self.started: list[tuple[str, StartRound]] = []
        self.updates: dict[tuple[str, int], Update] = {}

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        replies = self._inner.exchange(requests, deadline_s)
        self.started += [(n, r) for n, r in requests.items() if isinstance(r, StartRound)]
        for name, reply in replies.items():
            if isinstance(reply, Update):
                self.updates[name, reply.round] = reply
        return replies


# beside the synchronous rounds


@pytest.mark.parametrize("method", ["splitfed-v1", "fedavg", "splitgp"])
def test_all_results_at_one_pace_are_the_synchronous_round_to_the_last_bit(method: str) -> None:
    together, buffered = world(method), world(method, buffer=4)
    ours = run(paced(buffered, EQUAL), 3)
    theirs = run(together.loop, 3)

    assert_same(buffered.state.read(), together.state.read())
    for name in NAMES:
        assert_same(buffered.clients[name].personal, together.clients[name].personal)
    assert [replace(r, seconds=0, simulated_s=None) for r in ours] == [
        replace(r, seconds=0) for r in theirs
    ]


def test_waiting_for_all_is_synchronous_whatever_their_pace() -> None:
    together, buffered = world(), world(buffer=4)
    results = run(paced(buffered, ONE_SLOW), 2)
    run(together.loop, 2)
    assert_same(buffered.state.read(), together.state.read())
    assert [r.simulated_s for r in results] == [3.5, 3.5]


# who waits for whom


def test_a_slow_client_holds_nobody_up_and_counts_when_it_comes() -> None:
    here = world(buffer=3, staleness_max=5)
    watcher = Watcher(here)
    results = run(paced(here, ONE_SLOW, watcher), 5)

    fast = ("client-0", "client-1", "client-2")
    # it ends at 3.5: after the third merge at 3, before the others end at 4
    assert [r.participants for r in results[:3]] == [fast] * 3
    assert results[3].participants == ("client-0", "client-1", "client-3")
    assert results[3].stale == {"client-3": 3}
    # the one left over at 4 is the first of the next merge
    assert results[4].stale == {"client-2": 1}
    assert [r.simulated_s for r in results[:4]] == [1.0, 1.0, 1.0, 1.0]
    assert all(r.merged and not r.missing and not r.refused for r in results)
    began = [start.round for name, start in watcher.started if name == "client-3"]
    assert began == [1]


def test_a_result_too_old_is_refused_by_name_and_its_client_begins_anew() -> None:
    here = world(buffer=3, staleness_max=2)
    engine = paced(here, ONE_SLOW)
    results = run(engine, 5)
    assert results[3].participants == ("client-0", "client-1", "client-2")
    assert results[3].refused == {"client-3": "an update 3 rounds late: expected at most 2"}
    assert engine.state_dict()[0]["begun"]["client-3"] == [5, 4.0 + 3.5]
    assert not results[4].refused


def test_everyone_starts_from_the_weights_of_the_round_it_begins_in() -> None:
    here = world(buffer=2, staleness_max=9)
    watcher = Watcher(here)
    engine = paced(here, ONE_SLOW, watcher)
    sent = {}
    for number in range(1, 7):
        sent[number] = here.state.read()
        run(engine, 1, first=number)
    rounds = {start.round for _, start in watcher.started}
    assert len(rounds) > 3
    for _, start in watcher.started:
        assert_same(start.weights, {name: sent[start.round][name] for name in start.weights})
    heard = [(name, start.round) for name, start in watcher.started]
    assert len(heard) == len(set(heard))  # one result a client and round


def test_clients_that_never_answer_do_not_keep_a_merge_waiting() -> None:
    here = world(buffer=3, quorum=0.6)
    clients = {name: c for name, c in here.clients.items() if name in NAMES[:2]}
    [result] = run(paced(here, EQUAL, LocalTransport(clients)), 1)
    assert result.merged  # 2 of 3 are a quorum
    assert result.participants == ("client-0", "client-1")
    assert result.missing == ("client-2", "client-3")


def test_below_the_quorum_nothing_changes() -> None:
    here = world(buffer=3, quorum=0.9)
    before = here.state.read()
    clients = {name: c for name, c in here.clients.items() if name in NAMES[:2]}
    [result] = run(paced(here, EQUAL, LocalTransport(clients)), 1)
    assert not result.merged
    assert_same(here.state.read(), before)


# what counts of a late result


def test_a_late_change_is_discounted_and_added_to_the_weights_of_now_by_hand() -> None:
    # from 1 to 5 is a change of 4; three merges late half of it counts, on top of 10
    update = Update(1, {"a": torch.tensor([5.0])}, 1, 1.0, 1, 1)
    late = Contribution(1, update, {"b": torch.tensor([3.0])})
    then = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])}
    now = {"a": torch.tensor([10.0]), "b": torch.tensor([0.0])}
    moved = rebase_update(late, then, now, (1 + 3) ** -0.5)
    assert moved.tensor("a").item() == 12.0
    assert moved.tensor("b").item() == 1.0  # in its copy on the server too


def test_a_late_variance_stays_above_zero() -> None:
    # it fell from 1 to 0.2 while the server's fell to 0.1: the change alone would lead to -0.46
    name = "stage1.bn.running_var"
    update = Update(1, {name: torch.tensor([0.2])}, 1, 1.0, 1, 1)
    copy = {"stage2.bn.running_var": torch.tensor([0.2])}
    then = {name: torch.tensor([1.0]), "stage2.bn.running_var": torch.tensor([1.0])}
    now = {name: torch.tensor([0.1]), "stage2.bn.running_var": torch.tensor([0.1])}
    moved = rebase_update(Contribution(1, update, copy), then, now, 0.7)
    # 0.7 of the way from 0.1 to 0.2
    assert moved.tensor(name).item() == pytest.approx(0.17)
    assert moved.tensor("stage2.bn.running_var").item() == pytest.approx(0.17)


def test_batchnorm_s_variances_stay_above_zero_at_any_pace() -> None:
    # each takes variances of 1 most of the way to those of its quiet signals
    generator = np.random.default_rng(0)
    clients = {
        name: TrainingClient(
            name,
            (0.1 * generator.standard_normal((32, 9, 16))).astype(np.float32),
            np.arange(32) % 3,
        )
        for name in NAMES
    }
    plan = Plan(
        backbone="har_cnn",
        input_shape=(9, 16),
        classes=3,
        mean=(0.0,) * 9,
        std=(1.0,) * 9,
        depth=3,
        training=Training(0.02, 8, epochs=4),
        part=ClientPart(whole=True),
    )
    state = ServerState(
        build("har_cnn", input_shape=(9, 16), classes=3, seed=0),
        Training(0.02, 8),
    )
    settings = RoundSettings(buffer=1, staleness_max=9)
    seconds = {name: 1 + number / 10 for number, name in enumerate(NAMES)}
    plans = dict.fromkeys(NAMES, plan)
    engine = BufferedLoop(
        fedavg(), plans, state, LocalTransport(clients), settings, workers=SimulatedWorkers(seconds)
    )
    assert all(result.merged for result in run(engine, 4))
    variances = [t for n, t in state.read().items() if n.endswith("running_var")]
    assert variances
    assert all(bool((variance > 0).all()) for variance in variances)


def test_a_late_client_s_part_is_what_it_made_of_the_weights_it_began_with() -> None:
    here = world("fedavg", buffer=1, staleness_max=3, staleness_power=1.0)
    watcher = Watcher(here)
    engine = paced(
        here, {"client-0": 1.0, "client-1": 1.5, "client-2": 9.0, "client-3": 9.0}, watcher
    )
    began = here.state.read()
    run(engine, 1)
    between = here.state.read()
    [second] = run(engine, 1, first=2)
    assert second.stale == {"client-1": 1}
    update = watcher.updates["client-1", 1].weights
    after = here.state.read()
    for name, tensor in update.items():  # one result, late by one merge: half of its change
        torch.testing.assert_close(after[name], between[name] + (tensor - began[name]) / 2)


@pytest.mark.parametrize("method", ["supersfl", "splitlpf", "harmony", "splitfed-v2"])
def test_one_model_generators_and_trunks_of_the_server_train_at_any_pace(method: str) -> None:
    here = world(method, buffer=2, staleness_max=9)
    before = here.state.read()
    results = run(paced(here, ONE_SLOW), 4)
    assert all(r.merged and not r.refused for r in results)
    assert any(r.stale for r in results)
    after = here.state.read()
    assert any(not torch.equal(after[n], before[n]) for n in after if "head" in n)


# going on


@pytest.mark.parametrize("method", ["splitfed-v1", "supersfl"])
def test_a_run_goes_on_from_a_checkpoint_in_the_same_bits(method: str, tmp_path: Path) -> None:
    numbers = recipe_of(method, rounds=5, buffer=2, staleness_max=4)
    whole = build_simulation(read_recipe(numbers))
    rows: list[dict[str, Any]] = []
    for _ in run_rounds(whole, rows):
        if len(rows) == 2:  # with two clients at work that began with weights now gone
            save_checkpoint(tmp_path, whole, rows)
            assert whole.loop.state_dict()[0]["begun"]

    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    again = build_simulation(read_recipe(numbers))
    checkpoint.restore(again)
    later = list(checkpoint.rows)
    for _ in run_rounds(again, later):
        pass
    assert_same(again.state.read(), whole.state.read())
    seconds = {"seconds": 0}
    assert [row | seconds for row in later] == [row | seconds for row in rows]


def test_what_does_not_fit_is_no_progress() -> None:
    engine = world(buffer=2).loop
    with pytest.raises(FrameError, match="no simulated buffered training"):
        engine.load_state_dict({}, {})
    with pytest.raises(FrameError, match="do not fit"):
        engine.load_state_dict({"clock_s": 1.0, "begun": {"client-0": [1, 2.0]}}, {})


def test_a_simulation_takes_its_pace_from_the_clients_latencies(tmp_path: Path) -> None:
    recipe = read_recipe(recipe_of(rounds=3, buffer=2, staleness_max=4))
    report = simulate(recipe, tmp_path)
    times = round_seconds(recipe.train, [12] * 4, 0)
    # 12 samples are two batches of at most 8: four messages at 20 to 200 ms
    assert all(4 * 0.02 <= seconds <= 4 * 0.2 for seconds in times)
    assert report["rounds"][0]["simulated_s"] == pytest.approx(sorted(times)[1])


# what cannot


@pytest.mark.parametrize("method", ["minibatch-sfl", "besplit"])
def test_methods_whose_step_needs_everybody_are_refused(method: str) -> None:
    with pytest.raises(ConfigurationError, match="needs all participants of a step at once"):
        world(method, buffer=2)


@pytest.mark.parametrize(
    "numbers",
    [{"buffer": 5}, {"buffer": 2, "participation": 0.5}, {"buffer": 2, "cohort": 2}],
)
def test_settings_that_need_a_common_round_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="buffer"):
        world(**numbers)


@pytest.mark.parametrize("numbers", [{"buffer": 0}, {"staleness_power": -1.0}])
def test_numbers_that_make_no_buffer_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(numbers))):
        RoundSettings(**numbers)
