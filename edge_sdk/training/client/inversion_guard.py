"""The inversion guard: the client trains its prefix against a decoder of its own (SCALA's
privacy-enhanced variant).

    Lk + weight * max(0, SSIM(decoder(z), x) - threshold)    SCALA, Eq. 17; after ResSFL

The decoder reconstructs inputs from the client's features. Each batch first steps the decoder
towards better reconstructions, and then the prefix towards worse ones. The decoder is personal:
kept between rounds, never sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edge_sdk.bundles.namespaces import INVERSION
from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.nets.registry import INIT_LOCK
from edge_sdk.training.client.companion import Companion, OpenBatch
from edge_sdk.training.client.state import ClientState
from edge_sdk.training.formulas.adam import Adam
from edge_sdk.training.formulas.decoder import Decoder, Pixels
from edge_sdk.training.formulas.image_similarity import ssim
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.weights import load_weights, read_weights


class InversionGuard(Companion):
    """Trains the prefix to be hard to invert."""

    def __init__(self, state: ClientState, plan: Plan) -> None:
        assert plan.part.inversion is not None, "the plan asks for a guard"
        self._guard = plan.part.inversion
        self._pixels = Pixels(state.x)
        self.decoder = _last_decoder(state, plan, self._guard.width)
        self._adam = Adam(self.decoder.parameters(), self._guard.learning_rate)
        self._away: Tensor | None = None  # the guard's gradient by the open batch's features

    def forward(self, batch: OpenBatch) -> None:
        """Step the decoder, then measure how well it reconstructs the batch."""
        z, images = batch.z.detach(), self._pixels(batch.x)
        self._step_decoder(z, images)
        z.requires_grad_()
        excess = ssim(self.decoder(z), images).mean() - self._guard.threshold
        (away,) = torch.autograd.grad(excess, z)
        self._away = away * self._guard.weight if float(excess.detach()) > 0 else None

    def gradient(self, batch: OpenBatch) -> Tensor | None:  # noqa: ARG002 - `forward` computed it
        """Away from good reconstructions; None while they are below the threshold."""
        return self._away

    def kept(self) -> Weights:
        """The decoder."""
        return INVERSION.prefixed(read_weights(self.decoder))

    def _step_decoder(self, z: Tensor, images: Tensor) -> None:
        """One step by 1 - SSIM."""
        loss = 1 - ssim(self.decoder(z), images).mean()
        self._adam.step(torch.autograd.grad(loss, self._adam.parameters))


def _last_decoder(state: ClientState, plan: Plan, width: int) -> Decoder:
    """The decoder of the last round, or one with the weights of the plan's seed."""
    features = network_of(plan).shape_at(plan.depth)
    with INIT_LOCK, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(plan.seed)
        try:
            decoder = Decoder(features, plan.input_shape, width)
        except ConfigurationError as err:
            raise FrameError(f"client {state.name}: {err}") from err
    kept = INVERSION.select(state.personal)
    if kept:
        load_weights(decoder, kept)
    return decoder.to(state.device)
