"""The server's step: from every participant's features to a gradient for each.

one_model      one suffix for all; each batch steps it, in client order (SplitFedV2, SuperSFL)
copies         a suffix for each client, averaged after the round (SplitFedV1)
concatenated   one forward over all features together (Minibatch-SFL, SCALA)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_sdk.errors import FrameError
from edge_sdk.training.fusion import clip_l2
from edge_sdk.training.messages import Features, Feedback
from server.training.state import ServerState

ServerLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One participant's features of the step, and the depth they come from."""

    depth: int
    features: Features

    @property
    def labels(self) -> Tensor:
        """Its labels.

        Raises: FrameError if they stayed on the client.
        """
        if self.features.labels is None:
            raise FrameError("this server step needs labels, and the client sent none")
        return self.features.labels


Arrivals = Mapping[str, Arrival]
ServerStep = Callable[[ServerState, Arrivals], dict[str, Feedback]]


def one_model(state: ServerState, arrivals: Arrivals) -> dict[str, Feedback]:
    """Every client's batch steps the same stages d+1..L and the final head, one after another.

    The gradient returned is that of the forward pass before the step it belongs to.
    SuperSFL, Alg. 2, phase 2.
    """
    state.net.train()
    feedback = {}
    for client, arrival in arrivals.items():
        suffix = state.net.suffix(arrival.depth)
        feedback[client] = _supervise(suffix, arrival, state.training.clip)
        state.step_stages(arrival.depth)
    return feedback


def copies(state: ServerState, arrivals: Arrivals) -> dict[str, Feedback]:
    """Every client's batch steps that client's own copy of the suffix."""
    feedback = {}
    for client, arrival in arrivals.items():
        suffix = state.copy_for(client, arrival.depth)
        feedback[client] = _supervise(suffix.module, arrival, state.training.clip)
        suffix.optimiser.step()
        suffix.optimiser.zero_grad(set_to_none=True)
    return feedback


def concatenated(state: ServerState, arrivals: Arrivals) -> dict[str, Feedback]:
    """One forward and one step over all features; clients of different depths join on the way up.

    The server's loss is the mean over all samples. A client's gradient is that of the mean over
    its own samples, so it does not shrink with the number of participants (SCALA, Eq. 12-13,
    without adjustment).
    """
    net = state.net.train()
    order = sorted(arrivals, key=lambda client: arrivals[client].depth)
    inputs = {
        client: arrivals[client].features.features.detach().requires_grad_() for client in order
    }
    climbing: list[Tensor] = []
    waiting = list(order)
    start = arrivals[order[0]].depth
    value = inputs[order[0]][:0]
    for stage in range(start, net.L):
        while waiting and arrivals[waiting[0]].depth == stage:
            climbing.append(inputs[waiting.pop(0)])
        value = net.stages[stage](torch.cat(climbing))
        climbing = [value]
    climbing += [inputs[client] for client in waiting]  # cut at L: the head alone is the server's
    logits = net.head(torch.cat(climbing))
    labels = torch.cat([arrivals[client].labels for client in order])
    sizes = [len(inputs[client]) for client in order]
    losses = nn.functional.cross_entropy(logits, labels, reduction="none").split(sizes)
    # one forward, two backwards: the clients' gradients first, the graph is kept for the server's
    own = torch.stack([loss.mean() for loss in losses]).sum()
    gradients = torch.autograd.grad(own, [inputs[client] for client in order], retain_graph=True)
    parameters = list(net.suffix(start).parameters())
    total = torch.cat(losses).mean()
    for parameter, gradient in zip(
        parameters,
        clip_l2(torch.autograd.grad(total, parameters), state.training.clip),
        strict=True,
    ):
        parameter.grad = gradient
    state.step_stages(start)
    return {
        client: Feedback(gradient, float(loss.detach().mean()))
        for client, gradient, loss in zip(order, gradients, losses, strict=True)
    }


def _supervise(suffix: nn.Module, arrival: Arrival, clip: float | None) -> Feedback:
    """Forward, backward, gradients left on the suffix; what goes back to the client."""
    z = arrival.features.features.detach().requires_grad_()
    loss = nn.functional.cross_entropy(suffix(z), arrival.labels)
    parameters = list(suffix.parameters())
    gradients = torch.autograd.grad(loss, [z, *parameters])
    for parameter, gradient in zip(parameters, clip_l2(gradients[1:], clip), strict=True):
        parameter.grad = gradient
    return Feedback(gradients[0], float(loss.detach()))
