"""An ONNX file -> a graph that can be cut, or a sentence that says what stands in the way.

read       weights listed among the inputs become plain weights; one input is left
float32    what computes in float16 or float64 computes in float32
fix        open sizes but the batch's take those of `shape`
fold       onnxruntime computes what is constant, and folds BatchNorm into convolutions
freeze     what depends on shapes alone becomes a batch term
infer      every tensor gets its shape at batch 1
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from exporters.adopt.graph.float32 import as_float32, uses_half
from exporters.adopt.graph.fold import first_line, fold, run_zeros
from exporters.adopt.graph.graph import (
    IR_VERSION,
    BatchTerm,
    Graph,
    Spec,
    bodies,
    own_name,
    shown,
    term_weight,
    uses,
)
from exporters.adopt.graph.reading import read_fixed
from exporters.adopt.graph.steps import rounds
from exporters.errors import ExportError

Array = NDArray[Any]

# int8 needs operators per channel, which are of version 13
OPSET: Final = 13
# Weights above it are not folded: no BatchNorm is behind layers of that size. VGG-19 loads in 4 s
# in place of 23.
FOLDED_VALUES: Final = 1 << 22
HEAVY_VALUES: Final = 1 << 10
_DATA_DEPENDENT: Final = ("NonZero", "Compress", "Unique", "NonMaxSuppression", "TfIdfVectorizer")
# operators whose input at that place is a shape or a count
_SHAPED_BY: Final[Mapping[str, Sequence[int]]] = {
    "Reshape": (1,), "Expand": (1,), "ConstantOfShape": (0,), "Tile": (1,), "Range": (0, 1, 2),
    "Slice": (1, 2, 4), "TopK": (1,), "Resize": (2, 3), "Upsample": (1,), "Pad": (1,),
    "OneHot": (1,), "Split": (1,),
}  # fmt: skip
_PROBES: Final = (1, 2, 3)


def load_graph(
    path: Path,
    prefix: str,
    *,
    shape: Sequence[int] | None = None,
    output: str | None = None,
    opset: int | None = None,
) -> Graph:
    """The graph of an ONNX file.

    Args:
        prefix: put before every name in it, so that two graphs can be joined.
        shape: of one sample, for what the file leaves open.
        output: which of several outputs is meant.
        opset: version of the standard operators to convert to, where onnx can; by default one
            below 13 becomes 13.
    Raises: ExportError naming the tensor or node that stands in the way.
    """
    model = read_fixed(path, shape=shape, output=output)
    half = uses_half(model)
    as_float32(model)
    heavy = _detach(model, FOLDED_VALUES)
    model = fold(model, path.name)
    heavy += _detach(model, HEAVY_VALUES)
    model = _prefixed(_modern(model, opset), prefix)
    for weight in heavy:
        weight.name = prefix + weight.name
    graph = _freeze(model, {weight.name: weight for weight in heavy}, path.name)
    return replace(graph, half=half, quantised=rounds(graph.nodes))


def _prefixed(model: onnx.ModelProto, prefix: str) -> onnx.ModelProto:
    """The model with a prefix before every name.

    `onnx.compose.add_prefix` leaves the names of weights that a body of If, Loop or Scan uses.
    """
    named = onnx.ModelProto()
    named.CopyFrom(model)
    onnx.compose.add_prefix_graph(
        named.graph,
        prefix,
        inplace=True,
        name_map={name: prefix + name for name in _weights_in(named.graph)},
    )
    return named


def _weights_in(graph: onnx.GraphProto) -> Iterator[str]:
    """Names of the weights of a graph and of the bodies in it."""
    yield from (weight.name for weight in graph.initializer)
    for node in graph.node:
        for body in bodies(node):
            yield from _weights_in(body)


def _detach(model: onnx.ModelProto, most: int) -> list[TensorProto]:
    """Take weights of more than `most` values out of a model, and leave inputs of their types and
    shapes: what follows copies the model several times.
    """
    heavy: list[TensorProto] = []
    light: list[TensorProto] = []
    for weight in model.graph.initializer:
        large = math.prod(weight.dims) > most and weight.data_type == TensorProto.FLOAT
        (heavy if large else light).append(weight)
    del model.graph.initializer[:]
    model.graph.initializer.extend(light)
    model.graph.input.extend(
        helper.make_tensor_value_info(weight.name, weight.data_type, list(weight.dims))
        for weight in heavy
    )
    return heavy


def _modern(model: onnx.ModelProto, target: int | None) -> onnx.ModelProto:
    """The model at that operator version, or 13 and above, where onnx can convert it; else as it
    is.
    """
    for entry in model.opset_import:
        entry.domain = "" if entry.domain == "ai.onnx" else entry.domain
    versions = {opset.domain: opset.version for opset in model.opset_import}
    used = {node.domain for node in model.graph.node} - {"", "ai.onnx"}
    kept = [opset for opset in model.opset_import if opset.domain in used | {""}]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    own = versions.get("", OPSET)
    wanted = max(own, OPSET) if target is None else target
    if own == wanted or used:
        return model
    try:
        converted: onnx.ModelProto = onnx.version_converter.convert_version(model, wanted)
        converted.ir_version = max(converted.ir_version, IR_VERSION)
        onnx.checker.check_model(converted)
    except Exception:  # noqa: BLE001 - the converter raises its own kinds; int8 is left out then
        return model
    return converted


def _freeze(model: onnx.ModelProto, heavy: Mapping[str, TensorProto], name: str) -> Graph:
    graph = model.graph
    weights = {weight.name: weight for weight in graph.initializer} | dict(heavy)
    info, (result,) = graph.input[0], graph.output
    entry = info.name
    nodes: list[NodeProto] = []
    constant, shaped, data, derived = set(weights), set[str](), {entry}, set[str]()
    shaping: list[NodeProto] = []
    for node in graph.node:
        needs = set(uses(node))
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            weights[node.output[0]] = _named(node.attribute[0].t, node.output[0])
            constant |= set(node.output)
        elif node.op_type in ("Shape", "Size") or (needs & shaped and needs <= shaped | constant):
            shaped |= set(node.output)
            shaping.append(node)
        elif needs <= constant:
            if not needs:
                raise ExportError(
                    f"{name}: {shown(node)} draws values that depend on nothing; export the model"
                    " in evaluation mode"
                )
            nodes.append(node)
            constant |= set(node.output)
            derived |= set(node.output)
        else:
            nodes.append(node)
            data |= set(node.output)
    if result.name not in data:
        raise ExportError(
            f"{name}: output {own_name(result.name)!r} does not depend on input"
            f" {own_name(entry)!r}; export the model with the input that its scores depend on"
        )
    _refuse_data_dependent(nodes, data)
    fixed = not info.type.tensor_type.shape.dim[0].dim_param
    terms = _terms(model, heavy, sorted(shaped), fixed=fixed)
    # what grows with the batch (a class token for each sample) is made again in each part
    growing = [node for node in shaping if not set(node.output) <= terms.keys()]
    derived |= {made for node in growing for made in node.output}
    nodes = growing + nodes
    specs = _specs(model, heavy, nodes, terms)
    return Graph(
        nodes=tuple(nodes),
        weights=weights,
        terms=terms,
        input=entry,
        output=result.name,
        specs=specs,
        opsets={opset.domain: opset.version for opset in model.opset_import},
        batch_fixed=fixed,
        derived=frozenset(derived),
    )


def _refuse_data_dependent(nodes: Sequence[NodeProto], data: Collection[str]) -> None:
    for node in nodes:
        places = _SHAPED_BY.get(node.op_type, ())
        by = [node.input[at] for at in places if at < len(node.input) and node.input[at] in data]
        if node.op_type in _DATA_DEPENDENT or by:
            reason = f", by tensor {own_name(by[0])!r}" if by else ""
            raise ExportError(
                f"{shown(node)}: the shape of its output depends on the"
                f" data{reason}; a device needs fixed shapes, so export the model without it"
            )


def _terms(
    model: onnx.ModelProto, heavy: Mapping[str, TensorProto], wanted: Sequence[str], *, fixed: bool
) -> dict[str, BatchTerm]:
    """Values of these tensors at batch sizes 1, 2 and 3, as straight lines, where they are such;
    constants where the graph runs at batch 1 only.
    """
    if not wanted:
        return {}
    probe = _whole(model, heavy)
    values = [_values(probe, wanted, batch) for batch in ((1,) if fixed else _PROBES)]
    first = [np.asarray(value) for value in values[0] or []]
    if any(value is None for value in values[1:]) or fixed:
        return {n: BatchTerm(v, np.zeros_like(v)) for n, v in zip(wanted, first, strict=True)}
    triples = zip(wanted, *(value or [] for value in values), strict=True)
    lines = {name: _line(*triple) for name, *triple in triples}
    return {name: line for name, line in lines.items() if line is not None}


def _line(one: Array, two: Array, three: Array) -> BatchTerm | None:
    """The straight line through values at batch sizes 1, 2 and 3; None where they are on none."""
    if not one.shape == two.shape == three.shape:
        return None
    if one.dtype == np.bool_:  # truth values have no differences
        same = np.array_equal(one, two) and np.array_equal(two, three)
        return BatchTerm(one, np.zeros_like(one)) if same else None
    each = two - one
    return BatchTerm(one - each, each) if np.array_equal(three - two, each) else None


def _specs(
    model: onnx.ModelProto,
    heavy: Mapping[str, TensorProto],
    nodes: Sequence[NodeProto],
    terms: Mapping[str, BatchTerm],
) -> dict[str, Spec]:
    """Type and shape of every tensor at batch 1, by shape inference; what that does not know is
    run once.

    Raises: ExportError for a tensor that has no fixed shape.
    """
    single = onnx.ModelProto()
    single.CopyFrom(model)
    single.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    constants = [node for node in single.graph.node if node.op_type == "Constant"]
    del single.graph.node[:], single.graph.value_info[:]
    single.graph.node.extend([*constants, *nodes])
    single.graph.initializer.extend(term_weight(n, term.at(1)) for n, term in terms.items())
    kept = list(single.graph.output)
    for info in kept:
        info.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(single, data_prop=True)
    specs = {}
    graph = inferred.graph
    for info in (*graph.input, *graph.value_info, *graph.output):
        tensor = info.type.tensor_type
        sizes = tuple(dim.dim_value for dim in tensor.shape.dim)
        if tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim):
            specs[info.name] = Spec(tensor.elem_type, sizes)
    unknown = [n for node in nodes for n in node.output if n and n not in specs]
    if unknown:
        specs |= _specs_by_running(_whole(single, heavy), unknown)
    return specs


def _specs_by_running(model: onnx.ModelProto, unknown: Sequence[str]) -> dict[str, Spec]:
    return {
        name: Spec(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for name, value in zip(unknown, _values(model, unknown, 1) or [], strict=True)
        if isinstance(value, np.ndarray)
    }


def _values(model: onnx.ModelProto, names: Sequence[str], batch: int) -> list[Array] | None:
    """Values of tensors where the input is zeros; None where the model does not take that batch.

    Raises: ExportError where it does not run at batch 1.
    """
    del model.graph.output[:]
    # undefined types: onnxruntime fills them in
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    try:
        return run_zeros(model, batch)
    except Exception as err:  # onnxruntime's errors share no base class of their own
        raise ExportError(
            f"tensor {own_name(names[0])!r}: has no fixed shape, and the graph does not run on"
            f" zeros ({first_line(err)}); a device needs fixed shapes"
        ) from err


def _whole(model: onnx.ModelProto, heavy: Mapping[str, TensorProto]) -> onnx.ModelProto:
    """A copy of the model with its large weights back in their place."""
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    inputs = [info for info in whole.graph.input if info.name not in heavy]
    del whole.graph.input[:]
    whole.graph.input.extend(inputs)
    whole.graph.initializer.extend(heavy.values())
    return whole


def with_open_reshapes(graph: Graph) -> Graph:
    """The graph with constant `Reshape`s that take any batch, as far as that can be guessed: the
    first size of the target becomes what is left.
    """
    nodes, weights = [], dict(graph.weights)
    for node in graph.nodes:
        target = weights.get(node.input[1]) if node.op_type == "Reshape" else None
        spec = graph.specs.get(node.output[0])
        if target is None or spec is None or not spec.shape:
            nodes.append(node)
            continue
        sizes = numpy_helper.to_array(target)
        if sizes[0] in (0, -1) and not (sizes[0] == 0 and -1 in sizes[1:]):
            nodes.append(node)
            continue
        opened = NodeProto()
        opened.CopyFrom(node)
        opened.input[1] = f"{node.output[0]}/sizes"
        weights[opened.input[1]] = term_weight(
            opened.input[1], np.array([-1, *spec.shape[1:]], np.int64)
        )
        nodes.append(opened)
    return replace(graph, nodes=tuple(nodes), weights=weights)


def _named(tensor: TensorProto, name: str) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = name
    return copy
