"""The server's step: from every participant's features to a gradient for each.

A step takes every participant's features at once and returns what goes back to each. Where only the
client can score the server's outputs, a step is a generator: it yields outputs by client, is sent
their gradients, and returns the feedback (server.training.methods.ask_clients).

shared         one suffix for all; each batch steps it, in client order (SplitFedV2, SuperSFL)
per_client     a suffix for each client, averaged after the round (SplitFedV1)
concatenated   one forward over all features together (Minibatch-SFL, SCALA)

Every step is an `Attempt`: it leaves no trace where its batch cannot be learnt from.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import isgeneratorfunction
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from edge_sdk.errors import FrameError
from edge_sdk.nets.precision import computing
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.formulas.sgd import clip_l2
from edge_sdk.training.protocol.messages import Features, Feedback, OutputGradient
from server.training.core.round_view import RoundView
from server.training.core.server_state import BatchNormSnapshot, ServerState, Suffix
from server.training.methods.formulas.contrastive import Alignment, Gradients, added

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Second samples of a participant, each paired with one row of its features.

    z: (B, ...) at the depth `entry`. same: (B,) bool, where the labels of a pair are equal.
    """

    align: Alignment
    z: Tensor
    entry: int
    same: Tensor


@dataclass(frozen=True, slots=True)
class ClientBatch:
    """One participant's features of the step, decoded, and the depth they come from.

    align: how the server's stages learn from its second view, added to the step's own loss.
    """

    depth: int
    features: Features
    align: Alignment | None = None

    @property
    def z(self) -> Tensor:
        """The features as a leaf of a new graph, (B, ...)."""
        return self.features.features.detach().requires_grad_()

    @property
    def pairs(self) -> Pairs | None:
        """The pairs that the server's stages align by; None where they do not."""
        features, align = self.features, self.align
        view, entry, same = features.view, features.entry, features.same
        if align is None or not align.weight or view is None or entry is None or same is None:
            return None
        return Pairs(align, view, entry, same.bool())

    @property
    def labels(self) -> Tensor:
        """The labels of its samples, (B,) int64.

        Raises: FrameError if they stayed on the client.
        """
        if self.features.labels is None:
            raise FrameError("this server step needs labels, and the client sent none")
        return self.features.labels


ClientBatches = Mapping[str, ClientBatch]
Answers = dict[str, Feedback]


@dataclass(frozen=True, slots=True)
class Joint:
    """The outputs of a forward over all participants' features, rows in the order of the clients.

    sizes: rows of each. logits: (B, N). labels: (B,).
    """

    clients: tuple[str, ...]
    sizes: tuple[int, ...]
    logits: Tensor
    labels: Tensor


# a client's name, its logits (B, N) and labels (B,), to the mean loss over its samples, ()
ClientLoss = Callable[[str, Tensor, Tensor], Tensor]
# every sample's loss: (B,) for the clients' gradients and (B,) for the server's step
JointLosses = Callable[[Joint], tuple[Tensor, Tensor]]
# yields outputs by client, is sent the gradients of the clients that answered
AskClients = Generator[dict[str, Tensor], Mapping[str, OutputGradient], Answers]
ServerStep = Callable[[ServerState, ClientBatches, RoundView], Answers | AskClients]


class Attempt:
    """One step of the server's half, undone where its batch cannot be learnt from.

    It cannot where BatchNorm finds one value per channel, or where a loss, a gradient or a running
    statistic is not finite. Then nothing is stepped, and BatchNorm's running statistics are
    restored.

    Args:
        clients: those of the batch, for the log.
        suffixes: what the batch goes through, and what is stepped.
    """

    def __init__(self, state: ServerState, clients: Collection[str], *suffixes: Suffix) -> None:
        self._clip = state.clip
        self._clients = clients
        self._suffixes = suffixes
        self._snapshots = [BatchNormSnapshot(suffix.buffers) for suffix in suffixes]

    def run(self, forward: Callable[[], R]) -> R | None:
        """Run `forward` and return its result; None where BatchNorm cannot take the batch."""
        try:
            return forward()
        except ValueError as err:  # BatchNorm, where one sample leaves one value per channel
            self.give_up(str(err))
            return None

    def step(self, gradients: Sequence[Gradients], *finite: Tensor | None) -> bool:
        """Step every suffix, if all is finite; whether it was.

        Args:
            gradients: by suffix, those of its parameters; a parameter without one does not even
                decay.
            finite: tensors that have to be.
        """
        if not is_finite(*finite) or not all(snapshot.sound for snapshot in self._snapshots):
            self.give_up("a loss or a gradient is not finite")
            return False
        for suffix, found in zip(self._suffixes, gradients, strict=True):
            pairs = zip(suffix.parameters, found, strict=True)
            part = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
            if part:
                taken = replace(suffix, parameters=[parameter for parameter, _ in part])
                taken.step(clip_l2([gradient for _, gradient in part], self._clip))
        return True

    def give_up(self, reason: str) -> None:
        """Undo what the forward pass changed."""
        for snapshot in self._snapshots:
            snapshot.restore()
        logger.warning("clients=%s no server step: %s", ",".join(self._clients), reason)


