"""Parity of an exported graph with the torch model: without it, nothing is published.

Rules, on 1,000 held-out samples (all of them if there are fewer):

    fp32 graphs      every logit within 1e-4 of torch's (`back`: on random features, by the rule
                     of the segments)
    int8 graphs      at most 0.5 % of the samples change label, and at most 0.5 % change side of
                     the gate; of all samples offloaded, at most 0.5 % change their final label
    the server's     from every entry, logits within 1e-4 of torch's, or within 1e-5 of the largest
    segments         logit where that is above 10: rounding grows with the length of the chain
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from edge_sdk.gate.gate import uncertainties
from edge_sdk.manifest import CODECS, Codec, GateSpec, GraphSpec, SegmentSpec
from edge_sdk.session import Session
from edge_sdk.wire import codecs
from exporters.errors import ParityError

Array = NDArray[Any]

LOGIT_TOLERANCE: Final = 1e-4
CHANGED_AT_MOST: Final = 0.005
SAMPLES: Final = 1000
BACK_SAMPLES: Final = 64
CHEAPEST_FIRST: Final[tuple[Codec, ...]] = ("int8", "fp16", "fp32")
AUTO: Final = "auto"
SMALLEST: Final = "smallest"
_BATCH: Final = 128


@dataclass(frozen=True, slots=True)
class ParityReport:
    """Distance between the graphs of a bundle and the torch model.

    Attributes:
        samples: held-out inputs compared.
        max_logit_error: largest absolute difference of a logit.
        label_changes, gate_changes: samples with another label, or on another side of the gate.
        offload_changes: by codec tried, samples with another final label than the whole torch
            model gives, when the graph's z passes that codec and the rest of the network.
        offload_bytes: by codec tried, the mean bytes of one sample's tensor.
    """

    samples: int
    max_logit_error: float
    label_changes: int
    gate_changes: int
    offload_changes: dict[str, int]
    offload_bytes: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-safe values."""
        return asdict(self)


