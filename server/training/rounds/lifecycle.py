"""The opening and the closing of a round: participants, the merge, the result for the report."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from edge_sdk.training.protocol.messages import Weights
from edge_sdk.training.streams import Stream
from server.training.core.trimmed_mean import (
    cap_shares,
    change_ratios,
    clipped_clients,
    trimmed_merge,
)
from server.training.core.weighted_mean import merge
from server.training.rounds.context import RoundContext
from server.training.rounds.round import RoundResult, RoundUnderWay, mean_coding, mean_loss

logger = logging.getLogger(__name__)


def open_round(context: RoundContext, number: int, seed: int) -> RoundUnderWay:
    """Start a round from the weights of now."""
    with context.using_state:
        state = context.state
        supervised = supervises(context, number, seed)
        now = RoundUnderWay.begin(number, context.plans, state.read(), state.memory, supervised)
        state.begin(number)
        context.suspects.open_round(number, context.plans)
        return now


def choose_clients(context: RoundContext, number: int, seed: int) -> list[str]:
    """The participants of a round, in client order; at least one."""
    names = list(context.plans)
    count = max(1, round(context.settings.participation * len(names)))
    if count == len(names):
        return names
    generator = Stream.PARTICIPANTS.generator(seed, round=number)
    chosen = generator.choice(len(names), count, replace=False)
    return [names[index] for index in sorted(chosen)]


def supervises(context: RoundContext, number: int, seed: int) -> bool:
    """Whether the server answers the clients' features in that round."""
    if context.method.server_step is None:
        return False
    draw = Stream.SUPERVISION.generator(seed, round=number).random()
    return bool(draw < context.settings.availability)


def close_round(
    context: RoundContext,
    now: RoundUnderWay,
    asked: Sequence[str],
    wanted: int,
    stale: Mapping[str, int],
) -> RoundResult:
    """Merge the contributions if they are a quorum of those wanted, else restore the weights.

    Args:
        stale: rounds late, by client, of the contributions of earlier rounds.
    """
    # in client order, as floats are added
    brought = {name: now.contributions[name] for name in context.plans if name in now.contributions}
    now.contributions = brought
    enough = len(brought) >= context.settings.quorum_of(wanted)
    weights: Mapping[str, float] = {}
    with context.using_state:
        if enough:
            weights = _merge(context, now)
        else:
            logger.warning(
                "round=%d not merged: %d of %d updates", now.number, len(brought), wanted
            )
            context.state.write(now.view.sent)
    heard = brought.keys() | now.refused.keys()
    return RoundResult(
        round=now.number,
        # noise covers no loss, so clients keep theirs to themselves
        loss=mean_loss(brought) if context.method.client.noise is None else None,
        participants=tuple(brought),
        missing=tuple(name for name in asked if name not in heard),
        refused=now.refused,
        merged=enough,
        bytes_up=now.traffic.up,
        bytes_down=now.traffic.down,
        seconds=time.perf_counter() - now.started,
        processor_s=time.process_time() - now.processor_started,
        bytes_by_kind=now.traffic.by_kind,
        missed_steps=now.missed,
        stale=stale,
        weights=weights,
        suspects=now.suspects,
        coding=mean_coding(now.codings),
        samples=now.samples,
        clipped=now.clipped,
        faults=now.faults,
    )


def _merge(context: RoundContext, now: RoundUnderWay) -> Mapping[str, float]:
    """Merge the contributions into the server's weights; the weight of each client's."""
    state, method, settings = context.state, context.method, context.settings
    # nothing is learnt from a client that stood out, on either side of the cut
    heard = {name: c for name, c in now.contributions.items() if name not in now.suspects}
    weights = method.weigh(heard, now.view)
    server = state.read()
    if settings.trimmed:
        weights = {name: weights.get(name, 0.0) for name in now.contributions}
        weights = cap_shares(weights, settings.weight_cap)
        merged = _trimmed(context, now, weights, server)
    else:
        merged = merge(now.contributions, weights, server, method.server_weight)
    if method.correct is not None and heard:
        merged = method.correct(merged, len(heard), now.view)
    state.write(merged)
    state.memory = now.view.memory
    return weights


def _trimmed(
    context: RoundContext, now: RoundUnderWay, weights: Mapping[str, float], server: Weights
) -> Weights:
    settings = context.settings
    ratios = change_ratios(now.contributions, now.view.sent)
    for client, why in clipped_clients(ratios, settings.clip_factor).items():
        now.suspect(client, why)
    return trimmed_merge(
        now.contributions,
        weights,
        server,
        context.method.server_weight,
        start=now.view.sent,
        ratios=ratios,
        clip_factor=settings.clip_factor,
        trim=settings.trim,
    )
