"""SuperSFL, Eq. 6-8, worked out by hand; copies of mixed depths; BatchNorm in an average."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_sdk.nets import build
from edge_sdk.nets.layers import Norm
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.client_part import ClientPart
from edge_sdk.training.protocol.messages import Update, Weights
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights
from profiles.allocation import supersfl_depth
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.core.weighted_mean import (
    Contribution,
    by_depth_and_loss,
    by_samples,
    merge,
    normalised,
)
from server.training.methods.fedavg import fedavg
from server.training.rounds.loop import RoundLoop
from server.training.rounds.transport import LocalTransport
from tests.training.plans import flat_plan

NOW = RoundView(1)


def contribution(depth: int, loss: float, samples: int = 1, **weights: float) -> Contribution:
    tensors = {name: torch.tensor([value]) for name, value in weights.items()}
    return Contribution(depth, Update(1, tensors, samples, loss, 1, 1))


def values(weights: Weights) -> dict[str, float]:
    return {name: float(tensor) for name, tensor in weights.items()}


# Two clients in a network of three stages: a holds one (loss 1), b two (loss 3).
#   w_a = 1/3 * 1 / (1 + 1/3)     = 1/3 * 3/4 = 1/4
#   w_b = 2/3 * 1/3 / (1 + 1/3)   = 2/3 * 1/4 = 1/6
PAIR = {
    "a": contribution(1, 1.0, one=1.0),
    "b": contribution(2, 3.0, one=2.0, two=20.0),
}
SERVER = {"one": torch.tensor([6.0]), "two": torch.tensor([60.0]), "three": torch.tensor([600.0])}


def test_weights_are_those_of_equation_6_by_hand() -> None:
    assert by_depth_and_loss(PAIR, NOW) == pytest.approx({"a": 1 / 4, "b": 1 / 6})


def test_normalised_weights_keep_their_ratio_and_sum_to_1() -> None:
    assert normalised(by_depth_and_loss)(PAIR, NOW) == pytest.approx({"a": 0.6, "b": 0.4})


def test_layers_are_merged_by_equation_8_by_hand() -> None:
    merged = merge(PAIR, by_depth_and_loss(PAIR, NOW), SERVER, 0.01)
    assert values(merged) == pytest.approx(
        {
            "one": (1 / 4 * 1 + 1 / 6 * 2 + 0.01 * 6) / (1 / 4 + 1 / 6 + 0.01),
            "two": (1 / 6 * 20 + 0.01 * 60) / (1 / 6 + 0.01),  # b alone holds it
            "three": 600,  # no client holds it: the server's stays
        }
    )


def test_a_vote_of_0_is_the_plain_average_over_the_holders() -> None:
    merged = merge(PAIR, by_depth_and_loss(PAIR, NOW), SERVER, 0.0)
    assert values(merged) == pytest.approx({"one": 0.6 * 1 + 0.4 * 2, "two": 20, "three": 600})


def test_one_client_without_a_vote_of_the_servers_is_taken_to_the_last_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(1000, generator=generator)
    alone = {"a": Contribution(1, Update(1, {"one": tensor}, 7, 0.3, 1, 1))}
    server = {"one": torch.randn(1000, generator=generator)}
    assert torch.equal(merge(alone, by_samples(alone, NOW), server, 0.0)["one"], tensor)


def test_samples_weigh_by_their_number() -> None:
    three = {"a": contribution(1, 1.0, 10), "b": contribution(3, 0.1, 30)}
    assert by_samples(three, NOW) == {"a": 0.25, "b": 0.75}


@pytest.mark.parametrize("loss", [0.0, 1e-12, 1e-3, 700.0, 1e30])
def test_equal_losses_leave_the_depth_alone(loss: float) -> None:
    pair = {"a": contribution(1, loss), "b": contribution(3, loss)}
    assert by_depth_and_loss(pair, NOW) == pytest.approx({"a": 1 / 8, "b": 3 / 8})


def test_weights_sum_to_about_one_over_the_clients() -> None:
    for count in (1, 10, 50):
        fleet = {str(i): contribution(1 + i % 4, 1.0) for i in range(count)}
        assert sum(by_depth_and_loss(fleet, NOW).values()) == pytest.approx(1 / count)


def test_the_servers_share_grows_with_clients_and_depth_as_the_paper_s_devices_have_it() -> None:
    """At 50 clients a third on stages all hold, half at 100; 0.43 at stage 6."""

    def share(clients: int, stage: int) -> float:
        found = []
        for seed in range(40):
            generator = np.random.default_rng(seed)
            memory = generator.uniform(2, 16, clients).tolist()
            latency = generator.uniform(20, 200, clients).tolist()
            low, high = min(latency), max(latency)
            depths = [
                supersfl_depth(m, lat, low, high, 12)
                for m, lat in zip(memory, latency, strict=True)
            ]
            fleet = {str(i): contribution(depth, 1.0) for i, depth in enumerate(depths)}
            weights = by_depth_and_loss(fleet, NOW)
            held = sum(weights[name] for name, c in fleet.items() if c.depth >= stage)
            found.append(0.01 / (held + 0.01))
        return float(np.mean(found))

    assert share(50, 1) == pytest.approx(1 / 3, abs=0.005)
    assert share(100, 1) == pytest.approx(1 / 2, abs=0.005)
    assert share(50, 6) == pytest.approx(0.43, abs=0.02)
    assert share(50, 9) == pytest.approx(0.74, abs=0.02)
    assert share(50, 11) == pytest.approx(0.99, abs=0.02)


# a is cut at 1 (10 samples), b at 2 (30), c at 2 (40; never answered, so it has no copy)
def test_copies_of_mixed_depths_count_every_clients_training_of_a_stage_by_its_samples() -> None:
    net = build("tiny", classes=3, seed=0)
    state = ServerState(net, Training(0.1, 8))
    samples = {"a": 10, "b": 30, "c": 40}
    depths = {"a": 1, "b": 2, "c": 2}
    for value, name in ((1.0, "a"), (2.0, "b")):
        _fill(state.copy_for(name, depths[name]).module, value)
    contributions = {}
    for value, name in ((10.0, "a"), (20.0, "b"), (40.0, "c")):
        held = {
            k: torch.full_like(t, value) for k, t in read_weights(net.prefix(depths[name])).items()
        }
        update = Update(1, held, samples[name], 1.0, 1, 1)
        contributions[name] = Contribution(depths[name], update, state.take_copy(name))

    own = state.read()
    merged = merge(contributions, by_samples(contributions, NOW), own, 0.0)

    # stage 1 on all three clients; stage 2 on b and c, and in a's copy; the rest in two copies
    assert _value(merged, "stage1.") == pytest.approx((10 * 10 + 30 * 20 + 40 * 40) / 80)
    assert _value(merged, "stage2.") == pytest.approx((10 * 1 + 30 * 20 + 40 * 40) / 80)
    assert _value(merged, "stage5.") == pytest.approx((10 * 1 + 30 * 2) / 40)
    assert _value(merged, "head.") == pytest.approx((10 * 1 + 30 * 2) / 40)
    assert all(torch.equal(merged[k], own[k]) for k in own if k.startswith("exit"))


def test_a_copy_is_taken_once_and_a_client_may_have_none() -> None:
    state = ServerState(build("tiny", classes=3, seed=0), Training(0.1, 8))
    _fill(state.copy_for("a", 4).module, 1.0)
    held = {name for name in state.read() if name.startswith(("stage5.", "head."))}
    assert state.take_copy("a").keys() == held
    assert state.take_copy("a") == state.take_copy("b") == {}


def test_a_trunk_of_the_servers_own_has_names_of_its_own() -> None:
    state = ServerState(build("tiny", classes=3, seed=0), Training(0.1, 8), "own")
    trunks = {name.removeprefix("trunk.") for name in state.read() if name.startswith("trunk.")}
    after = ("stage2.", "stage3.", "stage4.", "stage5.", "head.")
    assert trunks == {name for name in state.read() if name.startswith(after)}
    _fill(state.copy_for("a", 4).module, 1.0)
    copy = state.take_copy("a")
    alone = {"a": Contribution(4, Update(1, {}, 1, 1.0, 1, 1), copy)}
    merged = merge(alone, {"a": 1.0}, state.read(), 0.0)
    before = {name: t for name, t in state.read().items() if not name.startswith("trunk.")}
    state.write(merged)
    assert _value(state.read(), "trunk.stage5.") == 1.0
    assert all(torch.equal(state.read()[name], tensor) for name, tensor in before.items())
    x = torch.randn(2, 1, 8, 8)
    assert not torch.equal(state.whole(2)(x), state.net(x))


def _fill(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def _value(weights: Weights, start: str) -> float:
    found = torch.cat([t.flatten() for name, t in weights.items() if name.startswith(start)])
    assert torch.equal(found, found[:1].expand_as(found))
    return float(found[0])


# BatchNorm

HAR: dict[str, Any] = {
    "backbone": "har_cnn",
    "input_shape": (9, 16),
    "classes": 3,
    "mean": (0.0,) * 9,
    "std": (1.0,) * 9,
    "depth": 3,
    "learning_rate": 0.02,
    "batch": 16,
    "epochs": 3,
    "part": ClientPart(whole=True),
}


def _unlike(
    samples: int, offset: float, seed: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Signals of three classes around an offset of this client's own."""
    generator = np.random.default_rng(seed)
    y = np.arange(samples) % 3
    x = generator.standard_normal((samples, 9, 16)) + offset
    x[np.arange(samples), y] += 2.5  # one signal is louder in each class
    return x.astype(np.float32), y


