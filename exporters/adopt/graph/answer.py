"""The end of a classifier: the tensor of its logits, one value a class.

Softmax, LogSoftmax      their input is the logits
Sigmoid                  its input; classes are then taken as excluding one another
Sigmoid of one value     0 and its input: a softmax of these two is 1 - p and p
quantised, and back      what stands in front of the pair, where that is one of these
(N, C, 1, 1)             flattened to (N, C)
(C) or () of one sample  a Squeeze without axes, or the first row: (N, C) and (N) again
anything else            as it is; `from_probabilities` where its rows turn out to sum to 1
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from exporters.adopt.graph.graph import Graph, Spec, attribute_of, own_name, shown, term_weight
from exporters.errors import ExportError

LOGITS: Final = "splitedge/logits"
_PASSING: Final = (
    "Identity", "Flatten", "Reshape", "Squeeze", "Dropout", "Cast", "QuantizeLinear",
    "DequantizeLinear",
)  # fmt: skip
_ENDINGS: Final = ("Softmax", "LogSoftmax", "Sigmoid")
# a sum of rounded probabilities is as exact as its steps
_SUM_TOLERANCE: Final = 1e-3
_ROUNDED_SUM_TOLERANCE: Final = 5e-2
_LEAST_PROBABILITY: Final = 1e-30


def with_logits(graph: Graph) -> Graph:
    """The graph with (batch, classes) float32 logits as its output.

    Raises: ExportError where its output is no score a class, naming the tensor.
    """
    result = repr(own_name(graph.output))
    spec = graph.specs.get(graph.output)
    if spec is None:
        raise ExportError(
            f"output {result}: has no fixed shape; a classifier's is (batch, classes)"
        )
    maker = _maker(graph, graph.output)
    if spec.elem_type not in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE):
        by = f", made by {shown(maker)}" if maker is not None else ""
        raise ExportError(
            f"output {result}: expected scores as floats, one a class, got whole numbers{by};"
            " export the model with its scores as output"
        )
    scores = _sizes(graph, graph.output)
    single = not scores
    if single and _is_sigmoid(graph):
        return replace(_of_two_classes(graph), step=_step(graph))
    if len(scores) != 1 or (len(spec.shape) > 1 and spec.shape[0] != 1):
        advice = (
            "of a model of two classes with one score p export two columns, 1 - p and p"
            if single
            else "adopt takes classifiers only"
        )
        raise ExportError(
            f"output {result}: expected a classifier's, (batch, classes) with 2 classes or more,"
            f" got shape {spec.shape}; {advice}"
        )
    return replace(_of_rows(graph, scores[0]), step=_step(graph))


def classes_of(graph: Graph) -> int:
    """Number of classes of a graph with logits."""
    return graph.specs[graph.output].shape[1]


def are_probabilities(outputs: NDArray[np.floating[Any]], *, rounded: bool = False) -> bool:
    """Whether rows look like probabilities: no value below 0, each row with sum 1.

    Args:
        rounded: whether a quantised file gave them.
    """
    tolerance = _ROUNDED_SUM_TOLERANCE if rounded else _SUM_TOLERANCE
    return bool((outputs >= 0).all() and np.allclose(outputs.sum(axis=1), 1.0, atol=tolerance))


def from_probabilities(graph: Graph) -> Graph:
    """The graph with the logarithm of its output: its nodes compute a softmax of their own."""
    least = term_weight(f"{LOGITS}/least", np.array(_LEAST_PROBABILITY, np.float32))
    nodes = [
        helper.make_node("Max", [graph.output, least.name], [f"{LOGITS}/above"]),
        helper.make_node("Log", [f"{LOGITS}/above"], [f"{LOGITS}/log"]),
    ]
    extended = _ending(graph, nodes, classes_of(graph))
    return replace(extended, weights={**graph.weights, least.name: least})


def _is_sigmoid(graph: Graph) -> bool:
    maker = _ending_of(graph)
    return maker is not None and maker.op_type == "Sigmoid"


def _of_rows(graph: Graph, classes: int) -> Graph:
    """The graph with (batch, classes) logits."""
    scored, flat = _before_softmax(graph), f"{LOGITS}/flat"
    row = term_weight(f"{LOGITS}/row", np.array([-1, classes], np.int64))
    flattened = helper.make_node("Flatten", [scored], [flat], axis=1)
    weights = graph.weights
    if len(graph.specs[scored].shape) == 1:  # no batch axis at batch 1
        flattened = helper.make_node("Reshape", [scored, row.name], [flat])
        weights = {**weights, row.name: row}
    cast = helper.make_node("Cast", [flat], [LOGITS], to=TensorProto.FLOAT)
    return replace(_ending(graph, [flattened, cast], classes), weights=weights)


def _of_two_classes(graph: Graph) -> Graph:
    """The graph with the logits of a sigmoid of one value: 0 and the sigmoid's input."""
    column = term_weight(f"{LOGITS}/column", np.array([-1, 1], np.int64))
    classes = term_weight(f"{LOGITS}/classes", np.array([0, 1], np.float32))
    names = [f"{LOGITS}/flat", f"{LOGITS}/score"]
    nodes = [
        helper.make_node("Reshape", [_before_softmax(graph), column.name], names[:1]),
        helper.make_node("Cast", names[:1], names[1:], to=TensorProto.FLOAT),
        helper.make_node("Mul", [names[1], classes.name], [LOGITS]),
    ]
    specs = dict.fromkeys(names, Spec(TensorProto.FLOAT, (1, 1)))
    ended = _ending(graph, nodes, 2)
    weights = {**graph.weights, column.name: column, classes.name: classes}
    return replace(ended, weights=weights, specs={**ended.specs, **specs})


