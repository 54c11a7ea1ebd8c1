"""The rest of a graph behind a cut, in torch, for its gradients: onnxruntime has none.

A bottleneck learns by them (exporters.offloads). All else runs by onnxruntime, and torch's logits
are compared with onnxruntime's before anything learns.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor

from exporters.adopt.graph.cuts import Cut
from exporters.adopt.graph.graph import Graph, part
from exporters.adopt.graph.operators import OPERATORS, Attributes
from exporters.adopt.graph.split import close, open_session, segment_model
from exporters.errors import ExportError

Floats = NDArray[np.float32]

COMPARED: Final = 32  # samples
STANDARD: Final = ("", "ai.onnx")  # domains of operators


class TorchSuffix:
    """z (B, ...) to logits (B, N), differentiable.

    Args:
        by_sample: whether the samples of a batch are run one after the other.
    Raises: ExportError naming an operator that torch is not taught here.
    """

    def __init__(self, graph: Graph, cut: Cut, *, by_sample: bool) -> None:
        given = (f"z{cut.depth}", cut.tensor)
        outputs = {"logits": graph.output}
        model = part(graph, given, outputs, batch=1 if by_sample else None)
        self._by_sample = by_sample
        (self._input,) = (info.name for info in model.graph.input)
        opset = max(each.version for each in model.opset_import if each.domain in STANDARD)
        self._nodes = [(node, Attributes(node, opset)) for node in model.graph.node]
        self._weights = {each.name: _tensor(each) for each in model.graph.initializer}
        unknown = sorted(
            {
                node.op_type
                for node, _ in self._nodes
                if node.op_type not in OPERATORS or node.domain not in STANDARD
            }
        )
        if unknown:
            raise ExportError(f"no gradients of the operator {', '.join(unknown)}")

    def __call__(self, z: Tensor) -> Tensor:
        """The logits of features."""
        if self._by_sample:
            return torch.cat([self._run(z[row : row + 1]) for row in range(len(z))])
        return self._run(z)

    def _run(self, z: Tensor) -> Tensor:
        values: dict[str, Tensor] = {**self._weights, self._input: z}
        for node, attributes in self._nodes:
            given = [values[name] if name else None for name in node.input]
            made = OPERATORS[node.op_type](attributes, *given)
            names = [name for name in node.output if name]
            tensors = [made] if isinstance(made, Tensor) else made
            values.update(zip(names, tensors, strict=False))
        return values["logits"]


def torch_suffix(graph: Graph, cut: Cut, z: Floats, *, by_sample: bool) -> TorchSuffix:
    """The rest of a graph behind a cut, once it was seen that it gives onnxruntime's logits.

    Args:
        z: (n, ...) features; 32 are compared.
    Raises: ExportError saying why there is none.
    """
    suffix = TorchSuffix(graph, cut, by_sample=by_sample)
    some = np.ascontiguousarray(z[:COMPARED])
    session = open_session(segment_model(graph, cut, None, by_sample=by_sample))
    (expected,) = session.run(None, {f"z{cut.depth}": some})
    try:
        with torch.no_grad():
            got = suffix(torch.from_numpy(some)).numpy()
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as err:
        # a form of an operator that is not taught here: there are too many to list
        raise ExportError(f"torch does not run the graph ({str(err).splitlines()[0]})") from err
    if got.shape != expected.shape or not close(expected, got):
        raise ExportError("torch gives other logits than onnxruntime")
    return suffix


def _tensor(weight: onnx.TensorProto) -> Tensor:
    return torch.from_numpy(np.array(numpy_helper.to_array(weight)))
