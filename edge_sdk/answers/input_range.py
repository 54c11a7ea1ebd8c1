"""Scale of the inputs, against that of the bundle's own samples: 0..255 in place of 0..16, say.

Such inputs have the right shape and dtype, and get confident, wrong answers.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from edge_sdk.session import Array

logger = logging.getLogger(__name__)

# a sensor may well reach twice or three times what it did in the samples
TOO_LARGE: Final = 4.0
TOO_SMALL: Final = 1 / 20
FIRST: Final = 20  # inputs that are looked at for values that are too small
ADVICE: Final = "scale the inputs as the training data were; the answers mean nothing otherwise"


class InputRange:
    """Warns once if inputs are of another scale than the samples that came with the bundle.

    Args:
        largest: the largest |value| of these samples.
        energy: the largest sum of squares of one of them.
    Attributes:
        energy_most: an input with a larger sum of squares is to be shown to `look`.
        young: whether every input is to be shown to it.
    """

    def __init__(self, bundle: str, largest: float, energy: float) -> None:
        self._bundle = bundle
        self._largest = largest
        self._seen = 0.0
        self._left = FIRST
        self.energy_most = energy * TOO_LARGE**2
        self.young = True

    def look(self, x: Array) -> None:
        """Look at an input; one of zeros alone says nothing."""
        reached = float(np.abs(x).max())
        if reached > TOO_LARGE * self._largest:
            self._warn(reached)
        elif self.young and reached > 0:
            self._left -= 1
            self._seen = max(self._seen, reached)
            if self._seen >= TOO_SMALL * self._largest:
                self.young = False
            elif self._left == 0:
                self._warn(self._seen)

    def _warn(self, reached: float) -> None:
        self.young, self.energy_most = False, float("inf")
        logger.warning(
            "bundle=%s inputs have values up to %.4g, its own samples up to %.4g: %s",
            *(self._bundle, reached, self._largest, ADVICE),
        )


def range_of(bundle: str, samples: Array) -> InputRange | None:
    """The range of a bundle's own samples, (n, ...); None if they are all zero, or huge.

    Their array may be mapped from a file: no more than one sample is in memory at a time.
    """
    largest = energy = 0.0
    for sample in samples:
        values = sample.astype(np.float64).ravel()
        largest = max(largest, float(values.max()), -float(values.min()))
        energy = max(energy, float(values @ values))
    return InputRange(bundle, largest, energy) if 0 < energy < np.inf else None
