"""Why a graph cannot be cut, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from onnx import NodeProto, TensorProto

from exporters.adopt.graph.answer import LOGITS
from exporters.adopt.graph.graph import Graph, own_name, shown
from exporters.adopt.graph.work import flops_of, layers_of

_BEGINNING: Final = "this graph cannot be cut: "
_WHOLE: Final = "so run this file whole, on the device or on the server"


def too_few_layers(graph: Graph) -> str | None:
    """Reason of a graph with one layer or none; None where it has more."""
    places = (place for place in layers_of(graph) if place >= graph.preamble)
    layers = [graph.nodes[place] for place in places if flops_of(graph, graph.nodes[place])]
    if len(layers) > 1:
        return None
    if layers:
        return _too_few(f"one layer with weights, {shown(layers[0])}, and nothing to part")
    nodes = graph.nodes[graph.preamble :]
    return no_layers(node for node in nodes if not node.output[0].startswith(LOGITS))


def no_layers(nodes: Iterable[NodeProto]) -> str:
    """Reason of a graph without any layer.

    Args:
        nodes: of it.
    """
    kinds = sorted({node.op_type for node in nodes})
    return _too_few(f"no layer with weights, only {', '.join(kinds)}")


def _too_few(found: str) -> str:
    return f"{_BEGINNING}it has {found}; adopt takes networks of two layers or more, {_WHOLE}"


def side_by_side(alive: Sequence[Collection[str]]) -> str:
    """Reason of a graph whose places all need several tensors; it names those of the narrowest.

    Args:
        alive: tensors that are needed behind each such place.
    """
    fewest = min(len(names) for names in alive)
    narrowest = sorted(map(own_name, next(names for names in alive if len(names) == fewest)))
    names = ", ".join(map(repr, narrowest[:3])) + (" ..." if len(narrowest) > 3 else "")
    return (
        f"{_BEGINNING}at each place before its last layer two or more tensors are needed together,"
        f" {names} where they are fewest, and a device sends one; join the branches of the model"
        " before its last layer, or adopt one of its branches"
    )


def no_floats(graph: Graph, name: str) -> str:
    """Reason of a graph whose tensors are not float32 where it could be cut.

    Args:
        name: of one of them.
    """
    spec = graph.specs.get(name)
    kind = "no tensor" if spec is None else TensorProto.DataType.Name(spec.elem_type).lower()
    found = f"{_BEGINNING}no tensor between its layers is float32, {own_name(name)!r} is {kind}; "
    if not graph.quantised:
        return found + "export the model so that its layers give float32"
    return found + (
        "adopt the float model, which adopt quantises by itself (--int8 auto), or quantise it in"
        " the form of QuantizeLinear and DequantizeLinear (QDQ)"
    )


def no_rows(graph: Graph, name: str) -> str:
    """Reason of a graph whose tensors have no row for each sample where it could be cut.

    Args:
        name: of one of them.
    """
    return (
        f"{_BEGINNING}no tensor between its layers has the samples of a batch on its first axis;"
        f" {own_name(name)!r} is {graph.specs[name].shape} for one sample; export the model with"
        " the batch first, behind each layer"
    )
