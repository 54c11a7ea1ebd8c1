"""Buffered rounds by a simulated clock: its times, its recipes, and going on after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import build
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.client_part import ClientPart
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training
from server.training.core.server_state import ServerState
from server.training.methods.fedavg import fedavg
from server.training.recipe.recipe import read_recipe
from server.training.rounds.buffered import BufferedLoop
from server.training.rounds.round import RoundSettings
from server.training.rounds.transport import LocalTransport
from server.training.rounds.workers import SimulatedWorkers
from server.training.run.checkpoint import latest_checkpoint, save_checkpoint
from server.training.simulation.build import build_simulation, round_seconds
from server.training.simulation.run import run_rounds, simulate
from tests.training.paces import NAMES, recipe_of
from tests.training.worlds import assert_same


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
    loop = BufferedLoop(
        fedavg(), plans, state, LocalTransport(clients), settings, workers=SimulatedWorkers(seconds)
    )
    results = [loop.run_round(number, 0) for number in (1, 2, 3, 4)]
    assert all(result.merged for result in results)
    variances = [t for n, t in state.read().items() if n.endswith("running_var")]
    assert variances
    assert all(bool((variance > 0).all()) for variance in variances)


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
    seconds = {"seconds": 0, "processor_s": 0}
    assert [row | seconds for row in later] == [row | seconds for row in rows]


def test_a_simulation_takes_its_pace_from_the_clients_latencies(tmp_path: Path) -> None:
    recipe = read_recipe(recipe_of(rounds=3, buffer=2, staleness_max=4))
    report = simulate(recipe, tmp_path)
    times = round_seconds(recipe.train, [12] * 4, 0)
    # 12 samples are two batches of at most 8: four messages at 20 to 200 ms
    assert all(4 * 0.02 <= seconds <= 4 * 0.2 for seconds in times)
    assert report["rounds"][0]["simulated_s"] == pytest.approx(sorted(times)[1])


@pytest.mark.parametrize("numbers", [{"buffer": 0}, {"staleness_power": -1.0}])
def test_numbers_that_make_no_buffer_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(numbers))):
        RoundSettings(**numbers)
