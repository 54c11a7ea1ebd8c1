"""Tensors whose first axis is that of the samples: only they can be sent one by one and computed
together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from exporters.adopt.graph.fold import run_zeros
from exporters.adopt.graph.graph import Graph, part
from exporters.adopt.graph.loading import with_open_reshapes

Shape = tuple[int, ...]

TRIED: Final = 2  # samples


def with_rows(graph: Graph, names: Sequence[str]) -> Collection[str]:
    """Tensors, among these, that have a row for each sample of a batch.

    The shape at batch 1 does not tell: the last state of an LSTM is (directions, batch, width).

    Returns: all of them where the graph takes no batch: it then runs sample by sample.
    """
    every = (*names, graph.output)
    wanted = {name: (TRIED, *graph.specs[name].sample) for name in every}
    for form in (graph, with_open_reshapes(graph)):
        found = _shapes(form, every)
        if found is not None and found[graph.output] == wanted[graph.output]:
            return {name for name in names if found[name] == wanted[name]}
    return names


def _shapes(graph: Graph, names: Sequence[str]) -> dict[str, Shape] | None:
    """Shapes of these tensors at a batch of 2; None where the graph does not take one."""
    outputs = {f"out{place}": name for place, name in enumerate(names)}
    model = part(graph, ("x", graph.input), outputs, batch=TRIED)
    for info in model.graph.output:  # they are what is asked for
        info.type.tensor_type.ClearField("shape")
    arrays = run_zeros(model, TRIED)
    if arrays is None:
        return None
    return {name: array.shape for name, array in zip(names, arrays, strict=True)}
