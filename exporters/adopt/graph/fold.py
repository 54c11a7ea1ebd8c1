"""Use of onnxruntime to read a graph: it folds constants, and runs the graph on zeros."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import helper

from exporters.errors import ExportError

Array = NDArray[Any]


def fold(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model as onnxruntime's basic optimisation leaves it: standard operators, fewer nodes.

    Args:
        name: of the file, for messages.
    Raises: ExportError where onnxruntime refuses the model.
    """
    options = _options()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with TemporaryDirectory() as folder:
        source, target = Path(folder) / "given.onnx", Path(folder) / "folded.onnx"
        options.optimized_model_filepath = str(target)
        try:
            onnx.save(model, source)
            onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
            folded: onnx.ModelProto = onnx.load(target)
        except Exception as err:  # onnxruntime's errors share no base class of their own
            raise ExportError(f"{name}: onnxruntime refuses it: {first_line(err)}") from err
    return folded


def run_zeros(model: onnx.ModelProto, batch: int) -> list[Array] | None:
    """The outputs for zeros; None where the model does not take a batch above 1.

    Raises: what onnxruntime raises, at batch 1.
    """
    (info,) = model.graph.input
    tensor = info.type.tensor_type
    sizes = [batch, *(dim.dim_value for dim in tensor.shape.dim[1:])]
    zeros = np.zeros(sizes, helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    try:
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), _options(), providers=["CPUExecutionProvider"]
        )
        outputs: list[Array] = session.run(None, {info.name: zeros})
    except Exception:
        if batch == 1:
            raise
        return None
    return outputs


def first_line(err: BaseException) -> str:
    """The first line of an error, at most 300 characters."""
    return (str(err).strip().splitlines() or [type(err).__name__])[0][:300]


def _options() -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options
