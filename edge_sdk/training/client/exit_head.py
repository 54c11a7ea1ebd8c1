"""The exit head that a client trains in a round, and its loss."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from edge_sdk.nets.copying import copy_module
from edge_sdk.training.client.optimiser import optimiser_of
from edge_sdk.training.client.state import ClientState
from edge_sdk.training.formulas.evidence import evidential_losses
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.weights import load_weights


class ExitHead:
    """A copy of the exit head at the plan's depth, with an optimiser.

    Args:
        number: of the round.
        weights: at the start of the round; none in the first round, which takes the weights of the
            plan's seed.

    Attributes:
        module: smashed data to logits (B, N), in train mode.
    """

    def __init__(self, state: ClientState, plan: Plan, number: int, weights: Weights) -> None:
        self.module: nn.Module = copy_module(network_of(plan).exit_head(plan.depth)).to(
            state.device
        )
        if weights:
            load_weights(self.module, weights)
        self.module.train()
        self.parameters = list(self.module.parameters())
        self._optimiser = optimiser_of(plan, self.parameters)
        self._plan, self._number = plan, number

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Lc, (): the mean over the batch."""
        return exit_loss(self._plan, self._number, logits, y)

    def step(self, gradients: Sequence[Tensor], share: float) -> None:
        """One optimiser step on `share` * Lc.

        The share is exit_share where the fusion is fixed, as the client and the server minimise
        g * Lc + (1 - g) * Ls together. SuperSFL's fusions weigh the prefix alone: its exit heads
        learn from Lc in full.

        Args:
            gradients: dLc by the head's parameters.
            share: the weight of Lc in the client's step; 1 without the server's feedback.
        """
        if self._plan.part.fusion == "fixed" and share != 1:
            gradients = [share * gradient for gradient in gradients]
        self._optimiser.step(gradients)


def exit_loss(plan: Plan, number: int, logits: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy; BESplit's Eq. 5 where the plan has exit heads learn evidence.

    Args:
        number: of the round. logits: (B, N). y: (B,).
    Returns: (), the mean over B.
    """
    loss = plan.part.exit_evidence
    if loss is None:
        return nn.functional.cross_entropy(logits, y)
    losses = evidential_losses(logits, y, loss.kl_weight(number), loss.activation)
    return losses.mean().to(logits.dtype)
