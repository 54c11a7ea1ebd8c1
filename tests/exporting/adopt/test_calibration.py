"""Samples that set the int8 ranges, where few are held out."""

from __future__ import annotations

import numpy as np

from edge_sdk.training.data.load import Part, Parts
from exporters.adopt.adoption import calibration_samples


def test_few_held_out_samples_are_joined_by_those_of_every_class() -> None:
    """A folder of pictures has one class after the other."""
    y = np.repeat(np.arange(4), 100)
    train = Part(y.astype(np.float32)[:, None], y)
    held_out = train.rows(slice(0, 40))
    x = calibration_samples(Parts(train, held_out, held_out))
    assert x.shape == (40 + 128, 1)
    counts = np.bincount(x[40:, 0].astype(np.int64))
    assert counts.min() >= 31
