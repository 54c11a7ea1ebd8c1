"""A model that computes in float16 or float64, as one that computes in float32.

The wire, the codecs and the exit heads are of float32. Weights, constants and casts change their
type; values beyond float32 become its largest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import onnx
from onnx import AttributeProto, NodeProto, TensorProto, numpy_helper

OTHERS: Final = (TensorProto.FLOAT16, TensorProto.DOUBLE)
# attributes that name an element type
_TYPES: Final = ("to", "dtype")
_LARGEST: Final = float(np.finfo(np.float32).max)


def uses_half(model: onnx.ModelProto) -> bool:
    """Whether the model computes in float16: its own answers are then good to three digits."""
    kinds = {weight.data_type for weight in model.graph.initializer}
    kinds |= {info.type.tensor_type.elem_type for info in model.graph.input}
    # weights may lie in Constant nodes too
    attributes = (each for node in model.graph.node for each in node.attribute)
    kinds |= {each.t.data_type for each in attributes if each.type == AttributeProto.TENSOR}
    return TensorProto.FLOAT16 in kinds


def as_float32(model: onnx.ModelProto) -> None:
    """Change the model so that it computes in float32 where it computed in float16 or float64."""
    _change_graph(model.graph)


def _change_graph(graph: onnx.GraphProto) -> None:
    _change_tensors(graph.initializer)
    for info in (*graph.input, *graph.output, *graph.value_info):
        if info.type.tensor_type.elem_type in OTHERS:
            info.type.tensor_type.elem_type = TensorProto.FLOAT
    for node in graph.node:
        _change_node(node)


def _change_node(node: NodeProto) -> None:
    for attribute in node.attribute:
        match attribute.type:
            case AttributeProto.TENSOR:
                _change_tensors([attribute.t])
            case AttributeProto.TENSORS:
                _change_tensors(attribute.tensors)
            case AttributeProto.GRAPH:
                _change_graph(attribute.g)
            case AttributeProto.GRAPHS:
                for inner in attribute.graphs:
                    _change_graph(inner)
            case AttributeProto.INT if attribute.name in _TYPES and attribute.i in OTHERS:
                attribute.i = TensorProto.FLOAT


def _change_tensors(tensors: Iterable[TensorProto]) -> None:
    for tensor in tensors:
        if tensor.data_type in OTHERS:
            values = numpy_helper.to_array(tensor).astype(np.float64)
            # infinities stay: they mask
            finite = np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), values)
            tensor.CopyFrom(numpy_helper.from_array(finite.astype(np.float32), tensor.name))