def _federated(norm: Norm, rounds: int = 6) -> tuple[ServerState, dict[str, TrainingClient]]:
    state = ServerState(
        build("har_cnn", input_shape=(9, 16), classes=3, seed=0, norm=norm),
        Training(0.02, 8),
    )
    clients = {
        name: TrainingClient(name, *_unlike(48, offset, seed))
        for seed, (name, offset) in enumerate({"a": 4.0, "b": 6.0}.items())
    }
    plans = dict.fromkeys(clients, flat_plan(**HAR, norm=norm))
    loop = RoundLoop(fedavg(), plans, state, LocalTransport(clients))
    for number in range(1, rounds + 1):
        loop.run_round(number, 0)
    return state, clients


def _accuracy(state: ServerState) -> float:
    parts = [_unlike(60, offset, seed) for seed, offset in ((10, 4.0), (11, 6.0))]
    net = state.net.eval()
    with torch.no_grad():
        guesses = [net(torch.from_numpy(x)).argmax(1).numpy() == y for x, y in parts]
    return float(np.mean(guesses))


def test_batch_norm_statistics_are_averaged_with_the_weights_and_counters_never() -> None:
    state, clients = _federated("batch", rounds=1)
    own = dict(state.net.named_buffers())
    counters = [t for name, t in own.items() if name.endswith("num_batches_tracked")]
    assert counters
    assert all(int(counter) == 0 for counter in counters)

    # by hand: what each client made of the same start, averaged by 48 and 48 samples
    means = []
    for name, client in clients.items():
        alone = ServerState(
            build("har_cnn", input_shape=(9, 16), classes=3, seed=0),
            Training(0.02, 8),
        )
        loop = RoundLoop(
            fedavg(), {name: flat_plan(**HAR, norm="batch")}, alone, LocalTransport({name: client})
        )
        loop.run_round(1, 0)
        means.append(alone.read()["stage2.1.running_var"])
    torch.testing.assert_close(state.read()["stage2.1.running_var"], (means[0] + means[1]) / 2)


