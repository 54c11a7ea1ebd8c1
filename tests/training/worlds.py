"""A small fleet on the tiny network, and transports that look at messages or change them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from edge_sdk.nets import build
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import (
    Reply,
    Request,
    Weights,
    from_bytes,
    to_bytes,
)
from edge_sdk.training.protocol.training import Training
from server.training.core.server_state import ServerState
from server.training.methods.fedavg import fedavg
from server.training.methods.method import Method
from server.training.methods.splitfed import (
    minibatch,
    multi_exit,
    splitfed_v1,
    splitfed_v2,
    splitgp,
)
from server.training.methods.supersfl import supersfl
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundResult, RoundSettings
from server.training.rounds.transport import LocalTransport, Transport
from tests.training.plans import flat_plan

CLASSES, SHAPE = 3, (1, 8, 8)
SIZES = {"a": 9, "b": 4, "c": 14, "d": 6}
DEPTHS = {"a": 1, "b": 3, "c": 2, "d": 4}
# a client's name, what it was asked and what it replied, to what the server gets; None for nothing
Change = Callable[[str, Request, Reply], Reply | None]
PROFILE: dict[str, Any] = {
    "name": "pi",
    "arch": "aarch64",
    "cores": 4,
    "memory_total_bytes": 4_000_000_000,
    "memory_available_bytes": 3_000_000_000,
    "accelerator": None,
    "compute_score_gflops": 2.5,
    "link_latency_ms": None,
    "link_bandwidth_mbps": None,
}

# a recipe of seconds but for its method
SMALL_RUN = """
[data]
name = "digits"
clients = 4
train_max = 300
test_max = 100
[train]
backbone = "tiny"
rounds = 1
iterations = 6
batch = 16
learning_rate = 0.1
depths = [1, 3]
"""


class BytesTransport(LocalTransport):
    """Sends every message as the bytes it would travel as, both ways."""

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        arrived: Any = {name: from_bytes(to_bytes(request)) for name, request in requests.items()}
        replies = super().exchange(arrived, deadline_s)
        sent: Any = {name: from_bytes(to_bytes(reply)) for name, reply in replies.items()}
        return dict(sent)


class Meddler:
    """Changes replies on their way, or drops them."""

    def __init__(self, inner: Transport, change: Change) -> None:
        self._inner = inner
        self._change = change
        self.asked: list[tuple[str, str]] = []

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        self.asked += [(name, type(request).__name__) for name, request in requests.items()]
        replies = self._inner.exchange(requests, deadline_s)
        changed = {n: self._change(n, requests[n], reply) for n, reply in replies.items()}
        return {name: reply for name, reply in changed.items() if reply is not None}


class World:
    """A small fleet, by default on the tiny network.

    Args:
        labels: of clients that shall not draw theirs at random.
        numbers: of the plans.
    """

    def __init__(
        self,
        method: Method,
        names: str = "abcd",
        *,
        settings: RoundSettings | None = None,
        transport: Callable[[Mapping[str, TrainingClient]], Transport] = LocalTransport,
        depth: int | None = None,
        momentum: float = 0.0,
        decay: float = 1.0,
        backbone: str = "tiny",
        labels: Mapping[str, Sequence[int]] | None = None,
        **numbers: Any,
    ) -> None:
        self.clients = {name: client_of(name, (labels or {}).get(name)) for name in names}
        self.state = ServerState(
            build(backbone, classes=CLASSES, input_shape=SHAPE, seed=0),
            Training(0.05, 8, momentum=momentum),
            decay=decay,
        )
        self.plans = {
            name: flat_plan(
                **{
                    "backbone": backbone,
                    "input_shape": SHAPE,
                    "classes": CLASSES,
                    "mean": (0.0,),
                    "std": (1.0,),
                    "depth": depth or DEPTHS[name],
                    "learning_rate": 0.05,
                    "batch": 4,
                    "momentum": momentum,
                    "part": method.client,
                    **numbers,
                }
            )
            for name in names
        }
        self.loop = RoundLoop(method, self.plans, self.state, transport(self.clients), settings)
        self.before = self.state.read()

    def run(self, rounds: int = 2, seed: int = 0) -> list[RoundResult]:
        return [self.loop.run_round(number, seed) for number in range(1, rounds + 1)]

    def trained(self, rounds: int = 2) -> Weights:
        self.run(rounds)
        return self.state.read()


def client_of(name: str, labels: Sequence[int] | None = None) -> TrainingClient:
    """A client with data of its own; as many samples as labels, where these are given."""
    generator = np.random.default_rng(ord(name))
    size = SIZES[name] if labels is None else len(labels)
    x = generator.standard_normal((size, *SHAPE)).astype(np.float32)
    y = generator.integers(0, CLASSES, size) if labels is None else np.array(labels)
    return TrainingClient(name, x, y)


def meddling(change: Change) -> Callable[[Mapping[str, TrainingClient]], Meddler]:
    """A World's transport that changes replies on their way."""
    return lambda clients: Meddler(LocalTransport(clients), change)


def differences(one: Weights, other: Weights) -> list[str]:
    """The names of tensors that differ in any bit."""
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def assert_same(one: Weights, other: Weights) -> None:
    assert differences(one, other) == []


METHODS: dict[str, Callable[[], Method]] = {
    "supersfl": supersfl,
    "splitfed-v1": splitfed_v1,
    "splitfed-v2": splitfed_v2,
    "minibatch-sfl": minibatch,
    "fedavg": fedavg,
    "multi-exit": multi_exit,
    "splitgp": splitgp,
}
