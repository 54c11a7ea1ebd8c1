from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from edge_sdk.nets import Supernet, build
from exporters import measure
from exporters.measure import measure_cost, median_latencies_us, median_latency_us
from profiles.cost import CostTable


@pytest.fixture(scope="module")
def costs(tiny: Supernet) -> CostTable:
    return measure_cost(tiny, np.zeros((1, 1, 8, 8), np.float32))


def test_counts_of_tiny_by_hand(costs: CostTable) -> None:
    stage = costs.stages[1]  # conv 3x3, 8 to 16 on 8x8, ReLU, pool to 4x4
    assert stage.parameters == 16 * 8 * 9 + 16
    assert stage.flops == 2 * 16 * 8 * 9 * 64
    assert stage.activation_bytes == 4 * 16 * 16
    assert stage.inference_peak_bytes == 4 * stage.parameters + 4 * (8 * 64 + 16 * 16)
    # kept: the ReLU's output, the pool's int64 indices, the output; stage 1 holds the input
    kept = 4 * 16 * 64 + 8 * 16 * 16 + 4 * 16 * 16
    assert stage.training_peak_bytes == 12 * stage.parameters + kept


def test_first_stage_also_keeps_its_normalised_input(costs: CostTable) -> None:
    stage = costs.stages[0]  # conv 3x3, 1 to 8 on 8x8, ReLU
    assert stage.parameters == 80
    assert stage.training_peak_bytes == 12 * 80 + 4 * 64 + 4 * 8 * 64


def test_attention_counts_its_two_matrix_products() -> None:
    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scaled_dot_product_attention(x, x, x)

    # 3 heads of width 8 over 5 tokens: scores and mixing, each 2 * 5 * 5 * 8 a head
    cost = measure._measure("attention", Attention(), torch.ones(2, 3, 5, 8), holds_input=False)
    assert cost.flops == 2 * (3 * 2 * 5 * 5 * 8)


def test_parameters_are_those_of_the_methods_page(costs: CostTable) -> None:
    prefixes = [sum(stage.parameters for stage in costs.stages[:depth]) for depth in range(1, 5)]
    assert prefixes == [80, 1248, 5888, 15136]
    assert [costs.exits[depth].parameters for depth in (1, 2, 3, 4)] == [330, 650, 1290, 1290]
    assert costs.suffix(0).parameters == 34282


def test_cnn8_may_also_be_cut_after_its_last_stage() -> None:
    costs = measure_cost(build("cnn8", seed=0), np.zeros((1, 1, 28, 28), np.uint8))
    assert costs.depths == (2, 3, 4, 5)
    assert costs.prefix(4).parameters == 387_840 + 23_050
    assert costs.suffix(4).parameters == 3_480_330


def test_network_with_batch_norm_is_left_as_it_was() -> None:
    net = build("resnet18", classes=10, input_shape=(1, 28, 28), seed=0)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    costs = measure_cost(net, np.ones((1, 1, 28, 28), np.uint8))
    assert all((before[name] == value).all() for name, value in net.state_dict().items())
    assert costs.prefix(2).parameters == 77_248 + 650


def test_latencies_are_positive_and_survive_json(costs: CostTable) -> None:
    assert all(part.latency_ms > 0 for part in (*costs.stages, *costs.exits.values(), costs.head))
    assert CostTable.from_dict(costs.to_dict()) == costs


def test_graphs_are_timed_side_by_side(tiny_tree: Any) -> None:
    graph = tiny_tree.bundle("d2").graphs["exit"]
    path = tiny_tree.path("d2")
    assert 1 < median_latency_us(path, graph) < 1e5
    first, second = median_latencies_us([path, path], graph)
    # the same file twice: they differ by noise alone, so 3 is generous
    assert 1 / 3 < first / second < 3