def test_without_its_statistics_a_batch_norm_network_loses_what_it_learnt() -> None:
    state, _ = _federated("batch")
    sound = _accuracy(state)
    for name, buffer in state.net.named_buffers():  # as if only parameters had travelled
        if name.endswith("running_mean"):
            buffer.zero_()
        if name.endswith("running_var"):
            buffer.fill_(1.0)
    left_out = _accuracy(state)

    assert sound > 0.9
    assert left_out < sound - 0.3


def test_an_averaged_counter_would_be_no_counter() -> None:
    """Counters are whole numbers: their mean would be cut, and differ from every client's."""
    names = read_weights(build("har_cnn", input_shape=(9, 16), seed=0).prefix(2))
    assert not [name for name in names if "num_batches" in name]
    assert {name for name in names if "running" in name} == {
        f"stage{stage}.1.running_{what}" for stage in (1, 2) for what in ("mean", "var")
    }


def test_group_norm_has_no_statistics_to_lose() -> None:
    state, _ = _federated("group")
    assert not [name for name in state.read() if "running" in name]
    assert _accuracy(state) > 0.9


def test_input_constants_do_not_travel() -> None:
    net = build("tiny", mean=(3.0,), std=(2.0,), seed=0)
    names: dict[str, Tensor] = read_weights(net.segment(0, None))
    assert not [name for name in names if name.startswith("normalise")]
