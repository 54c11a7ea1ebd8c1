"""Work of the parts of a graph: operations, weights and memory, counted from its nodes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, numpy_helper

from exporters.adopt.graph.graph import Graph, attribute_of, bodies, constants, uses

# operators that sum products, as `flops_of` counts them
PRODUCTS: Final = (
    "Conv", "DeformConv", "ConvInteger", "QLinearConv", "ConvTranspose", "Gemm", "QGemm", "MatMul",
    "MatMulInteger", "QLinearMatMul", "Einsum", "LSTM", "GRU", "RNN",
)  # fmt: skip
_STEPS_MOST: Final = 1_000_000  # of a Loop; a larger count means that a condition ends it


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
    """Places of the layers: nodes that sum products with weights of two axes or more, or take rows
    of a table. Scales, slopes and biases of any number of axes are none.
    """
    constant = constants(graph)
    return [
        place
        for place, node in enumerate(graph.nodes)
        if not set(node.output) <= constant
        and any(len(shape) > 1 for shape in _weights(graph, node, constant))
        and (flops_of(graph, node) or _is_other_layer(node, constant))
    ]


def _is_other_layer(node: NodeProto, constant: Collection[str]) -> bool:
    """Whether a node is a layer without operations that are counted: it takes rows of a table, or
    is of another domain, which may hold layers.
    """
    rows = node.op_type == "Gather" and node.input[0] in constant
    return rows or node.domain not in ("", "ai.onnx")


def flops_of(graph: Graph, node: NodeProto) -> int:
    """Operations of one node for one sample, a multiply-add counts 2; 0 where no products are
    summed (activations, pools).
    """
    out = _count(graph, node.output[0])
    # quantised operators that round their output have a scale and a zero point behind each tensor
    place = 3 if node.op_type in ("QLinearConv", "QLinearMatMul", "QGemm") else 1
    weight = _shape(graph, node.input[place]) if place < len(node.input) else ()
    flops = 0
    match node.op_type:
        case "Conv" | "DeformConv" | "ConvInteger" | "QLinearConv":
            flops = 2 * out * math.prod(weight[1:])
        case "ConvTranspose":  # (in, out / group, *kernel), per input value
            flops = 2 * _count(graph, node.input[0]) * math.prod(weight[1:])
        case "Gemm" | "QGemm":
            flops = 2 * out * (weight[1] if attribute_of(node, "transB", 0) else weight[0])
        case "MatMul" | "MatMulInteger" | "QLinearMatMul":
            flops = 2 * out * (_shape(graph, node.input[0]) or (0,))[-1]
        case "LSTM" | "GRU" | "RNN":
            steps = (_shape(graph, node.input[0]) or (0,))[0]
            flops = 2 * steps * sum(math.prod(_shape(graph, name)) for name in node.input[1:3])
        case "Einsum":
            flops = 2 * out * _summed(graph, node)
        case "If" | "Loop" | "Scan":
            flops = _steps(graph, node) * max(_body_flops(graph, body) for body in bodies(node))
    return flops


def _summed(graph: Graph, node: NodeProto) -> int:
    """Products in each sum of an Einsum; 0 where there are no sums."""
    if len(node.input) == 1:
        return 0
    given, arrow, made = attribute_of(node, "equation").decode().replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for letters, name in zip(given.split(","), node.input, strict=True):
        before, _, behind = letters.partition("...")
        shape = _shape(graph, name)
        sizes |= zip(before, shape, strict=False)  # an ellipsis stands for the other axes
        sizes |= zip(behind[::-1], shape[::-1], strict=False)
    kept = made if arrow else [letter for letter in sizes if given.count(letter) == 1]
    inner = [size for letter, size in sizes.items() if letter not in kept]
    return math.prod(inner) if inner else 0


def _steps(graph: Graph, node: NodeProto) -> int:
    """Number of runs of a body, as far as the graph tells it; else 1."""
    if node.op_type == "Scan":
        given = node.input[-attribute_of(node, "num_scan_inputs")]
        axis = attribute_of(node, "scan_input_axes", [0])[0]
        shape = _shape(graph, given)
        return int(shape[axis]) if shape else 1
    if node.op_type == "If":
        return 1
    (body,) = bodies(node)
    stacked = [(*_shape(graph, name), 0)[0] for name in node.output[len(body.input) - 2 :]]
    return next((steps for steps in (*stacked, _whole(graph, node.input[0])) if steps), 1)


def _whole(graph: Graph, name: str) -> int:
    """The value of a count of steps, where it does not depend on the data; else 0."""
    if name in graph.weights:
        value = numpy_helper.to_array(graph.weights[name])
    else:
        value = graph.terms[name].at(1) if name in graph.terms else np.zeros(1)
    steps = int(value.item())
    return steps if steps <= _STEPS_MOST else 0


def _body_flops(graph: Graph, body: onnx.GraphProto) -> int:
    """Operations of one run of a body: two for each weight, since its tensors have no shapes."""
    own = {weight.name: tuple(weight.dims) for weight in body.initializer}
    flops = 0
    for node in body.node:
        shapes = [own.get(name, ()) for name in node.input]
        shapes += [tuple(graph.weights[name].dims) for name in node.input if name in graph.weights]
        if node.op_type in PRODUCTS:
            flops += 2 * sum(math.prod(shape) for shape in shapes if len(shape) > 1)
        flops += max((_body_flops(graph, inner) for inner in bodies(node)), default=0)
    return flops


def _weights(graph: Graph, node: NodeProto, constant: Collection[str]) -> list[tuple[int, ...]]:
    """Shapes of the weights of a node, and of those of its bodies."""
    own = [tuple(weight.dims) for body in bodies(node) for weight in body.initializer]
    return own + [_shape(graph, name) for name in uses(node) if name in constant]


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
