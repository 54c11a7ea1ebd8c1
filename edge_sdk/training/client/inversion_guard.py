"""A client that trains its prefix against a decoder of its own: SCALA's privacy-enhanced half.

    Lk + weight * max(0, SSIM(decoder(z), x) - threshold)    SCALA, Eq. 17; after ResSFL

Each batch steps the decoder first, towards the inputs, and then pulls the prefix away from what the
decoder makes of its features. The decoder is personal: kept between rounds, never sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.nets.registry import DRAWING
from edge_sdk.training.client.client_round import Half, Open
from edge_sdk.training.formulas.decoder import Decoder, Pixels
from edge_sdk.training.formulas.image_similarity import ssim
from edge_sdk.training.protocol.messages import EndRound, Feedback, StartRound, Update
from edge_sdk.training.protocol.plan import Inversion, network_of
from edge_sdk.training.protocol.weights import load_weights, read_weights

if TYPE_CHECKING:
    from edge_sdk.training.client import TrainingClient

# names under which its decoder is kept among a client's personal weights
MARK: Final = "inversion."


class GuardedHalf(Half):
    """A Half whose prefix also learns to be hard to invert."""

    def __init__(self, client: TrainingClient, start: StartRound) -> None:
        super().__init__(client, start)
        assert start.plan.part.inversion is not None
        self._guard: Inversion = start.plan.part.inversion
        self._pixels = Pixels(client.x)
        self._decoder = self._last_decoder()
        self._adam = torch.optim.Adam(self._decoder.parameters(), self._guard.learning_rate)
        self._away: Tensor | None = None  # of the guard, with respect to the open batch's features

    def end(self, message: EndRound) -> Update:
        """As Half does; the decoder is kept."""
        update = super().end(message)
        decoder = read_weights(self._decoder)
        self._keep({f"{MARK}{name}": tensor for name, tensor in decoder.items()})
        return update

    def _forward(self, x: Tensor, y: Tensor) -> Open:
        opened = super()._forward(x, y)
        images = self._pixels(x)
        self._step_decoder(opened.z.detach(), images)
        z = opened.z.detach().requires_grad_()
        excess = ssim(self._decoder(z), images).mean() - self._guard.threshold
        (away,) = torch.autograd.grad(excess, z)
        self._away = away * self._guard.weight if float(excess.detach()) > 0 else None
        return opened

    def _gradient(self, batch: Open, feedback: Feedback | None) -> list[Tensor]:
        """As Half has it, and the guard's beside it, whoever else pulls at the prefix."""
        away, self._away = self._away, None
        if away is None:
            return super()._gradient(batch, feedback)
        guard = self._pull(batch.z, away, keep=True)
        joined = super()._gradient(batch, feedback)
        return [one + other for one, other in zip(joined, guard, strict=True)]

    def _step_decoder(self, z: Tensor, images: Tensor) -> None:
        """One step by 1 - SSIM."""
        self._adam.zero_grad(set_to_none=True)
        loss = 1 - ssim(self._decoder(z), images).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._adam.step()

    def _last_decoder(self) -> Decoder:
        """The one of the last round, or one with the weights of the plan's seed."""
        plan = self.plan
        features = network_of(plan).shape_at(plan.depth)
        with DRAWING, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(plan.seed)
            try:
                decoder = Decoder(features, plan.input_shape, self._guard.width)
            except ConfigurationError as err:
                raise FrameError(f"client {self.client.name}: {err}") from err
        personal = self.client.personal
        kept = {k.removeprefix(MARK): t for k, t in personal.items() if k.startswith(MARK)}
        if kept:
            load_weights(decoder, kept)
        return decoder.to(self.client.device)
