"""The gate decides whether one sample exits on the device or is offloaded to the server.

A policy is a pure function from one sample's logits to its label, its probabilities and its
uncertainty; a gate exits when the uncertainty is strictly below its threshold. A composed policy
(edge_sdk.gate_form) has one uncertainty too. Thresholds come from the user, the bundle or
`edge_sdk.gate.controllers`.

`decide` is in the path of every prediction: at 10 classes it takes about 5 us on one x86 core, a
tenth of a small network's run. Hence array methods and `math` for scalars below, where a call of
`np.clip` or a `keepdims` reduction alone would cost 3 us.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError
from edge_sdk.gate_form import TANGENT_FROM, GateForm, read_gate
from edge_sdk.manifest import GateSpec

Floats = NDArray[np.float32]
Policy = Callable[[Floats], tuple[int, Floats, float]]

_sum = np.add.reduce  # what ndarray.sum calls, without the 0.7 us on the way


@dataclass(slots=True, eq=False)
class Decision:
    """Decision of a gate on one sample. Treat it as read-only: freezing it would cost 1 us.

    Attributes:
        exit: whether the device's answer is final.
        label: index of the largest logit; the first of several equal ones.
        probabilities: (N,) float32, sum 1.
        uncertainty, threshold: of the gate that decided, in its policy's unit.
    """

    exit: bool
    label: int
    probabilities: Floats
    uncertainty: float
    threshold: float


def entropy(logits: Floats) -> tuple[int, Floats, float]:
    """Label, softmax and its Shannon entropy in nats, from 0 (sure) to ln N.

    With s = logits - max and S = sum e^s:  H = ln S - sum(e^s * s) / S, two terms >= 0.

    A NaN or +inf anywhere makes the uncertainty nan, under every policy: no gate exits on it.
    """
    label = int(logits.argmax())
    peak = logits.item(label)
    if not -math.inf < peak < math.inf:
        return _unsure(logits, label)
    # float64: differences of float32 cannot overflow in it
    shifted = logits.astype(np.float64)
    shifted -= peak
    weights = np.exp(shifted)
    total = float(_sum(weights))
    value = math.log(total) - float(weights.dot(shifted)) / total
    weights /= total
    return label, weights.astype(np.float32), value


def margin(logits: Floats) -> tuple[int, Floats, float]:
    """Label, softmax and 1 - (p1 - p2) of its two largest entries, from 0 (sure) to 1 (a tie).

    Computed as (p2 + sum of all but p1), which does not round to 0 for a sure network.
    """
    label = int(logits.argmax())
    peak = logits.item(label)
    if not -math.inf < peak < math.inf:
        return _unsure(logits, label)
    weights = logits.astype(np.float64)
    weights -= peak
    np.exp(weights, out=weights)
    weights[label] = 0.0
    rest = float(weights.sum())
    second = float(weights.max())
    weights[label] = 1.0
    weights /= 1.0 + rest
    return label, weights.astype(np.float32), (second + rest) / (1.0 + rest)


def vacuity(logits: Floats) -> tuple[int, Floats, float]:
    """Label, expected probabilities and vacuity N / S of the Dirichlet that the logits stand for,
    from 0 (unlimited evidence) to 1 (none).

    e = softplus(logits), alpha = e + 1, S = sum alpha, p = alpha / S    BESplit, Evidence

    The evidence of bundles of the releases before; `vacuity_exp` is that of networks trained now.
    """
    label = int(logits.argmax())
    if not -math.inf < logits.item(label) < math.inf:
        return _unsure(logits, label)
    return _expected(label, np.logaddexp(logits.astype(np.float64), 0.0))


def vacuity_exp(logits: Floats) -> tuple[int, Floats, float]:
    """Label, expected probabilities and vacuity, with e = exp(logits), by its tangent beyond 10."""
    label = int(logits.argmax())
    peak = logits.item(label)
    if not -math.inf < peak < math.inf:
        return _unsure(logits, label)
    evidence = logits.astype(np.float64)
    if peak <= TANGENT_FROM:
        return _expected(label, np.exp(evidence, out=evidence))
    slope = np.maximum(evidence - (TANGENT_FROM - 1.0), 1.0)
    return _expected(label, np.exp(np.minimum(evidence, TANGENT_FROM)) * slope)


POLICIES: Final[Mapping[str, Policy]] = {
    "entropy": entropy,
    "margin": margin,
    "vacuity": vacuity,
    "vacuity-exp": vacuity_exp,
}


@dataclass(slots=True)
class Gate:
    """Exits when the policy's uncertainty is strictly below the threshold (HARMONY, inference).

    `threshold` may be written at any time, for example by a controller of
    `edge_sdk.gate.controllers`; inf always exits, -inf never does.
    """

    policy: Policy
    threshold: float

    def __post_init__(self) -> None:
        if math.isnan(self.threshold):
            raise ConfigurationError("gate threshold: expected a number, got nan")

    def decide(self, logits: Floats) -> Decision:
        """The decision for one sample's logits, (N,) float32, N >= 2."""
        threshold = self.threshold
        label, probabilities, uncertainty = self.policy(logits)
        return Decision(uncertainty < threshold, label, probabilities, uncertainty, threshold)


