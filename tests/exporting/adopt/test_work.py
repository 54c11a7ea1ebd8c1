"""Layers and operations of an adopted graph, as exporters.adopt.graph.work counts them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from exporters.adopt.classifier import load_classifier
from exporters.adopt.graph.cuts import choose_cuts, find_cuts
from exporters.adopt.graph.work import flops_of
from tests.exporting.adopt.conftest import dynamically_quantised, recurrence

Make = Callable[..., Path]


def test_operations_are_counted_by_hand(small_onnx: Path) -> None:
    stages = find_cuts(load_classifier(small_onnx).graph).stages
    convolutions = 2 * (8 * 9 * 64 + 16 * 8 * 9 * 16 + 32 * 16 * 9 * 16)
    assert sum(stage.flops for stage in stages) == convolutions + 2 * (128 * 64 + 64 * 10)
    weights = 8 * 9 + 8 + 16 * 72 + 16 + 32 * 144 + 32 + 128 * 64 + 64 + 640 + 10
    assert sum(stage.parameters for stage in stages) == weights


def test_scales_of_any_form_are_no_layers(make_graph: Make) -> None:
    """Slopes and scales of two axes behind the last product: what they make is the answer."""
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(64, 12)).astype(np.float32),
        "v": random.normal(size=(12, 10)).astype(np.float32),
        "slopes": np.full((1, 12), 0.1, np.float32),
        "scale": random.normal(size=(1, 10)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Flatten", ["x"], ["f"]),
        helper.make_node("MatMul", ["f", "w"], ["a"]),
        helper.make_node("PRelu", ["a", "slopes"], ["h"]),
        helper.make_node("MatMul", ["h", "v"], ["scores"]),
        helper.make_node("Mul", ["scores", "scale"], ["y"]),
    ]
    plan = find_cuts(load_classifier(make_graph(nodes, weights=weights)).graph)
    assert [cut.tensor for cut in plan.cuts] == ["net/f", "net/a", "net/h"]


@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_each_step_of_a_body_is_counted(make_graph: Make, kind: str) -> None:
    nodes, weights = recurrence(kind)
    path = make_graph(nodes, weights=weights, given=("n", 8, 8))
    first, *rest = (stage.flops for stage in find_cuts(load_classifier(path).graph).stages)
    # 8 steps of two products with 8 x 8 weights each
    assert first == 8 * 2 * (8 * 8 + 8 * 8)
    assert sum(rest) == 2 * (8 * 16 + 16 * 10)


@pytest.mark.parametrize(
    "equation", ["bihw,hwk->bik", "...hw,hwk->...k", "bihw, hwk -> bik", "bihw,hwk"]
)
def test_einsum_counts_as_the_product_that_it_is(make_graph: Make, equation: str) -> None:
    random = np.random.default_rng(0)
    weights = {
        "w": random.normal(size=(8, 8, 12)).astype(np.float32),
        "v": random.normal(size=(12, 10)).astype(np.float32),
    }
    nodes = [
        helper.make_node("Einsum", ["x", "w"], ["e"], equation=equation),
        helper.make_node("Relu", ["e"], ["h"]),
        helper.make_node("Flatten", ["h"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    stages = find_cuts(load_classifier(make_graph(nodes, weights=weights)).graph).stages
    assert sum(stage.flops for stage in stages) == 2 * (64 * 12 + 12 * 10)


def test_layers_of_whole_numbers_count_as_those_of_floats(make_graph: Make) -> None:
    nodes, weights = dynamically_quantised()
    plan = find_cuts(load_classifier(make_graph(nodes, weights=weights)).graph)
    layers = 64 * 16, 16 * 64, 64 * 10
    assert sum(stage.flops for stage in plan.stages) == 2 * sum(layers)
    # and one scale for all of them
    assert sum(stage.parameters for stage in plan.stages) == sum(layers) + 1
    early, late = choose_cuts(plan, 64 * 4, None).cuts
    assert (early.shape, late.shape) == ((16,), (64,))
    assert early.device_share == layers[0] / sum(layers)


def test_convolutions_of_whole_numbers_count_as_those_of_floats(make_graph: Make) -> None:
    """Each operator with its form in floats, which is counted by hand above."""
    weights = {
        "s": np.array(0.1, np.float32),
        "z": np.array(0, np.uint8),
        "w": np.ones((4, 1, 3, 3), np.uint8),
        "m": np.ones((256, 10), np.uint8),
        "flat": np.array([-1, 256]),
    }
    pads = [1, 1, 1, 1]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("ConvInteger", ["q", "w"], ["i"], pads=pads),
        helper.make_node("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        helper.make_node("QLinearConv", ["q", "s", "z", "w", "s", "z", "s", "z"], ["c"], pads=pads),
        helper.make_node("DequantizeLinear", ["c", "s", "z"], ["d"]),
        helper.make_node("Add", ["f", "d"], ["a"]),
        helper.make_node("QuantizeLinear", ["a", "s", "z"], ["b"]),
        helper.make_node("Reshape", ["b", "flat"], ["r"]),
        helper.make_node("QLinearMatMul", ["r", "s", "z", "m", "s", "z", "s", "z"], ["p"]),
        helper.make_node("DequantizeLinear", ["p", "s", "z"], ["y"]),
    ]
    graph = load_classifier(make_graph(nodes, weights=weights)).graph
    counted = {node.op_type: flops_of(graph, node) for node in graph.nodes}
    convolution = 2 * 4 * 9 * 64
    assert {name: flops for name, flops in counted.items() if flops} == {
        "ConvInteger": convolution,
        "QLinearConv": convolution,
        "QLinearMatMul": 2 * 256 * 10,
    }
