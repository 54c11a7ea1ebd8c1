"""The files of an adopted model: segments, bundles and costs, written as any export writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from edge_sdk.learning.head import Head
from edge_sdk.manifest import (
    BundleManifest,
    GateSpec,
    GraphSpec,
    ModelManifest,
    SegmentSpec,
    TensorSpec,
)
from edge_sdk.session import Session
from edge_sdk.training.data.load import Part
from exporters.adopt.classifier import Classifier
from exporters.adopt.costs import Timed, cost_table
from exporters.adopt.graph.cuts import Cut, Plan
from exporters.adopt.graph.graph import Graph
from exporters.adopt.graph.split import device_model, open_session, segment_model, tolerance_of
from exporters.adopt.heads import BIAS, LOGITS, WEIGHT, head_addition
from exporters.adopt.inputs import as_raw
from exporters.adopt.narrowing import bottleneck_at
from exporters.adopt.operating import Judged, deployed_curve, figures_at
from exporters.adopt.settings import Settings
from exporters.bundle import BundleSource, HeldOut, spread_rows
from exporters.graphs import make_overridable, save, strip
from exporters.model import write_bundles, write_tree
from exporters.offloads.bottleneck import write_decoder
from exporters.parity import AUTO, SAMPLES, SMALLEST, require_segments
from exporters.quantize import CALIBRATION_SAMPLES

Array = NDArray[Any]
Floats = NDArray[np.float32]
Progress = Callable[[str], None]

BACKBONE: Final = "onnx"
# Operations that checks may take per depth: 1,000 samples of a ResNet-18 at 32 x 32.
CHECKED_FLOPS: Final = 1_100_000_000_000
CHECKED_LEAST: Final = 32
SEGMENT_SAMPLES: Final = 160  # batches of 1, 2, 4 ... 64, and what is left
_BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class Exit:
    """A cut to publish.

    Attributes:
        head: trained.
        judged: exit and whole model on the samples that chose the gate's threshold.
        logits: of the head for the held-out part.
        judged_x: inputs of those samples.
    """

    cut: Cut
    head: Head
    judged: Judged
    gate: GateSpec
    logits: Floats
    judged_x: Array


def write_model(
    classifier: Classifier,
    plan: Plan,
    exits: Sequence[Exit],
    settings: Settings,
    *,
    train: Part,
    held_out: tuple[Part, Floats],
    calibration: Array | None,
    progress: Progress,
) -> ModelManifest:
    """Write `{out}/{name}/{version}`.

    Args:
        train: samples that bottlenecks learn from.
        held_out: samples, and the whole model's logits of them.
        calibration: samples that set the int8 ranges; None leaves int8 out.
    Raises: ParityError, ExportError, StorageError.
    """
    part, logits = held_out
    rows = spread_rows(len(part), checked_samples(plan))
    x = as_raw(part.x[rows], classifier.raw)
    labels = logits.argmax(axis=1) if part.y is None else part.y
    checked = HeldOut(x, labels[rows], logits[rows])
    if calibration is not None:
        some = spread_rows(len(calibration), CALIBRATION_SAMPLES)
        calibration = as_raw(calibration[some], classifier.raw)

    def write(work: Path) -> ModelManifest:
        segments = _write_segments(classifier, exits, checked, work / "segments", progress)
        variants: list[str] = []
        timed = []
        decoders = []
        for each in exits:
            source = _source(classifier, each, settings, checked, rows)
            if settings.bottleneck != "never":
                prefix = _prefix(classifier, each)
                z = prefix(checked.x)
                narrow = bottleneck_at(
                    classifier,
                    plan,
                    each.cut,
                    halves=(prefix, source.suffix),
                    samples=(train.x, z),
                    wanted=settings.bottleneck,
                    progress=progress,
                )
                if narrow is not None:
                    pair, changed_at_most = narrow
                    decoders.append(write_decoder(pair, each.cut.depth, z, work / "segments")[0])
                    source = replace(
                        source,
                        bottleneck=pair,
                        changed_at_most=changed_at_most,
                        codec=SMALLEST if settings.codec == AUTO else settings.codec,
                    )
            variants += write_bundles(source, work / "bundles", calibration, progress)
            bundle = BundleManifest.load(work / "bundles" / f"d{each.cut.depth}")
            exit_ms = bundle.parity["latency_us"] / 1e3
            timed.append(Timed(each.cut, each.head, exit_ms))
        progress("measuring what each stage costs")
        return ModelManifest(
            name=settings.name,
            version=str(settings.version),
            backbone=BACKBONE,
            stages=len(plan.stages),
            cuts=tuple(each.cut.depth for each in exits),
            class_names=settings.class_names,
            input=classifier.raw,
            segments=segments,
            variants=tuple(variants),
            cost=cost_table(classifier.graph, plan, timed, classifier.raw).to_dict(),
            decoders=tuple(decoders),
        )

    return write_tree(settings.out, settings.name, settings.version, write, progress)


def checked_samples(plan: Plan) -> int:
    """Samples that are run one by one for each depth: fewer where the model is large."""
    flops = max(1, sum(stage.flops for stage in plan.stages))
    return min(SAMPLES, max(CHECKED_LEAST, CHECKED_FLOPS // flops))


def _write_segments(
    classifier: Classifier,
    exits: Sequence[Exit],
    checked: HeldOut,
    folder: Path,
    progress: Progress,
) -> tuple[SegmentSpec, ...]:
    folder.mkdir()
    graph, cuts = classifier.graph, [each.cut for each in exits]
    joints: list[Cut | None] = [None, *cuts]
    ends: list[Cut | None] = [*cuts, None]
    segments = []
    for entry, end in zip(joints, ends, strict=True):
        given = classifier.raw if entry is None else TensorSpec("float32", entry.shape)
        made = (classifier.classes,) if end is None else end.shape
        first, last = 0 if entry is None else entry.depth, None if end is None else end.depth
        file = f"{first}-{'end' if last is None else last}.onnx"
        _save(segment_model(graph, entry, end, by_sample=not classifier.batches), folder / file)
        segments.append(SegmentSpec(file, first, last, given, TensorSpec("float32", made)))
        progress(f"segment {file} of {len(ends)}")
    some = spread_rows(len(checked.x), SEGMENT_SAMPLES)
    prefixes = {each.cut.depth: _prefix(classifier, each) for each in exits}
    reference = checked.logits[some]
    error = require_segments(
        folder,
        segments,
        lambda depth, x: prefixes[depth](x),
        checked.x[some],
        lambda _: reference,
        tolerance=_tolerance(graph, reference),
    )
    progress(f"segments give the logits of the whole model within {error:.1e}")
    return tuple(segments)


def _prefix(classifier: Classifier, each: Exit) -> Callable[[Array], Floats]:
    """z by the graph that a device runs, one sample at a time."""
    addition = head_addition(classifier.graph, each.cut, each.head)
    session = open_session(device_model(classifier.graph, each.cut, addition, LOGITS))

    def run(x: Array) -> Floats:
        rows = [session.run(["z"], {"x": x[row : row + 1]})[0] for row in range(len(x))]
        return np.concatenate(rows)

    return run


def _source(
    classifier: Classifier, each: Exit, settings: Settings, checked: HeldOut, rows: Array
) -> BundleSource:
    cut, graph = each.cut, classifier.graph
    addition = head_addition(graph, cut, each.head)

    def write(folder: Path) -> dict[str, GraphSpec]:
        model = device_model(graph, cut, addition, LOGITS)
        make_overridable(model, (WEIGHT, BIAS))
        _save(model, folder / "exit.onnx")
        outputs = {
            "logits": TensorSpec("float32", (classifier.classes,)),
            "z": TensorSpec("float32", cut.shape),
        }
        inputs = {"x": classifier.raw}
        # what a device allows another processor to differ by
        precision: Literal["fp32", "int8"] = "int8" if graph.quantised else "fp32"
        return {"exit": GraphSpec("exit.onnx", precision, inputs, outputs, (WEIGHT, BIAS))}

    exit_logits = each.logits[rows]
    offloaded = spread_rows(len(each.judged_x), len(rows))
    return BundleSource(
        model=f"{settings.name}/{settings.version}",
        backbone=BACKBONE,
        depth=cut.depth,
        class_names=settings.class_names,
        held_out=checked,
        exit_logits=exit_logits,
        gate=each.gate,
        write=write,
        suffix=_suffix(classifier, cut),
        tolerance=_tolerance(graph, exit_logits),
        codec=settings.codec,
        measure=lambda logits: deployed_curve(each.gate, each.judged, offloaded, logits),
        measured_x=as_raw(each.judged_x[offloaded], classifier.raw),
        notes={"threshold": _notes(each, settings)},
    )


def _notes(each: Exit, settings: Settings) -> dict[str, Any]:
    """Figures at the bundle's threshold, of the samples that chose it, for the manifest."""
    figures = figures_at(each.gate, each.judged)
    return {
        "samples": len(each.judged.exit),
        "agreement_asked": settings.agreement,
        "exit_rate": figures.exit_rate,
        "agreement": figures.agreement,
        "curve_against": "the whole model" if each.judged.labels is None else "labels",
    }


def _suffix(classifier: Classifier, cut: Cut) -> Callable[[Array], Floats]:
    """The rest of the network: z (n, ...) to logits (n, classes)."""
    session: list[Session] = []

    def run(z: Array) -> Floats:
        if not session:
            by_sample = not classifier.batches
            session.append(
                open_session(segment_model(classifier.graph, cut, None, by_sample=by_sample))
            )
        (name,) = session[0].inputs
        batches = (z[start : start + _BATCH] for start in range(0, len(z), _BATCH))
        return np.concatenate([session[0].run(None, {name: batch})[0] for batch in batches])

    return run


def _tolerance(graph: Graph, reference: Floats) -> float:
    """A share of the size of the logits, which a user's model may have in any scale."""
    return tolerance_of(graph) * max(1.0, float(np.abs(reference).max()))


def _save(model: onnx.ModelProto, path: Path) -> None:
    strip(model)
    save(model, path)
