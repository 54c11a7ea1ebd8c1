"""Clients that poison a training: they speak the protocol well, and what they send is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.feature_codec import decode_batch, encode_batch
from edge_sdk.training.protocol.messages import (
    Features,
    FinishAlone,
    Reply,
    Request,
    StartRound,
    Update,
    Weights,
)
from edge_sdk.training.protocol.weights import is_statistic

Attack = Literal["sign flip", "noise", "label flip"]
FACTOR = 10.0


class PoisonedClient(TrainingClient):
    """A client whose replies are poisoned.

    Args:
        attack: `sign flip` sends -10 times its features and its change of the weights, `noise`
            normal noise ten times as large as they are, `label flip` trains honestly on 9 - label.
    """

    def __init__(self, name: str, x: Any, y: Any, attack: Attack) -> None:
        super().__init__(name, x, y.max() - y if attack == "label flip" else y)
        self._attack = attack
        self._sent: Weights = {}
        self._noise = torch.Generator().manual_seed(sum(map(ord, name)))

    def handle(self, message: Request | FinishAlone) -> Reply:
        """An honest reply, poisoned."""
        if isinstance(message, StartRound):
            self._sent = {name: tensor.clone() for name, tensor in message.weights.items()}
        reply = super().handle(message)
        if self._attack == "label flip":
            return reply
        if isinstance(reply, Update):
            return replace(reply, weights=self._poison_weights(reply.weights))
        if isinstance(reply, Features):
            z = decode_batch(reply.features, reply.ranges)
            codec: Any = {torch.float32: "fp32", torch.float16: "fp16", torch.uint8: "int8"}
            features, ranges = encode_batch(self._poison(z), codec[reply.features.dtype])
            return replace(reply, features=features, ranges=ranges)
        return reply

    def _poison_weights(self, weights: Weights) -> Weights:
        """The weights with another change; statistics stay, or the update would be refused."""
        return {
            name: tensor
            if is_statistic(name) or name not in self._sent
            else self._sent[name] + self._poison(tensor - self._sent[name])
            for name, tensor in weights.items()
        }

    def _poison(self, values: Tensor) -> Tensor:
        if self._attack == "sign flip":
            return -FACTOR * values
        size = FACTOR * float(values.square().mean().sqrt())
        return size * torch.randn(values.shape, generator=self._noise)
