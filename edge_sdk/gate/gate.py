"""The gate decides whether one sample exits on the device or is offloaded to the server.

A policy is a pure function from one sample's logits to its label, its probabilities and its
uncertainty; a gate exits when the uncertainty is strictly below its threshold. Gates compose with
`AllOf` and `AnyOf`. Thresholds come from the user, the bundle or `edge_sdk.gate.controllers`.

`decide` is in the path of every prediction: at 10 classes it takes about 5 us on one x86 core, a
tenth of a small network's run. Hence array methods and `math` for scalars below, where a call of
`np.clip` or a `keepdims` reduction alone would cost 3 us.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from edge_sdk.errors import ConfigurationError
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


class ExitRule(Protocol):
    """A gate, or a composition of gates."""

    def decide(self, logits: Floats) -> Decision:
        """The decision for one sample's logits, (N,) float32."""


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
    """
    label = int(logits.argmax())
    if not -math.inf < logits.item(label) < math.inf:
        return _unsure(logits, label)
    alpha = np.logaddexp(logits.astype(np.float64), 0.0)
    alpha += 1.0
    strength = float(alpha.sum())
    alpha /= strength
    return label, alpha.astype(np.float32), len(alpha) / strength


POLICIES: Final[Mapping[str, Policy]] = {
    "entropy": entropy,
    "margin": margin,
    "vacuity": vacuity,
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


@dataclass(frozen=True, slots=True)
class AllOf:
    """Exits when every gate does. As with Python's `and`, the decision is that of the first gate
    that does not exit, or else of the last gate.
    """

    gates: Sequence[ExitRule]

    def __post_init__(self) -> None:
        _need_gates(self.gates)

    def decide(self, logits: Floats) -> Decision:
        """The decision for one sample's logits, (N,) float32."""
        for gate in self.gates:
            decision = gate.decide(logits)
            if not decision.exit:
                break
        return decision


@dataclass(frozen=True, slots=True)
class AnyOf:
    """Exits when one gate does. As with Python's `or`, the decision is that of the first gate that
    exits, or else of the last gate.
    """

    gates: Sequence[ExitRule]

    def __post_init__(self) -> None:
        _need_gates(self.gates)

    def decide(self, logits: Floats) -> Decision:
        """The decision for one sample's logits, (N,) float32."""
        for gate in self.gates:
            decision = gate.decide(logits)
            if decision.exit:
                break
        return decision


def gate_from(spec: GateSpec, threshold: float | None = None) -> Gate:
    """The bundle's gate; a user's `threshold`, in the policy's unit, replaces the bundle's.

    Raises: ConfigurationError if `threshold` is nan.
    """
    return Gate(POLICIES[spec.policy], spec.threshold if threshold is None else threshold)


def uncertainties(policy: str, logits: Floats) -> NDArray[np.float64]:
    """The uncertainty of many samples, each as a gate on the device computes it.

    One row at a time, so that the export and the device get the same bits, and a sample that lies
    on a threshold falls on the same side for both. Takes 5 us a row at 10 classes.

    Args:
        logits: (n, N).
    Returns: (n,) float64.
    Raises: ConfigurationError for an unknown policy.
    """
    try:
        measure = POLICIES[policy]
    except KeyError:
        known = ", ".join(POLICIES)
        raise ConfigurationError(f"gate policy: expected one of {known}, got {policy!r}") from None
    rows = np.ascontiguousarray(logits, np.float32)
    return np.fromiter((measure(row)[2] for row in rows), np.float64, len(rows))


def _unsure(logits: Floats, label: int) -> tuple[int, Floats, float]:
    """The result for logits that are not finite: argmax picks a NaN first, and +inf next."""
    return label, np.full(logits.shape, np.nan, np.float32), math.nan


def _need_gates(gates: Sequence[ExitRule]) -> None:
    if not gates:
        raise ConfigurationError("composed gate: expected at least one gate, got none")
