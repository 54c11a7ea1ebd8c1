"""What training sends, in bytes by kind: weights, features, labels, gradients."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from edge_sdk.training.messages import (
    EndRound,
    Features,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
)


class Ledger:
    """A round's account. Payloads only: headers depend on the transport."""

    def __init__(self) -> None:
        self.up = 0
        self.down = 0
        self.by_kind: Counter[str] = Counter()

    def sent(self, request: Request) -> None:
        """Count what goes to a client."""
        match request:
            case StartRound():
                self._down("weights", sum(map(_size, request.weights.values())))
            case Step() | EndRound() if request.feedback is not None:
                self._down("gradients", _size(request.feedback.gradient))
            case _:
                pass

    def received(self, reply: Reply) -> None:
        """Count what comes from a client; features as their codec sends them."""
        match reply:
            case Features():
                self._up("features", _size(reply.features))
                if reply.ranges is not None:
                    self._up("features", _size(reply.ranges))
                if reply.labels is not None:
                    self._up("labels", _size(reply.labels))
            case Update():
                self._up("weights", sum(map(_size, reply.weights.values())))
            case _:
                pass

    def _down(self, kind: str, size: int) -> None:
        self.down += size
        self.by_kind[f"down {kind}"] += size

    def _up(self, kind: str, size: int) -> None:
        self.up += size
        self.by_kind[f"up {kind}"] += size


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
