"""Exit heads for a run that left none: trained on the answers of the run's own network.

A head is the layer that `splitedge adopt` trains, on the features that the network's own exit head
pools. Its teacher is the whole network, so the samples need no labels. A gate by vacuity needs
evidence, which the head then learns from the same answers (BESplit, Eq. 5).

Only a last layer that every device keeps to itself (SplitLPF) needs labels: without it there is no
whole network to learn from, so it is trained first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_sdk.gate_form import EVIDENCE, Activation, read_gate
from edge_sdk.learning.head import Head
from edge_sdk.manifest import GatePolicy
from edge_sdk.training.client.auxiliary import auxiliary_of
from edge_sdk.training.formulas.evidence import evidential_losses
from exporters.adopt.heads import soft_cross_entropy, train_head
from exporters.composition import Composition
from exporters.errors import ExportError
from exporters.parity import run_torch
from exporters.run.network import TrainedRun

Array = NDArray[Any]
Progress = Callable[[str], None]

# Share of the divergence: with all of it the head learns to be certain of nothing. For softplus it
# is that of the releases before, so their runs give the same heads.
KL_WEIGHTS: Final[Mapping[Activation, float]] = {"exp": 0.01, "softplus": 0.1}
# Logit of the true class where labels are the teacher: a probability of 1 within 1e-8.
CERTAIN: Final = 20.0


def train_exits(
    trained: TrainedRun,
    x: Array,
    y: NDArray[np.int64] | None,
    depths: Sequence[int],
    progress: Progress = lambda _: None,
) -> TrainedRun:
    """The run with trained exits at these depths; others stay as they are.

    Args:
        x: (n, ...) raw inputs. y: (n,) their labels; None where they have none.
    Raises: ExportError if labels are needed and there are none.
    """
    record = trained.record
    halves = trained.halves.frozen()
    if not record.back:
        if y is None:
            raise ExportError(
                f"--train-exits: expected samples with labels, because every device of"
                f" {record.method} kept its own last layer; give labelled samples"
            )
        _train_back(halves, x, y, record.depths or depths)
        progress(f"last layer trained on {len(x)} labelled samples; devices may have their own")
    auxiliaries = dict(trained.auxiliaries)
    loss = head_loss(record.gate)
    for depth in depths:
        if record.auxiliary is None:
            stages: nn.Module = halves.device.prefix(depth)
            head = halves.device.exit_head(depth)
        else:
            model = auxiliary_of(halves.device, depth, record.auxiliary, record.network.seed)
            auxiliaries[depth] = model.eval()
            stages, head = model.extractor, model.head
        layers = list(cast("nn.Sequential", head).children())
        features = run_torch(nn.Sequential(stages, *layers[:-1]), x)[0]
        teacher = run_torch(halves.whole(depth), x)[0]
        made = train_head(features, teacher, seed=record.network.seed, loss=loss)
        _set(cast("nn.Linear", layers[-1]), made)
        agreed = float((made.logits(features).argmax(1) == teacher.argmax(1)).mean())
        progress(
            f"exit at depth {depth} trained on {len(x)} samples: on these, {agreed:.1%} of its"
            " answers are the whole network's"
        )
    exits = tuple(sorted({*record.exits, *depths}))
    return TrainedRun(replace(record, exits=exits, back=True), halves, auxiliaries)


def head_loss(gate: GatePolicy) -> Callable[[Tensor, Tensor], Tensor]:
    """The loss by which a head learns what a gate measures: (B, N) logits and a teacher's, to ().

    For evidence it is BESplit's Eq. 5 for the classes that the teacher finds likeliest.
    """
    measures = read_gate(gate).measures
    learnt = next((EVIDENCE[measure] for measure in measures if measure in EVIDENCE), None)
    if learnt is None:
        return soft_cross_entropy

    def evidence_loss(given: Tensor, teacher: Tensor) -> Tensor:
        losses = evidential_losses(given, teacher.argmax(1), KL_WEIGHTS[learnt], learnt)
        return losses.mean().to(given.dtype)

    return evidence_loss


def _train_back(halves: Composition, x: Array, y: NDArray[np.int64], depths: Sequence[int]) -> None:
    """Train the last layer on the embeddings of the devices' depths."""
    if halves.server is halves.device:
        depths = depths[:1]  # one network, wherever it is cut
    necks = (
        nn.Sequential(halves.device.prefix(depth), halves.server.suffix(depth).neck)
        for depth in depths
    )
    embeddings = np.concatenate([run_torch(neck, x)[0] for neck in necks])
    back = halves.server.suffix(depths[0]).classifier
    teacher = CERTAIN * np.eye(back.out_features, dtype=np.float32)[np.tile(y, len(depths))]
    _set(back, train_head(embeddings, teacher, seed=0))


def _set(layer: nn.Linear, head: Head) -> None:
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(head.weight))
        layer.bias.copy_(torch.from_numpy(head.bias))
