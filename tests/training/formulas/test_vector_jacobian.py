"""Gradients through a part of a network: torch's own bits, without what torch imports for them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from edge_sdk.nets import build
from edge_sdk.training.formulas.vector_jacobian import vector_jacobian

torch.set_num_threads(1)

# one round of methods whose clients and servers take gradients in every way that there is
ROUNDS = """
import sys, tempfile
from dataclasses import replace
from pathlib import Path
import torch
torch.set_num_threads(1)
from server.training.recipe.recipe import load_recipe
from server.training.simulation.run import simulate
for method in ("supersfl", "splitlpf", "harmony", "besplit"):
    recipe = load_recipe(Path(f"examples/recipes/{method}-digits.toml"))
    with tempfile.TemporaryDirectory() as folder:
        simulate(replace(recipe, train=replace(recipe.train, rounds=1)), Path(folder, "run"))
late = [name for name in ("sympy", "torch._dynamo") if name in sys.modules]
assert late == [], f"imported while a trainer waits: {late}"
"""


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_bits_are_those_of_torch(layout: torch.memory_format) -> None:
    generator = torch.Generator().manual_seed(0)
    net = build("cnn6", seed=0).stages[0]
    x = torch.randn(16, 1, 28, 28, generator=generator).to(memory_format=layout)
    parameters = list(net.parameters())
    z = net(x)
    for scale in (1.0, 1e-30, 1e30):
        vector = scale * torch.randn(z.shape, generator=generator).to(memory_format=layout)
        ours = vector_jacobian(z, parameters, vector, keep=True)
        theirs = torch.autograd.grad(z, parameters, vector, retain_graph=True)
        assert all(map(torch.equal, ours, theirs))


def test_features_that_are_not_finite_do_not_reach_the_gradients() -> None:
    weight = torch.tensor([2.0, 3.0], requires_grad=True)
    x = torch.tensor([torch.inf, 5.0])
    (gradient,) = vector_jacobian(weight * x.clamp(max=7.0) + x, [weight], torch.tensor([1.0, 4.0]))
    assert gradient.tolist() == [7.0, 20.0]  # by hand: vector * min(x, 7)


def test_an_input_without_a_part_in_the_outputs_has_no_gradient() -> None:
    one, other = (torch.ones(2, requires_grad=True) for _ in range(2))
    found = vector_jacobian(3 * one, [one, other], torch.tensor([1.0, 2.0]), allow_unused=True)
    assert found[0].tolist() == [3.0, 6.0]
    assert found[1] is None


def test_a_vector_of_another_shape_is_refused() -> None:
    z = torch.ones(2, 3, requires_grad=True) * 2
    with pytest.raises(ValueError, match=r"expected shape .*2, 3.*got .*3"):
        vector_jacobian(z, [z], torch.ones(3))


def test_no_training_imports_sympy_in_the_middle_of_a_step() -> None:
    """Its import takes seconds on a fast processor, and a step of a device has a deadline."""
    done = subprocess.run(
        [sys.executable, "-c", ROUNDS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
