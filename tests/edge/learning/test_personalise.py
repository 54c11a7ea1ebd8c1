"""Learning from labels: when it begins, what it improves, and when it is dropped."""

from __future__ import annotations

import numpy as np

from edge_sdk.learning.head import Floats, Head
from edge_sdk.learning.personalise import (
    HELD_OUT_EVERY,
    HELD_OUT_LEAST,
    Personalisation,
    Sample,
)

CLASSES, FEATURES = 3, 12
RANDOM = np.random.default_rng(1)
CENTRES = RANDOM.normal(size=(CLASSES, FEATURES)).astype(np.float32) * 2


def one_hot(label: int) -> Floats:
    target = np.zeros(CLASSES, np.float32)
    target[label] = 1
    return target


def sample(shift: float = 0.0) -> tuple[Floats, int]:
    label = int(RANDOM.integers(CLASSES))
    noise = RANDOM.normal(size=FEATURES).astype(np.float32)
    return CENTRES[label] + noise + np.float32(shift), label


def bundle_head() -> Head:
    """The best linear head of three unit Gaussians without shift: W = mu, b = -|mu|^2 / 2."""
    return Head(CENTRES, -np.square(CENTRES).sum(axis=1) / 2)


def accuracy(head: Head, shift: float) -> float:
    drawn = [sample(shift) for _ in range(600)]
    logits = head.logits(np.stack([features for features, _ in drawn]))
    return float((logits.argmax(axis=1) == [label for _, label in drawn]).mean())


def taught(own: Personalisation, count: int, shift: float) -> None:
    for _ in range(count):
        features, label = sample(shift)
        own.add(Sample(features, one_hot(label)))


def test_nothing_is_learnt_before_enough_is_held_out() -> None:
    own = Personalisation(bundle_head())
    taught(own, HELD_OUT_EVERY * HELD_OUT_LEAST - 1, shift=0.0)
    assert own.turn().outcome == "waiting"
    assert own.head is own.base
    taught(own, 1, shift=0.0)
    assert own.turn().outcome != "waiting"


def test_a_shifted_stream_is_learnt() -> None:
    shift = 6.0
    own = Personalisation(bundle_head())
    before = accuracy(own.base, shift)
    for _ in range(8):
        taught(own, 40, shift)
        turn = own.turn()
    assert turn.outcome == "learnt"
    assert turn.bundle is not None
    assert turn.learnt is not None
    assert turn.learnt.accuracy > turn.bundle.accuracy
    assert accuracy(own.head, shift) > before + 0.1


def test_a_head_that_does_worse_on_held_out_samples_is_dropped() -> None:
    own = Personalisation(bundle_head())
    taught(own, 80, shift=0.0)
    own.turn()
    for place, each in enumerate(own.learnt):  # wrong labels, but not of the held-out samples
        wrong = one_hot((int(each.target.argmax()) + 1) % CLASSES)
        own.learnt[place] = Sample(each.features, wrong)
    turn = own.turn()
    assert turn.outcome == "dropped"
    assert own.head is own.base


def test_easy_inputs_keep_their_answers_while_hard_ones_of_one_class_are_learnt() -> None:
    """Only class 0 is ever labelled, with features like class 1's; anchors are all classes."""

    def learnt(anchors: bool) -> Head:
        own = Personalisation(bundle_head(), anchor_share=0.25)
        for _ in range(400):
            own.add(
                Sample(CENTRES[1] + RANDOM.normal(size=FEATURES).astype(np.float32) + 4, one_hot(0))
            )
            if anchors:
                own.anchor(sample()[0])
        for _ in range(5):
            own.turn()
        return own.head

    assert accuracy(learnt(anchors=False), 0.0) < 0.8
    assert accuracy(learnt(anchors=True), 0.0) > 0.95


def test_samples_are_bounded_and_the_newest_are_kept() -> None:
    own = Personalisation(bundle_head(), samples=40)
    taught(own, 1000, shift=0.0)
    own.add(Sample(np.full(FEATURES, 7, np.float32), one_hot(1)))
    assert len(own.learnt) == 40
    assert len(own.held_out) == 40
    assert own.learnt[-1].features[0] == 7


def test_samples_that_are_not_finite_numbers_do_not_reach_the_answers() -> None:
    own = Personalisation(bundle_head(), rate=2.0)
    taught(own, 80, shift=0.0)
    for _ in range(60):
        own.add(Sample(np.full(FEATURES, 3e38, np.float32), one_hot(0)))
    with np.errstate(all="ignore"):
        assert own.turn().outcome == "dropped"
    assert own.head is own.base
