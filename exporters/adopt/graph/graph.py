"""An ONNX graph in the form in which it can be cut: nodes in order, weights, fixed shapes.

Everything that depends on the batch size alone (`Shape` of a tensor, and what is computed from it)
is a `BatchTerm`, a value that any part of the graph can work out from the batch of its own input.
So a cut has to carry the data alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from exporters.errors import ExportError

Array = NDArray[Any]

BATCH: Final = "batch"
IR_VERSION: Final = 8
# put before the names of a file: of the model, and of the preprocessing in front of it
MODEL: Final = "net/"
BEFORE: Final = "pre/"


@dataclass(frozen=True, slots=True)
class BatchTerm:
    """A tensor that depends on the batch size B alone: `fixed + per_sample * B`."""

    fixed: Array
    per_sample: Array

    @property
    def varies(self) -> bool:
        """Whether the value depends on the batch size at all."""
        return bool(np.any(self.per_sample))

    def at(self, batch: int) -> Array:
        """The value at one batch size."""
        value: Array = np.asarray(self.fixed + self.per_sample * batch, self.fixed.dtype)
        return value


@dataclass(frozen=True, slots=True)
class Spec:
    """ONNX element type and shape of a tensor at batch 1, the batch axis included."""

    elem_type: int
    shape: tuple[int, ...]

    @property
    def sample(self) -> tuple[int, ...]:
        """The shape without the batch axis."""
        return self.shape[1:]


@dataclass(frozen=True, slots=True)
class Graph:
    """One input, one output, no shape that depends on the data.

    Attributes:
        nodes: in topological order; those that compute on shapes alone are left out.
        weights: initialisers by name.
        terms: tensors that depend on the batch size alone, by name.
        input, output: names of tensors.
        specs: of every tensor that a node makes, and of the input.
        opsets: version by domain.
        preamble: nodes of the preprocessing, which come first in `nodes`.
        batch_fixed: whether the file fixes the batch size to 1.
        derived: tensors that nodes make from weights alone.
        half: whether the file computes in float16; this graph computes in float32.
        quantised: whether it rounds values to steps.
        step: of the values that the file gives, where they are rounded; else 0.
    """

    nodes: tuple[NodeProto, ...]
    weights: Mapping[str, TensorProto] = field(repr=False)
    terms: Mapping[str, BatchTerm] = field(repr=False)
    input: str
    output: str
    specs: Mapping[str, Spec] = field(repr=False)
    opsets: Mapping[str, int]
    preamble: int = 0
    batch_fixed: bool = False
    derived: frozenset[str] = frozenset()
    half: bool = False
    quantised: bool = False
    step: float = 0.0

    @property
    def opset(self) -> int:
        """Version of the standard operators."""
        return self.opsets.get("", 1)


@dataclass(frozen=True, slots=True)
class Addition:
    """Nodes and weights that a part gets in addition to its own, for example an exit head.

    Attributes:
        specs: of the tensors that are outputs.
    """

    nodes: Sequence[NodeProto] = ()
    weights: Sequence[TensorProto] = ()
    specs: Mapping[str, Spec] = field(default_factory=dict)


def uses(node: NodeProto) -> list[str]:
    """Names of the tensors that a node reads, those that its subgraphs take from outside too."""
    names = [name for name in node.input if name]
    for body in bodies(node):
        names += _outside(body)
    return names


def bodies(node: NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs inside a node: branches of If, bodies of Loop and Scan."""
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def every_node(graph: onnx.GraphProto) -> Iterator[NodeProto]:
    """The nodes of a graph and those of the bodies in it."""
    for node in graph.node:
        yield node
        for body in bodies(node):
            yield from every_node(body)


def constants(graph: Graph) -> frozenset[str]:
    """The weights, and the tensors that nodes make from weights alone.

    A quantised file has the values of a layer's weights among the second.
    """
    known = set(graph.weights)
    for node in graph.nodes:
        if set(uses(node)) <= known:
            known |= set(node.output)
    return frozenset(known)


def attribute_of(node: NodeProto, name: str, default: Any = None) -> Any:
    """The value of a node's attribute, or the default where it has none."""
    for attribute in node.attribute:
        if attribute.name == name:
            return helper.get_attribute_value(attribute)
    return default


def own_name(name: str) -> str:
    """The name of a tensor or node as its file has it, for messages."""
    prefix = next((each for each in (MODEL, BEFORE) if name.startswith(each)), "")
    return name.removeprefix(prefix)


def shown(node: NodeProto) -> str:
    """A node as messages name it: `node 'flat' (Reshape, makes 'f')`, by the names of its file."""
    made = own_name(next((name for name in node.output if name), "nothing"))
    name = own_name(node.name)
    named = f" {name!r}" if name else ""
    return f"node{named} ({node.op_type}, makes {made!r})"


