"""The linear layer of an exit head, and its training by numpy.

    L(U, c) = mean_i CE(softmax(U g_i + c), q_i) + pull / 2 * |U - U_0|^2
    g = (f - mean) / deviation            features, standardised by those at hand
    U = W * deviation,  c = b + W mean    the same layer, for g

A step of SGD is U -= rate * dL/dU, and the same for c. The rate is a share of 1 / mean |(g, 1)|^2,
so that one number suits features of any size and count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

# Least deviation of a feature, as a share of the largest: one that hardly varies is mostly noise.
DEVIATION_LEAST: Final = 0.05


@dataclass(frozen=True, slots=True)
class Head:
    """A linear layer: logits = features @ weight.T + bias.

    Attributes:
        weight: (classes, features). bias: (classes,).
    """

    weight: Floats
    bias: Floats

    @property
    def features(self) -> int:
        """Number of features."""
        return int(self.weight.shape[1])

    def logits(self, features: Floats) -> Floats:
        """(n, features) to (n, classes)."""
        logits: Floats = features @ self.weight.T + self.bias
        return logits

    @property
    def finite(self) -> bool:
        """Whether every weight is a number."""
        return bool(np.isfinite(self.weight).all() and np.isfinite(self.bias).all())


@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and deviation of features, (features,) each."""

    mean: Floats
    deviation: Floats

    @classmethod
    def of(cls, features: Floats) -> Self:
        """The scale of (n, features)."""
        deviation = features.std(axis=0)
        least = DEVIATION_LEAST * float(deviation.max(initial=0.0)) or 1.0
        return cls(features.mean(axis=0), np.maximum(deviation, np.float32(least)))

    def standardised(self, features: Floats) -> Floats:
        """(n, features) with mean 0 and deviation 1."""
        scaled: Floats = (features - self.mean) / self.deviation
        return scaled

    def inner(self, head: Head) -> Head:
        """The head for standardised features that gives the logits of `head`."""
        bias: Floats = head.bias + head.weight @ self.mean
        return Head(head.weight * self.deviation, bias)

    def outer(self, head: Head) -> Head:
        """The head for plain features that gives the logits of `head` for standardised ones."""
        weight: Floats = head.weight / self.deviation
        return Head(weight, head.bias - weight @ self.mean)


def softmax(logits: Floats) -> Floats:
    """Probabilities of logits (n, classes)."""
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities: Floats = powers / powers.sum(axis=1, keepdims=True)
    return probabilities


def cross_entropy(logits: Floats, targets: Floats) -> float:
    """Mean over n of -sum_k q_k ln softmax(logits)_k.

    Args:
        targets: (n, classes), each a distribution.
    """
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return float(-(targets * logs).sum(axis=1).mean())


def sgd_step(
    head: Head, features: Floats, targets: Floats, *, rate: float, pull: float, start: Head
) -> Head:
    """The head after one step on L.

    Args:
        features: (n, features), standardised. targets: (n, classes).
        rate: share of the largest safe learning rate, 1 / mean |(g, 1)|^2.
        pull: strength of the pull to `start`.
    """
    error = (softmax(head.logits(features)) - targets) / np.float32(len(features))
    step = np.float32(rate / (1.0 + float(np.square(features).sum(axis=1).mean())))
    weight: Floats = error.T @ features + np.float32(pull) * (head.weight - start.weight)
    bias: Floats = error.sum(axis=0)
    return Head(head.weight - step * weight, head.bias - step * bias)
