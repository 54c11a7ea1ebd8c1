"""An inversion attack: how much of an input can be rebuilt from its smashed data?

The attacker is the server or a listener. It has the prefix, because the server averages its
weights, and images like the clients'. It trains a decoder on features of its own images and
rebuilds the clients' images with it (SCALA, section 5.7; ResSFL's strongest attacker: 64 channels,
4 residual blocks, 50 epochs).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_sdk.training.formulas.decoder import Decoder, Pixels
from edge_sdk.training.formulas.image_similarity import mse, psnr, ssim

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Attacker:
    """Resources of an attacker.

    Attributes:
        width, blocks: of its decoder. learning_rate: Adam's, at its peak.
    """

    width: int = 64
    blocks: int = 4
    epochs: int = 50
    batch: int = 64
    learning_rate: float = 5e-3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Leak:
    """Similarity of rebuilt images and inputs: means over images.

    Attributes:
        psnr: in dB.
        mse_blind, ssim_blind: of the mean of the attacker's images, which needs no features: an
            attack that does no better has learnt nothing.
    """

    mse: float
    ssim: float
    psnr: float
    mse_blind: float
    ssim_blind: float


@torch.no_grad()
def attack(prefix: nn.Module, known: Array, private: Array, attacker: Attacker) -> Leak:
    """Train the attacker's decoder and measure it on images it has never seen.

    Args:
        prefix: raw inputs to smashed data, on one device; not changed.
        known: (m, C, H, W) raw, the attacker's own images. private: (n, C, H, W) raw.
    Raises: ConfigurationError where inputs or smashed data are not images.
    """
    device = next(prefix.parameters()).device
    training = prefix.training
    prefix.eval()
    try:
        pixels = Pixels(known)
        features = torch.cat([prefix(x) for x in _batches(known, device)])
        images = torch.cat([pixels(x) for x in _batches(known, device)])
        decoder = _train(features, images, attacker)
        blind = images.mean(0, keepdim=True)
        scores = []
        for x in _batches(private, device):
            target, drawn = pixels(x).clamp(0, 1), decoder(prefix(x))
            guess = blind.expand_as(target)
            measures = (
                mse(drawn, target), ssim(drawn, target), psnr(drawn, target),
                mse(guess, target), ssim(guess, target),
            )  # fmt: skip
            scores.append(torch.stack(measures, 1))
    finally:
        prefix.train(training)
    return Leak(*torch.cat(scores).double().mean(0).tolist())


@torch.enable_grad()
def _train(features: Tensor, images: Tensor, attacker: Attacker) -> Decoder:
    """Train a decoder by mean squared error, with Adam and a one-cycle learning rate."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(attacker.seed)
        shapes = tuple(features.shape[1:]), tuple(images.shape[1:])
        decoder = Decoder(*shapes, attacker.width, attacker.blocks).to(features.device)
    generator = torch.Generator().manual_seed(attacker.seed)
    optimiser = torch.optim.Adam(decoder.parameters(), attacker.learning_rate)
    steps = attacker.epochs * -(-len(images) // attacker.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, attacker.learning_rate, total_steps=steps
    )
    for _ in range(attacker.epochs):
        for rows in torch.split(torch.randperm(len(images), generator=generator), attacker.batch):
            optimiser.zero_grad(set_to_none=True)
            loss = mse(decoder(features[rows]), images[rows]).mean()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimiser.step()
            schedule.step()
    return decoder


def _batches(x: Array, device: torch.device, size: int = 256) -> Iterator[Tensor]:
    for at in range(0, len(x), size):
        yield torch.from_numpy(np.ascontiguousarray(x[at : at + size])).to(device)
