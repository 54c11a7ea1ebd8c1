"""A graph -> the models that devices and the server run, and proof that they are the whole.

Segments take any batch. Where a graph mixes samples once the batch grows (it was fixed to one
sample, and something in it relies on that), its segments hold it in a `Scan` over the batch: the
same answers, sample by sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from edge_sdk.errors import BundleError, InputError
from edge_sdk.session import Session
from exporters.adopt.graph.cuts import Cut
from exporters.adopt.graph.graph import BATCH, IR_VERSION, Addition, Graph, part, term_weight
from exporters.adopt.graph.steps import STEP_TOLERANCE, ranges_own_values
from exporters.errors import ParityError

Array = NDArray[Any]
Run = Callable[[Array], NDArray[np.float32]]

BATCHES: Final = (1, 2, 32)
TOLERANCE: Final = 1e-4  # of the largest value
HALF_TOLERANCE: Final = 2e-2  # against a file that rounds each of its tensors to float16
_DISTINCT: Final = 8


def device_model(graph: Graph, cut: Cut, head: Addition, logits: str) -> onnx.ModelProto:
    """Raw input `x` of one sample to `logits` of the exit head and `z`.

    Args:
        logits: the tensor that the head's nodes end in.
    """
    outputs = {"logits": logits, "z": cut.tensor}
    return part(graph, ("x", graph.input), outputs, batch=1, addition=head)


def segment_model(
    graph: Graph, entry: Cut | None, end: Cut | None, *, by_sample: bool
) -> onnx.ModelProto:
    """Part of a graph between two cuts, or from the input or to the logits, for any batch.

    Args:
        by_sample: run the samples of a batch one after the other.
    """
    given = ("x", graph.input) if entry is None else (f"z{entry.depth}", entry.tensor)
    outputs = {"logits": graph.output} if end is None else {f"z{end.depth}": end.tensor}
    if not by_sample:
        return part(graph, given, outputs, batch=None)
    return _scanned(part(graph, given, outputs, batch=1))


def open_session(model: onnx.ModelProto, *, threads: int = 1, quiet: bool = False) -> Session:
    """A session of a model that lies in memory.

    Args:
        quiet: for a probe, whose failures onnxruntime shall not print.
    Raises: BundleError where onnxruntime refuses it.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "part.onnx"
        onnx.save(model, path)
        return Session(path, threads=threads, quiet=quiet)


def takes_batches(graph: Graph, x: Array) -> bool:
    """Whether the graph gives for batches of 1, 2 and 32 what it gives sample by sample.

    Args:
        x: (n, ...) raw inputs; eight different ones are used at most.
    """
    # a batch that sets the steps of its samples mixes them
    tolerance = TOLERANCE if ranges_own_values(graph.nodes) else tolerance_of(graph)
    rows = x[: min(_DISTINCT, len(x))]
    outputs = {"logits": graph.output}
    single = open_session(part(graph, ("x", graph.input), outputs, batch=1), threads=2)
    answers = [single.run(None, {"x": rows[i : i + 1]})[0] for i in range(len(rows))]
    expected = np.concatenate(answers)
    try:
        model = part(graph, ("x", graph.input), outputs, batch=None)
        session = open_session(model, threads=2, quiet=True)
        for batch in BATCHES:
            picked = np.arange(batch) % len(rows)
            (given,) = session.run(None, {"x": np.ascontiguousarray(rows[picked])})
            if given.shape != (batch, *expected.shape[1:]):
                return False
            if not difference(expected[picked], given) <= tolerance:
                return False
    except (BundleError, InputError):  # onnxruntime refuses a batch that does not fit
        return False
    return True


def tolerance_of(graph: Graph) -> float:
    """Difference that two ways to compute a graph may have, as a share of the largest value."""
    return STEP_TOLERANCE if graph.quantised else TOLERANCE