class DeviceRun:
    """The graphs of a bundle as a device runs them: one sample at a time, one thread."""

    def __init__(self, folder: Path, graphs: Mapping[str, GraphSpec]) -> None:
        self._exit = Session(folder / graphs["exit"].file)
        self._prefix = Session(folder / graphs["prefix"].file) if "prefix" in graphs else None

    def __call__(self, x: Array) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Raw inputs (n, ...) to logits (n, N) and z (n, ...)."""
        logits, z = [], []
        for i in range(len(x)):
            feeds = {"x": x[i : i + 1]}
            if self._prefix is None:
                logits_i, z_i = self._exit.run(["logits", "z"], feeds)
            else:
                (logits_i,) = self._exit.run(["logits"], feeds)
                (z_i,) = self._prefix.run(["z"], feeds)
            logits.append(logits_i)
            z.append(z_i)
        return np.concatenate(logits), np.concatenate(z)


def run_torch(module: nn.Module, x: Array) -> tuple[NDArray[np.float32], ...]:
    """The outputs of a module for all of x, in batches."""
    batches = []
    with torch.inference_mode():
        for start in range(0, len(x), _BATCH):
            # a copy, because x may be read-only, and torch warns of that
            given = module(torch.from_numpy(x[start : start + _BATCH].copy()))
            batches.append(given if isinstance(given, tuple) else (given,))
    return tuple(torch.cat(parts).numpy() for parts in zip(*batches, strict=True))


def compare(
    reference: NDArray[np.float32],
    logits: NDArray[np.float32],
    gate: GateSpec,
    offload_changes: Mapping[str, int],
    offload_bytes: Mapping[str, float] | None = None,
) -> ParityReport:
    """Compare the logits of a graph with those of the torch model.

    Args:
        reference, logits: (n, N), of the same samples.
        gate: of the bundle.
    """
    sides = [uncertainties(gate.policy, side) < gate.threshold for side in (reference, logits)]
    return ParityReport(
        samples=len(reference),
        max_logit_error=_largest_error(reference, logits),
        label_changes=int((reference.argmax(axis=1) != logits.argmax(axis=1)).sum()),
        gate_changes=int((sides[0] != sides[1]).sum()),
        offload_changes=dict(offload_changes),
        offload_bytes=dict(offload_bytes or {}),
    )


def require_fp32(report: ParityReport, what: str, tolerance: float = LOGIT_TOLERANCE) -> None:
    """Check an fp32 graph against the rules.

    Raises: ParityError.
    """
    if not report.max_logit_error <= tolerance:  # NaN does not pass
        raise ParityError(
            f"{what}: expected logits within {tolerance:g} of the reference on"
            f" {report.samples} samples, got {report.max_logit_error:.3g}"
            f" ({report.label_changes} labels changed);"
            " the export changed the function, so it is not published"
        )
    counts = {"labels": report.label_changes, "sides of the gate": report.gate_changes}
    _require_same_answers(report, counts, what, "it is not published")


def require_back(folder: Path, graph: GraphSpec, back: nn.Module) -> None:
    """Check the `back` graph on random features drawn from N(0, 1).

    Raises: ParityError.
    """
    shape = graph.inputs["features"].shape
    features = np.random.default_rng(0).normal(size=(BACK_SAMPLES, *shape)).astype(np.float32)
    session = Session(folder / graph.file)
    logits = [
        session.run(["logits"], {"features": features[i : i + 1]})[0] for i in range(len(features))
    ]
    expected = run_torch(back, features)[0]
    error, allowed = _largest_error(expected, np.concatenate(logits)), _allowed(expected)
    if not error <= allowed:
        raise ParityError(
            f"{graph.file}: expected logits within {allowed:.3g} of torch on {BACK_SAMPLES}"
            f" random features, got {error:.3g}; the export changed the function"
        )


def require_int8(
    report: ParityReport, codec: Codec, what: str, final_at_most: float = CHANGED_AT_MOST
) -> None:
    """Check a quantised graph against the rules.

    Args:
        final_at_most: share of the final labels that may change: more than of the others where a
            bottleneck, and not int8, changes them.
    Raises: ParityError.
    """
    remedy = "calibrate on samples like the held-out ones, or publish fp32"
    counts = {"labels": report.label_changes, "sides of the gate": report.gate_changes}
    _require_same_answers(report, counts, what, remedy)
    final = {"final labels": report.offload_changes[codec]}
    _require_same_answers(report, final, what, remedy, final_at_most)


@dataclass(frozen=True, slots=True)
class CodecTrial:
    """A codec tried on what an offload sends.

    Attributes:
        changes: samples with another final label than the whole model gives.
        mean_bytes: of one sample's tensor, without the frame around it.
        kept: whether no more of the labels changed than may.
    """

    codec: Codec
    changes: int
    mean_bytes: float
    kept: bool


def choose_codec(
    z: NDArray[np.float32],
    suffix: Callable[[Array], NDArray[np.float32]],
    labels: NDArray[np.integer[Any]],
    wanted: str = AUTO,
    at_most: float = CHANGED_AT_MOST,
) -> tuple[Codec, list[CodecTrial]]:
    """The codec of a bundle, which keeps the final labels.

    Args:
        z: (n, ...) from the device's graph.
        suffix: the rest of the network, from z to logits.
        labels: (n,) of the whole torch model.
        wanted: `auto` takes the first of int8, fp16 and fp32; `smallest` that of all codecs with
            the fewest bytes on these samples; the name of a codec takes that one.
        at_most: share of the labels that may change.
    Returns: the first codec that changes no more of the labels (fp32 if none does), and the codecs
        tried, in that order.
    Raises: ParityError if the codec that was named changes more.
    """
    tried: list[CodecTrial] = []
    for codec, encoded in _in_order(z, wanted):
        rows = [codecs.decode(*row, z.shape[1:]) for row in encoded]
        changes = int((suffix(np.concatenate(rows)).argmax(axis=1) != labels).sum())
        kept = changes <= at_most * len(z)
        tried.append(CodecTrial(codec, changes, _mean_bytes(encoded), kept))
        if kept:
            return codec, tried
    if wanted in (AUTO, SMALLEST):
        return "fp32", tried
    raise ParityError(
        f"--codec {wanted}: expected at most {int(at_most * len(z))} of {len(z)} final labels to"
        f" change, got {tried[0].changes}; take --codec smallest, which finds one that keeps them"
    )


Encoded = list[tuple[Array, dict[str, Any]]]


def _in_order(z: NDArray[np.float32], wanted: str) -> Iterator[tuple[Codec, Encoded]]:
    """The codecs to try with the samples that they encode, the cheapest first."""
    if wanted == SMALLEST:
        made = {codec: _encoded(z, codec) for codec in CODECS}
        yield from sorted(made.items(), key=lambda item: _mean_bytes(item[1]))
        return
    for codec in CHEAPEST_FIRST if wanted == AUTO else (cast("Codec", wanted),):
        yield codec, _encoded(z, codec)


def _encoded(z: NDArray[np.float32], codec: Codec) -> Encoded:
    return [codecs.encode(z[row : row + 1], codec) for row in range(len(z))]


def _mean_bytes(encoded: Encoded) -> float:
    return float(np.mean([array.nbytes for array, _ in encoded]))


def through(z: NDArray[np.float32], codec: Codec) -> NDArray[np.float32]:
    """Samples (n, ...) as the server gets them."""
    rows = [codecs.decode(*row, z.shape[1:]) for row in _encoded(z, codec)]
    return np.concatenate(rows)


def require_segments(
    folder: Path,
    segments: Sequence[SegmentSpec],
    prefix: Callable[[int, Array], Array],
    x: Array,
    reference: Callable[[int], NDArray[np.float32]],
    *,
    tolerance: float | None = None,
) -> float:
    """Run the segments from every entry to the end, and compare with torch.

    Args:
        prefix: z of raw inputs at a depth, by the reference.
        x: (n, ...) raw inputs.
        reference: the reference's output for them, (n, N), by the depth of the entry, 0 for x.
        tolerance: largest absolute difference of a logit; by default that of the rules above.
    Returns: the largest absolute difference of a logit.
    Raises: ParityError naming the entry.
    """
    sessions = [Session(folder / segment.file) for segment in segments]
    worst = 0.0
    for first, segment in enumerate(segments):
        given = x if segment.entry == 0 else prefix(segment.entry, x)
        outputs, expected = _chain(sessions[first:], given), reference(segment.entry)
        error, allowed = _largest_error(expected, outputs), tolerance
        if allowed is None:
            allowed = _allowed(expected)
        if not error <= allowed:
            raise ParityError(
                f"segments from {segment.entry}: expected logits within {allowed:.3g} of torch"
                f" on {len(x)} samples, got {error:.3g}; the export changed the function"
            )
        worst = max(worst, error)
    return worst


def _allowed(reference: NDArray[np.float32]) -> float:
    return LOGIT_TOLERANCE * max(1.0, float(np.abs(reference).max()) / 10)


def _chain(sessions: Sequence[Session], given: Array) -> NDArray[np.float32]:
    """Run the segments in batches of 1, 2, 4 ..., which tries the batch axis at several sizes."""
    parts = []
    start, size = 0, 1
    while start < len(given):
        batch = given[start : start + size]
        for session in sessions:
            (name,) = session.inputs
            (batch,) = session.run(None, {name: batch})
        parts.append(batch)
        start, size = start + size, min(2 * size, _BATCH)
    return np.concatenate(parts)


def _largest_error(reference: NDArray[np.float32], logits: NDArray[np.float32]) -> float:
    return float(np.abs(reference.astype(np.float64) - logits).max())


def _require_same_answers(
    report: ParityReport,
    counts: Mapping[str, int],
    what: str,
    remedy: str,
    at_most: float = CHANGED_AT_MOST,
) -> None:
    allowed = int(at_most * report.samples)
    changed = ", ".join(f"{count} {name}" for name, count in counts.items() if count > allowed)
    if changed:
        raise ParityError(
            f"{what}: expected at most {allowed} of {report.samples} samples to change, got"
            f" {changed}; {remedy}"
        )
