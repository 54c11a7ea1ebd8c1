"""The server's step: from every participant's features to a gradient for each.

A step takes every participant's features at once and returns what goes back to each. Where only the
client can judge the server's outputs, a step is a generator: it yields outputs by client, is sent
their gradients, and returns the feedback.

shared         one suffix for all; each batch steps it, in client order (SplitFedV2, SuperSFL)
per_client     a suffix for each client, averaged after the round (SplitFedV1)
concatenated   one forward over all features together (Minibatch-SFL, SCALA)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from inspect import isgeneratorfunction

import torch
from torch import Tensor, nn

from edge_sdk.errors import FrameError
from edge_sdk.nets.supernet import Supernet, View
from edge_sdk.training.formulas.sgd import clip_l2
from edge_sdk.training.protocol.messages import Features, Feedback, OutputGradient
from server.training.core.round_view import RoundView
from server.training.core.server_state import BatchNormSnapshot, ServerState, Suffix
from server.training.methods.formulas.contrastive import Alignment, added

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Other samples of a participant's, each paired with one of its features.

    z: (B, ...) at the depth `entry`. same: (B,) bool, where the labels of a pair are equal.
    """

    align: Alignment
    z: Tensor
    entry: int
    same: Tensor


@dataclass(frozen=True, slots=True)
class ClientBatch:
    """One participant's features of the step, decoded, and the depth they come from.

    align: how the server's stages learn from its second view, beside the step's own loss.
    """

    depth: int
    features: Features
    align: Alignment | None = None

    @property
    def pairs(self) -> Pairs | None:
        """What the server's stages align by; None where they do not."""
        features, align = self.features, self.align
        view, entry, same = features.view, features.entry, features.same
        if align is None or not align.weight or view is None or entry is None or same is None:
            return None
        return Pairs(align, view, entry, same.bool())

    @property
    def labels(self) -> Tensor:
        """Its labels.

        Raises: FrameError if they stayed on the client.
        """
        if self.features.labels is None:
            raise FrameError("this server step needs labels, and the client sent none")
        return self.features.labels


ClientBatches = Mapping[str, ClientBatch]
Answers = dict[str, Feedback]


@dataclass(frozen=True, slots=True)
class Joint:
    """What a forward over all participants' features gives, rows in the order of the clients.

    sizes: rows of each. logits: (B, N). labels: (B,).
    """

    clients: tuple[str, ...]
    sizes: tuple[int, ...]
    logits: Tensor
    labels: Tensor


# of a client, its logits (B, N) and labels (B,): the mean over its samples, ()
ClientLoss = Callable[[str, Tensor, Tensor], Tensor]
# of every sample: (B,) for the clients' gradients and (B,) for the server's step
JointLosses = Callable[[Joint], tuple[Tensor, Tensor]]
# yields outputs by client, is sent the gradients of those who answered
Asking = Generator[dict[str, Tensor], Mapping[str, OutputGradient], Answers]
ServerStep = Callable[[ServerState, ClientBatches, RoundView], Answers | Asking]


def needs_labels(step: ServerStep) -> bool:
    """Whether the server judges its own outputs; a step that asks the clients need not."""
    return not isgeneratorfunction(step)


def advances_alone(step: ServerStep | None) -> bool:
    """Whether a step answers each client by itself, so that none has to wait for the others."""
    return step in {None, shared, per_client} or (step is not None and not needs_labels(step))


def shared(state: ServerState, arrivals: ClientBatches, _now: RoundView) -> Answers:
    """Every client's batch steps the same stages d+1..L and the final head, one after another.

    The gradient returned is that of the forward pass before the step it belongs to.
    SuperSFL, Alg. 2, phase 2.

    The order matters: a client's gradient comes from a suffix that those before it have stepped.
    Clients that advance together take turns batch by batch; in cohorts of one, as SplitFedV2 has
    it, a client's whole round comes before the next one's.
    """
    return shared_step(state, arrivals, _plain_loss)


def shared_step(state: ServerState, arrivals: ClientBatches, loss: ClientLoss) -> Answers:
    """As `shared`, by another loss than cross-entropy."""
    return {
        client: feedback
        for client, arrival in arrivals.items()
        if (feedback := _supervise(state, state.suffix(arrival.depth), client, arrival, loss))
    }


def per_client(state: ServerState, arrivals: ClientBatches, _now: RoundView) -> Answers:
    """Every client's batch steps that client's own copy of the suffix."""
    return per_client_step(state, arrivals, _plain_loss)


def per_client_step(state: ServerState, arrivals: ClientBatches, loss: ClientLoss) -> Answers:
    """As `per_client`, by another loss than cross-entropy."""
    return {
        client: feedback
        for client, arrival in arrivals.items()
        if (
            feedback := _supervise(
                state, state.copy_for(client, arrival.depth), client, arrival, loss
            )
        )
    }


def concatenated(state: ServerState, arrivals: ClientBatches, _now: RoundView) -> Answers:
    """One forward and one step over all features; clients of different depths join on the way up.

    SCALA, Eq. 12-13, without adjustment.
    """
    return joint_step(state, arrivals, _plain_losses)


