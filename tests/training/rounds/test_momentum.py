"""Momentum lives within a round, on clients and on the server alike."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import nn

from edge_sdk.nets import build
from edge_sdk.training.protocol.weights import read_weights
from server.training.methods.method import Method
from server.training.methods.splitfed import minibatch, splitfed_v1, splitfed_v2
from tests.training.worlds import CLASSES, World

RATE, MOMENTUM, BATCH, SEED = 0.05, 0.9, 4, 0


@pytest.mark.parametrize("method", [splitfed_v1, splitfed_v2, minibatch])
def test_every_round_begins_both_halves_with_a_new_optimiser(
    method: Callable[[], Method],
) -> None:
    """One client and the server against torch's SGD on the whole network, over three rounds."""
    world = World(method(), "c", depth=2, momentum=MOMENTUM)
    ours = world.trained(3)

    owner = world.clients["c"]
    net = build("tiny", classes=CLASSES, seed=0).train().segment(0, None)
    for number in (1, 2, 3):
        optimiser = torch.optim.SGD(net.parameters(), RATE, MOMENTUM)
        order = np.random.default_rng([SEED, number, crc32(b"c")]).permutation(owner.samples)
        for at in range(0, owner.samples, BATCH):
            rows = order[at : at + BATCH]
            x, y = torch.from_numpy(owner.x[rows]), torch.from_numpy(owner.y[rows])
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()  # type: ignore[no-untyped-call]  # torch
            optimiser.step()
    for name, tensor in read_weights(net).items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)
