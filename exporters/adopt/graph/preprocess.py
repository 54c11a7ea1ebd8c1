"""Preprocessing of a raw input, folded into the graph, so that it travels with the model.

    x ── Cast ── (channels first) ── Resize ── (x - mean) / std ── (the model's layout) ── model

Each step is left out where nothing asks for it; with none, `x` is the model's own input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from onnx import NodeProto, TensorProto, helper

from edge_sdk.manifest import TensorSpec
from edge_sdk.training.data.pictures import PictureForm
from exporters.adopt.graph.graph import BEFORE, BatchTerm, Graph, Spec, term_weight
from exporters.adopt.graph.loading import load_graph
from exporters.errors import ExportError

Layout = Literal["nchw", "nhwc"]
InputType = Literal["uint8", "float32"]

CHANNELS: Final = (1, 3)
_RESIZE_OPSET: Final = 11


@dataclass(frozen=True, slots=True)
class Preprocessing:
    """Form of raw inputs, and the way to the model's input.

    Attributes:
        input: dtype of x; that of the model by default.
        mean, std: one a channel, or one for all, in the unit of x (pixels are 0..255).
        layout: of x; that of the model by default. A window shows no channels by its shape; `nchw`
            is (channels, steps). The number of means tells which axis of the model's they are; else
            the model has the layout that x has not.
        resize: height and width of x; those of the model by default.
        graph: a graph of the user's own from x to the model's input, in place of all others.
    """

    input: InputType | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    layout: Layout | None = None
    resize: tuple[int, int] | None = None
    graph: Path | None = None

    def __post_init__(self) -> None:
        if bool(self.mean) != bool(self.std):
            raise ExportError("preprocessing: expected --mean and --std together, got one of them")
        if not all(map(math.isfinite, self.mean)) or not all(0 < v < math.inf for v in self.std):
            raise ExportError(
                f"preprocessing: expected finite means and deviations above 0, got {self.mean} and"
                f" {self.std}"
            )
        others = (self.input, self.mean, self.layout, self.resize)
        if self.graph is not None and any(others):
            raise ExportError(
                "preprocessing: expected --preprocess FILE or the options --input, --mean, --std,"
                " --layout, --resize, got both"
            )


def with_preprocessing(graph: Graph, options: Preprocessing) -> Graph:
    """The graph with the preprocessing in front; its input is the raw x.

    Raises: ExportError where the options do not fit the model's input.
    """
    if options.graph is not None:
        return _joined(load_graph(options.graph, BEFORE, opset=graph.opset), graph, options.graph)
    given = graph.specs[graph.input]
    if len(given.sample) == 2:
        layout = _window_layout(given.sample, options)
    else:
        layout = layout_of(given.sample)
    wanted = options.layout or layout
    if options.resize is not None and len(given.sample) != 3:
        raise ExportError(
            f"preprocessing: --resize is for pictures; the model's input is {given.sample}"
        )
    changes_form = wanted != layout or options.resize is not None
    if layout is None and (changes_form or len(options.mean) > 1):
        raise ExportError(
            "preprocessing: --layout and a mean for each channel are for pictures and for windows"
            f" of two axes, --resize is for pictures; the model's input is {given.sample}, not of 1"
            " or 3 channels"
        )
    if given.elem_type == TensorProto.UINT8 and (options.mean or options.resize):
        raise ExportError(
            "preprocessing: the model takes uint8, so its own graph normalises; leave out --mean,"
            " --std and --resize"
        )
    chain = _Chain(graph, layout, wanted, options)
    return chain.joined() if chain.nodes else graph


def for_windows(options: Preprocessing, own: Sequence[int], sample: Sequence[int]) -> Preprocessing:
    """The options without a layout where windows of the data have the model's own shape: there is
    nothing to turn.

    Args:
        own: shape of the model's input. sample: of one sample of the data.
    """
    fits = len(own) == 2 and tuple(sample) == tuple(own) and own[0] != own[1]
    return replace(options, layout=None) if fits else options


def raw_input(graph: Graph) -> TensorSpec:
    """Dtype and shape of one raw input."""
    spec = graph.specs[graph.input]
    dtype = str(helper.tensor_dtype_to_np_dtype(spec.elem_type))
    return TensorSpec(dtype, spec.sample)


def layout_of(shape: Sequence[int]) -> Layout | None:
    """Axis of a picture's channels, of size 1 or 3; None if neither end has that size."""
    if len(shape) != 3:
        return None
    if shape[0] in CHANNELS:
        return "nchw"
    return "nhwc" if shape[2] in CHANNELS else None


