"""The client half of every method: the same object in a simulation and on a device."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_sdk.errors import FrameError
from edge_sdk.training.codec import through_codec
from edge_sdk.training.fusion import clip_l2, fuse, own_weight
from edge_sdk.training.messages import (
    EndRound,
    Features,
    Feedback,
    Ready,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
    Weights,
)
from edge_sdk.training.plan import Plan, network_of
from edge_sdk.training.weights import load_weights, read_weights

Array = NDArray[Any]


class TrainingClient:
    """One client's data and what it keeps to itself between rounds.

        reply = client.handle(message)

    Args:
        name: unique among the clients; random streams are keyed by it.
        x: (n, ...) raw inputs. y: (n,) int64 labels.
    """

    def __init__(self, name: str, x: Array, y: NDArray[np.int64]) -> None:
        self.name = name
        self.x = x
        self.y = y
        # exit heads by depth and, for personal methods, the last weights of all this client trains
        self.personal: Weights = {}
        self._round: _Round | None = None

    def handle(self, message: Request) -> Reply:
        """Do what the server asks.

        Raises: FrameError for a message that does not belong to the round under way.
        """
        if isinstance(message, StartRound):
            self._round = _Round(self, message)
            return self._round.ready()
        if self._round is None or self._round.number != message.round:
            raise FrameError(f"client {self.name}: no round {message.round} is under way here")
        match message:
            case Step():
                return self._round.step(message)
            case EndRound():
                update = self._round.end(message)
                self._round = None
                return update

    @property
    def samples(self) -> int:
        """n_k."""
        return len(self.y)


@dataclass(slots=True)
class _Open:
    """A batch between its forward and its backward half."""

    z: Tensor
    sent: Tensor
    own: list[Tensor] | None
    loss: float | None
    samples: int


class _Round:
    """One client in one round: the prefix, the exit head and their optimisers."""

    def __init__(self, client: TrainingClient, start: StartRound) -> None:
        self.number = start.round
        self.client = client
        plan = self.plan = start.plan
        template = network_of(plan)
        self.stages = template.L
        if plan.whole:
            self.prefix: nn.Module = deepcopy(template.segment(0, None))
        else:
            self.prefix = deepcopy(template.prefix(plan.depth))
        self.head = deepcopy(template.exit_head(plan.depth)) if plan.exit_head else None
        self._take(start.weights)
        self.prefix.train()
        self.parameters = list(self.prefix.parameters())
        self.optimiser = _sgd(self.parameters, plan)
        self.head_optimiser = None
        if self.head is not None:
            self.head.train()
            self.head_optimiser = _sgd(list(self.head.parameters()), plan)
        self.anchor = [p.detach().clone() for p in self.parameters] if plan.prox_mu else None
        self.batches = self._order()
        self.open: _Open | None = None
        self.loss_sum = 0.0
        self.seen = self.done = self.supervised = 0

    def ready(self) -> Ready:
        """Counts, before the first batch."""
        counts: tuple[int, ...] = ()
        if self.plan.send_labels:
            counts = tuple(np.bincount(self.client.y, minlength=self.plan.classes).tolist())
        steps = 0 if self.plan.whole else len(self.batches)
        return Ready(self.number, self.client.samples, steps, counts)

    def step(self, message: Step) -> Features:
        """Close the batch before and open the one asked for."""
        self._close(message.feedback)
        if not 0 <= message.step < len(self.batches):
            raise FrameError(f"client {self.client.name}: no step {message.step}")
        x, y = self._batch(message.step)
        self.open = self._forward(x, y)
        labels = y if self.plan.send_labels else None
        return Features(self.number, message.step, self.open.sent, labels, self.open.loss)

    def end(self, message: EndRound) -> Update:
        """Close the last batch and hand over what was learnt."""
        self._close(message.feedback)
        if self.plan.whole:
            self._train_whole()
        weights = read_weights(self.prefix)
        if self.head is not None:
            heads = {f"exit{self.plan.depth}.{k}": v for k, v in read_weights(self.head).items()}
            weights |= heads
            self.client.personal |= {key: value.clone() for key, value in heads.items()}
        if self.plan.personal_share:
            self.client.personal |= {key: value.clone() for key, value in weights.items()}
        mean_loss = self.loss_sum / max(self.seen, 1)
        return Update(
            self.number, weights, self.client.samples, mean_loss, self.done, self.supervised
        )

    def _take(self, weights: Weights) -> None:
        """Start from the average, from what is personal, or from a mixture of the two."""
        share, own = self.plan.personal_share, self.client.personal
        mixed = {
            key: torch.lerp(value, own[key], share) if share and key in own else value
            for key, value in weights.items()
        }
        head = f"exit{self.plan.depth}."
        load_weights(self.prefix, {k: v for k, v in mixed.items() if not k.startswith("exit")})
        if self.head is not None:
            # a head the server does not send is the client's own, or fresh in its first round
            source = mixed if any(key.startswith(head) for key in mixed) else own
            found = {k.removeprefix(head): v for k, v in source.items() if k.startswith(head)}
            if found:
                load_weights(self.head, found)

    def _order(self) -> list[NDArray[np.int64]]:
        key = [self.plan.seed, self.number, crc32(self.client.name.encode())]
        generator = np.random.default_rng(key)
        n, batch = self.client.samples, self.plan.batch
        batches: list[NDArray[np.int64]] = []
        for _ in range(self.plan.epochs):
            order = generator.permutation(n)
            batches += [order[at : at + batch] for at in range(0, n, batch)]
        return batches

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        rows = self.batches[step]
        x = torch.from_numpy(np.ascontiguousarray(self.client.x[rows]))
        return x, torch.from_numpy(self.client.y[rows])

    def _forward(self, x: Tensor, y: Tensor) -> _Open:
        """The forward half: features to send and, with an exit head, the client's own gradient.

        SuperSFL, Alg. 2, phase 1: the gradient passes through the head as it was before its step,
        and is clipped over the whole prefix.
        """
        z = self.prefix(x)
        own, loss = None, None
        if self.head is not None and self.head_optimiser is not None:
            own_loss = nn.functional.cross_entropy(self.head(z), y)
            heads = list(self.head.parameters())
            gradients = torch.autograd.grad(own_loss, [*self.parameters, *heads], retain_graph=True)
            own = clip_l2(gradients[: len(self.parameters)], self.plan.clip)
            _apply(self.head_optimiser, heads, gradients[len(self.parameters) :])
            loss = float(own_loss.detach())
        sent = through_codec(z.detach(), self.plan.codec)
        return _Open(z, sent, own, loss, len(y))

    def _close(self, feedback: Feedback | None) -> None:
        """The backward half, with the server's feedback or without it (SuperSFL, Alg. 3)."""
        batch, self.open = self.open, None
        if batch is None:
            return
        self.done += 1
        if feedback is None:
            if batch.own is not None and batch.loss is not None:
                self._step_prefix(batch.own)
                self._count(batch.loss, batch.samples)
            return
        self.supervised += 1
        servers = torch.autograd.grad(batch.z, self.parameters, feedback.gradient)
        if batch.own is None or batch.loss is None:
            self._step_prefix(servers)
            self._count(feedback.loss, batch.samples)
            return
        share = own_weight(self.plan, self.stages, batch.loss, feedback.loss)
        self._step_prefix(fuse(batch.own, servers, share))
        self._count(share * batch.loss + (1 - share) * feedback.loss, batch.samples)

    def _train_whole(self) -> None:
        """Every batch of a client that holds the whole network."""
        for step in range(len(self.batches)):
            x, y = self._batch(step)
            loss = nn.functional.cross_entropy(self.prefix(x), y)
            self._step_prefix(torch.autograd.grad(loss, self.parameters))
            self._count(float(loss.detach()), len(y))
            self.done += 1

    def _step_prefix(self, gradients: Sequence[Tensor]) -> None:
        if self.anchor is not None:
            # FedProx: the gradient of mu/2 * |w - w_start|^2
            gradients = [
                gradient + self.plan.prox_mu * (parameter.detach() - start)
                for gradient, parameter, start in zip(
                    gradients, self.parameters, self.anchor, strict=True
                )
            ]
        _apply(self.optimiser, self.parameters, gradients)

    def _count(self, loss: float, samples: int) -> None:
        self.loss_sum += loss * samples
        self.seen += samples


def _sgd(parameters: list[nn.Parameter], plan: Plan) -> torch.optim.SGD:
    return torch.optim.SGD(
        parameters, plan.learning_rate, momentum=plan.momentum, weight_decay=plan.weight_decay
    )


def _apply(
    optimiser: torch.optim.SGD, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimiser.step()
    optimiser.zero_grad(set_to_none=True)
