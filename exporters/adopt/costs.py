"""Costs of an adopted model: operations and memory counted from the graph, time measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

from edge_sdk.learning.head import Head
from edge_sdk.manifest import GraphSpec, TensorSpec
from exporters.adopt.graph.cuts import Cut, Plan
from exporters.adopt.graph.graph import Graph, part
from exporters.adopt.heads import LOGITS, head_addition
from exporters.measure import median_latency_us
from profiles.cost import TRAINED_WEIGHT_BYTES, WEIGHT_BYTES, CostTable, StageCost
from profiles.device import probe


@dataclass(frozen=True, slots=True)
class Timed:
    """A published cut, its head, and one run of its exit graph in milliseconds."""

    cut: Cut
    head: Head
    exit_ms: float


def cost_table(graph: Graph, plan: Plan, timed: Sequence[Timed], raw: TensorSpec) -> CostTable:
    """The cost table of the model.

    Time is measured for the exit graphs that are published, for their heads alone, and for the
    whole model; between cuts it is shared out by operations.

    Args:
        timed: ascending by depth. raw: one raw input.
    """
    heads_ms = {each.cut.depth: _head_ms(graph, each) for each in timed}
    whole = part(graph, ("x", graph.input), {"logits": graph.output}, batch=1)
    whole_ms = _run_ms(whole, "x", raw)
    marks = [(each.cut.depth, each.exit_ms - heads_ms[each.cut.depth]) for each in timed]
    latencies = _shared_out(plan, [*marks, (len(plan.stages), whole_ms)])
    shapes = [*(cut.values for cut in plan.cuts), math.prod(graph.specs[graph.output].sample)]
    stages = tuple(
        StageCost(
            name=f"stage{depth}",
            parameters=work.parameters,
            flops=work.flops,
            activation_bytes=WEIGHT_BYTES * values,
            inference_peak_bytes=WEIGHT_BYTES * (work.parameters + work.widest),
            training_peak_bytes=TRAINED_WEIGHT_BYTES * work.parameters + WEIGHT_BYTES * work.made,
            latency_ms=latency,
        )
        for depth, (work, values, latency) in enumerate(
            zip(plan.stages, shapes, latencies, strict=True), start=1
        )
    )
    exits = {each.cut.depth: _exit_cost(each, heads_ms[each.cut.depth]) for each in timed}
    classes = shapes[-1]
    nothing = StageCost(
        "head", 0, 0, WEIGHT_BYTES * classes, WEIGHT_BYTES * classes, WEIGHT_BYTES * classes, 0.0
    )
    return CostTable(stages, exits, nothing, probe().core_score_gflops)


def _shared_out(plan: Plan, marks: Sequence[tuple[int, float]]) -> list[float]:
    """Milliseconds of each stage, from what the first so many of them take together."""
    latencies: list[float] = []
    before = 0.0
    for depth, until_ms in marks:
        stages = plan.stages[len(latencies) : depth]
        spent = max(0.0, until_ms - before)
        total = sum(stage.flops for stage in stages)
        for stage in stages:
            share = stage.flops / total if total else 1 / len(stages)
            latencies.append(spent * share)
        before = max(before, until_ms)
    return latencies


def _exit_cost(timed: Timed, latency_ms: float) -> StageCost:
    classes, features = timed.head.weight.shape
    parameters = timed.head.weight.size + timed.head.bias.size
    held = WEIGHT_BYTES * (timed.cut.values + features + classes)
    return StageCost(
        name=f"exit{timed.cut.depth}",
        parameters=parameters,
        flops=2 * timed.head.weight.size,
        activation_bytes=WEIGHT_BYTES * classes,
        inference_peak_bytes=WEIGHT_BYTES * parameters + held,
        training_peak_bytes=TRAINED_WEIGHT_BYTES * parameters + held,
        latency_ms=latency_ms,
    )


def _head_ms(graph: Graph, timed: Timed) -> float:
    cut = timed.cut
    model = part(
        graph,
        ("z", cut.tensor),
        {"logits": LOGITS},
        batch=1,
        addition=head_addition(graph, cut, timed.head),
    )
    return _run_ms(model, "z", TensorSpec("float32", cut.shape))


def _run_ms(model: onnx.ModelProto, name: str, sample: TensorSpec) -> float:
    inputs: Mapping[str, TensorSpec] = {name: sample}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "part.onnx"
        onnx.save(model, path)
        spec = GraphSpec(path.name, "fp32", dict(inputs), {})
        return median_latency_us(path, spec) / 1e3
