"""Companions: what a client trains in a round in addition to its prefix and exit head.

A round calls every companion at the same places:

    forward     the prefix made a batch's features
    gradient    before the prefix steps: the companion's own pull at the features
    close       the prefix made its step, or had nothing to learn from
    kept        at the end of the round: weights for the client's next round, never sent
    sent        at the end of the round: weights that the server averages

The auxiliary model (BESplit), the personal head (SplitLPF) and the inversion guard (SCALA) are
companions, and a plan may ask for several. Which parts exclude each other, and why, stands in
`edge_sdk.training.protocol.client_part.EXCLUSIONS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from edge_sdk.training.client.second_view import SecondView
from edge_sdk.training.formulas.vector_jacobian import vector_jacobian
from edge_sdk.training.protocol.messages import Weights


@dataclass(slots=True, eq=False)
class OpenBatch:
    """A batch between its forward and its backward half.

    Attributes:
        x: (B, ...) raw inputs. y: (B,) labels.
        z: (B, ...) features, with the graph that leads back to `parameters`.
        parameters: of the module that made z.
        own: dLc/dz, through the exit head as it was before its step; None without an exit head.
        head: dLc by the exit head's parameters, for its step; none without an exit head.
        loss: Lc; 0 without an exit head.
        view: the second view that travels with the features, if any.
        logits: (B, N) of the whole network, once the client knows them; None until then.
        server_loss: Ls, where the client computed it from the server's outputs; None until then.
    """

    x: Tensor
    y: Tensor
    z: Tensor
    parameters: Sequence[nn.Parameter]
    own: Tensor | None = None
    head: Sequence[Tensor] = ()
    loss: float = 0.0
    view: SecondView | None = None
    logits: Tensor | None = None
    server_loss: float | None = None

    def pull(self, gradient: Tensor, *, keep: bool = False) -> list[Tensor]:
        """The gradient of each parameter, from a gradient with respect to z.

        Args:
            keep: whether the graph is needed again.
        """
        return list(vector_jacobian(self.z, self.parameters, gradient, keep=keep))


class Companion:
    """A companion that does nothing: a round with it equals the round without it, bit for bit.

    Attributes:
        learns_alone: whether the companion learns from batches while the server is silent.
    """

    learns_alone: bool = False

    def forward(self, batch: OpenBatch) -> None:
        """Prepare for a batch, just after its forward pass."""

    def gradient(self, batch: OpenBatch) -> Tensor | None:  # noqa: ARG002 - for companions that pull
        """Own gradient with respect to z, added in full to what the prefix learns."""
        return None

    def close(self, batch: OpenBatch) -> None:
        """Learn from a batch; `batch.logits` holds the whole network's logits, if known."""

    def kept(self) -> Weights:
        """Weights for the client's next round, by the keys under which they are kept."""
        return {}

    def sent(self) -> Weights:
        """Weights that the server averages, by the names under which they travel."""
        return {}


class Responder(Protocol):
    """The part of a client that answers the server's outputs, where labels stay on the client."""

    @property
    def width(self) -> int:
        """Numbers that the server's outputs have for each sample."""

    def answer(self, batch: OpenBatch, step: int, outputs: Tensor) -> tuple[Tensor, float]:
        """Learn from the server's outputs, and set the batch's logits and server loss.

        Args:
            outputs: (B, width) finite, a leaf that requires a gradient.
        Returns: the gradient with respect to `outputs`, and the loss that may be sent with it.
        """
