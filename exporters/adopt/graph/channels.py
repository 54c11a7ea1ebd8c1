"""The axis of a tensor's channels: behind the batch around convolutions, the last one around
products of matrices, and where transposes and reshapes carry it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from onnx import NodeProto

from exporters.adopt.graph.graph import Graph, attribute_of, uses
from exporters.adopt.graph.preprocess import layout_of

VOLUME_AXES: Final = 5  # batch, channels, depth, height and width
_FIRST: Final = (
    "Conv", "ConvInteger", "QLinearConv", "ConvTranspose", "MaxPool", "AveragePool",
    "GlobalMaxPool", "GlobalAveragePool", "BatchNormalization", "InstanceNormalization",
    "GroupNormalization", "DepthToSpace", "SpaceToDepth",
)  # fmt: skip
_LAST: Final = (
    "MatMul", "MatMulInteger", "QLinearMatMul", "Gemm", "QGemm", "Einsum", "LSTM", "GRU", "RNN",
    "Loop", "Scan",
)  # fmt: skip
_RESHAPES: Final = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


def channel_axis(graph: Graph, name: str) -> int:
    """The axis of a tensor's channels, the batch axis counted: the widest where they are parted.

    Before the first layer it is 1, unless the input is a picture with its channels last.
    """
    makers = {made: node for node in graph.nodes for made in node.output}
    order = {made: place for place, made in enumerate(makers)}
    shape = graph.specs[name].shape
    walk: list[tuple[NodeProto, Sequence[int], Sequence[int]]] = []
    while name in makers and not _decides(graph, makers[name]):
        node, made = makers[name], graph.specs[name].shape
        sources = _data_of(graph, node)
        if not sources:
            return 1
        alike = [each for each in sources if len(graph.specs[each].shape) == len(made)]
        # the one made first is what a block adds to: its own layers may mix another axis
        name = min(alike or sources, key=lambda each: order.get(each, len(order)))
        walk.append((node, graph.specs[name].shape, made))
    last = len(graph.specs[name].shape) - 1
    if name in makers:
        axes = [1 if makers[name].op_type in _FIRST else last]
    elif layout_of(graph.specs[name].sample) == "nhwc":
        axes = [last]
    else:
        norms = [at for at, step in enumerate(walk) if step[0].op_type == "LayerNormalization"]
        if not norms:
            return 1
        axes = [len(walk[norms[-1]][2]) - 1]  # it normalises over the channels
        del walk[norms[-1] :]
    for node, before, behind in reversed(walk):
        axes = _carried(node, axes, before, behind)
    return max(axes, key=lambda axis: (shape[axis], axis))


def is_volume(graph: Graph, name: str) -> bool:
    """Whether a tensor of five axes comes from operators on volumes, batch and channels first;
    a map whose channels are split in two to be shuffled does not.
    """
    makers = {made: node for node in graph.nodes for made in node.output}
    while name in makers:
        node = makers[name]
        if node.op_type in _FIRST:
            return True
        inputs = _data_of(graph, node)
        name = next((each for each in inputs if len(graph.specs[each].shape) == VOLUME_AXES), "")
    return False


def _decides(graph: Graph, node: NodeProto) -> bool:
    """Whether a node makes channels: a layer, or the rows of a table (an embedding)."""
    rows = node.input[0] if node.op_type == "Gather" else ""
    table = rows in graph.weights or rows in graph.derived
    return table or node.op_type in (*_FIRST, *_LAST)


def _data_of(graph: Graph, node: NodeProto) -> list[str]:
    """The tensors that a node reads and that depend on the data."""
    return [name for name in uses(node) if name in graph.specs and name not in graph.derived]


def _carried(
    node: NodeProto, axes: Sequence[int], before: Sequence[int], behind: Sequence[int]
) -> list[int]:
    """Axes of the channels of what a node makes, from those of what it reads."""
    last = len(behind) - 1
    if node.op_type in _RESHAPES:
        return _reshaped(axes, before, behind)
    if node.op_type == "Transpose":
        order: Mapping[int, int] = dict(enumerate(attribute_of(node, "perm", range(last, -1, -1))))
        return [axis for axis, origin in order.items() if origin in axes] or [last]
    if len(before) == len(behind):
        return list(axes)
    return [last if len(before) - 1 in axes else min(1, last)]


def _reshaped(axes: Sequence[int], before: Sequence[int], behind: Sequence[int]) -> list[int]:
    """The axes that hold channels alone behind a reshape; else those that hold some.

    An axis steps through memory from the product of the sizes behind it to that and its own size.
    """
    spans = [(math.prod(before[axis + 1 :]), math.prod(before[axis:])) for axis in axes]

    def channels(axis: int) -> float:
        low, high = math.prod(behind[axis + 1 :]), math.prod(behind[axis:])
        return math.prod(max(1, min(high, end) / max(low, start)) for start, end in spans)

    some = [axis for axis in range(1, len(behind)) if channels(axis) > 1]
    alone = [axis for axis in some if channels(axis) == behind[axis]]
    # the one channel of a group norm of one group is the whole map
    return alone or some or [1 if list(axes) == [1] and len(before) > 2 else len(behind) - 1]
