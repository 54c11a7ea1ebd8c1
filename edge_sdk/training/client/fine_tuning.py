"""Personalisation after training, where the data are: on a device when training ends, in a
simulation when clients are scored.

fine tuning   steps of prefix and exit head    HARMONY, Eq. 5, and SplitGP with fine-tuning
refit         passes of a client's own last layer    SplitLPF, 3.2

SplitLPF's back is trained behind its own client's middle, and answers behind the average of all
middles. A refit trains it there, before it answers. The paper has clients train their personal
models alone once the base model is complete. Rate, momentum and dropout are those of the last round
of training (ours).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from edge_sdk.training.client.batches import passes
from edge_sdk.training.client.exit_head import exit_loss
from edge_sdk.training.client.optimiser import optimiser_of
from edge_sdk.training.client.personal_head import back_rate, dropped, personal_classifier
from edge_sdk.training.client.state import ClientState
from edge_sdk.training.formulas.sgd import Sgd
from edge_sdk.training.protocol.fine_tuning import FineTuning
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.streams import Stream


def fine_tune(
    state: ClientState,
    plan: Plan,
    pair: tuple[nn.Module, nn.Module],
    how: FineTuning,
    number: int,
) -> None:
    """Adapt a client's prefix and exit head to its own data, in place.

    Args:
        pair: (B, ...) raw inputs to smashed data, and smashed data to logits.
        number: of the last round.
    """
    prefix, head = pair
    generator = Stream.FINE_TUNING.generator(plan.seed, client=state.name)
    rate = plan.training.learning_rate if how.rate is None else how.rate
    optimiser = Sgd([*prefix.parameters(), *head.parameters()], rate)
    prefix.train()
    head.train()
    for _ in range(how.steps):
        x, y = state.at(generator.permutation(state.samples)[: plan.training.batch])
        loss = exit_loss(plan, number, head(prefix(x)), y)
        optimiser.step(torch.autograd.grad(loss, optimiser.parameters))


def refitted_back(state: ClientState, plan: Plan, base: nn.Module, epochs: int) -> nn.Linear:
    """A client's own last layer after passes over the client's samples behind a network at rest.

    Args:
        base: (B, ...) raw inputs to embeddings, on the client's device; nothing in it changes.
        epochs: passes; 0 gives the layer as the client keeps it.
    """
    part = plan.part.back
    assert part is not None, "the plan has a last layer of the client's own"
    back = personal_classifier(plan, state.personal).to(state.device)
    parameters = list(back.parameters())
    optimiser = optimiser_of(plan, parameters, back_rate(plan, state.personal))
    generator = Stream.REFIT.generator(plan.seed, client=state.name)
    training = base.training
    base.eval()
    try:
        for rows in passes(generator, state.samples, plan.training.batch, epochs):
            x, y = state.at(rows)
            with torch.no_grad():
                embeddings = base(x)
                if part.dropout:
                    drawn = generator.random(embeddings.shape, np.float32)
                    embeddings = dropped(embeddings, drawn, part.dropout)
            logits = back(embeddings)
            loss = nn.functional.cross_entropy(logits, y)
            optimiser.step(torch.autograd.grad(loss, parameters))
    finally:
        base.train(training)
    return back
