"""What the server knows between two rounds: one super-network, its optimisers, its copies."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from edge_sdk.errors import FrameError
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.messages import Weights
from edge_sdk.training.weights import check_weights, load_weights, read_weights


@dataclass(frozen=True, slots=True)
class ServerTraining:
    """How the server's own half learns."""

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None


class ServerState:
    """The global network and what the server's steps need.

    Args:
        net: the super-network; every stage, exit head and the final head, held once.
    """

    def __init__(self, net: Supernet, training: ServerTraining) -> None:
        self.net = net
        self.training = training
        self._optimisers: dict[int, torch.optim.SGD] = {}
        self.copies: dict[str, Suffix] = {}
        self._cuts: dict[int, tuple[int, ...]] = {}
        self._folded: dict[str, tuple[Tensor, int]] = {}
        self._samples = 0

    def shape_at(self, depth: int) -> tuple[int, ...]:
        """Of one sample's features after that many stages."""
        if depth not in self._cuts:
            with torch.no_grad():  # on no device: shapes alone, and no statistics are touched
                prefix = deepcopy(self.net.prefix(depth)).to("meta").eval()
                z = prefix(torch.empty(1, *self.net.input_shape, device="meta"))
            self._cuts[depth] = tuple(z.shape[1:])
        return self._cuts[depth]

    def weights(self, depth: int, *, whole: bool, exit_head: bool) -> Weights:
        """What a client of that depth starts from."""
        part = self.net.segment(0, None) if whole else self.net.prefix(depth)
        weights = read_weights(part)
        if exit_head:
            head = read_weights(self.net.exit_head(depth))
            weights |= {f"exit{depth}.{name}": tensor for name, tensor in head.items()}
        return weights

    def read(self) -> Weights:
        """Every weight, by the names that travel: `stage1.…`, `head.…`, `exit2.…`."""
        weights = read_weights(self.net.segment(0, None))
        for depth in self.net.cuts:
            head = read_weights(self.net.exit_head(depth))
            weights |= {f"exit{depth}.{name}": tensor for name, tensor in head.items()}
        return weights

    def write(self, weights: Weights) -> None:
        """Set the weights named, leave the others.

        Raises: FrameError for a name or shape the network does not have.
        """
        merged = self.read()
        known = {name: merged[name] for name in weights if name in merged}
        check_weights(weights, known)
        merged |= weights
        whole = {k: v for k, v in merged.items() if not k.startswith("exit")}
        load_weights(self.net.segment(0, None), whole)
        for depth in self.net.cuts:
            start = f"exit{depth}."
            head = {k.removeprefix(start): v for k, v in merged.items() if k.startswith(start)}
            load_weights(self.net.exit_head(depth), head)

    def step_stages(self, depth: int) -> None:
        """One optimiser step of stages depth+1..L and the final head, whose gradients are there.

        Momentum is a stage's own: it does not depend on where a client is cut.
        """
        for stage in range(depth, self.net.L + 1):
            optimiser = self._optimiser(stage)
            if optimiser is not None:
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)

    def copy_for(self, client: str, depth: int) -> Suffix:
        """This client's own copy of the suffix, made when first asked for in a round."""
        if client not in self.copies:
            module = deepcopy(self.net.suffix(depth))
            module.train()
            optimiser = self._sgd(module)
            assert optimiser is not None
            self.copies[client] = Suffix(module, optimiser)
        return self.copies[client]

    def fold_copies(self, samples: Mapping[str, int]) -> None:
        """Add the copies of these clients, weighted by n_k, to the round's sum, and drop them all.

        Args:
            samples: n_k of those whose updates are merged, in client order: addition depends on
                order. A copy whose client is not among them was trained in vain.
        """
        for client, count in samples.items():
            if client not in self.copies:
                continue
            for name, tensor in read_weights(self.copies[client].module).items():
                total, weight = self._folded.get(name, (torch.zeros_like(tensor), 0))
                self._folded[name] = (total + count * tensor, weight + count)
        self._samples += sum(samples.values())
        self.copies.clear()

    def folded(self) -> tuple[Weights, dict[str, float]]:
        """The mean of the round's copies, and their share of all samples, tensor by tensor.

        Beside clients weighted by n_k / n that share makes every client's training of a stage
        count the same, on the client or in its copy.
        """
        mean = {name: total / weight for name, (total, weight) in self._folded.items()}
        share = {name: weight / self._samples for name, (_, weight) in self._folded.items()}
        return mean, share

    def drop_copies(self) -> None:
        """Forget the round's copies and their sum."""
        self.copies.clear()
        self._folded.clear()
        self._samples = 0

    def momentum(self) -> dict[tuple[int, int], Tensor]:
        """For a checkpoint: the momentum of each stage's parameters that have been stepped, by
        stage (L is the head's) and place of the parameter.
        """
        return {
            (stage, place): optimiser.state[parameter]["momentum_buffer"]
            for stage, optimiser in self._optimisers.items()
            for place, parameter in enumerate(optimiser.param_groups[0]["params"])
            if optimiser.state[parameter].get("momentum_buffer") is not None
        }

    def set_momentum(self, momentum: Mapping[tuple[int, int], Tensor]) -> None:
        """Go on with the momentum of a checkpoint.

        Raises: FrameError where it does not fit the network.
        """
        self._optimisers.clear()
        for (stage, place), tensor in momentum.items():
            optimiser = self._optimiser(stage) if 0 <= stage <= self.net.L else None
            known = [] if optimiser is None else optimiser.param_groups[0]["params"]
            if optimiser is None or place >= len(known) or known[place].shape != tensor.shape:
                raise FrameError(
                    f"momentum of stage {stage}, parameter {place}: the network has none of shape"
                    f" {tuple(tensor.shape)}"
                )
            optimiser.state[known[place]]["momentum_buffer"] = tensor.to(known[place].device)

    def _optimiser(self, stage: int) -> torch.optim.SGD | None:
        """Of a stage, or of the head at L; None where there is nothing to learn."""
        if stage not in self._optimisers:
            part = self.net.head if stage == self.net.L else self.net.stages[stage]
            optimiser = self._sgd(part)
            if optimiser is None:
                return None
            self._optimisers[stage] = optimiser
        return self._optimisers[stage]

    def _sgd(self, module: nn.Module) -> torch.optim.SGD | None:
        parameters = list(module.parameters())
        if not parameters:
            return None
        training = self.training
        return torch.optim.SGD(
            parameters,
            training.learning_rate,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )


@dataclass(slots=True)
class Suffix:
    """A client's own copy of the server's half within a round."""

    module: nn.Module
    optimiser: torch.optim.SGD = field(repr=False)
