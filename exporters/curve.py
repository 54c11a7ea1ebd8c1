"""The operating curve of a gate, measured on held-out data, and the threshold chosen from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.gate.gate import uncertainties
from edge_sdk.manifest import GatePoint, GatePolicy, GateSpec

Floats = NDArray[np.floating[Any]]
Labels = NDArray[np.integer[Any]]

# HARMONY's grid for 10 classes, in nats (its paper, docs/methods.md); it scales with ln N.
HARMONY_GRID: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.2, 1.6, 2.3)
QUANTILES: Final = tuple(q / 20 for q in range(1, 20))
# Half a point would be one sample of a few hundred: then luck decides, and everything exits.
TOLERANCE: Final = 0.0


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
        tolerance: see `choose_threshold`.
    """
    uncertainty = uncertainties(policy, exit_logits.astype(np.float32))
    exit_correct = exit_logits.argmax(axis=1) == labels
    full_correct = full_logits.argmax(axis=1) == labels
    thresholds = candidate_thresholds(uncertainty, exit_logits.shape[1], policy)
    curve = operating_curve(uncertainty, exit_correct, full_correct, thresholds)
    threshold = choose_threshold(
        curve,
        exit_accuracy=float(exit_correct.mean()),
        full_accuracy=float(full_correct.mean()),
        tolerance=tolerance,
    )
    return GateSpec(policy, threshold, curve)


def candidate_thresholds(
    uncertainty: NDArray[np.float64], classes: int, policy: GatePolicy = "entropy"
) -> NDArray[np.float64]:
    """The thresholds worth measuring, ascending: for entropy HARMONY's grid scaled to the number of
    classes; quantiles of the held-out samples, and one at which all of them exit.

    Quantiles lie midway between two neighbouring samples: on a sample, the last bit of a float
    would decide on which side of the gate it falls.
    """
    # margin and vacuity go from 0 to 1, whatever the number of classes
    top = math.log(classes) if policy == "entropy" else 1.0
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
    """What each threshold gives when a sample exits where its uncertainty lies below it.

    Args:
        uncertainty, exit_correct, full_correct: (n,), of the same samples.
    Returns: one point a threshold; those at which nothing exits have no exit accuracy and are
        left out.
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
    """The loosest threshold of the most accurate gated pair.

    With a few hundred held-out samples, "as accurate as the server alone" is true by luck of
    thresholds at which nearly everything exits; the top of the curve is not.

    Args:
        exit_accuracy, full_accuracy: of all samples on the device, and all on the server.
        tolerance: in accuracy (0.005 is half a point), how far below the best pair, or the server
            alone, it may lie; 1 lets everything exit that does not make the pair worse than the
            device alone.
    Returns: a threshold of the curve, or 0 (offload everything) where none is good enough.
    """
    best = max((point.accuracy for point in curve), default=0.0)
    floor = max(max(best, full_accuracy) - tolerance, exit_accuracy)
    # sums of the same few thousand 0/1 values: equal rates may differ in the last bit
    good = [point.threshold for point in curve if point.accuracy >= floor - 1e-12]
    return max(good, default=0.0)