def _before_softmax(graph: Graph) -> str:
    """The input of the softmax that ends the graph, else the output itself."""
    maker = _ending_of(graph)
    if maker is None or (maker.op_type != "Sigmoid" and not _over_classes(graph, maker)):
        return graph.output
    return str(maker.input[0])


def _ending_of(graph: Graph) -> NodeProto | None:
    """The softmax or sigmoid whose values the graph gives, in whatever form."""
    name = graph.output
    sizes = _sizes(graph, name)
    while True:
        maker = _maker(graph, name)
        if maker is None or maker.op_type in _ENDINGS:
            return maker
        if maker.op_type not in _PASSING or _sizes(graph, maker.input[0]) != sizes:
            return None
        name = maker.input[0]


def _step(graph: Graph) -> float:
    """The step of the values that the graph gives, where it rounds them; else 0."""
    maker = _maker(graph, graph.output)
    if maker is None or maker.op_type != "DequantizeLinear":
        return 0.0
    scale = graph.weights.get(maker.input[1])
    return 0.0 if scale is None else float(numpy_helper.to_array(scale).max())


def _over_classes(graph: Graph, node: NodeProto) -> bool:
    """Whether a softmax normalises over the one axis that is longer than 1."""
    shape = graph.specs[node.input[0]].shape
    axis = attribute_of(node, "axis", 1 if graph.opset < 13 else -1) % len(shape)
    # before version 13 everything from the axis on is one row
    span: Sequence[int] = shape[axis:] if graph.opset < 13 else shape[axis : axis + 1]
    return math.prod(span) == math.prod(shape)


def _sizes(graph: Graph, name: str) -> list[int]:
    spec = graph.specs.get(name)
    return [] if spec is None else [size for size in spec.shape if size != 1]


def _maker(graph: Graph, name: str) -> NodeProto | None:
    return next((node for node in graph.nodes if name in node.output), None)


def _ending(graph: Graph, nodes: Sequence[NodeProto], classes: int) -> Graph:
    made = {name: Spec(TensorProto.FLOAT, (1, classes)) for node in nodes for name in node.output}
    return replace(
        graph,
        nodes=(*graph.nodes, *nodes),
        specs={**graph.specs, **made},
        output=nodes[-1].output[0],
    )
