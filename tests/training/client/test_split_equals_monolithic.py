"""A network trained in two halves is the network trained whole, to the last bit.

Both do the same operations on the same numbers in the same order, so no tolerance is needed: on one
thread a cut changes no bit (only clients that are averaged do, by rounding).
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_sdk.nets import NAMES, Supernet
from edge_sdk.nets.memory_format import ChosenFormat, set_format
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.client_part import ClientPart
from edge_sdk.training.protocol.messages import EndRound, Features, StartRound, Step, Update
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.methods.fedavg import fedavg, fedprox
from server.training.methods.method import Method
from server.training.methods.splitfed import minibatch, multi_exit, splitfed_v1, splitfed_v2
from server.training.methods.steps import ClientBatch, shared
from server.training.rounds.loop import RoundLoop
from server.training.rounds.transport import LocalTransport

# the smallest input each backbone takes
SHAPES = {
    "alexnet": (3, 28, 28),
    "cnn6": (1, 16, 16),
    "cnn8": (1, 28, 28),
    "densenet121": (3, 32, 32),
    "har_cnn": (9, 16),
    "mobilenetv2": (3, 32, 32),
    "resnet18": (1, 28, 28),
    "resnet50": (3, 32, 32),
    "tiny": (1, 8, 8),
    "vgg11": (3, 32, 32),
    "vit_b": (3, 16, 16),
    "vit_s": (3, 16, 16),
}
LARGE = ("densenet121", "resnet50", "vit_b", "vit_s")
# once: the same blocks as vit_s, four times as many weights
ONCE = ("vit_b",)
SPLIT = [splitfed_v1, splitfed_v2, minibatch]
SGD: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "momentum and decay": {"momentum": 0.9, "weight_decay": 0.01},
}
RATE, SEED, CLASSES = 0.05, 3, 4


def plan_for(name: str, depth: int, method: Method | None = None, **numbers: Any) -> Plan:
    """A plan in one memory format: equal bits need the same on both sides."""
    channels = SHAPES[name][0]
    numbers = {"memory_format": "contiguous", **numbers}
    return Plan(
        name,
        SHAPES[name],
        CLASSES,
        (0.0,) * channels,
        (1.0,) * channels,
        depth,
        Training(**{"learning_rate": RATE, "batch": 2, **numbers}),
        seed=SEED,
        part=ClientPart() if method is None else method.client,
    )


def network(name: str) -> Supernet:
    """The weights everyone starts from; not to be trained."""
    return network_of(plan_for(name, 1))


def fresh(name: str) -> Supernet:
    return deepcopy(network(name))


def client(name: str, net: str, samples: int) -> TrainingClient:
    generator = np.random.default_rng(crc32(name.encode()))
    x = generator.standard_normal((samples, *SHAPES[net])).astype(np.float32)
    return TrainingClient(name, x, generator.integers(0, CLASSES, samples))


def batches(owner: TrainingClient, batch: int, epochs: int) -> list[tuple[Tensor, Tensor]]:
    """Rows that the client draws in round 1: one permutation per epoch, keyed by seed and name."""
    generator = np.random.default_rng([SEED, 1, crc32(owner.name.encode())])
    drawn = []
    for _ in range(epochs):
        order = generator.permutation(len(owner.y))
        drawn += [order[at : at + batch] for at in range(0, len(order), batch)]
    return [(torch.from_numpy(owner.x[rows]), torch.from_numpy(owner.y[rows])) for rows in drawn]


def train_split(
    method: Method,
    name: str,
    clients: dict[str, TrainingClient],
    depths: dict[str, int],
    *,
    batch: int = 2,
    epochs: int = 1,
    **sgd: Any,
) -> Supernet:
    """One round."""
    net = fresh(name)
    state = ServerState(net, Training(RATE, 8, **sgd))
    plans = {
        owner: plan_for(name, depths[owner], method, batch=batch, epochs=epochs, **sgd)
        for owner in clients
    }
    result = RoundLoop(method, plans, state, LocalTransport(clients)).run_round(1, SEED)
    assert result.participants == tuple(clients)
    return net


def train_whole(
    name: str,
    drawn: list[tuple[Tensor, Tensor]],
    memory_format: ChosenFormat = "contiguous",
    *,
    rate: float = RATE,
    **sgd: Any,
) -> Supernet:
    """An ordinary loop."""
    net = fresh(name).train()
    set_format(net, memory_format)
    parts = net.segment(0, None)
    optimiser = torch.optim.SGD(parts.parameters(), rate, **sgd)
    for x, y in drawn:
        optimiser.zero_grad()
        nn.functional.cross_entropy(parts(x), y).backward()  # type: ignore[no-untyped-call]  # torch
        optimiser.step()
    return net


def assert_same(ours: Supernet, theirs: Supernet, *, since: int = 0) -> None:
    """Every weight and statistic of stages since+1..L and the final head."""
    got = read_weights(ours.segment(since, None))
    want = read_weights(theirs.segment(since, None))
    assert got.keys() == want.keys()
    different = [key for key in want if not torch.equal(got[key], want[key])]
    assert not different
    start = read_weights(network(ours.name).segment(since, None))
    assert any(not torch.equal(want[key], start[key]) for key in want)


@pytest.mark.parametrize(
    ("name", "memory_format"),
    [*((name, "contiguous") for name in NAMES), ("cnn6", "channels_last")],
)
def test_one_client_cut_anywhere_trains_the_whole_network(
    name: str, memory_format: ChosenFormat
) -> None:
    # small steps, since deep networks leave the finite numbers on batches of two; two of them where
    # that is cheap, so that the second starts from what the first has made of both halves
    rate, momentum, steps = (1e-3, 0.0, 1) if name in LARGE else (1e-3, 0.9, 2)
    numbers: dict[str, Any] = {
        "learning_rate": rate,
        "momentum": momentum,
        "memory_format": memory_format,
    }
    owner = client("a", name, 2 * steps)
    want = read_weights(
        train_whole(
            name, batches(owner, 2, 1), memory_format, rate=rate, momentum=momentum
        ).segment(0, None)
    )
    net, start = fresh(name), network(name).state_dict()
    set_format(net, memory_format)
    for depth in net.cuts if name not in ONCE else (6,):
        net.load_state_dict(start)
        state = ServerState(net, Training(rate, 8, momentum=momentum))
        plan = plan_for(name, depth, **numbers)
        owner.handle(StartRound(1, plan, state.weights(depth, whole=False, exit_head=False)))
        feedback = None
        for step in range(steps):
            features = owner.handle(Step(1, step, feedback))
            assert isinstance(features, Features)
            feedback = shared(state, {"a": ClientBatch(depth, features)}, RoundView(1))["a"]
        update = owner.handle(EndRound(1, feedback))

        assert isinstance(update, Update)
        got = update.weights | read_weights(net.suffix(depth))
        assert got.keys() == want.keys()
        assert [key for key in want if not torch.equal(got[key], want[key])] == []
    assert any(not torch.equal(tensor, start_of(start, key)) for key, tensor in want.items())


def start_of(state: dict[str, Tensor], key: str) -> Tensor:
    """`stage3.0.weight` is `stages.2.0.weight` in the network itself."""
    stage, _, rest = key.partition(".")
    inside = key if stage == "head" else f"stages.{int(stage[5:]) - 1}.{rest}"
    return state[inside]


@pytest.mark.parametrize("sgd", SGD.values(), ids=SGD)
@pytest.mark.parametrize("name", ["tiny", "har_cnn"])
@pytest.mark.parametrize("method", SPLIT)
def test_every_server_step_trains_the_whole_network(
    method: Callable[[], Method], name: str, sgd: dict[str, Any]
) -> None:
    # 4 samples: times 4 and divided by 4 again, a copy's weights lose nothing in the average
    owner = client("a", name, 4)
    for depth in network(name).cuts:
        ours = train_split(method(), name, {"a": owner}, {"a": depth}, epochs=3, **sgd)
        assert_same(ours, train_whole(name, batches(owner, 2, 3), **sgd))


@pytest.mark.parametrize("share", [0.5, 0.2])
@pytest.mark.parametrize("name", ["tiny", "har_cnn"])
def test_a_step_with_an_exit_is_the_joint_step_on_both_losses(name: str, share: float) -> None:
    """Prefix, exit head and suffix by one optimiser of torch on g * Lc + (1 - g) * Ls."""
    owner = client("a", name, 4)
    sgd = SGD["momentum and decay"]
    for depth in network(name).cuts:
        ours = train_split(multi_exit(share), name, {"a": owner}, {"a": depth}, epochs=3, **sgd)

        net = fresh(name).train()
        prefix, head, suffix = net.prefix(depth), net.exit_head(depth), net.suffix(depth)
        parts = nn.ModuleList([prefix, head, suffix])
        optimiser = torch.optim.SGD(parts.parameters(), RATE, **sgd)
        for x, y in batches(owner, 2, 3):
            optimiser.zero_grad()
            z = prefix(x)
            exit_loss = nn.functional.cross_entropy(head(z), y)
            server_loss = nn.functional.cross_entropy(suffix(z), y)
            total = share * exit_loss + (1 - share) * server_loss
            total.backward()  # type: ignore[no-untyped-call]  # torch
            optimiser.step()
        assert_close(ours, net, since=0)
        heads = read_weights(ours.exit_head(depth)), read_weights(head)
        for key, want in heads[1].items():
            torch.testing.assert_close(heads[0][key], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sgd", SGD.values(), ids=SGD)
@pytest.mark.parametrize("name", ["tiny", "har_cnn"])
@pytest.mark.parametrize("method", [fedavg, lambda: fedprox(0.0)], ids=["fedavg", "fedprox 0"])
def test_one_client_that_holds_all_is_an_ordinary_loop(
    method: Callable[[], Method], name: str, sgd: dict[str, Any]
) -> None:
    owner = client("a", name, 5)
    ours = train_split(method(), name, {"a": owner}, {"a": 1}, batch=5, epochs=3, **sgd)
    assert_same(ours, train_whole(name, batches(owner, 5, 3), **sgd))


@pytest.mark.parametrize("name", ["tiny", "har_cnn"])
def test_the_concatenated_step_is_the_step_on_the_joint_batch(name: str) -> None:
    clients = {"a": client("a", name, 2), "b": client("b", name, 4)}
    ours = train_split(minibatch(), name, clients, {"a": 1, "b": 1}, batch=4)

    [(x_a, y_a)], [(x_b, y_b)] = (batches(owner, 4, 1) for owner in clients.values())
    net = fresh(name).train()
    # each client's BatchNorm sees its own batch; the server's sees both
    z = torch.cat([net.prefix(1)(x_a), net.prefix(1)(x_b)]).detach()
    suffix = net.suffix(1)
    optimiser = torch.optim.SGD(suffix.parameters(), RATE)
    loss = nn.functional.cross_entropy(suffix(z), torch.cat([y_a, y_b]))
    loss.backward()  # type: ignore[no-untyped-call]  # torch
    optimiser.step()
    assert_close(ours, net, since=1)


def test_features_of_different_depths_meet_on_the_way_up() -> None:
    clients = {"a": client("a", "tiny", 3), "b": client("b", "tiny", 2)}
    ours = train_split(minibatch(), "tiny", clients, {"a": 3, "b": 1}, batch=4)

    # by hand: b enters at 1, a joins it at 3; the loss is the mean over the five samples
    [(x_a, y_a)], [(x_b, y_b)] = (batches(owner, 4, 1) for owner in clients.values())
    net = fresh("tiny").train()
    z_a, z_b = net.prefix(3)(x_a).detach(), net.prefix(1)(x_b).detach()
    logits_a, logits_b = net.suffix(3)(z_a), net.suffix(1)(z_b)
    optimiser = torch.optim.SGD(net.suffix(1).parameters(), RATE)
    total = nn.functional.cross_entropy(logits_a, y_a, reduction="sum")
    total = total + nn.functional.cross_entropy(logits_b, y_b, reduction="sum")
    (total / 5).backward()  # type: ignore[no-untyped-call]  # torch
    optimiser.step()
    assert_close(ours, net, since=3)


def assert_close(ours: Supernet, theirs: Supernet, *, since: int) -> None:
    """Sums over a batch in another order: float32 rounding, a few units in the last place."""
    got = read_weights(ours.segment(since, None))
    for key, want in read_weights(theirs.segment(since, None)).items():
        torch.testing.assert_close(got[key], want, rtol=1e-5, atol=1e-6)