def require_same(graph: Graph, model_input: str, original: Session, x: Array) -> float:
    """See that the graph which is cut answers as the file does, sample by sample.

    Args:
        model_input: the tensor behind the preprocessing, which the file takes.
        original: the file. Its output may be the softmax or the sigmoid of the graph's.
        x: (n, ...) raw inputs; eight are used at most.
    Returns: the largest difference as a share of the largest value.
    Raises: ParityError.
    """
    outputs = {"logits": graph.output, "given": model_input}
    session = open_session(part(graph, ("x", graph.input), outputs, batch=1))
    (name,) = original.inputs
    worst = 0.0
    for row in range(min(_DISTINCT, len(x))):
        logits, given = session.run(None, {"x": x[row : row + 1]})
        (answer,) = original.run(None, {name: given.astype(original.inputs[name])})
        expected = answer.reshape(1, -1).astype(np.float64)
        forms = _forms(logits.astype(np.float64))
        if expected.shape[1] == 1:  # of the second class of two
            forms = [form[:, 1:] for form in forms]
        gaps = [difference(expected, form, step=graph.step) for form in forms]
        worst = max(worst, min(gaps))
    tolerance = max(tolerance_of(graph), HALF_TOLERANCE if graph.half else 0)
    if not worst <= tolerance:
        raise ParityError(
            f"the graph that is cut: expected the answers of the file within {tolerance:g} of"
            f" their size, got {worst:.3g}; export the model again, in evaluation mode"
        )
    return worst


def _forms(logits: Array) -> list[Array]:
    """Logits, and what a model may give in their place."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    softmax = np.exp(shifted) / np.exp(shifted).sum(axis=1, keepdims=True)
    log_softmax = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    with np.errstate(over="ignore"):
        sigmoid = 1 / (1 + np.exp(-logits))
    return [logits, softmax, log_softmax, sigmoid]


def close(expected: Array, got: Array) -> bool:
    """Whether two arrays are equal within 1e-4 of the size of the first; NaN is not."""
    return bool(difference(expected, got) <= TOLERANCE)


def difference(expected: Array, got: Array, *, step: float = 0.0) -> float:
    """The largest absolute difference, as a share of the largest expected value (at least 1e-6);
    infinity where a value is not finite.

    Args:
        step: of the values, where they are rounded; a difference of one is none.
    """
    if not np.isfinite(expected).all() or not np.isfinite(got).all():
        return float("inf")
    size = max(float(np.abs(expected).max(initial=0.0)), 1e-6)
    gap = np.abs(expected.astype(np.float64) - got).max(initial=0.0)
    return max(float(gap) - step, 0.0) / size


def _scanned(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model of one sample as a `Scan` over the batch."""
    graph = model.graph
    (given,), (made,) = graph.input, graph.output
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=1)
    into, out_of = f"{given.name}/one", f"{made.name}/one"
    axes = term_weight("scan/axes", np.zeros(1, np.int64))
    extra = [axes.name] if opset >= 13 else []
    more: dict[str, Any] = {} if extra else {"axes": [0]}
    row = f"{given.name}/row"
    body = helper.make_graph(
        [
            helper.make_node("Unsqueeze", [into, *extra], [row], **more),
            *_renamed(graph.node, given.name, row),
            helper.make_node("Squeeze", [made.name, *extra], [out_of], **more),
        ],
        "sample",
        [_without_batch(given, into)],
        [_without_batch(made, out_of)],
    )
    every = f"{made.name}/all"
    scan = helper.make_node("Scan", [given.name], [every], body=body, num_scan_inputs=1)
    last = helper.make_node("Identity", [every], [made.name])
    for info in (given, made):
        info.type.tensor_type.shape.dim[0].dim_param = BATCH
    return helper.make_model(
        helper.make_graph([scan, last], "scan", [given], [made], [*graph.initializer, axes]),
        opset_imports=model.opset_import,
        ir_version=IR_VERSION,
    )


def _renamed(nodes: Sequence[onnx.NodeProto], old: str, new: str) -> list[onnx.NodeProto]:
    """The nodes, the first of which (`Identity` of the input) reads the new name."""
    first = onnx.NodeProto()
    first.CopyFrom(nodes[0])
    assert list(first.input) == [old]
    first.input[0] = new
    return [first, *nodes[1:]]


def _without_batch(info: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    tensor = info.type.tensor_type
    sizes = [dim.dim_value for dim in tensor.shape.dim[1:]]
    return helper.make_tensor_value_info(name, tensor.elem_type, sizes)
