"""Personalisation after training: a few steps on the client's own data.

HARMONY, Eq. 5, and SplitGP with fine-tuning. It runs where the data are: on a device when training
ends, in a simulation when clients are scored.
"""

from __future__ import annotations

import torch
from torch import nn

from edge_sdk.training.client.exit_head import exit_loss
from edge_sdk.training.client.state import ClientState
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
    optimiser = torch.optim.SGD([*prefix.parameters(), *head.parameters()], rate)
    prefix.train()
    head.train()
    for _ in range(how.steps):
        x, y = state.at(generator.permutation(state.samples)[: plan.training.batch])
        optimiser.zero_grad(set_to_none=True)
        loss = exit_loss(plan, number, head(prefix(x)), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimiser.step()