def needs_labels(step: ServerStep) -> bool:
    """Whether the server scores its own outputs; a step that asks the clients need not."""
    return not isgeneratorfunction(step)


def advances_alone(step: ServerStep | None) -> bool:
    """Whether a step answers each client by itself, so that none has to wait for the others."""
    return step is shared or keeps_clients_apart(step)


def keeps_clients_apart(step: ServerStep | None) -> bool:
    """Whether no client's step changes another's before the merge, in whatever order they come."""
    return step is None or isinstance(step, PerClient) or not needs_labels(step)


def shared(state: ServerState, batches: ClientBatches, _now: RoundView) -> Answers:
    """Every client's batch steps the same stages d+1..L and the final head, one after another.

    The gradient returned is that of the forward pass before the step it belongs to.
    SuperSFL, Alg. 2, phase 2.

    The order matters: a client's gradient comes from a suffix that those before it have stepped.
    Clients that advance together take turns batch by batch; in cohorts of one, as SplitFedV2 has
    it, a client's whole round comes before the next one's.
    """
    return shared_step(state, batches, _plain_loss)


def shared_step(state: ServerState, batches: ClientBatches, loss: ClientLoss) -> Answers:
    """The step `shared` with another loss than cross-entropy."""
    return {
        client: feedback
        for client, batch in batches.items()
        if (feedback := _supervise(state, state.suffix(batch.depth), client, batch, loss))
    }


@dataclass(frozen=True, slots=True)
class PerClient:
    """Every client's batch steps that client's own copy of the suffix.

    server_share: of Ls in the copies' step, 1 - g where clients and server minimise
        g * Lc + (1 - g) * Ls together. Clients get the gradient of Ls in full and weigh it
        themselves; alignment is added in full.
    """

    server_share: float = 1.0

    def __call__(self, state: ServerState, batches: ClientBatches, _now: RoundView) -> Answers:
        """Step the copies, and answer each client."""
        return per_client_step(state, batches, _plain_loss, self.server_share)


per_client: Final = PerClient()


def per_client_step(
    state: ServerState, batches: ClientBatches, loss: ClientLoss, server_share: float = 1.0
) -> Answers:
    """The step of `PerClient` with another loss than cross-entropy."""
    answers: Answers = {}
    for client, batch in batches.items():
        copy = state.copy_for(client, batch.depth)
        feedback = _supervise(state, copy, client, batch, loss, server_share=server_share)
        if feedback is not None:
            answers[client] = feedback
    return answers


def concatenated(state: ServerState, batches: ClientBatches, _now: RoundView) -> Answers:
    """One forward and one step over all features; clients of different depths join on the way up.

    SCALA, Eq. 12-13, without adjustment.
    """
    return joint_step(state, batches, _plain_losses)