def policy_of(text: str, classes: int, *, answer: str | None = None) -> Policy:
    """The policy that a text stands for (edge_sdk.gate_form).

    Label and probabilities are those of the measure that is named first: the softmax for entropy
    and margin, the expected probabilities of the evidence for vacuity.

    Args:
        classes: N, for measures without a scale.
        answer: measure that gives the probabilities in place of the first.
    Raises: ConfigurationError for a text that is no gate.
    """
    form = read_gate(text)
    answer = answer or form.first
    if form.kind == answer:
        return POLICIES[answer]
    answering, value = POLICIES[answer], _value(form, classes, answer)

    def policy(logits: Floats) -> tuple[int, Floats, float]:
        label, probabilities, uncertainty = answering(logits)
        return label, probabilities, value(logits, uncertainty)

    return policy


def answer_policy(spec: GateSpec) -> Policy:
    """The policy that turns logits of the bundle's network into label and probabilities."""
    return POLICIES[read_gate(spec.policy).first]


def largest_uncertainty(text: str, classes: int) -> float:
    """The largest uncertainty that a gate can have; none is above it, but for rounding."""
    return _largest(read_gate(text), classes)


def term_scale(term: GateForm, classes: int) -> float:
    """The scale of a term; where it is open, its largest value, and 1 for a composition."""
    if term.scale is not None:
        return term.scale
    return 1.0 if term.terms else _largest(term, classes)


def gate_from(
    spec: GateSpec, classes: int, *, text: str | None = None, threshold: float | None = None
) -> Gate:
    """The bundle's gate, or the user's.

    Probabilities stay those of the bundle's own gate: the network learnt evidence, or it did not.

    Args:
        text: the user's gate; None takes the bundle's.
        threshold: in that gate's unit; None takes the bundle's, and with `text` the threshold that
            its scales stand for, else inf, which a controller replaces.
    Raises: ConfigurationError if `threshold` is nan.
    """
    policy = text or spec.policy
    form = read_gate(policy)
    if threshold is None:
        own = math.inf if form.threshold is None else form.threshold
        threshold = spec.threshold if text is None else own
    answer = read_gate(spec.policy).first
    return Gate(policy_of(policy, classes, answer=answer), threshold)


def uncertainties(text: str, logits: Floats) -> NDArray[np.float64]:
    """The uncertainty of many samples, each as a gate on the device computes it.

    One row at a time, so that the export and the device get the same bits, and a sample that lies
    on a threshold falls on the same side for both. Takes 5 us a row and measure at 10 classes.

    Args:
        logits: (n, N).
    Returns: (n,) float64.
    Raises: ConfigurationError for a text that is no gate.
    """
    rows = np.ascontiguousarray(logits, np.float32)
    policy = policy_of(text, rows.shape[1])
    return np.fromiter((policy(row)[2] for row in rows), np.float64, len(rows))


def _value(form: GateForm, classes: int, known: str) -> Callable[[Floats, float], float]:
    """The uncertainty of a gate from logits and the uncertainty of the measure `known`."""
    if not form.terms:
        measure = POLICIES[form.kind]
        if form.kind == known:
            return lambda _, given: given
        return lambda logits, _: measure(logits)[2]
    values = [(_value(term, classes, known), term_scale(term, classes)) for term in form.terms]
    pick = max if form.kind == "all" else min

    def composed(logits: Floats, given: float) -> float:
        parts = [value(logits, given) / scale for value, scale in values]
        # a nan would win or lose by its place
        return math.nan if math.isnan(sum(parts)) else pick(parts)

    return composed


def _largest(form: GateForm, classes: int) -> float:
    if not form.terms:
        return math.log(classes) if form.kind == "entropy" else 1.0
    pick = max if form.kind == "all" else min
    return pick(_largest(term, classes) / term_scale(term, classes) for term in form.terms)


def _expected(label: int, evidence: NDArray[np.float64]) -> tuple[int, Floats, float]:
    """Label, expected probabilities and vacuity; `evidence` (N,) is overwritten."""
    evidence += 1.0
    strength = float(evidence.sum())
    evidence /= strength
    return label, evidence.astype(np.float32), len(evidence) / strength


def _unsure(logits: Floats, label: int) -> tuple[int, Floats, float]:
    """The result for logits that are not finite: argmax picks a NaN first, and +inf next."""
    return label, np.full(logits.shape, np.nan, np.float32), math.nan
