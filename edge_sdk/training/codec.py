"""The wire's codecs on torch tensors, sample by sample."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from edge_sdk.manifest import Codec
from edge_sdk.wire.codecs import decode, encode


def through_codec(z: Tensor, codec: Codec) -> Tensor:
    """What the receiver sees of `z` (B, ...): the same in a simulation as over a network.

    A sample is a tensor of its own, so its range does not depend on its neighbours.
    """
    if codec == "fp32":
        return z
    rows = [decode(*encode(row, codec)) for row in z.numpy()]
    return torch.from_numpy(np.stack(rows))
