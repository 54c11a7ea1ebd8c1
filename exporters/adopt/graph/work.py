"""Work of the parts of a graph: operations, weights and memory, counted from its nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from onnx import NodeProto, TensorProto

from exporters.adopt.graph.graph import Graph, attribute_of, constants, uses

# operators that `flops_of` counts
PRODUCTS: Final = (
    "Conv", "ConvInteger", "QLinearConv", "ConvTranspose", "Gemm", "QGemm", "MatMul",
    "MatMulInteger", "QLinearMatMul", "LSTM", "GRU", "RNN",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageWork:
    """Part of a graph between neighbouring cuts, for one sample.

    Attributes:
        flops: operations. parameters: weights.
        widest: values that one node reads and makes, at most. made: values that all of them make.
    """

    flops: int
    parameters: int
    widest: int
    made: int


def work_between(graph: Graph, places: Sequence[int]) -> list[StageWork]:
    """The work of each part of a graph between cuts behind the nodes at these places, one part more
    than there are places.
    """
    constant = constants(graph)
    stages, counted, start = [], set[str](), 0
    for end in (*(place + 1 for place in places), len(graph.nodes)):
        # what makes weights runs once, when a part is loaded
        nodes = [node for node in graph.nodes[start:end] if not set(node.output) <= constant]
        own = {name for node in nodes for name in uses(node) if name in constant} - counted
        counted |= own
        stages.append(
            StageWork(
                flops=sum(flops_of(graph, node) for node in nodes),
                parameters=sum(_parameters(graph, name) for name in own),
                widest=max((_held(graph, node) for node in nodes), default=0),
                made=sum(_count(graph, name) for node in nodes for name in node.output),
            )
        )
        start = end
    return stages


def layers_of(graph: Graph) -> list[int]:
    """Places of the nodes with weights of two axes or more: layers, and no scales or biases."""
    constant = constants(graph)
    return [
        place
        for place, node in enumerate(graph.nodes)
        if not set(node.output) <= constant
        and any(len(_shape(graph, name)) > 1 for name in uses(node) if name in constant)
    ]


def flops_of(graph: Graph, node: NodeProto) -> int:
    """Operations of one node for one sample, a multiply-add counts 2; 0 where no products are
    summed (activations, pools).
    """
    out = _count(graph, node.output[0])
    # quantised operators that round their output have a scale and a zero point behind each tensor
    place = 3 if node.op_type in ("QLinearConv", "QLinearMatMul", "QGemm") else 1
    weight = _shape(graph, node.input[place]) if place < len(node.input) else ()
    match node.op_type:
        case "Conv" | "ConvInteger" | "QLinearConv":
            return 2 * out * math.prod(weight[1:])
        case "ConvTranspose":  # (in, out / group, *kernel), per input value
            return 2 * _count(graph, node.input[0]) * math.prod(weight[1:])
        case "Gemm" | "QGemm":
            inner = weight[1] if attribute_of(node, "transB", 0) else weight[0]
            return 2 * out * inner
        case "MatMul" | "MatMulInteger" | "QLinearMatMul":
            return 2 * out * (_shape(graph, node.input[0]) or (0,))[-1]
        case "LSTM" | "GRU" | "RNN":
            steps = (_shape(graph, node.input[0]) or (0,))[0]
            return 2 * steps * sum(math.prod(_shape(graph, name)) for name in node.input[1:3])
    return 0


def _parameters(graph: Graph, name: str) -> int:
    held = graph.weights.get(name)
    kind = graph.specs[name].elem_type if held is None else held.data_type
    shape = _shape(graph, name)
    # whole numbers are weights of a quantised layer, or zero points
    numbers = kind in (TensorProto.INT8, TensorProto.UINT8) and len(shape) > 1
    return math.prod(shape) if numbers or kind == TensorProto.FLOAT else 0


def _held(graph: Graph, node: NodeProto) -> int:
    return sum(_count(graph, name) for name in {*uses(node), *node.output} if name in graph.specs)


def _shape(graph: Graph, name: str) -> tuple[int, ...]:
    if name in graph.weights:
        return tuple(graph.weights[name].dims)
    spec = graph.specs.get(name)
    return () if spec is None else spec.shape


def _count(graph: Graph, name: str) -> int:
    spec = graph.specs.get(name)
    return 0 if spec is None else math.prod(spec.shape)
