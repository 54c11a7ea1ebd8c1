"""A device's own exit head: learnt from its newest labels, and kept only while it is no worse.

Labels are the user's corrections, or the server's probabilities. One in HELD_OUT_EVERY labelled
samples is held out: it is never learnt from, and the learnt head must answer the held-out samples
at least as well as the bundle's. If it does not, it is dropped, and learning starts again from the
bundle's head.

Answers of the device itself are learnt from too, at a small weight, with what the bundle's head
says of them: so a head that learns from hard inputs keeps its answers to the easy ones.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from edge_sdk.learning.head import Floats, Head, Scale, cross_entropy, sgd_step, softmax

HELD_OUT_EVERY: Final = 4
# Labelled samples of each kind without which nothing is learnt.
LEARNT_LEAST: Final = 16
HELD_OUT_LEAST: Final = 8
HELD_OUT_MOST: Final = 256
ANCHORS_MOST: Final = 256
BATCH: Final = 32
STEPS: Final = 50
# Seconds after which a turn ends early, on a device that is slow or busy.
TURN_S: Final = 1.0

Outcome = Literal["waiting", "learnt", "dropped"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Features of one input, and the distribution over classes that the head should give."""

    features: Floats
    target: Floats


@dataclass(frozen=True, slots=True)
class Score:
    """Answers of a head to the held-out samples.

    Attributes:
        accuracy: share of answers that are the label. loss: mean cross-entropy.
    """

    accuracy: float
    loss: float

    def worse_than(self, other: Score) -> bool:
        """Whether fewer answers are right or, with as many right, the loss is larger."""
        return (-self.accuracy, self.loss) > (-other.accuracy, other.loss)


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one turn of learning.

    Attributes:
        bundle, learnt: scores of the bundle's head and of the learnt one; None while waiting.
    """

    outcome: Outcome
    bundle: Score | None = None
    learnt: Score | None = None


class Personalisation:
    """The head of one bundle on one device.

    Args:
        base: the bundle's own head.
        samples: most labelled samples to learn from; the newest count.
        rate: share of the largest safe learning rate of SGD.
        pull: strength of the pull to the bundle's head.
        anchor_share: share of a batch that are inputs which the device answered alone.

    Attributes:
        head: the head to answer with: the bundle's own, until a learnt one is no worse.
    """

    def __init__(
        self,
        base: Head,
        *,
        samples: int = 512,
        rate: float = 1.0,
        pull: float = 0.001,
        anchor_share: float = 0.25,
    ) -> None:
        self.base = self.head = base
        self.learnt: deque[Sample] = deque(maxlen=samples)
        self.held_out: deque[Sample] = deque(maxlen=min(samples, HELD_OUT_MOST))
        self._anchors: deque[Floats] = deque(maxlen=min(samples, ANCHORS_MOST))
        self._rate, self._pull, self._anchor_share = rate, pull, anchor_share
        self._labelled = 0
        self._turns = 0

    def add(self, sample: Sample) -> None:
        """Take a labelled sample; one in HELD_OUT_EVERY is held out."""
        self._labelled += 1
        held_out = self._labelled % HELD_OUT_EVERY == 0
        (self.held_out if held_out else self.learnt).append(sample)

    def anchor(self, features: Floats) -> None:
        """Take an input that the device answers alone."""
        self._anchors.append(features)

    def take(self, head: Head) -> None:
        """Answer with a head that was learnt before, if it still is no worse than the bundle's."""
        if self.held_out and not self.score(head).worse_than(self.score(self.base)):
            self.head = head

    def turn(self) -> Turn:
        """Learn for STEPS steps or TURN_S seconds, then compare with the bundle's head."""
        if len(self.learnt) < LEARNT_LEAST or len(self.held_out) < HELD_OUT_LEAST:
            return Turn("waiting")
        candidate = self._train()
        before, after = self.score(self.base), self.score(candidate)
        if not candidate.finite or after.worse_than(before):
            self.head = self.base
            return Turn("dropped", before, after)
        self.head = candidate
        return Turn("learnt", before, after)

    def score(self, head: Head) -> Score:
        """Answers of a head to the held-out samples, of which there is at least one."""
        features, targets = _stacked(self.held_out)
        logits = head.logits(features)
        right = float((logits.argmax(axis=1) == targets.argmax(axis=1)).mean())
        return Score(right, cross_entropy(logits, targets))

    def _train(self) -> Head:
        features, targets = _stacked(self.learnt)
        scale = Scale.of(features)
        own = scale.standardised(features)
        anchors = targets[:0], own[:0]
        if self._anchors and self._anchor_share:
            plain = np.stack(self._anchors)
            anchors = softmax(self.base.logits(plain)), scale.standardised(plain)
        start, head = scale.inner(self.base), scale.inner(self.head)
        self._turns += 1
        random = np.random.default_rng([self._labelled, self._turns])
        end = time.monotonic() + TURN_S
        for _ in range(STEPS):
            rows = random.integers(len(own), size=BATCH)
            count = round(BATCH * self._anchor_share) if len(anchors[0]) else 0
            others = random.integers(max(len(anchors[0]), 1), size=count)
            head = sgd_step(
                head,
                np.concatenate([own[rows], anchors[1][others]]),
                np.concatenate([targets[rows], anchors[0][others]]),
                rate=self._rate,
                pull=self._pull,
                start=start,
            )
            if time.monotonic() > end:
                break
        return scale.outer(head)


def _stacked(samples: deque[Sample]) -> tuple[Floats, Floats]:
    features = np.stack([sample.features for sample in samples])
    return features, np.stack([sample.target for sample in samples])