def picture_form(shape: Sequence[int]) -> PictureForm | None:
    """The form of pictures that a raw input of that shape takes; None where it takes none."""
    match layout_of(shape):
        case "nchw":
            return PictureForm(shape[0], shape[1], shape[2])
        case "nhwc":
            return PictureForm(shape[2], shape[0], shape[1])
    return None


def _window_layout(shape: Sequence[int], options: Preprocessing) -> Layout | None:
    """Layout of a model's window: its channels are as many as the means, else where x has none.

    Raises: ExportError where the means fit neither axis, or both and no layout is given.
    """
    count = max(len(options.mean), len(options.std))
    layouts: tuple[Layout, Layout] = ("nchw", "nhwc")
    fits = [layout for layout, size in zip(layouts, shape, strict=True) if size == count]
    if count > 1 and not fits:
        raise ExportError(
            f"preprocessing: --mean and --std: expected 1 number, or one a channel: {shape[0]} or"
            f" {shape[1]} for windows of {tuple(shape)}, got {count}"
        )
    if count > 1 and len(fits) == 1:
        return fits[0]
    if count > 1 and options.layout is None:
        raise ExportError(
            f"preprocessing: --mean and --std: windows of {tuple(shape)} do not show which axis is"
            " that of the channels; scale x in a graph of your own, --preprocess FILE"
        )
    return next((each for each in layouts if options.layout not in (None, each)), None)


