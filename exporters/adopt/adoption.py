"""An ONNX classifier and samples -> an early-exit model that a server serves.

cuts        found in the graph, offered by cost
heads       trained on features of the training part, against the model's own answers
thresholds  chosen on the held-out part; where that is small, by folds of train and held-out
figures     of the test part, which chose nothing
tree        segments, bundles and costs, as any export writes them
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.learning.head import Head
from edge_sdk.manifest import GateSpec, ModelManifest, TensorSpec
from edge_sdk.training.data.load import Array, Part, Parts
from exporters.adopt.classifier import Classifier, checked
from exporters.adopt.deployed import DeployedOffload
from exporters.adopt.graph.cuts import Cut, Offer, Plan, choose_cuts, find_cuts
from exporters.adopt.graph.graph import own_name
from exporters.adopt.heads import Extractor, crossed_logits, train_head
from exporters.adopt.inputs import as_raw
from exporters.adopt.operating import Figures, Judged, agreement_gate, figures_at, require_finite
from exporters.adopt.settings import Settings
from exporters.adopt.tree import Exit, checked_samples, write_model
from exporters.bundle import spread_rows
from exporters.model import check_place
from exporters.quantize import CALIBRATION_SAMPLES

Floats = NDArray[np.float32]
Progress = Callable[[str], None]

FEW_SAMPLES: Final = 500  # of all parts
FEW_TO_LEARN: Final = 400  # of those without the test part, which is a fifth of all by default
# With 48 held-out samples, exits of a text classifier agreed in 84 % of cases in place of the 98 %
# that was asked for; by five folds of 240 in 94 to 100 %.
CROSSED_BELOW: Final = 200
PROGRESS_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class CutFigures:
    """A published cut and what it gives on the test part.

    Attributes:
        z_bytes: of one offload in its codec, the mean of the held-out samples.
        x_bytes: of one raw input.
        bottleneck: shape of what it sends in place of z; None for none.
    """

    cut: Cut
    z_bytes: int
    x_bytes: int
    codec: str
    bottleneck: tuple[int, ...] | None
    gate: GateSpec
    figures: Figures

    @property
    def tensor(self) -> str:
        """The cut's name in the user's file."""
        return own_name(self.cut.tensor)


@dataclass(frozen=True, slots=True)
class Adoption:
    """Result of an adoption.

    Attributes:
        samples: how many of each part were used. labelled: whether accuracies are known.
        seconds: from the first feature to the published tree.
        head_seconds: of training one head, on average.
        by_sample: whether the server runs the samples of a batch one after the other.
        crossed: whether train and held-out part chose the thresholds together, by five folds.
    """

    manifest: ModelManifest
    path: Path
    cuts: tuple[CutFigures, ...]
    samples: dict[str, int]
    labelled: bool
    seconds: float
    head_seconds: float
    by_sample: bool
    crossed: bool
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class _Warnings:
    """Lines that the user must see: told at once, and kept for the report."""

    progress: Progress
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        self.lines.append(line)
        self.progress(f"warning: {line}")


@dataclass(frozen=True, slots=True)
class _Answers:
    """Logits of the whole model, and features of each cut, for one part."""

    part: Part
    logits: Floats
    features: list[Floats]


def adopt(
    classifier: Classifier,
    parts: Parts,
    settings: Settings,
    progress: Progress = lambda _: None,
    *,
    notices: Sequence[str] = (),
) -> Adoption:
    """Make an early-exit model of a classifier and publish it.

    Args:
        parts: raw inputs of the classifier; with labels in the order of its classes, or without.
        notices: warnings about the inputs, told before the work begins.
    Raises: ExportError naming what stands in the way; ParityError where a graph does not give the
        model's answers; StorageError.
    """
    started = time.perf_counter()
    check_place(settings.out, settings.name, settings.version)
    warnings = _Warnings(progress)
    for notice in notices:
        warnings.add(notice)
    plan = find_cuts(classifier.graph)
    x_bytes = _bytes_of(classifier.raw)
    offer = choose_cuts(plan, x_bytes, settings.depths)
    _tell_offer(plan, offer, x_bytes, progress)
    _tell_few(parts, warnings)
    classifier = checked(classifier, as_raw(parts.train.x[:8], classifier.raw))
    _tell_batches(classifier, progress)
    train, held_out, test = _answers(classifier, parts, offer.cuts, settings, progress)
    heads, head_seconds = _train_heads(train, offer.cuts, settings, progress)
    exits = [
        _exit(cut, head, (train, held_out), place, settings)
        for place, (cut, head) in enumerate(zip(offer.cuts, heads, strict=True))
    ]
    calibration = _calibration(classifier, parts, settings, progress)
    manifest = write_model(
        classifier,
        plan,
        exits,
        settings,
        train=train.part,
        held_out=(held_out.part, held_out.logits),
        calibration=calibration,
        progress=progress,
    )
    path = settings.out / settings.name / manifest.version
    progress(f"figures of {len(test.part)} test samples, offloads by codec and segments")
    cuts = []
    for place, each in enumerate(exits):
        offload = DeployedOffload(path, manifest, each.cut.depth, threads=settings.threads)
        most = checked_samples(plan)
        cuts.append(_figures(each, test, place, offload, raw=classifier.raw, most=most))
    for found in cuts:
        _warn(found, settings, warnings)
    return Adoption(
        manifest=manifest,
        path=path,
        cuts=tuple(cuts),
        samples=parts.sizes,
        labelled=parts.test.y is not None,
        seconds=time.perf_counter() - started,
        head_seconds=head_seconds,
        by_sample=not classifier.batches,
        crossed=len(parts.held_out) < CROSSED_BELOW,
        warnings=tuple(warnings.lines),
    )


def _answers(
    classifier: Classifier,
    parts: Parts,
    cuts: Sequence[Cut],
    settings: Settings,
    progress: Progress,
) -> list[_Answers]:
    extract = Extractor(
        classifier.graph, cuts, batches=bool(classifier.batches), threads=settings.threads
    )
    total = len(parts.train) + len(parts.held_out) + len(parts.test)
    done, reported, found = 0, time.perf_counter(), []
    progress(f"computing features of {total} samples; cuts: {len(cuts)}")
    for name, each in (("train", parts.train), ("held-out", parts.held_out), ("test", parts.test)):
        batches = []
        for start in range(0, len(each), extract.batch):
            raw = as_raw(each.x[start : start + extract.batch], classifier.raw)
            batches.append(extract(raw))
            done += len(raw)
            if time.perf_counter() - reported > PROGRESS_EVERY_S:
                reported = time.perf_counter()
                progress(f"features of {done} of {total} samples")
        logits, *features = (np.concatenate(arrays) for arrays in zip(*batches, strict=True))
        require_finite(f"logits of the {name} part", logits)
        found.append(_Answers(each, logits, features))
    return found


def _train_heads(
    train: _Answers, cuts: Sequence[Cut], settings: Settings, progress: Progress
) -> tuple[list[Head], float]:
    started = time.perf_counter()
    heads = []
    for place, cut in enumerate(cuts):
        features = train.features[place]
        require_finite(f"features at depth {cut.depth}", features)
        heads.append(train_head(features, train.logits, seed=settings.seed))
        progress(f"depth {cut.depth}: exit head of {features.shape[1]} features trained")
    return heads, (time.perf_counter() - started) / len(cuts)


def _exit(
    cut: Cut, head: Head, seen: tuple[_Answers, _Answers], place: int, settings: Settings
) -> Exit:
    """The exit with its threshold.

    Args:
        seen: train and held-out part. Where the second is small, luck would choose the threshold:
            then both choose it, by heads that did not learn from the sample at hand.
    """
    train, held_out = seen
    logits = head.logits(held_out.features[place])
    judged, judged_x = Judged(logits, held_out.logits, held_out.part.y), held_out.part.x
    if len(held_out.part) < CROSSED_BELOW:
        features = np.concatenate([train.features[place], held_out.features[place]])
        whole = np.concatenate([train.logits, held_out.logits])
        labels = [each.part.y for each in seen if each.part.y is not None]
        judged = Judged(
            crossed_logits(features, whole, seed=settings.seed),
            whole,
            np.concatenate(labels) if len(labels) == len(seen) else None,
        )
        judged_x = np.concatenate([train.part.x, held_out.part.x])
    gate = agreement_gate(settings.gate, judged, settings.agreement)
    return Exit(cut, head, judged, gate, logits, judged_x)


def _figures(
    each: Exit, test: _Answers, place: int, offload: DeployedOffload, *, raw: TensorSpec, most: int
) -> CutFigures:
    judged = Judged(each.head.logits(test.features[place]), test.logits, test.part.y)
    figures = figures_at(
        each.gate, judged, lambda rows: offload(as_raw(test.part.x[rows], raw)), most
    )
    return CutFigures(
        cut=each.cut,
        z_bytes=round(offload.offload_bytes),
        x_bytes=_bytes_of(raw),
        codec=offload.codec,
        bottleneck=offload.bottleneck,
        gate=each.gate,
        figures=figures,
    )


def _tell_few(parts: Parts, warnings: _Warnings) -> None:
    """Say where the heads and the threshold, or the figures, rest on few samples."""
    chosen, tested = len(parts.train) + len(parts.held_out), len(parts.test)
    if chosen < min(tested, FEW_TO_LEARN):  # the figures are well measured, what they are of is not
        warnings.add(
            f"{chosen} samples for heads and thresholds are few, {len(parts.held_out)} of them for"
            f" the threshold: both are rough; give {FEW_TO_LEARN} or more (--samples)"
        )
    elif chosen + tested < FEW_SAMPLES:
        warnings.add(
            f"{chosen + tested} samples are few: the threshold and all figures are rough; give"
            f" {FEW_SAMPLES} or more"
        )


def _calibration(
    classifier: Classifier, parts: Parts, settings: Settings, progress: Progress
) -> Array | None:
    """Samples that set the int8 ranges; None where no int8 form is made."""
    if settings.int8 == "never":
        return None
    if classifier.graph.quantised:
        progress("the file is quantised already: no int8 form of it is made")
        return None
    return calibration_samples(parts)


def calibration_samples(parts: Parts) -> Array:
    """Samples that set the int8 ranges: held-out ones, and where they are few, those of train."""
    if len(parts.held_out) >= CALIBRATION_SAMPLES:
        return parts.held_out.x
    # spread, because a folder has one class after the other
    rows = spread_rows(len(parts.train), CALIBRATION_SAMPLES)
    return np.concatenate([parts.held_out.x, parts.train.x[rows]])


def _bytes_of(raw: TensorSpec) -> int:
    return int(np.prod(raw.shape)) * np.dtype(raw.dtype).itemsize


def _tell_offer(plan: Plan, offer: Offer, x_bytes: int, progress: Progress) -> None:
    depths = ", ".join(str(cut.depth) for cut in offer.cuts)
    progress(f"{len(plan.cuts)} cuts in the graph; depths {depths} are published")
    for cut in offer.dear:
        if cut not in offer.cuts:
            progress(
                f"left out: depth {cut.depth}, z takes {cut.values} bytes or more, the input"
                f" {x_bytes}; --depth {cut.depth} publishes it all the same"
            )


def _tell_batches(classifier: Classifier, progress: Progress) -> None:
    if not classifier.batches:
        progress(
            "the graph mixes the samples of a batch, or takes one only: the server runs them one"
            " by one"
        )
    elif classifier.graph.batch_fixed:
        progress("fixed to batch 1, made batch-free: batches of 1, 2 and 32 give the same answers")


def _warn(each: CutFigures, settings: Settings, warnings: _Warnings) -> None:
    depth = each.cut.depth
    if each.z_bytes > each.x_bytes:
        warnings.add(
            f"depth {depth}: an offload takes {each.z_bytes} bytes, the input itself {each.x_bytes}"
        )
    if not each.figures.exit_rate:
        warnings.add(
            f"depth {depth}: no threshold keeps {settings.agreement:.1%} agreement, so nothing"
            " exits; lower --agreement, cut deeper, or give more samples"
        )
