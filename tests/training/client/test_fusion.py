"""SuperSFL, Eq. 3-4 and the clip, against numbers worked out by hand and torch's own clip."""

from __future__ import annotations

import pytest
import torch

from edge_sdk.training.client.fusion import client_weight, fuse
from edge_sdk.training.protocol.client_part import ClientPart, Fusion
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training

L = 12


def plan(fusion: Fusion, depth: int = 3, exit_share: float = 0.5) -> Plan:
    return Plan(
        "vit_s",
        (3, 32, 32),
        10,
        (0.0,) * 3,
        (1.0,) * 3,
        depth,
        Training(0.1, 8),
        ClientPart(exit_head=True, fusion=fusion, exit_share=exit_share),
    )


@pytest.mark.parametrize(
    ("own", "server", "weight"),
    [
        (1.0, 1.0, 0.125),  # 3/12 * 1 / (1 + 1)
        (2.0, 1.0, 0.25 / 3),  # 1/2 / (1/2 + 1) = 1/3
        (1.0, 3.0, 0.1875),  # 1 / (1 + 1/3) = 3/4
        (0.0, 1.0, 0.25),  # a client without loss has all that its depth allows
        (1.0, 0.0, 0.0),  # and a server without loss has everything
        (0.0, 0.0, 0.125),
        (3e38, 3e38, 0.125),  # as large as float32 has it
        (1e-30, 1.0, 0.25),
        (3e38, 1e-30, 0.0),
    ],
)
def test_the_clients_weight_is_that_of_equation_3(own: float, server: float, weight: float) -> None:
    assert client_weight(plan("tpgf"), L, own, server) == pytest.approx(weight, rel=1e-7, abs=3e-9)


def test_at_every_depth_the_weight_is_the_literal_formula() -> None:
    eps = 1e-8
    for depth in range(1, 12):
        for own, server in ((0.7, 2.3), (2.3, 0.7), (1e-4, 5.0)):
            inverse_own, inverse_server = 1 / (own + eps), 1 / (server + eps)
            literal = depth / (depth + (L - depth)) * inverse_own / (inverse_own + inverse_server)
            assert client_weight(plan("tpgf", depth), L, own, server) == pytest.approx(literal)


@pytest.mark.parametrize(
    ("fusion", "weight"),
    [("no_loss", 0.25), ("no_depth", 0.75), ("equal", 0.5), ("fixed", 0.3), ("server", 0.0)],
)
def test_ablations_leave_out_their_term(fusion: Fusion, weight: float) -> None:
    # Lc = 1, Ls = 3: no_depth is 3 / (1 + 3)
    assert client_weight(plan(fusion, exit_share=0.3), L, 1.0, 3.0) == pytest.approx(weight)


def test_gradients_are_joined_parameter_by_parameter() -> None:
    own = [torch.tensor([1.0, 0.0]), torch.tensor([[2.0]])]
    server = [torch.tensor([0.0, 4.0]), torch.tensor([[6.0]])]

    joined = fuse(own, server, 0.25)

    assert [tensor.tolist() for tensor in joined] == [[0.25, 3.0], [[5.0]]]


@pytest.mark.parametrize(("share", "index"), [(0.0, 1), (1.0, 0)])
def test_a_weight_of_0_or_1_takes_one_side_to_the_last_bit(share: float, index: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sides = [[torch.randn(100, generator=generator) * 1e3] for _ in range(2)]
    assert torch.equal(fuse(sides[0], sides[1], share)[0], sides[index][0])
