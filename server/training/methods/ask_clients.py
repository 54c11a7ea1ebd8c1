"""A server step in which clients score the server's outputs, since labels stay with them.

server    s = neck(z), each client's batch through its own copy; s or its logits go out
client    returns the gradient of its loss by what it got
server    copy -= lr * (share * dL + dCSA); dL/dz goes back
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edge_sdk.training.formulas.vector_jacobian import vector_jacobian
from edge_sdk.training.protocol.messages import Feedback
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState, Suffix
from server.training.methods.formulas.contrastive import Gradients, added
from server.training.methods.steps import (
    Answers,
    AskClients,
    Attempt,
    ClientBatch,
    ClientBatches,
    Pairs,
    ServerStep,
    is_finite,
    scaled,
)


def ask_clients(server_share: float = 1.0, *, early_views: bool = False) -> ServerStep:
    """The step.

    Args:
        server_share: of the clients' loss in the copies' gradients; alignment is added to it.
        early_views: whether second views may enter before the client's cut, so that a copy begins
            at the network's first cut.
    """

    def step(state: ServerState, batches: ClientBatches, now: RoundView) -> AskClients:
        under_way: dict[str, _Forward] = {}
        for client, batch in batches.items():
            depth = min(state.trunk.cuts) if early_views else batch.depth
            embeddings = now.plans[client].part.answers == "embeddings"
            copy = state.copy_for(client, depth)
            forward = _forward(state, client, batch, copy, embeddings=embeddings)
            if forward is not None:
                under_way[client] = forward
        replies = yield {client: f.outputs.detach().contiguous() for client, f in under_way.items()}
        answers: Answers = {}
        for client, reply in replies.items():
            forward = under_way[client]
            gradient, *task = forward.backward(reply.gradient)
            own = forward.aligned(scaled(task, server_share))
            if gradient is None:
                forward.attempt.give_up("its outputs do not depend on the features")
            elif forward.attempt.step([own], gradient, *own):
                answers[client] = Feedback(gradient.contiguous(), reply.loss)
        return answers

    return step


@dataclass(frozen=True, slots=True)
class _Forward:
    """One client's way through its copy.

    outputs: logits of s2, or s2 itself where the client has the last layer.
    first, second: embeddings s1 and s2; pairs: with I. None without a second view.
    """

    attempt: Attempt
    copy: Suffix
    z: Tensor
    outputs: Tensor
    second: Tensor
    first: Tensor | None
    pairs: Pairs | None

    def backward(self, gradient: Tensor) -> Gradients:
        """From the gradient by the outputs to those by z and by the copy's parameters."""
        wanted = [self.z, *self.copy.parameters]
        keep = self.first is not None
        return list(vector_jacobian(self.outputs, wanted, gradient, keep=keep, allow_unused=True))

    def aligned(self, own: Gradients) -> Gradients:
        """The parameters' gradients with the alignment's added."""
        if self.first is None or self.pairs is None:
            return own
        parameters = self.copy.parameters
        csa = self.pairs.align.gradients(self.first, self.second, self.pairs.same, parameters)
        return added(own, csa)


def _forward(
    state: ServerState, client: str, batch: ClientBatch, copy: Suffix, *, embeddings: bool
) -> _Forward | None:
    """None where the batch cannot be learnt from: the client then trains by itself."""
    z, pairs = batch.z, batch.pairs
    neck, classifier = copy.neck, copy.classifier

    def run() -> tuple[Tensor, Tensor | None]:
        # from the stage after the cut of each: depth-matched routing    HARMONY, Eq. 6
        second = neck.part(batch.depth, None)(z)
        return second, None if pairs is None else neck.part(pairs.entry, None)(pairs.z)

    attempt = Attempt(state, [client], copy)
    found = attempt.run(run)
    if found is None:
        return None
    second, first = found
    outputs = second if embeddings else classifier(second)
    if not is_finite(outputs):
        attempt.give_up("its outputs are not finite")
        return None
    return _Forward(attempt, copy, z, outputs, second, first, pairs)
