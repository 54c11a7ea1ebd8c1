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
from exporters.adopt.graph.work import StageWork, layers_of, work_between
from exporters.errors import ExportError

# bounds of the share of the work that a device does; the best cut of each span is offered
SPANS: Final = (0.0, 0.08, 0.2, 0.4, 0.65, 0.97)
DEPTH_MAX: Final = 999  # of the names of bundles
MAP_AXES: Final = 3  # channels, height and width


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

    Raises: ExportError where there is none; it names the tensors that are needed side by side.
    """
    places = list(_single(graph))
    travelling = with_rows(graph, [name for _, name in places]) if places else ()
    places = [(place, name) for place, name in places if name in travelling]
    if not places:
        raise ExportError(
            f"this graph cannot be cut: from {graph.input!r} to {graph.output!r} two or more"
            f" tensors are always needed together, {_widest_pair(graph)} among them"
        )
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


def _single(graph: Graph) -> Iterator[tuple[int, str]]:
    """Place and name of each tensor that is alone alive behind a node."""
    last = {name: place for place, node in enumerate(graph.nodes) for name in uses(node)}
    last[graph.output] = len(graph.nodes)
    # behind the last layer, z is the answer itself
    layers = layers_of(graph)
    end = layers[-1] if layers else 0
    alive = {graph.input}
    for place, node in enumerate(graph.nodes[:end]):
        alive |= {name for name in node.output if last.get(name, -1) > place} - graph.derived
        alive = {name for name in alive if last.get(name, -1) > place}
        if len(alive) != 1 or place < graph.preamble or not set(node.output) - graph.derived:
            continue
        (name,) = alive
        if name in node.output and _can_travel(graph, name):
            yield place, name


def _can_travel(graph: Graph, name: str) -> bool:
    spec = graph.specs.get(name)
    return (
        spec is not None
        and spec.elem_type == TensorProto.FLOAT
        and len(spec.shape) >= 2
        and spec.shape[0] == 1
        and all(size > 0 for size in spec.shape)
        and len(spec.shape) <= 8
    )


def _widest_pair(graph: Graph) -> str:
    outputs = [node.output[0] for node in graph.nodes[:2]]
    return " and ".join(repr(name) for name in outputs)


def _listed(cuts: Sequence[Cut]) -> str:
    shown = [f"{cut.depth} {'x'.join(map(str, cut.shape))}" for cut in cuts[:12]]
    return ", ".join(shown) + (" ..." if len(cuts) > 12 else "")
