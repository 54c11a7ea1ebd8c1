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


class Inverter:
    """A decoder that the attacker has trained for one prefix.

    Args:
        prefix: raw inputs to what the attacker sees of them, on one device; not changed.
        known: (m, C, H, W) raw, the attacker's own images.
    Raises: ConfigurationError where inputs or smashed data are not images.
    """

    @torch.no_grad()
    def __init__(self, prefix: nn.Module, known: Array, attacker: Attacker) -> None:
        self._prefix = prefix
        self._device = next(prefix.parameters()).device
        self._pixels = Pixels(known)
        features = torch.cat([self._seen(x) for x in _batches(known, self._device)])
        images = torch.cat([self._pixels(x) for x in _batches(known, self._device)])
        self._decoder = _train(features, images, attacker)
        self._blind = images.mean(0, keepdim=True)

    @torch.no_grad()
    def rebuild(self, private: Array) -> tuple[Tensor, Tensor]:
        """Images rebuilt from what the attacker sees of them, and the images, (n, C, H, W) each.

        Args:
            private: (n, C, H, W) raw. Values returned are in [0, 1].
        """
        drawn, targets = [], []
        for x in _batches(private, self._device):
            targets.append(self._pixels(x).clamp(0, 1))
            drawn.append(self._decoder(self._seen(x)))
        return torch.cat(drawn), torch.cat(targets)

    def measure(self, private: Array) -> Leak:
        """Similarity of rebuilt images and inputs."""
        drawn, target = self.rebuild(private)
        guess = self._blind.expand_as(target)
        measures = (
            mse(drawn, target), ssim(drawn, target), psnr(drawn, target),
            mse(guess, target), ssim(guess, target),
        )  # fmt: skip
        return Leak(*torch.stack(measures, 1).double().mean(0).tolist())

    def _seen(self, x: Tensor) -> Tensor:
        training = self._prefix.training
        self._prefix.eval()
        try:
            seen: Tensor = self._prefix(x)
        finally:
            self._prefix.train(training)
        return seen


def attack(prefix: nn.Module, known: Array, private: Array, attacker: Attacker) -> Leak:
    """Train the attacker's decoder and measure it on images it has never seen.

    Args:
        prefix, known, attacker: as `Inverter`. private: (n, C, H, W) raw.
    Raises: ConfigurationError as `Inverter`.
    """
    return Inverter(prefix, known, attacker).measure(private)


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