def part(
    graph: Graph,
    given: tuple[str, str],
    outputs: Mapping[str, str],
    *,
    batch: int | None,
    addition: Addition | None = None,
) -> onnx.ModelProto:
    """Part of a graph between one tensor and others, as a model of its own.

    Args:
        given: public name of the part's input and the tensor of the graph that it stands for.
        outputs: tensor of the graph, or of the addition, by public name.
        batch: batch size to fix; None leaves the batch axis open.
        addition: nodes that are appended before the outputs are taken.
    Raises: ExportError where the outputs need more than the given tensor.
    """
    public, entry = given
    extra = addition or Addition()
    made = {name for node in extra.nodes for name in node.output}
    wanted = [name for name in outputs.values() if name not in made]
    wanted += [name for node in extra.nodes for name in uses(node) if name not in made]
    nodes, leaves = _needed(graph, wanted, entry)
    held = {weight.name for weight in extra.weights}
    strange = sorted(leaves - set(graph.weights) - set(graph.terms) - held - {entry})
    if strange:
        raise ExportError(
            f"part from {own_name(entry)!r}: expected it to need that tensor alone, it needs also"
            f" {', '.join(repr(own_name(name)) for name in strange[:3])}; cut elsewhere"
        )
    weights = [graph.weights[name] for name in sorted(leaves & set(graph.weights))]
    terms = {name: graph.terms[name] for name in sorted(leaves & set(graph.terms))}
    batch_nodes, batch_weights = _batch_terms(terms, public, batch)
    every = [
        helper.make_node("Identity", [public], [entry]),
        *batch_nodes,
        *nodes,
        *extra.nodes,
        *(helper.make_node("Identity", [inner], [name]) for name, inner in outputs.items()),
    ]
    specs = {**graph.specs, **extra.specs}
    spec = specs[entry]
    axis: int | str = BATCH if batch is None else batch
    return helper.make_model(
        helper.make_graph(
            [_numbered(node, place) for place, node in enumerate(every)],
            "part",
            [_value_info(public, spec, axis)],
            [_value_info(name, specs[inner], axis) for name, inner in outputs.items()],
            [*weights, *batch_weights, *extra.weights],
        ),
        opset_imports=[helper.make_opsetid(*pair) for pair in graph.opsets.items()],
        ir_version=IR_VERSION,
    )


def term_weight(name: str, value: Array) -> TensorProto:
    """An array as an initialiser."""
    return numpy_helper.from_array(np.ascontiguousarray(value), name)


def _needed(graph: Graph, wanted: Sequence[str], entry: str) -> tuple[list[NodeProto], set[str]]:
    """The nodes between the entry and the wanted tensors, and the names that no node makes."""
    missing, nodes, made = set(wanted) - {entry}, [], {entry}
    for node in reversed(graph.nodes):
        if missing & set(node.output):
            nodes.append(node)
            made |= set(node.output)
            missing |= set(uses(node)) - {entry}
            missing -= set(node.output)
    return nodes[::-1], (missing - made) | {entry}


def _batch_terms(
    terms: Mapping[str, BatchTerm], public: str, batch: int | None
) -> tuple[list[NodeProto], list[TensorProto]]:
    """Batch terms as weights at a fixed batch, else as nodes that start from the input's shape."""
    nodes: list[NodeProto] = []
    weights: list[TensorProto] = []
    for name, term in terms.items():
        if batch is not None or not term.varies:
            weights.append(term_weight(name, term.at(1 if batch is None else batch)))
            continue
        # as many axes as the term has: a scalar stays one
        place = np.zeros((1,) if term.fixed.ndim else (), np.int64)
        inner = [f"{name}/{step}" for step in ("shape", "place", "batch", "each", "fixed", "grown")]
        shape, at, size, each, fixed, grown = inner
        typed = f"{name}/typed"
        nodes += [
            helper.make_node("Shape", [public], [shape]),
            helper.make_node("Gather", [shape, at], [size], axis=0),
            helper.make_node(
                "Cast", [size], [typed], to=helper.np_dtype_to_tensor_dtype(term.fixed.dtype)
            ),
            helper.make_node("Mul", [typed, each], [grown]),
            helper.make_node("Add", [grown, fixed], [name]),
        ]
        weights += [
            term_weight(at, place),
            term_weight(each, np.asarray(term.per_sample, term.fixed.dtype)),
            term_weight(fixed, term.fixed),
        ]
    return nodes, weights


def _numbered(node: NodeProto, place: int) -> NodeProto:
    """A copy of a node under a name of its own: the quantiser goes by names."""
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.name = f"node{place}"
    return copy


def _value_info(name: str, spec: Spec, axis: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, spec.elem_type, [axis, *spec.sample])


def _outside(graph: onnx.GraphProto) -> Iterator[str]:
    own = {info.name for info in graph.input} | {weight.name for weight in graph.initializer}
    for node in graph.node:
        yield from (name for name in uses(node) if name not in own)
        own |= set(node.output)
    yield from (info.name for info in graph.output if info.name not in own)