class _Chain:
    """Builds the nodes from x to the model's input, in the order of the module's drawing."""

    def __init__(
        self, graph: Graph, layout: Layout | None, wanted: Layout | None, options: Preprocessing
    ) -> None:
        self.nodes: list[NodeProto] = []
        self._weights: list[TensorProto] = []
        self._terms: dict[str, BatchTerm] = {}
        self._specs: dict[str, Spec] = {}
        self._graph = graph
        model = graph.specs[graph.input]
        channels_first = model.sample if layout != "nhwc" else _first(model.sample)
        sizes = channels_first
        if options.resize is not None:
            sizes = (channels_first[0], *options.resize)
        shape = sizes if wanted != "nhwc" else _last(sizes)
        rank = len(shape)
        kind = model.elem_type
        if options.input is not None:
            kind = TensorProto.UINT8 if options.input == "uint8" else TensorProto.FLOAT
        self._input = Spec(kind, (1, *shape))
        self._name = f"{BEFORE}x"
        self._shape: tuple[int, ...] = shape
        if kind != TensorProto.FLOAT and (kind != model.elem_type or options.mean):
            self._add("Cast", "float", to=TensorProto.FLOAT)
        moves = wanted == "nhwc" and (options.resize is not None or layout != wanted)
        if moves:
            self._add("Transpose", "first", perm=[0, rank, *range(1, rank)], shape=sizes)
        if options.resize is not None and sizes != channels_first:
            self._resize(channels_first)
        if options.mean:
            at_end = layout == "nhwc" and not moves and wanted == "nhwc"
            self._normalise(options, channels_first[0], at_end=at_end)
        if layout == "nhwc" and (moves or wanted == "nchw"):
            back = [0, *range(2, rank + 1), 1]
            self._add("Transpose", "last", perm=back, shape=_last(channels_first))
        if kind == TensorProto.FLOAT and model.elem_type == TensorProto.UINT8:
            self._add("Cast", "bytes", to=TensorProto.UINT8)

    def joined(self) -> Graph:
        """The model's graph behind the nodes."""
        graph = self._graph
        last = helper.make_node("Identity", [self._name], [graph.input])
        nodes = [*self.nodes, last]
        return replace(
            graph,
            nodes=(*nodes, *graph.nodes),
            weights={**graph.weights, **{weight.name: weight for weight in self._weights}},
            terms={**graph.terms, **self._terms},
            specs={**graph.specs, **self._specs, f"{BEFORE}x": self._input},
            input=f"{BEFORE}x",
            preamble=len(nodes),
        )

    def _resize(self, target: tuple[int, ...]) -> None:
        if self._graph.opset < _RESIZE_OPSET:
            raise ExportError(
                f"preprocessing: --resize needs operator version {_RESIZE_OPSET}, the model has"
                f" {self._graph.opset}; export it again, or resize before"
            )
        name = f"{BEFORE}sizes"
        fixed = np.array([0, *target], np.int64)
        each = np.array([1, *(0 for _ in target)], np.int64)
        self._terms[name] = BatchTerm(fixed, each)
        mode: dict[str, Any] = {"mode": "linear", "coordinate_transformation_mode": "half_pixel"}
        self._add("Resize", "resized", "", "", name, shape=target, **mode)

    def _normalise(self, options: Preprocessing, channels: int, *, at_end: bool) -> None:
        for kind, name, values in (("Sub", "mean", options.mean), ("Div", "std", options.std)):
            if len(values) not in (1, channels):
                raise ExportError(
                    f"preprocessing: --{name}: expected 1 or {channels} numbers, one a channel,"
                    f" got {len(values)}"
                )
            form: tuple[int, ...] = ()
            if len(values) > 1:
                form = (len(values),) if at_end else (len(values), *(1 for _ in self._shape[1:]))
            array = np.array(values, np.float32).reshape(form)
            self._weights.append(term_weight(f"{BEFORE}{name}", array))
            self._add(kind, f"{name}_out", f"{BEFORE}{name}")

    def _add(
        self,
        kind: str,
        made: str,
        *more: str,
        shape: Sequence[int] | None = None,
        **attributes: Any,
    ) -> None:
        name = f"{BEFORE}{made}"
        self.nodes.append(helper.make_node(kind, [self._name, *more], [name], **attributes))
        self._shape = self._shape if shape is None else tuple(shape)
        self._specs[name] = Spec(TensorProto.FLOAT, (1, *self._shape))
        self._name = name


def _joined(before: Graph, graph: Graph, path: Path) -> Graph:
    """A preprocessing graph of the user's own in front of the model's."""
    made, taken = before.specs.get(before.output), graph.specs[graph.input]
    if made != taken:
        got = "nothing known" if made is None else str(made.sample)
        raise ExportError(
            f"{path}: expected its output to be the model's input, {taken.sample} of the same"
            f" type, got {got}"
        )
    if before.opsets.get("") != graph.opsets.get(""):
        raise ExportError(
            f"{path}: has operator version {before.opset}, the model {graph.opset}, and onnx"
            " cannot convert it; export both with one version"
        )
    nodes = [*before.nodes, helper.make_node("Identity", [before.output], [graph.input])]
    return replace(
        graph,
        nodes=(*nodes, *graph.nodes),
        weights={**graph.weights, **before.weights},
        terms={**graph.terms, **before.terms},
        specs={**graph.specs, **before.specs},
        opsets={**before.opsets, **graph.opsets},
        input=before.input,
        preamble=len(nodes),
        derived=graph.derived | before.derived,
    )


def _first(shape: Sequence[int]) -> tuple[int, ...]:
    return (shape[-1], *shape[:-1])


def _last(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[1:], shape[0])