def joint_step(state: ServerState, arrivals: ClientBatches, losses: JointLosses) -> Answers:
    """One forward over all features, two backwards: the clients' and the server's.

    The server's loss is the mean over all samples. A client's gradient is that of the mean over
    its own samples, so it does not shrink with the number of participants; behind BatchNorm, which
    mixes samples, the others' means are in it too. Both are of the forward pass before the step.
    Where second views are aligned by, it is by the mean over all pairs.

    Args:
        losses: of every sample, as the clients' gradients and as the server's step have it.
    """
    order = sorted(arrivals, key=lambda client: arrivals[client].depth)
    inputs = [_input(arrivals[client]) for client in order]
    sizes = [len(z) for z in inputs]
    depths = [arrivals[client].depth for client in order]
    suffix = state.suffix(depths[0])
    body, classifier = _head_of(suffix.module)
    paired = [(client, pairs) for client in order if (pairs := arrivals[client].pairs) is not None]
    first: Tensor | None = None
    statistics = BatchNormSnapshot(suffix.module)
    try:
        second = forward_joint(state.trunk, inputs, depths, body)
        if paired:
            views = [pairs.z for _, pairs in paired]
            entries = [pairs.entry for _, pairs in paired]
            first = forward_joint(state.trunk, views, entries, body)
    except ValueError as err:
        statistics.restore()
        logger.warning("clients=%s get no feedback: %s", ",".join(order), err)
        return {}
    labels = torch.cat([arrivals[client].labels for client in order])
    logits = classifier(second)
    of_clients, of_server = losses(Joint(tuple(order), tuple(sizes), logits, labels))
    means = torch.stack([loss.mean() for loss in torch.split(of_clients, sizes)])
    # the clients' gradients first: the graph is kept for the server's
    gradients = torch.autograd.grad(means.sum(), inputs, retain_graph=True)
    own = list(torch.autograd.grad(of_server.mean(), suffix.parameters, retain_graph=bool(paired)))
    if first is not None:
        parts = dict(zip(order, torch.split(second, sizes), strict=True))
        others = torch.cat([parts[client] for client, _ in paired])
        same = torch.cat([pairs.same for _, pairs in paired])
        align = paired[0][1].align
        own = added(own, align.gradients(first, others, same, suffix.parameters))
    if not _finite(means, *gradients, *(own if paired else ())) or not statistics.sound:
        statistics.restore()
        logger.warning("clients=%s get no feedback: a loss is not finite", ",".join(order))
        return {}
    suffix.step(clip_l2(own, state.clip))
    return {
        client: Feedback(gradient.contiguous(), loss)
        for client, gradient, loss in zip(order, gradients, means.tolist(), strict=True)
    }


def neck_of(module: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """A suffix up to its embeddings, and the layer behind them."""
    assert isinstance(module, View), "a suffix is a view of the network"
    return module.neck, module.classifier


def _plain_loss(_client: str, logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def _plain_losses(joint: Joint) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(joint.logits, joint.labels, reduction="none")
    return losses, losses


def forward_joint(
    net: Supernet, inputs: Sequence[Tensor], depths: Sequence[int], body: nn.Module
) -> Tensor:
    """Embeddings of all inputs, which join at their depths; ascending, in the order given."""
    together: list[Tensor] = []
    for stage in range(depths[0], net.L + 1):
        together += [z for z, depth in zip(inputs, depths, strict=True) if depth == stage]
        part = body if stage == net.L else net.stages[stage]
        together = [part(torch.cat(together))]
    return together[0]


def _supervise(
    state: ServerState,
    suffix: Suffix,
    client: str,
    arrival: ClientBatch,
    loss_of: ClientLoss,
) -> Feedback | None:
    """Forward, backward, and one step of the suffix; what goes back to the client.

    None where the batch cannot be learnt from: nothing is stepped then, and BatchNorm's running
    statistics are put back.
    """
    z = _input(arrival)
    pairs = arrival.pairs
    first: Tensor | None = None
    statistics = BatchNormSnapshot(suffix.module)
    neck, classifier = neck_of(suffix.module)
    try:
        second = neck(z)
        if pairs is not None:
            first = neck(pairs.z)
    except ValueError as err:  # BatchNorm, where one sample leaves one value per channel
        statistics.restore()
        logger.warning("client=%s gets no feedback: a batch of %d: %s", client, len(z), err)
        return None
    loss = loss_of(client, classifier(second), arrival.labels)
    leaves = [z, *suffix.parameters]
    gradient, *own = torch.autograd.grad(loss, leaves, retain_graph=first is not None)
    if pairs is not None and first is not None:
        own = added(own, pairs.align.gradients(first, second, pairs.same, suffix.parameters))
    if not _finite(loss, gradient, *(own if pairs else ())) or not statistics.sound:
        statistics.restore()
        logger.warning("client=%s gets no feedback: its loss is not finite", client)
        return None
    suffix.step(clip_l2(own, state.clip))
    return Feedback(gradient.contiguous(), float(loss.detach()))


def _head_of(module: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """A suffix's head up to its embeddings, and the layer behind them."""
    assert isinstance(module, View), "a suffix is a view of the network"
    return module.neck[-1], module.classifier


def _input(arrival: ClientBatch) -> Tensor:
    return arrival.features.features.detach().requires_grad_()


def _finite(*tensors: Tensor) -> bool:
    # of the sum: twice as fast, and a sum that overflows is no loss to learn from either
    return all(math.isfinite(float(tensor.detach().sum())) for tensor in tensors)
