"""An ONNX file as a model of one input of fixed sizes and one output."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import onnx
from onnx import TensorProto
from onnx.external_data_helper import load_external_data_for_model, uses_external_data

from exporters.adopt.graph.fold import first_line
from exporters.adopt.graph.graph import BATCH, IR_VERSION, every_node
from exporters.adopt.graph.reasons import no_layers
from exporters.adopt.graph.work import PRODUCTS
from exporters.errors import ExportError

GRAPH_BYTES_MAX: Final = 1_900_000_000  # protobuf ends at 2 GiB
_FLOATS: Final = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
_INPUT_TYPES: Final = (*_FLOATS, TensorProto.UINT8)
# operators of ai.onnx.ml that hold a whole model
_MODELS: Final = (
    "TreeEnsemble", "TreeEnsembleClassifier", "TreeEnsembleRegressor", "LinearClassifier",
    "LinearRegressor", "SVMClassifier", "SVMRegressor",
)  # fmt: skip


def read_fixed(
    path: Path, *, shape: Sequence[int] | None = None, output: str | None = None
) -> onnx.ModelProto:
    """The file with one input of fixed sizes, its batch axis as it is, and one output.

    Raises: ExportError, as `load_graph`.
    """
    model = read_model(path)
    _require_network(model)
    fix_input(model, shape, path.name)
    _keep_output(model, output, path.name)
    return model


def read_model(path: Path) -> onnx.ModelProto:
    """The file as it is, but that weights are no inputs.

    Raises: ExportError where there is no such file, or it is no ONNX model.
    """
    if not path.is_file():
        raise ExportError(f"{path}: expected an ONNX file there, found none")
    if path.stat().st_size > GRAPH_BYTES_MAX:
        raise ExportError(
            f"{path}: expected at most {GRAPH_BYTES_MAX} bytes, got {path.stat().st_size}"
        )
    try:
        model = onnx.load(path, load_external_data=False)
        missing = _missing_data(model, path.parent)
        if not missing:
            load_external_data_for_model(model, str(path.parent))
        known = bool(model.graph.node) and bool(model.opset_import)
    except Exception as err:  # the errors of protobuf and onnx share no base class
        raise ExportError(f"{path}: expected an ONNX model ({first_line(err)})") from err
    if missing:
        raise ExportError(
            f"{path}: its weights are in {missing[0]}, which is not there; put {missing[0]} beside"
            " it"
        )
    if not known:
        raise ExportError(f"{path}: expected an ONNX model, got a file without any node")
    held = {weight.name for weight in model.graph.initializer}
    inputs = [info for info in model.graph.input if info.name not in held]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    model.ir_version = max(model.ir_version, IR_VERSION)
    return model


def _missing_data(model: onnx.ModelProto, folder: Path) -> list[str]:
    """Files of weights that the model names and its folder lacks."""
    named = {
        entry.value
        for weight in model.graph.initializer
        if uses_external_data(weight)
        for entry in weight.external_data
        if entry.key == "location"
    }
    return sorted(name for name in named if not (folder / name).is_file())


def _require_network(model: onnx.ModelProto) -> None:
    """Refuse trees and linear models, whatever their inputs and outputs are."""
    nodes = list(every_node(model.graph))
    kinds = {node.op_type for node in nodes}
    if kinds & set(_MODELS) and not kinds & set(PRODUCTS):
        raise ExportError(no_layers(nodes))


def fix_input(model: onnx.ModelProto, shape: Sequence[int] | None, name: str) -> None:
    """Give the input the sizes of `shape` where it leaves them open, and open the batch axis.

    Raises: ExportError unless there is one input, of one sample's shape behind a batch axis.
    """
    inputs = list(model.graph.input)
    if len(inputs) != 1:
        names = ", ".join(repr(info.name) for info in inputs) or "none"
        raise ExportError(
            f"{name}: expected one input, got {len(inputs)}: {names}; a device sends one tensor,"
            " so make the others constants of the graph"
        )
    (info,) = inputs
    tensor = info.type.tensor_type
    if tensor.elem_type not in _INPUT_TYPES:
        kind = TensorProto.DataType.Name(tensor.elem_type).lower()
        raise ExportError(
            f"{name}: input {info.name!r}: expected floats or uint8, got {kind}; export the model"
            " with a float32 input"
        )
    dims = tensor.shape.dim
    sizes = [dim.dim_value if dim.dim_value > 0 else None for dim in dims]
    if not sizes and shape is not None:
        for _ in range(len(shape) + 1):
            dims.add()
        sizes = [None] * (len(shape) + 1)
    known = ", ".join("open" if size is None else str(size) for size in sizes) or "of no rank"
    if len(sizes) < 2 or sizes[0] not in (None, 1):
        raise ExportError(
            f"{name}: input {info.name!r}: expected a batch axis of size 1 or open, then one"
            f" sample's shape, got ({known}); export the model with an open batch axis"
        )
    given = [None] * (len(sizes) - 1) if shape is None else list(shape)
    fits = len(given) == len(sizes) - 1 and all(
        own is None or size in (None, own) for own, size in zip(sizes[1:], given, strict=True)
    )
    if not fits:
        wanted = ",".join(map(str, given))
        raise ExportError(
            f"{name}: --shape {wanted}: input {info.name!r} takes (batch, then {known} from its"
            " first axis on); give the sizes of one sample that fit it"
        )
    for dim, own, size in zip(dims[1:], sizes[1:], given, strict=True):
        if own is None and size is None:
            raise ExportError(
                f"{name}: input {info.name!r}: has shape ({known}), and a device needs fixed"
                " sizes; give those of one sample, --shape 3,224,224 say"
            )
        dim.dim_value = size if own is None else own
    if sizes[0] is None:
        dims[0].dim_param = BATCH


def _keep_output(model: onnx.ModelProto, output: str | None, name: str) -> None:
    """Leave one output: the one that is named, or the only one that can be scores of classes."""
    outputs = list(model.graph.output)
    names = ", ".join(repr(info.name) for info in outputs)
    if output is not None:
        kept = [info for info in outputs if info.name == output]
        if not kept:
            raise ExportError(f"{name}: --output {output}: expected one of {names}")
    else:
        kept = outputs if len(outputs) == 1 else [info for info in outputs if _is_scores(info)]
    maps = [info.name for info in kept or outputs if not info.type.HasField("tensor_type")]
    if maps and len(kept) < 2:
        raise ExportError(
            f"{name}: output {maps[0]!r}: expected a tensor of scores, got maps from class to score"
            " (ZipMap); export the model without them: skl2onnx with options={'zipmap': False},"
            " onnxmltools with zipmap=False"
        )
    if len(kept) != 1:
        raise ExportError(
            f"{name}: expected one output of scores, a class each, got {names}; name it with"
            " --output"
        )
    del model.graph.output[:]
    model.graph.output.extend(kept)


def _is_scores(info: onnx.ValueInfoProto) -> bool:
    tensor = info.type.tensor_type
    sizes = [dim.dim_value for dim in tensor.shape.dim]
    floats = tensor.elem_type in _FLOATS
    return floats and len(sizes) >= 2 and sizes[1] >= 2 and all(size == 1 for size in sizes[2:])
