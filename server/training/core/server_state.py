"""The server's state between two rounds: one super-network, its optimiser, the clients' copies."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Literal, Self

import torch
from torch import Tensor, nn

from edge_sdk.bundles import namespaces
from edge_sdk.nets.copying import copy_module
from edge_sdk.nets.supernet import Supernet, View
from edge_sdk.training.client.auxiliary import Auxiliary, build_auxiliary
from edge_sdk.training.formulas.sgd import Sgd
from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import (
    check_weights,
    contiguous_copy,
    read_weights,
    tensors_of,
)

Trunk = Literal["shared", "own"]


class ServerState:
    """The global network and what the server's steps need.

    Args:
        net: the super-network; every stage, exit head and the final head, held once.
        trunk: `shared`: clients and server train the same stages; `own`: the server has stages of
            its own after every cut, which are never merged with clients' (HARMONY).
        training: the numbers of its optimiser.
        clip: largest L2 norm of the gradient of one step; None for no limit.
        decay: factor of the learning rates of training from one round to the next: the server's,
            the clients', and that of a client's own last layer. A constant of a method stays: the
            rate of an adaptation (HARMONY's a) and that of a guard's decoder (Adam's).
        first: first weights of parts that stay on clients: `exit2.…`, `back.…`.

    Attributes:
        trunk: what the server's steps train: `net` itself, or the server's own.
        memory: what the method keeps from round to round.
        seen: the last look at each client, where merges are robust
            (server.training.rounds.outliers).
        auxiliaries: by cut, the auxiliary model of its clients, where the server averages it.
        copies: by client, its own copy of the suffix, until the client's update takes it.
        copy_sources: by client, the weights its copy is made of, where these are not the trunk's.
    """

    def __init__(
        self,
        net: Supernet,
        training: Training,
        trunk: Trunk = "shared",
        *,
        clip: float | None = None,
        decay: float = 1.0,
        first: Weights | None = None,
    ) -> None:
        self.net = net
        self.trunk = net if trunk == "shared" else deepcopy(net)
        self.training = training
        self.clip = clip
        self.decay = decay
        self.first: Weights = {} if first is None else first
        self.memory: dict[str, Tensor] = {}
        self.seen: dict[str, Tensor] = {}
        self.auxiliaries: dict[int, Auxiliary] = {}
        self.copies: dict[str, Suffix] = {}
        self.copy_sources: dict[str, Weights] = {}
        self._suffixes: dict[int, Suffix] = {}
        self._frozen = False
        self._learning_rate = training.learning_rate
        self._optimiser = self._sgd(self.trunk.segment(0, None).parameters())
        self._cuts: dict[int, tuple[int, ...]] = {}

    def begin(self, number: int) -> None:
        """Prepare the steps of a round: train mode, the round's learning rate, and no momentum.

        Clients and their copies of the suffix begin a round without momentum, so the one suffix for
        all does too: the merge has put other weights, or other clients, in front of it.
        """
        self.net.train()  # an evaluation may have come in between
        self.trunk.train()
        self._learning_rate = self.decayed_rate(self.training.learning_rate, number)
        self._optimiser.learning_rate = self._learning_rate
        self._optimiser.velocities.clear()

    def hold_auxiliaries(self, plans: Iterable[Plan]) -> None:
        """Hold an auxiliary model for each cut whose clients share one, with the seed's weights."""
        for plan in plans:
            if plan.part.shared_auxiliary and plan.depth not in self.auxiliaries:
                device = next(self.net.parameters()).device
                self.auxiliaries[plan.depth] = build_auxiliary(plan).to(device).eval()

    def auxiliary_tensors(self, depth: int) -> Weights:
        """The live tensors of a cut's auxiliary model, by the names that travel."""
        return namespaces.auxiliary(depth).prefixed(self.auxiliaries[depth].tensors())

    def decayed_rate(self, learning_rate: float, number: int) -> float:
        """A learning rate in round `number`, from 1."""
        return learning_rate * self.decay ** (number - 1)

    def decayed_plan(self, plan: Plan, number: int) -> Plan:
        """A client's plan with the learning rates of round `number`, from 1."""
        rate = self.decayed_rate(plan.training.learning_rate, number)
        plan = replace(plan, training=replace(plan.training, learning_rate=rate))
        back = plan.part.back
        if back is None or back.learning_rate is None:
            return plan
        own = replace(back, learning_rate=self.decayed_rate(back.learning_rate, number))
        return replace(plan, part=replace(plan.part, back=own))

    def shape_at(self, depth: int) -> tuple[int, ...]:
        """Shape of one sample's features after that many stages."""
        if depth not in self._cuts:
            self._cuts[depth] = self.net.shape_at(depth)
        return self._cuts[depth]

    def weights(self, depth: int, *, whole: bool, exit_head: bool) -> Weights:
        """The weights that a client of that depth starts from."""
        part = self.net.segment(0, None) if whole else self.net.prefix(depth)
        weights = read_weights(part)
        if exit_head:
            head = read_weights(self.net.exit_head(depth))
            weights |= {f"exit{depth}.{name}": tensor for name, tensor in head.items()}
        return weights

    def read(self) -> Weights:
        """Every weight, by the names that travel: `stage1.…`, `head.…`, `exit2.…`, `auxiliary2.…`.

        Stages of the server's own are `trunk.stage3.…` and `trunk.head.…`.
        """
        return {name: contiguous_copy(tensor) for name, tensor in self._tensors().items()}

    def write(self, weights: Weights) -> None:
        """Set the weights that are named, and leave the others.

        Raises: FrameError for a name or shape the network does not have.
        """
        own = self._tensors()
        check_weights(weights, {name: own[name] for name in weights if name in own})
        with torch.no_grad():
            for name, tensor in weights.items():
                own[name].copy_(tensor)

    def _tensors(self) -> Weights:
        """The live tensors of the network and the trunk, by the names that travel."""
        weights = tensors_of(self.net.segment(0, None))
        for depth in self.net.cuts:
            head = tensors_of(self.net.exit_head(depth))
            weights |= {f"exit{depth}.{name}": tensor for name, tensor in head.items()}
        for depth in sorted(self.auxiliaries):
            weights |= self.auxiliary_tensors(depth)
        return weights | self._server_named(tensors_of(self.trunk.suffix(min(self.net.cuts))))

    def _server_named(self, weights: Weights) -> Weights:
        """Weights of a suffix, by the names that travel."""
        if self.trunk is self.net:
            return weights
        return {f"trunk.{name}": tensor for name, tensor in weights.items()}

    def whole(self, depth: int) -> nn.Module:
        """The network as a client of that depth and the server run it together: (B, ...) to logits.

        Shares its parts with `net` and the server's trunk.
        """
        return nn.Sequential(self.net.prefix(depth), self.trunk.suffix(depth))

    def suffix(self, depth: int) -> Suffix:
        """Stages depth+1..L and the final head, the one for all clients.

        One optimiser serves all depths: it steps the parameters that have gradients, so momentum
        is a parameter's own and does not depend on where a client is cut.
        """
        if depth not in self._suffixes:
            module = self.trunk.suffix(depth)
            parameters = list(module.parameters())
            self._suffixes[depth] = Suffix.of(module, parameters, self._optimiser)
        suffix = self._suffixes[depth]
        return replace(suffix, optimiser=None) if self._frozen else suffix

    def rest_logits(self, depth: int, z: Tensor) -> Tensor | None:
        """Logits of the server's own stages at rest, (B, N); no client's copy, nothing learns.

        Where each client's batches step a copy of its own, these stages are those of the round's
        start. BatchNorm uses its running statistics.

        Returns: None where they are not finite.
        """
        module = self.suffix(depth).module
        module.eval()
        with torch.no_grad():
            logits: Tensor = module(z)
        module.train()
        return logits if math.isfinite(float(logits.sum())) else None

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A context in which the one suffix for all keeps its weights, momentum and statistics.

        Clients' own copies are stepped all the same.
        """
        snapshot = BatchNormSnapshot(self.trunk.buffers())
        self._frozen = True
        try:
            yield
        finally:
            self._frozen = False
            snapshot.restore()

    def copy_for(self, client: str, depth: int) -> Suffix:
        """Copy of the suffix for one client, made when first asked for in a round."""
        if client not in self.copies:
            module = copy_module(self.trunk.suffix(depth))
            if client in self.copy_sources:
                for name, tensor in self._server_named(tensors_of(module)).items():
                    tensor.copy_(self.copy_sources[client][name])
            module.train()
            parameters = list(module.parameters())
            self.copies[client] = Suffix.of(module, parameters, self._sgd(parameters))
        return self.copies[client]

    def take_copy(self, client: str) -> Weights:
        """Drop this client's copy and give its weights; none where the client has no copy."""
        copy = self.copies.pop(client, None)
        return {} if copy is None else self._server_named(tensors_of(copy.module))

    def _sgd(self, parameters: Iterable[nn.Parameter]) -> Sgd:
        numbers = self.training
        return Sgd(parameters, self._learning_rate, numbers.momentum, numbers.weight_decay)


@dataclass(frozen=True, slots=True)
class Suffix:
    """The server's half of a network: the one for all, or a client's own copy within a round.

    neck: the same up to its embeddings. classifier: the layer behind them.
    buffers: BatchNorm's statistics; like the neck found once, which takes a tenth of a step.
    optimiser: None for a suffix that is frozen.
    """

    module: View
    neck: View = field(repr=False)
    classifier: nn.Linear = field(repr=False)
    parameters: list[nn.Parameter] = field(repr=False)
    buffers: list[Tensor] = field(repr=False)
    optimiser: Sgd | None = field(repr=False)

    @classmethod
    def of(cls, module: View, parameters: list[nn.Parameter], optimiser: Sgd) -> Self:
        """The suffix of a view of the network that ends in its head."""
        buffers = list(module.buffers())
        return cls(module, module.neck, module.classifier, parameters, buffers, optimiser)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One optimiser step by the gradients of `parameters`, and of nothing else."""
        if self.optimiser is not None:
            self.optimiser.step(gradients, self.parameters)


class BatchNormSnapshot:
    """BatchNorm's running statistics of a part of the network, before a batch goes through it.

    A forward pass moves them, and only its end shows whether the batch can be learnt from.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._before = [(buffer, buffer.clone()) for buffer in buffers]

    @property
    def sound(self) -> bool:
        """Whether the statistics of now are finite: a variance overflows before the loss does."""
        sums = [buffer.sum(dtype=torch.float64) for buffer, _ in self._before]
        return not sums or bool(torch.isfinite(torch.stack(sums)).all())

    def restore(self) -> None:
        """Restore the saved statistics."""
        for buffer, value in self._before:
            buffer.copy_(value)