def joint_step(state: ServerState, batches: ClientBatches, losses: JointLosses) -> Answers:
    """One forward over all features, two backwards: the clients' and the server's.

    The server's loss is the mean over all samples. A client's gradient is that of the mean over
    its own samples, so it does not shrink with the number of participants; behind BatchNorm, which
    mixes samples, the others' means are in it too. Both are of the forward pass before the step.
    Where second views are aligned, it is by the mean over all pairs.

    Args:
        losses: of every sample, for the clients' gradients and for the server's step.
    """
    order = sorted(batches, key=lambda client: batches[client].depth)
    inputs = [batches[client].z for client in order]
    sizes = [len(z) for z in inputs]
    depths = [batches[client].depth for client in order]
    suffix = state.suffix(depths[0])
    body, classifier = suffix.neck[-1], suffix.classifier
    paired = [(client, pairs) for client in order if (pairs := batches[client].pairs) is not None]

    def forward() -> tuple[Tensor, Tensor | None]:
        second = forward_joint(state.trunk, inputs, depths, body)
        if not paired:
            return second, None
        views, entries = [pairs.z for _, pairs in paired], [pairs.entry for _, pairs in paired]
        return second, forward_joint(state.trunk, views, entries, body)

    attempt = Attempt(state, order, suffix)
    embeddings = attempt.run(forward)
    if embeddings is None:
        return {}
    second, first = embeddings
    labels = torch.cat([batches[client].labels for client in order])
    logits = classifier(second)
    of_clients, of_server = losses(Joint(tuple(order), tuple(sizes), logits, labels))
    means = torch.stack([loss.mean() for loss in torch.split(of_clients, sizes)])
    # the clients' gradients first: the graph is kept for the server's
    gradients = torch.autograd.grad(means.sum(), inputs, retain_graph=True)
    own: Gradients = list(
        torch.autograd.grad(of_server.mean(), suffix.parameters, retain_graph=bool(paired))
    )
    if first is not None:
        parts = dict(zip(order, torch.split(second, sizes), strict=True))
        others = torch.cat([parts[client] for client, _ in paired])
        same = torch.cat([pairs.same for _, pairs in paired])
        align = paired[0][1].align
        own = added(own, align.gradients(first, others, same, suffix.parameters))
    if not attempt.step([own], means, *gradients, *(own if paired else ())):
        return {}
    return {
        client: Feedback(gradient.contiguous(), loss)
        for client, gradient, loss in zip(order, gradients, means.tolist(), strict=True)
    }


def forward_joint(
    net: Supernet, inputs: Sequence[Tensor], depths: Sequence[int], body: nn.Module
) -> Tensor:
    """Embeddings of all inputs, which join at their depths; ascending, in the order given."""
    together: list[Tensor] = []
    with computing(net.precision, inputs[0].device):
        for stage in range(depths[0], net.L + 1):
            together += [z for z, depth in zip(inputs, depths, strict=True) if depth == stage]
            part = body if stage == net.L else net.stages[stage]
            together = [part(torch.cat(together))]
    return together[0].float()


def scaled(gradients: Sequence[Tensor | None], share: float) -> Gradients:
    """Gradients of `share` times the loss; None where a parameter took no part in it."""
    if share == 1:
        return list(gradients)
    return [None if gradient is None else share * gradient for gradient in gradients]


def is_finite(*tensors: Tensor | None) -> bool:
    """Whether the sums of these tensors are finite; None counts as finite."""
    # of the sum: twice as fast, and a sum that overflows is no loss to learn from either
    return all(t is None or math.isfinite(float(t.detach().sum())) for t in tensors)


def _plain_loss(_client: str, logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels)


def _plain_losses(joint: Joint) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(joint.logits, joint.labels, reduction="none")
    return losses, losses


def _supervise(
    state: ServerState,
    suffix: Suffix,
    client: str,
    batch: ClientBatch,
    loss_of: ClientLoss,
    *,
    server_share: float = 1.0,
) -> Feedback | None:
    """Forward, backward, and one step of the suffix; the client's feedback.

    None where the batch cannot be learnt from.
    """
    z, pairs = batch.z, batch.pairs
    neck, classifier = suffix.neck, suffix.classifier
    attempt = Attempt(state, [client], suffix)
    embeddings = attempt.run(lambda: (neck(z), None if pairs is None else neck(pairs.z)))
    if embeddings is None:
        return None
    second, first = embeddings
    loss = loss_of(client, classifier(second), batch.labels)
    leaves = [z, *suffix.parameters]
    gradient, *found = torch.autograd.grad(loss, leaves, retain_graph=first is not None)
    own = scaled(found, server_share)
    if pairs is not None and first is not None:
        own = added(own, pairs.align.gradients(first, second, pairs.same, suffix.parameters))
    if not attempt.step([own], loss, gradient, *(own if pairs else ())):
        return None
    return Feedback(gradient.contiguous(), float(loss.detach()))
