"""Gaussian noise on the smashed data and the updates that a client sends. Both are clipped first.

    z'  = clip(z, C_z) + N(0, (s_z * C_z)^2)          each sample by its own L2 norm
    u'  = clip(u, C_u) + N(0, (s_u * C_u)^2)          u, the change of all weights together

The server's accountant computes epsilon (server.training.recipe.privacy). It holds against a server
that follows the plan, because the plan says how much noise there is. The noise is keyed by a secret
that the server does not know. The key counts the starts of a round too, so the same noise never
covers different data.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

from edge_sdk.errors import InputError
from edge_sdk.training.protocol.client_part import Noise
from edge_sdk.training.protocol.messages import Features, OutputGradient, Reply, Update, Weights
from edge_sdk.training.streams import Stream

NO_SCORES: Final = "devices are not scored under noise: a count of right answers has none"


@dataclass(frozen=True, slots=True)
class NoiseKey:
    """Source of the noise of one client in one round.

    Attributes:
        secret: the client's own, which the server does not know.
        start: how many times the client has started this round before.
    """

    secret: int
    client: str
    round: int
    start: int

    def generator(self, stream: Stream, **words: int) -> np.random.Generator:
        """A generator of that stream of noise."""
        return stream.generator(
            self.secret, client=self.client, round=self.round, start=self.start, **words
        )


def clip_samples(z: Tensor, limit: float) -> Tensor:
    """Scale each sample so that its L2 norm is at most `limit`.

    Args:
        z: (B, ...) float32.
    """
    norms = z.flatten(1).norm(dim=1).clamp(min=torch.finfo(z.dtype).tiny)
    scale = (limit / norms).clamp(max=1.0)
    clipped: Tensor = z * scale.view(-1, *[1] * (z.ndim - 1))
    return clipped


def noised_features(z: Tensor, noise: Noise, key: NoiseKey, given: int) -> Tensor:
    """Clipped smashed data as they leave the client; unchanged for a plan without noise on them.

    Args:
        given: batches that have left in this round.
    """
    if noise.feature_clip is None or not noise.feature_sigma:
        return z
    generator = key.generator(Stream.FEATURE_NOISE, index=given)
    return z + _gaussian(z, noise.feature_sigma * noise.feature_clip, generator)


def noised_update(weights: Weights, sent: Weights, noise: Noise, key: NoiseKey) -> Weights:
    """Weights after their change since the round's start has been clipped and noised.

    Every weight must have been sent; a plan with noise has no others.

    Raises: InputError if the change is not finite: it cannot be clipped, so no noise covers it.
    """
    if noise.update_clip is None:
        return weights
    names = sorted(weights)  # a transport may change their order
    change = {name: weights[name] - sent[name] for name in names}
    norm = float(torch.stack([c.double().norm() for c in change.values()]).norm())
    if not np.isfinite(norm):
        raise InputError(
            "update: expected finite weights to clip, got NaN or infinity; lower update_sigma"
            " (noise of earlier rounds makes weights diverge) or learning_rate"
        )
    scale = min(1.0, noise.update_clip / norm) if norm else 1.0
    std = noise.update_sigma * noise.update_clip
    noised = {}
    for place, name in enumerate(names):
        noised[name] = sent[name] + scale * change[name]
        if std:
            generator = key.generator(Stream.UPDATE_NOISE, index=place)
            noised[name] += _gaussian(change[name], std, generator)
    return noised


def without_loss(reply: Reply) -> Reply:
    """The reply without its loss, which no noise covers."""
    match reply:
        case Features():
            return replace(reply, loss=None)
        case OutputGradient() | Update():
            return replace(reply, loss=0.0)
        case _:
            return reply


def _gaussian(like: Tensor, std: float, generator: np.random.Generator) -> Tensor:
    drawn = generator.standard_normal(tuple(like.shape))
    return torch.from_numpy(drawn * std).to(like.device, like.dtype)
