"""The wire's codecs applied to a batch of features, sample by sample.

Each sample is coded by itself, so its range does not depend on the other samples.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from edge_sdk.errors import FrameError, InputError, NotFiniteError
from edge_sdk.manifest import FeatureCodec
from edge_sdk.wire.codecs import decode, encode

# dtypes that the codecs turn float32 into
CODED: Final = (torch.float32, torch.float16, torch.uint8)


def encode_batch(z: Tensor, codec: FeatureCodec) -> tuple[Tensor, Tensor | None]:
    """A batch as it travels.

    Args:
        z: (B, ...) float32.
    Returns: (B, ...) float32, float16 or uint8, contiguous; and for int8 (B, 2) float32, each
        sample's scale and zero point, else None. A batch with NaN, infinity or a magnitude that
        the codec does not take travels as NaN whole: the receiver learns that training diverged.
    """
    # contiguous, as bytes from a message are: the order in memory changes the last bits
    z = z.contiguous()
    if codec == "fp32":
        return z, None
    try:
        rows = [encode(row, codec) for row in z.cpu().numpy()]
    except InputError:
        return _diverged(z, codec)
    values = torch.from_numpy(np.stack([values for values, _ in rows])).to(z.device)
    if codec == "fp16":
        return values, None
    ranges = [(numbers["scale"], numbers["zero_point"]) for _, numbers in rows]
    return values, torch.tensor(ranges, dtype=torch.float32, device=z.device)


def _diverged(z: Tensor, codec: FeatureCodec) -> tuple[Tensor, Tensor | None]:
    """A coded batch that decodes to NaN, or is refused for ranges of NaN."""
    if codec == "fp16":
        return torch.full_like(z, math.nan, dtype=torch.float16), None
    return torch.zeros_like(z, dtype=torch.uint8), torch.full((len(z), 2), math.nan).to(z.device)


def decode_batch(values: Tensor, ranges: Tensor | None) -> Tensor:
    """The features that the receiver computes with: (B, ...) float32.

    Raises: FrameError for tensors that `encode_batch` does not give; NotFiniteError for an int8
        batch that diverged, one of fp16 decodes to NaN.
    """
    if not values.ndim or not len(values):
        raise FrameError(
            f"features: expected one sample or more, got a tensor of shape {tuple(values.shape)}"
        )
    if values.dtype not in CODED:
        raise FrameError(f"features: expected float32, float16 or uint8, got {values.dtype}")
    if values.dtype != torch.uint8:
        return values.to(torch.float32)
    if ranges is None or ranges.shape != (len(values), 2) or ranges.dtype != torch.float32:
        raise FrameError(f"features: expected a scale and a zero point for {len(values)} samples")
    if not torch.isfinite(ranges).all():
        raise NotFiniteError("features: expected finite scales and zero points")
    rows = [
        decode(row, {"scale": scale, "zero_point": int(zero_point)})
        for row, (scale, zero_point) in zip(values.cpu().numpy(), ranges.tolist(), strict=True)
    ]
    return torch.from_numpy(np.stack(rows)).to(values.device)
