"""The server's step: from every participant's features to a gradient for each.

one_model      one suffix for all; each batch steps it, in client order (SplitFedV2, SuperSFL)
copies         a suffix for each client, averaged after the round (SplitFedV1)
concatenated   one forward over all features together (Minibatch-SFL, SCALA)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from edge_sdk.errors import FrameError
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.fusion import clip_l2
from edge_sdk.training.messages import Features, Feedback
from server.training.state import ServerState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """One participant's features of the step, decoded, and the depth they come from."""

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

    The order matters: a client's gradient comes from a suffix that those before it have stepped.
    Clients that advance together take turns batch by batch; in cohorts of one, as SplitFedV2 has
    it, a client's whole round comes before the next one's.
    """
    state.net.train()
    feedback = {}
    for client, arrival in arrivals.items():
        answer = _supervise(state.net.suffix(arrival.depth), client, arrival, state.training.clip)
        if answer is not None:
            feedback[client] = answer
            state.step_stages(arrival.depth)
    return feedback


def copies(state: ServerState, arrivals: Arrivals) -> dict[str, Feedback]:
    """Every client's batch steps that client's own copy of the suffix."""
    feedback = {}
    for client, arrival in arrivals.items():
        suffix = state.copy_for(client, arrival.depth)
        answer = _supervise(suffix.module, client, arrival, state.training.clip)
        if answer is not None:
            feedback[client] = answer
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
    start = arrivals[order[0]].depth
    inputs = [_input(arrivals[client]) for client in order]
    labels = torch.cat([arrivals[client].labels for client in order])
    try:
        logits = _climb(net, inputs, [arrivals[client].depth for client in order])
    except ValueError as err:
        logger.warning("clients=%s get no feedback: %s", ",".join(order), err)
        return {}
    losses = torch.split(
        nn.functional.cross_entropy(logits, labels, reduction="none"), [len(z) for z in inputs]
    )
    # one forward, two backwards: the clients' gradients first, the graph is kept for the server's
    means = torch.stack([loss.mean() for loss in losses])
    gradients = torch.autograd.grad(means.sum(), inputs, retain_graph=True)
    parameters = list(net.suffix(start).parameters())
    own = torch.autograd.grad(torch.cat(losses).mean(), parameters)
    if not _finite(means, *gradients):
        logger.warning("clients=%s get no feedback: a loss is not finite", ",".join(order))
        return {}
    _leave(parameters, own, state.training.clip)
    state.step_stages(start)
    return {
        client: Feedback(gradient.contiguous(), loss)
        for client, gradient, loss in zip(order, gradients, means.tolist(), strict=True)
    }


def _climb(net: Supernet, inputs: Sequence[Tensor], depths: Sequence[int]) -> Tensor:
    """Logits of all inputs, which join at their depths; ascending, in the order given."""
    together: list[Tensor] = []
    for stage in range(depths[0], net.L + 1):
        together += [z for z, depth in zip(inputs, depths, strict=True) if depth == stage]
        part = net.head if stage == net.L else net.stages[stage]
        together = [part(torch.cat(together))]
    return together[0]


def _supervise(
    suffix: nn.Module, client: str, arrival: Arrival, clip: float | None
) -> Feedback | None:
    """Forward, backward, gradients left on the suffix; what goes back to the client.

    None where the batch cannot be learnt from: the suffix is not to be stepped then.
    """
    z = _input(arrival)
    try:
        logits = suffix(z)
    except ValueError as err:  # BatchNorm, where one sample leaves one value per channel
        logger.warning("client=%s gets no feedback: a batch of %d: %s", client, len(z), err)
        return None
    loss = nn.functional.cross_entropy(logits, arrival.labels)
    parameters = list(suffix.parameters())
    gradient, *own = torch.autograd.grad(loss, [z, *parameters])
    if not _finite(loss, gradient):
        logger.warning("client=%s gets no feedback: its loss is not finite", client)
        return None
    _leave(parameters, own, clip)
    return Feedback(gradient.contiguous(), float(loss.detach()))


def _input(arrival: Arrival) -> Tensor:
    return arrival.features.features.detach().requires_grad_()


def _leave(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], clip: float | None
) -> None:
    for parameter, gradient in zip(parameters, clip_l2(gradients, clip), strict=True):
        parameter.grad = gradient


def _finite(*tensors: Tensor) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)
