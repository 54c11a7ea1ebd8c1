"""Updates from clients: each is decoded, checked whole, and becomes a contribution to the merge."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from edge_sdk.errors import FrameError
from edge_sdk.training.protocol.messages import Update
from edge_sdk.training.protocol.update_transfer import decode_from_wire
from server.training.core.weighted_mean import Contribution
from server.training.rounds.context import RoundContext, trained_part
from server.training.rounds.reply_checks import Refusal, samples_fault, update_fault
from server.training.rounds.round import RoundUnderWay, coding_of
from server.training.rounds.staleness import Staleness

logger = logging.getLogger(__name__)


def accept_updates(
    context: RoundContext, now: RoundUnderWay, updates: Mapping[str, Update]
) -> dict[str, Contribution]:
    """The contributions of sound updates; an update that learnt from no batch brings none."""
    accepted = {}
    for name, arrived in updates.items():
        plan = context.plans[name]
        try:
            update = decode_from_wire(arrived, plan, context.start_weights(now, name))
        except FrameError as err:
            now.refuse(name, Refusal.of(err))
            continue
        sent = trained_part(now.view.sent, plan, exit_head=plan.part.exit_head)
        fault = update_fault(update, sent, now.samples[name], context.settings.norm_bound)
        if fault is not None:
            now.refuse(name, fault)
        elif update.steps:
            if plan.update.lossy and (coding := coding_of(arrived, update)):
                now.codings.append(coding)
            # the copy of a client that has begun another round since is not this update's
            copy = {} if update.round < now.number else context.state.take_copy(name)
            brought = Contribution(plan.depth, _merged_part(context, update), copy)
            accepted[name] = brought if now.spool is None else brought.spool(now.spool)
    return accepted


def accept_late_updates(
    context: RoundContext, staleness: Staleness, now: RoundUnderWay, late: Mapping[str, Update]
) -> dict[str, int]:
    """Add the updates of earlier rounds to the contributions, within the limit of staleness.

    Returns: rounds late, by client, of those that were added.
    """
    ages = {}
    for name, update in late.items():
        if name not in context.plans or name in now.contributions or name in now.refused:
            continue
        rounds = now.number - update.round
        sent = staleness.sent(update.round)
        fault = staleness.fault(rounds) or samples_fault(
            update.samples, context.settings.samples_max
        )
        if fault is not None:
            now.refuse(name, fault)
            continue
        if sent is None:
            now.refuse(name, f"an update of round {update.round}: it is not known to have begun")
            continue
        now.samples[name] = update.samples
        # the number stays this round's, so that no copy of the client's is taken for the update's
        then = replace(now, view=replace(now.view, sent=sent), spool=None)
        context.suspects.exclude_late_outlier(now, name, update.round)
        for brought in accept_updates(context, then, {name: update}).values():
            logger.info("round=%d client=%s update merged %d late", now.number, name, rounds)
            moved = staleness.rebase(brought, sent, now.view.sent, rounds)
            now.contributions[name] = moved if now.spool is None else moved.spool(now.spool)
            ages[name] = rounds
    return ages


def _merged_part(context: RoundContext, update: Update) -> Update:
    """The update without its exit head, where exit heads stay on their clients."""
    if context.method.share_exits:
        return update
    weights = {k: v for k, v in update.weights.items() if not k.startswith("exit")}
    return replace(update, weights=weights)
