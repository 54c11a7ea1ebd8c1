"""A graph that asks for a lot of memory where its input says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

NODES: tuple[tuple[str, list[str], str, dict[str, Any]], ...] = (
    ("ReduceMax", ["x"], "largest", {"keepdims": 0}),
    ("Greater", ["largest", "limit"], "above", {}),
    ("Where", ["above", "much", "little"], "count", {}),
    ("Reshape", ["count", "one"], "shape", {}),
    ("ConstantOfShape", ["shape"], "zeros", {}),
    ("ReduceSum", ["zeros"], "sum", {"keepdims": 0}),
    ("Mul", ["sum", "nothing"], "none", {}),
    ("Add", ["plain", "none"], "logits", {}),
)


def hungry(model: onnx.ModelProto, *, values: int = 500_000_000) -> bytes:
    """The same logits, and many zeros on the way to them if a value is above a million.

    Args:
        values: number of zeros, of 4 bytes each.
    """
    (last,) = (node for node in model.graph.node if "logits" in node.output)
    last.output[list(last.output).index("logits")] = "plain"
    constants = {
        "limit": np.float32(1e6), "much": np.int64(values), "little": np.int64(1),
        "one": np.array([1], np.int64), "nothing": np.float32(0),
    }  # fmt: skip
    for name, value in constants.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    for kind, inputs, output, more in NODES:
        model.graph.node.append(helper.make_node(kind, inputs, [output], **more))
    return bytes(model.SerializeToString())
