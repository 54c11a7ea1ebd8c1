"""Samples for the network `tiny`, and an option by which none of them is answered alone."""

from __future__ import annotations

import numpy as np

from edge_sdk.manifest import TensorSpec
from edge_sdk.session import Array

SPEC = TensorSpec("float32", (1, 8, 8))
SAMPLES: Array = np.random.default_rng(7).integers(0, 17, (5, 1, 8, 8)).astype(np.float32)
NEVER = ("--threshold", "-1")  # below every entropy: nothing exits on the device
