"""A trainer of HARMONY and its clients, in one process."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.training import Training
from server.training.core.server_state import ServerState
from server.training.methods.method import Method
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundResult, RoundSettings
from server.training.rounds.transport import LocalTransport

SEED, RATE, CLASSES, BATCH = 3, 0.05, 4, 5
NAMES = ("ada", "bob", "cyd")


def client(name: str, samples: int, classes: int = CLASSES, like: str = "") -> TrainingClient:
    """Samples that show their class, of the first `classes` classes."""
    generator = np.random.default_rng(crc32((like or name).encode()))
    y = generator.integers(0, classes, samples)
    x = generator.standard_normal((samples, 1, 8, 8)).astype(np.float32)
    x[np.arange(samples), 0, y] += 2
    return TrainingClient(name, x, y, secret=0)


def plan_for(method: Method, depth: int, **numbers: Any) -> Plan:
    return Plan(
        "tiny",
        (1, 8, 8),
        CLASSES,
        (0.0,),
        (1.0,),
        depth,
        Training(**{"learning_rate": RATE, "batch": BATCH, **numbers}),
        part=method.client,
        send_labels=method.labels == "sent",
        seed=SEED,
    )


@dataclass
class Trainer:
    """A round loop over a few clients."""

    method: Method
    depths: Mapping[str, int]
    clients: Mapping[str, TrainingClient]
    sgd: dict[str, Any] = field(default_factory=dict)
    transport: Any = LocalTransport
    numbers: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plans = {
            name: plan_for(self.method, self.depths[name], **self.sgd, **self.numbers)
            for name in self.clients
        }
        net = deepcopy(network_of(next(iter(plans.values()))))
        self.state = ServerState(net, Training(RATE, 8, **self.sgd), self.method.trunk)
        self.wire = self.transport(self.clients)
        self.loop = RoundLoop(self.method, plans, self.state, self.wire, RoundSettings(quorum=0.0))

    def run(self, rounds: int = 1) -> RoundResult:
        return [self.loop.run_round(number, SEED) for number in range(1, rounds + 1)][-1]


def first_batch(owner: TrainingClient, size: int = BATCH) -> NDArray[np.int64]:
    generator = np.random.default_rng([SEED, 1, crc32(owner.name.encode())])
    return generator.permutation(owner.samples)[:size]
