"""When an exit answers: the threshold that keeps an agreement, and what it gives elsewhere.

The threshold is chosen on held-out samples; the figures that are reported are of the test part,
which chose nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_sdk.gate.gate import largest_uncertainty, uncertainties
from edge_sdk.gate_form import read_gate
from edge_sdk.manifest import GatePoint, GatePolicy, GateSpec
from exporters.bundle import spread_rows
from exporters.curve import fit_scales, measure_gate, operating_curve
from exporters.errors import ExportError

Floats = NDArray[np.float32]
Labels = NDArray[np.integer[Any]]
Offload = Callable[[NDArray[np.intp]], Labels]


@dataclass(frozen=True, slots=True)
class Judged:
    """An exit and the whole model on the same samples.

    Attributes:
        exit, whole: (n, classes) logits.
        labels: (n,) true classes, or None.
    """

    exit: Floats
    whole: Floats
    labels: Labels | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a threshold on samples that did not choose it.

    Attributes:
        exit_rate: share of the samples that exit.
        agreement: share of those whose label is the whole model's; 1 where none exits.
        hybrid_agreement: share of all samples whose final label is the whole model's.
        accuracy: of the exit head alone, on all samples. hybrid_accuracy: of the gated pair.
            whole_accuracy: of the whole model. None without labels.
    """

    exit_rate: float
    agreement: float
    hybrid_agreement: float
    accuracy: float | None = None
    hybrid_accuracy: float | None = None
    whole_accuracy: float | None = None


def agreed_threshold(policy: GatePolicy, judged: Judged, agreement: float) -> float:
    """The loosest threshold at which the exits agree with the whole model as often as asked.

    It lies midway between two neighbouring samples; 0 where no threshold agrees often enough.
    """
    uncertainty = uncertainties(policy, judged.exit)
    order = np.argsort(uncertainty, kind="stable")
    ordered = uncertainty[order]
    agrees = (judged.exit.argmax(axis=1) == judged.whole.argmax(axis=1))[order]
    share = np.cumsum(agrees) / np.arange(1, len(agrees) + 1)
    # no threshold parts two samples of one uncertainty
    last = np.append(ordered[1:] > ordered[:-1], True)
    good = np.flatnonzero(last & (share >= agreement - 1e-12))
    if not len(good):
        return 0.0
    place = int(good[-1])
    if place == len(ordered) - 1:
        return 1.001 * largest_uncertainty(policy, judged.exit.shape[1])
    return float(ordered[place] + ordered[place + 1]) / 2


def agreement_gate(policy: GatePolicy, judged: Judged, agreement: float) -> GateSpec:
    """The gate of a bundle: the threshold that keeps the agreement, and the curve around it.

    Scales that a composed gate leaves open are fitted, at the share of samples that exit by its
    first measure alone with the agreement.

    Accuracies of the curve are against the labels; without labels, against the whole model.
    """
    labels = judged.whole.argmax(axis=1) if judged.labels is None else judged.labels
    form = read_gate(policy)
    if form.terms and not form.closed:
        alone = agreed_threshold(form.first, judged, agreement)
        share = float((uncertainties(form.first, judged.exit) < alone).mean())
        policy = fit_scales(policy, judged.exit, share)
    spec = measure_gate(judged.exit, judged.whole, labels, policy=policy)
    threshold = agreed_threshold(policy, judged, agreement)
    own = operating_curve(
        uncertainties(policy, judged.exit),
        judged.exit.argmax(axis=1) == labels,
        judged.whole.argmax(axis=1) == labels,
        [threshold],
    )
    curve = sorted((*spec.curve, *own), key=lambda point: point.threshold)
    return replace(spec, threshold=threshold, curve=_distinct(curve))


def deployed_curve(
    gate: GateSpec, judged: Judged, rows: NDArray[np.intp], offloaded: Floats
) -> GateSpec:
    """The gate with the accuracies that offloads through codec and bottleneck give.

    At each threshold, the whole model's answers to the samples that do not exit are corrected by
    the difference that those of `rows` show.

    Args:
        judged: samples that the gate was measured on.
        rows: indices of those that were offloaded. offloaded: (n, classes), their final logits.
    """
    labels = judged.whole.argmax(axis=1) if judged.labels is None else judged.labels
    right = (offloaded.argmax(axis=1) == labels[rows]).astype(np.float64)
    gained = right - (judged.whole.argmax(axis=1) == labels)[rows]
    uncertainty = uncertainties(gate.policy, judged.exit)[rows]

    def corrected(point: GatePoint) -> GatePoint:
        sent = gained[uncertainty >= point.threshold]
        if not len(sent):
            return point
        accuracy = point.accuracy + (1 - point.exit_rate) * float(sent.mean())
        return replace(point, accuracy=min(max(accuracy, 0.0), 1.0))

    return replace(gate, curve=tuple(map(corrected, gate.curve)))


def figures_at(
    gate: GateSpec, judged: Judged, offload: Offload | None = None, most: int = 1000
) -> Figures:
    """Figures of a gate on these samples.

    Args:
        offload: final labels of offloaded samples, by their indices. By default the whole model's.
        most: offloaded samples that it is asked for, evenly spread. Of the others the whole model's
            answers are taken, corrected by the difference that these show: an offload differs so
            rarely from the whole model that few samples measure it well.
    """
    exits = uncertainties(gate.policy, judged.exit) < gate.threshold
    own, whole = judged.exit.argmax(axis=1), judged.whole.argmax(axis=1)
    rate = float(exits.mean())
    sent = np.flatnonzero(~exits)
    asked = sent[spread_rows(len(sent), most)]
    answers = whole[asked] if offload is None else offload(asked)

    def hybrid(labels: Labels) -> float:
        difference = _share(answers, labels[asked]) - _share(whole[asked], labels[asked])
        offloaded = min(max(_share(whole[sent], labels[sent]) + difference, 0.0), 1.0)
        return rate * _share(own[exits], labels[exits]) + (1 - rate) * offloaded

    figures = Figures(
        exit_rate=rate, agreement=_share(own[exits], whole[exits]), hybrid_agreement=hybrid(whole)
    )
    if judged.labels is None:
        return figures
    return replace(
        figures,
        accuracy=_share(own, judged.labels),
        hybrid_accuracy=hybrid(judged.labels),
        whole_accuracy=_share(whole, judged.labels),
    )


def require_finite(name: str, values: Floats) -> None:
    """Refuse logits or features that are not finite.

    Raises: ExportError saying of how many samples.
    """
    bad = int((~np.isfinite(values).all(axis=1)).sum())
    if bad:
        raise ExportError(
            f"{name}: expected finite values, got NaN or infinity for {bad} of {len(values)}"
            " samples; check --mean, --std and the range of the data"
        )


def _share(given: Labels, wanted: Labels) -> float:
    """Share of equal labels; 1 of none."""
    return float((given == wanted).mean()) if len(given) else 1.0


def _distinct(curve: Sequence[GatePoint]) -> tuple[GatePoint, ...]:
    return tuple({point.threshold: point for point in curve}.values())
