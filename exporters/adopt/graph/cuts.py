"""Cuts of a graph: their places, their costs, and those worth offering.

Walk the nodes in order with the set of tensors that are made and needed later: where one is left
alone, everything passes it, and the graph can be cut. Depth d is the d-th such tensor from the
input on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from onnx import TensorProto

from exporters.adopt.graph.batches import with_rows
from exporters.adopt.graph.graph import Graph, uses
from exporters.adopt.graph.reasons import no_floats, no_rows, side_by_side, too_few_layers
from exporters.adopt.graph.work import StageWork, layers_of, work_between
from exporters.errors import ExportError

# bounds of the share of the work that a device does; the best cut of each span is offered
SPANS: Final = (0.0, 0.08, 0.2, 0.4, 0.65, 0.97)
DEPTH_MAX: Final = 999  # of the names of bundles
MAP_AXES: Final = 3  # channels, height and width
AXES_MAX: Final = 8  # of a tensor on the wire


@dataclass(frozen=True, slots=True)
class Cut:
    """A tensor that everything passes.

    Attributes:
        depth: 1 for the first from the input on.
        tensor: its name in the graph. shape: of one sample.
        device_share: share of the operations that lie before it.
    """

    depth: int
    tensor: str
    shape: tuple[int, ...]
    device_share: float

    @property
    def values(self) -> int:
        """Number of values of one sample: bytes of z as int8."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Plan:
    """All cuts of a graph and the work of its stages, one more than there are cuts."""

    cuts: tuple[Cut, ...]
    stages: tuple[StageWork, ...]

    def at(self, depth: int) -> Cut:
        """The cut of that depth.

        Raises: ExportError naming the depths there are.
        """
        if not 1 <= depth <= len(self.cuts):
            raise ExportError(
                f"--depth {depth}: expected 1 to {len(self.cuts)}, the cuts of this graph:"
                f" {_listed(self.cuts)}"
            )
        return self.cuts[depth - 1]


@dataclass(frozen=True, slots=True)
class Offer:
    """The cuts to publish, and those that cost more to send than the input does."""

    cuts: tuple[Cut, ...]
    dear: tuple[Cut, ...]


def find_cuts(graph: Graph) -> Plan:
    """All cuts of a graph with logits.

    Raises: ExportError where there is none, saying why.
    """
    places = _places(graph)
    if len(places) > DEPTH_MAX:
        raise ExportError(f"expected at most {DEPTH_MAX} cuts, got {len(places)}")
    stages = work_between(graph, [place for place, _ in places])
    total = max(1, sum(stage.flops for stage in stages))
    cuts, before = [], 0
    for depth, (place, stage) in enumerate(zip(places, stages, strict=False), start=1):
        before += stage.flops
        name = place[1]
        cuts.append(Cut(depth, name, graph.specs[name].sample, before / total))
    return Plan(tuple(cuts), tuple(stages))


def choose_cuts(plan: Plan, x_bytes: int, depths: Sequence[int] | None) -> Offer:
    """The cuts to publish: those asked for, else the cheapest to send of each span of work.

    Args:
        x_bytes: of one raw input. A cut whose z as int8 takes more is left out where another
            remains, unless it was asked for.
    """
    if depths:
        return Offer(tuple(plan.at(depth) for depth in sorted(set(depths))), ())
    spans = [
        [cut for cut in plan.cuts if low < cut.device_share <= high]
        for low, high in pairwise(SPANS)
    ]
    best = [min(span, key=_cheapest) for span in spans if span]
    best = best or [min(plan.cuts, key=_cheapest)]
    fair = [cut for cut in best if cut.values <= x_bytes]
    kept = fair or [min(best, key=lambda cut: cut.values)]
    return Offer(tuple(kept), tuple(cut for cut in best if cut.values > x_bytes))


def _cheapest(cut: Cut) -> tuple[int, int, int]:
    """The last of several cuts of equal cost: behind the activation, before it is flattened.

    A map of channels whose channels are two axes for a while, to be shuffled, ranks as others do.
    """
    return cut.values, -min(len(cut.shape), MAP_AXES), -cut.depth


def _places(graph: Graph) -> list[tuple[int, str]]:
    """Places of the nodes behind which the graph can be cut, with the tensor that is sent there.

    Raises: ExportError where there is none.
    """
    layers = layers_of(graph)
    # behind the last layer, z is the answer itself
    end = layers[-1] if layers else 0
    alive = list(_alive(graph))[:end]
    alone = [
        (place, name)
        for place, (name, *others) in enumerate(alive)
        if not others and place >= graph.preamble and name in graph.nodes[place].output
    ]
    if not alone:
        several = [names for names in alive[graph.preamble :] if len(names) > 1]
        raise ExportError(too_few_layers(graph) or side_by_side(several))
    floats = [(place, name) for place, name in alone if _is_float(graph, name)]
    if not floats:
        raise ExportError(no_floats(graph, alone[-1][1]))
    first = [(place, name) for place, name in floats if _is_sample(graph, name)]
    rows = with_rows(graph, [name for _, name in first]) if first else ()
    if not rows:
        raise ExportError(no_rows(graph, floats[-1][1]))
    return [(place, name) for place, name in first if name in rows]


def _alive(graph: Graph) -> Iterator[set[str]]:
    """The tensors that are made and needed later, behind each node."""
    last = {name: place for place, node in enumerate(graph.nodes) for name in uses(node)}
    last[graph.output] = len(graph.nodes)
    alive = {graph.input}
    for place, node in enumerate(graph.nodes):
        known = alive | (set(node.output) - graph.derived)
        alive = {name for name in known if last.get(name, -1) > place}
        yield alive


def _is_float(graph: Graph, name: str) -> bool:
    spec = graph.specs.get(name)
    return spec is not None and spec.elem_type == TensorProto.FLOAT


def _is_sample(graph: Graph, name: str) -> bool:
    """Whether the shape at batch 1 can be that of a batch of one sample."""
    shape = graph.specs[name].shape
    return 2 <= len(shape) <= AXES_MAX and shape[0] == 1 and all(size > 0 for size in shape)


def _listed(cuts: Sequence[Cut]) -> str:
    shown = [f"{cut.depth} {'x'.join(map(str, cut.shape))}" for cut in cuts[:12]]
    return ", ".join(shown) + (" ..." if len(cuts) > 12 else "")
