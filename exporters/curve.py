"""The operating curve of a gate on held-out data, and the threshold chosen from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.gate.gate import largest_uncertainty, uncertainties
from edge_sdk.gate_form import GateForm, read_gate
from edge_sdk.manifest import GatePoint, GatePolicy, GateSpec

Floats = NDArray[np.floating[Any]]
Labels = NDArray[np.integer[Any]]

# HARMONY's grid for 10 classes, in nats (docs/methods/common.md); it scales with ln N.
HARMONY_GRID: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.3)
QUANTILES: Final = tuple(q / 20 for q in range(1, 20))
# Half a point is one sample of a few hundred: luck would decide, and everything would exit.
TOLERANCE: Final = 0.0
# Shares at which a scale is taken: quantiles further out rest on few samples.
SHARES: Final = (0.05, 0.95)


def measure_gate(
    exit_logits: Floats,
    full_logits: Floats,
    labels: Labels,
    *,
    policy: GatePolicy = "entropy",
    tolerance: float = TOLERANCE,
) -> GateSpec:
    """The gate of a bundle: its whole curve and the default threshold.

    Args:
        exit_logits: (n, classes) of the exit head on held-out samples.
        full_logits: (n, classes) of the whole network on the same samples.
        labels: (n,) their true classes.
        policy: the gate as text; scales that it leaves open are fitted (`fit_scales`), at the share
            of samples that exit by its first measure alone.
        tolerance: see `choose_threshold`.
    """
    exit_correct = exit_logits.argmax(axis=1) == labels
    full_correct = full_logits.argmax(axis=1) == labels

    def measured(text: str) -> tuple[GateSpec, float]:
        uncertainty = uncertainties(text, exit_logits.astype(np.float32))
        thresholds = candidate_thresholds(uncertainty, exit_logits.shape[1], text)
        curve = operating_curve(uncertainty, exit_correct, full_correct, thresholds)
        threshold = choose_threshold(
            curve,
            exit_accuracy=float(exit_correct.mean()),
            full_accuracy=float(full_correct.mean()),
            tolerance=tolerance,
        )
        return GateSpec(text, threshold, curve), float((uncertainty < threshold).mean())

    form = read_gate(policy)
    if form.terms and not form.closed:
        policy = fit_scales(policy, exit_logits, measured(form.first)[1])
    return measured(policy)[0]


def fit_scales(policy: GatePolicy, exit_logits: Floats, share: float) -> GatePolicy:
    """The gate with a scale for each measure of a composition that has none: the quantile of its
    uncertainties on these samples, at the same share for all of them.

    So at the threshold 1 each of the measures alone would let that share exit.

    Args:
        exit_logits: (n, classes) of the exit head on held-out samples.
        share: of the samples, in [0, 1]; it is moved to 0.05 or 0.95 where it is beyond.
    """
    low, high = SHARES
    return str(_fitted(read_gate(policy), exit_logits, min(max(share, low), high)))


def _fitted(form: GateForm, exit_logits: Floats, share: float) -> GateForm:
    if form.terms:
        return replace(form, terms=tuple(_fitted(term, exit_logits, share) for term in form.terms))
    if form.scale is not None:
        return form
    values = uncertainties(form.kind, exit_logits.astype(np.float32))
    # a network that is sure of all samples has quantiles of 0
    least = 1e-6 * largest_uncertainty(form.kind, exit_logits.shape[1])
    return replace(form, scale=float(f"{max(float(np.quantile(values, share)), least):.4g}"))


def candidate_thresholds(
    uncertainty: NDArray[np.float64], classes: int, policy: GatePolicy = "entropy"
) -> NDArray[np.float64]:
    """Thresholds to measure, ascending.

    They are HARMONY's grid scaled to the number of classes (for entropy), quantiles of the held-out
    samples, and one threshold at which every sample exits. Quantiles lie midway between two
    neighbouring samples: at a sample's own value, the last bit of a float would decide its side.
    """
    top = largest_uncertainty(policy, classes)
    grid = np.array(HARMONY_GRID if policy == "entropy" else ()) * top / math.log(10)
    ordered = np.sort(uncertainty)
    below = np.array([int(q * (len(ordered) - 1)) for q in QUANTILES])
    above = np.minimum(below + 1, len(ordered) - 1)
    midways = (ordered[below] + ordered[above]) / 2
    return np.unique(np.concatenate([grid, midways, [1.001 * top]]))


def operating_curve(
    uncertainty: Floats,
    exit_correct: NDArray[np.bool_],
    full_correct: NDArray[np.bool_],
    thresholds: Sequence[float] | Floats,
) -> tuple[GatePoint, ...]:
    """Exit rate and accuracies at each threshold; a sample exits if its uncertainty is below it.

    Args:
        uncertainty, exit_correct, full_correct: (n,), of the same samples.
    Returns: one point a threshold, except thresholds at which nothing exits: they have no exit
        accuracy.
    """
    points = []
    for threshold in thresholds:
        exits = uncertainty < threshold
        if not exits.any():
            continue
        points.append(
            GatePoint(
                threshold=float(threshold),
                exit_rate=float(exits.mean()),
                exit_accuracy=float(exit_correct[exits].mean()),
                accuracy=float(np.where(exits, exit_correct, full_correct).mean()),
            )
        )
    return tuple(points)


def choose_threshold(
    curve: Sequence[GatePoint], *, exit_accuracy: float, full_accuracy: float, tolerance: float
) -> float:
    """The largest threshold at which device and server together are most accurate.

    "As accurate as the server alone" would be the wrong goal: with a few hundred held-out samples,
    luck makes it true of thresholds at which nearly everything exits.

    Args:
        exit_accuracy, full_accuracy: with all samples on the device, and all on the server.
        tolerance: accuracy (0.005 is half a point) that may be lost against the best point of the
            curve and against the server alone; 1 allows any threshold at which the pair is no
            worse than the device alone.
    Returns: a threshold of the curve, or 0 (offload everything) if none is good enough.
    """
    best = max((point.accuracy for point in curve), default=0.0)
    floor = max(max(best, full_accuracy) - tolerance, exit_accuracy)
    # rates are sums of 0/1 values: equal ones may differ in the last bit
    good = [point.threshold for point in curve if point.accuracy >= floor - 1e-12]
    return max(good, default=0.0)
