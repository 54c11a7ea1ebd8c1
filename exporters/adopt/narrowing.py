"""A bottleneck at a cut of a user's classifier (exporters.offloads), learnt without labels.

The server's half is an ONNX graph. It runs in torch while the bottleneck learns
(exporters.adopt.graph.gradients). Where torch does not run it, the bottleneck stays the principal
components.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from exporters.adopt.classifier import Classifier
from exporters.adopt.graph.channels import channel_axis
from exporters.adopt.graph.cuts import Cut, Plan
from exporters.adopt.graph.gradients import torch_suffix
from exporters.adopt.inputs import as_raw
from exporters.bundle import spread_rows
from exporters.errors import ExportError
from exporters.offloads.bottleneck import (
    BATCH,
    LEARNT_MOST,
    STEPS,
    Answer,
    Bottleneck,
    fit_bottleneck,
)

Array = NDArray[Any]
Floats = NDArray[np.float32]
Run = Callable[[Array], Floats]

LEARNT_BYTES: Final = 1_000_000_000  # of the features that it learns from
# Operations of one distillation, where that is more than the least steps; a step is three forward.
LEARNT_FLOPS: Final = 2e13
STEPS_LEAST: Final = 40


def bottleneck_at(
    classifier: Classifier,
    plan: Plan,
    cut: Cut,
    *,
    halves: tuple[Run, Run],
    samples: tuple[Array, Array],
    wanted: int | Literal["auto"],
    progress: Callable[[str], None],
) -> tuple[Bottleneck, float] | None:
    """The bottleneck of a cut and the share of the final labels that it may change.

    Args:
        halves: raw inputs to z, and z to logits, by onnxruntime.
        samples: inputs of the training part, and z of held-out ones.
        wanted: its channels.
    Returns: None where `auto` finds none.
    Raises: ExportError for a number of channels that z does not have.
    """
    prefix, suffix = halves
    learn_x, z_held = samples
    most = min(LEARNT_MOST, max(1, LEARNT_BYTES // (4 * cut.values)))
    z = prefix(as_raw(learn_x[spread_rows(len(learn_x), most)], classifier.raw))

    def by_onnxruntime(given: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(suffix(given.numpy()))

    answer: Answer = by_onnxruntime
    learns = True
    try:
        answer = torch_suffix(classifier.graph, cut, z, by_sample=not classifier.batches)
    except ExportError as err:
        progress(f"d{cut.depth}: {err}; the bottleneck is the principal components")
        learns = False
    flops = 3 * BATCH * sum(stage.flops for stage in plan.stages[cut.depth :])
    return fit_bottleneck(
        z,
        narrowed_axis(classifier, cut),
        answer,
        (z_held, suffix(z_held).argmax(axis=1)),
        wanted=wanted,
        depth=cut.depth,
        progress=progress,
        learns=learns,
        steps=int(min(max(LEARNT_FLOPS / max(1, flops), STEPS_LEAST), STEPS)),
    )


def narrowed_axis(classifier: Classifier, cut: Cut) -> int:
    """The axis of z's channels behind the batch; the last where z is neither map nor tokens."""
    axes = len(cut.shape)
    return 1 if axes in (2, 3) and channel_axis(classifier.graph, cut.tensor) == 1 else axes
