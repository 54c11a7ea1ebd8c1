"""Bytes that training sends, by kind: weights, features, labels, outputs, gradients."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from edge_sdk.training.protocol.messages import (
    EndRound,
    Evaluate,
    Features,
    OutputGradient,
    Outputs,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
)


class TrafficCounter:
    """Counts the bytes of a round. Payloads only: headers depend on the transport."""

    def __init__(self) -> None:
        self.up = 0
        self.down = 0
        self.by_kind: Counter[str] = Counter()

    def sent(self, request: Request) -> None:
        """Count a request to a client."""
        match request:
            case StartRound() | Evaluate():
                self._down("weights", sum(map(_size, request.weights.values())))
            case Step() | EndRound() if request.feedback is not None:
                self._down("gradients", _size(request.feedback.gradient))
                if request.feedback.outputs is not None:
                    self._down("outputs", _size(request.feedback.outputs))
            case Outputs():
                self._down("outputs", _size(request.outputs))
            case _:
                pass

    def received(self, reply: Reply) -> None:
        """Count a reply of a client; features as their codec sends them."""
        match reply:
            case Features():
                coded = (reply.features, reply.ranges, reply.view, reply.view_ranges)
                self._up("features", sum(_size(part) for part in coded if part is not None))
                for part in (reply.labels, reply.same):
                    if part is not None:
                        self._up("labels", _size(part))
            case OutputGradient():
                self._up("output gradients", _size(reply.gradient))
            case Update():
                self._up("weights", sum(map(_size, reply.weights.values())))
            case _:
                pass

    def add(self, other: TrafficCounter) -> None:
        """Add another counter's bytes."""
        self.up += other.up
        self.down += other.down
        self.by_kind.update(other.by_kind)

    def _down(self, kind: str, size: int) -> None:
        self.down += size
        self.by_kind[f"down {kind}"] += size

    def _up(self, kind: str, size: int) -> None:
        self.up += size
        self.by_kind[f"up {kind}"] += size


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
