"""Our Adam against torch's, bit for bit, and what no training may import."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from edge_sdk.training.formulas.adam import Adam

torch.set_num_threads(1)

# A device that trains by every optimiser that a plan may ask for, and a trainer's network.
TRAINING = """
import sys
import numpy as np
import torch
from edge_sdk.training.device.warmup import warm_up
from edge_sdk.training.formulas.adam import Adam
from edge_sdk.training.formulas.sgd import Sgd
import edge_sdk.training.client.fine_tuning, edge_sdk.training.client.inversion_guard
import edge_sdk.training.protocol.update_codec, server.training.core.server_state
from edge_sdk.nets import build

warm_up()
assert build("tiny").shape_at(2) == (16, 4, 4)
layer = torch.nn.Linear(3, 2)
for optimiser in (Sgd(layer.parameters(), 0.1, 0.9), Adam(layer.parameters(), 0.1)):
    loss = layer(torch.ones(4, 3)).sum()
    optimiser.step(torch.autograd.grad(loss, optimiser.parameters))
assert "torch._dynamo" not in sys.modules, "torch's compiler was imported: 72 MB"
"""


def test_steps_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (5,), (2, 3, 3, 3)]
    ours = [torch.randn(shape, generator=generator) for shape in shapes]
    theirs = [nn.Parameter(tensor.clone()) for tensor in ours]
    mine, reference = Adam(ours, 0.05), torch.optim.Adam(theirs, 0.05)
    for _ in range(20):
        gradients = [torch.randn(shape, generator=generator) for shape in shapes]
        given = [gradient.clone() for gradient in gradients]
        mine.step(gradients)
        assert all(map(torch.equal, gradients, given))
        for parameter, gradient in zip(theirs, gradients, strict=True):
            parameter.grad = gradient
        reference.step()
        assert all(map(torch.equal, ours, theirs))


def test_a_training_does_not_load_torchs_compiler() -> None:
    subprocess.run([sys.executable, "-P", "-c", TRAINING], check=True, timeout=120)
