"""How an update changes hands: coded as the plan says on the device, decoded on the server.

What the codec lost is measured where the raw update is, and said beside the coded one.
"""

from __future__ import annotations

from dataclasses import replace
from zlib import crc32

from edge_sdk.training.protocol.messages import StartRound, Update, Weights
from edge_sdk.training.protocol.noise import Key, noised_update
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.synthetic import Replay
from edge_sdk.training.protocol.update_codec import decode_update, encode_update, fidelity

_SEARCH = 0x73796E74  # apart from every other stream of training


def coded(update: Update, start: StartRound, client: str, key: Key) -> Update:
    """The update as it travels, noised where the plan says so, and what the codec made of it.

    Args:
        start: what the round began with. client: its name, which keys the search for samples.
        key: of the client's noise in this round.
    Raises: InputError if training diverged and the codec takes only finite weights.
    """
    plan, sent = start.plan, start.weights
    if plan.part.noise is not None:
        update = replace(update, weights=noised_update(update.weights, sent, plan.part.noise, key))
    if plan.update.codec == "fp32":
        return update

    def replay() -> Replay:
        return _replay(plan, sent)

    key = (plan.seed, _SEARCH, update.round, crc32(client.encode()))
    travels = encode_update(update.weights, sent, plan.update, replay, key)
    arrives = decode_update(travels, sent, plan.update, replay)
    lost = fidelity(update.weights, travels, arrives, sent)
    return replace(update, weights=travels, error=lost.error, cosine=lost.cosine)


def decoded(update: Update, plan: Plan, sent: Weights) -> Update:
    """The update with the weights that it stands for.

    Args:
        sent: what the client was sent for this round.
    Raises: FrameError for what `coded` does not give.
    """
    return replace(
        update,
        weights=decode_update(update.weights, sent, plan.update, lambda: _replay(plan, sent)),
    )


def _replay(plan: Plan, sent: Weights) -> Replay:
    return Replay(network_of(plan), None if plan.part.whole else plan.depth, sent)
