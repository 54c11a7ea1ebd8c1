"""Scores of a published bundle on test samples, which chose none of its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.gate.gate import uncertainties
from edge_sdk.manifest import BundleManifest
from exporters.bundle import spread_rows
from exporters.parity import DeviceRun

Array = NDArray[Any]

SCORED_MOST: Final = 2000


@dataclass(frozen=True, slots=True)
class BundleScore:
    """A bundle and its server on test samples.

    Attributes:
        samples: scored.
        exit_rate: share that the exit head answers.
        accuracy: of exits and offloads together. exit_accuracy: of the exits; None without any.
    """

    samples: int
    exit_rate: float
    accuracy: float
    exit_accuracy: float | None


def score_bundle(
    folder: Path,
    whole_labels: Array,
    x: Array,
    y: Array,
    *,
    offload: Callable[[Array], Array] | None = None,
) -> BundleScore:
    """Run a bundle's graphs on test samples, at most 2,000, evenly spread.

    Args:
        folder: of the bundle.
        whole_labels: (n,) answers of the whole network, which offloads get.
        offload: labels of the raw inputs that are offloaded, as deployed; by default those of the
            whole network.
        x, y: (n, ...) raw test inputs and (n,) their true classes.
    """
    manifest = BundleManifest.load(folder)
    rows = spread_rows(len(x), SCORED_MOST)
    logits, _ = DeviceRun(folder, manifest.graphs)(x[rows])
    exits = uncertainties(manifest.gate.policy, logits) < manifest.gate.threshold
    answers = whole_labels[rows]
    if offload is not None and not exits.all():
        answers = answers.copy()
        answers[~exits] = offload(x[rows][~exits])
    right = np.where(exits, logits.argmax(axis=1), answers) == y[rows]
    return BundleScore(
        samples=len(rows),
        exit_rate=float(exits.mean()),
        accuracy=float(right.mean()),
        exit_accuracy=float(right[exits].mean()) if exits.any() else None,
    )
