"""An update on its way: encoded on the device as the plan says, decoded on the server.

The device has the raw update, so it measures what the codec loses and sends the measure too.
"""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from edge_sdk.errors import InputError
from edge_sdk.training.protocol.messages import StartRound, Update, Weights
from edge_sdk.training.protocol.noise import NoiseKey, noised_update
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.synthetic import GradientProbe
from edge_sdk.training.protocol.update_codec import (
    MakeProbe,
    decode_update,
    encode_diverged,
    encode_update,
    fidelity,
)
from edge_sdk.training.streams import Stream

logger = logging.getLogger(__name__)


def encode_for_wire(update: Update, start: StartRound, client: str, key: NoiseKey) -> Update:
    """The update as it travels: with the plan's noise, encoded by the plan's codec.

    One that diverged travels as NaN, so that the server learns the reason and not the numbers. Its
    loss is 0 then: JSON writes NaN as null, and a trainer of the release before reads no null.

    Args:
        start: the message that started the round.
        client: its name, part of the key of the random search for synthetic samples.
        key: key of the client's noise in this round.
    """
    plan, sent = start.plan, start.weights

    def probe() -> GradientProbe:
        return _probe(plan, sent)

    try:
        return _encoded(update, start, client, key, probe)
    except InputError as err:
        logger.warning("round=%d client=%s diverged: %s", update.round, client, err)
        return replace(
            update, weights=encode_diverged(update.weights, sent, plan.update, probe), loss=0.0
        )


def _encoded(
    update: Update, start: StartRound, client: str, key: NoiseKey, probe: MakeProbe
) -> Update:
    """Raises: InputError if numbers are not finite, or too large for the codec."""
    plan, sent = start.plan, start.weights
    if not math.isfinite(update.loss):
        raise InputError(f"update: expected a finite loss, got {update.loss}")
    if plan.part.noise is not None:
        update = replace(update, weights=noised_update(update.weights, sent, plan.part.noise, key))
    if not plan.update.lossy:
        return update
    search = Stream.SYNTHETIC.generator(plan.seed, round=update.round, client=client)
    encoded = encode_update(update.weights, sent, plan.update, probe, search)
    decoded = decode_update(encoded, sent, plan.update, probe)
    lost = fidelity(update.weights, encoded, decoded, sent)
    return replace(update, weights=encoded, error=lost.error, cosine=lost.cosine)


def decode_from_wire(update: Update, plan: Plan, sent: Weights) -> Update:
    """The update with its weights decoded.

    Args:
        sent: the weights that the client was sent for this round.
    Raises: FrameError for what `encode_for_wire` does not give.
    """
    return replace(
        update,
        weights=decode_update(update.weights, sent, plan.update, lambda: _probe(plan, sent)),
    )


def _probe(plan: Plan, sent: Weights) -> GradientProbe:
    return GradientProbe(network_of(plan), None if plan.part.whole else plan.depth, sent)
