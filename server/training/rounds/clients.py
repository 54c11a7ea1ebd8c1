"""One group of clients in a round, from the weights that they start with to their contributions.

    start      each client gets its plan and the weights of its stages
    step       features come in, the method's server step answers each with a gradient
    end        updates come in and are checked whole

The clients of a group advance in lockstep, because a server step sees all of them at once.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from edge_sdk.training.protocol.messages import (
    EndRound,
    Feedback,
    Ready,
    Request,
    StartRound,
    Step,
    Update,
)
from server.training.core.trimmed_mean import cap_weights
from server.training.core.weighted_mean import Contribution
from server.training.methods.method import Method
from server.training.methods.steps import keeps_clients_apart
from server.training.rounds.context import RoundContext
from server.training.rounds.reply_checks import ready_fault, samples_fault
from server.training.rounds.round import RoundSettings, RoundUnderWay, replies_of
from server.training.rounds.supervision import answer_features, ask_features
from server.training.rounds.updates import accept_updates

logger = logging.getLogger(__name__)

# Steps in a row without any reply, after which no further one is asked for. A single one may be a
# batch that its device declines, or a link that was gone for seconds.
SILENT_STEPS: Final = 3


def train_clients(
    context: RoundContext, now: RoundUnderWay, names: Sequence[str]
) -> dict[str, Contribution]:
    """Train these clients together and give their contributions, in the same order."""
    ready = _start(context, now, names)
    feedback = _steps(context, now, ready)
    requests: dict[str, Request] = {
        name: EndRound(now.number, feedback.get(name)) for name in ready if name not in now.refused
    }
    replies = context.exchange(now, requests, context.settings.round_deadline_s)
    return accept_updates(context, now, replies_of(Update, replies, now.number))


TrainClients = Callable[[RoundContext, RoundUnderWay, Sequence[str]], dict[str, Contribution]]


def train_apart(
    context: RoundContext, now: RoundUnderWay, names: Sequence[str]
) -> dict[str, Contribution]:
    """The same for clients that do not meet (`can_train_apart`), one whole round after another.

    The result is the same, bit for bit. In one process it is faster: a client's batch goes back
    through activations that it has just made, and memory is that of one client.
    """
    found: dict[str, Contribution] = {}
    for name in names:
        found |= train_clients(context, now, [name])
        context.state.copies.pop(name, None)  # the copy of a client that gave no update
    return found


def can_train_apart(method: Method, settings: RoundSettings) -> bool:
    """Whether no client of a round depends on another until the merge."""
    return (
        keeps_clients_apart(method.server_step)
        and method.batch_share is None
        and not settings.trimmed
    )


def _start(context: RoundContext, now: RoundUnderWay, names: Sequence[str]) -> dict[str, Ready]:
    """Send each client its weights; the replies of those that can begin."""
    settings = context.settings
    requests: dict[str, Request] = {name: _start_request(context, now, name) for name in names}
    replies = context.exchange(now, requests, settings.round_deadline_s)
    ready = {}
    for name, reply in replies_of(Ready, replies, now.number).items():
        fault = ready_fault(reply, context.plans[name])
        fault = fault or samples_fault(reply.samples, settings.samples_max)
        if fault is not None:
            now.refuse(name, fault)
            continue
        now.samples[name] = reply.samples
        now.label_counts[name] = reply.label_counts
        ready[name] = reply
    if settings.trimmed:
        # a client that boasts shall not fill the joint batches, nor bend what the others learn by
        most = cap_weights(now.samples, settings.weight_cap)
        now.view.samples = {name: int(count) for name, count in most.items()}
    return ready


def _start_request(context: RoundContext, now: RoundUnderWay, name: str) -> StartRound:
    decayed = context.state.decayed_plan(context.plans[name], now.number)
    weights = context.start_weights(now, name) | context.first_weights(name)
    return StartRound(now.number, decayed, weights)


def _steps(
    context: RoundContext, now: RoundUnderWay, ready: Mapping[str, Ready]
) -> dict[str, Feedback]:
    """Run every step of the clients that began; the feedback that they have not had yet.

    A client that ran out of batches gets its last feedback with the end of its round.
    """
    shares = _batch_shares(context, now, ready)
    feedback: dict[str, Feedback] = {}
    limit_s, silent = context.settings.steps_deadline_s, 0
    end = math.inf if limit_s is None else time.monotonic() + limit_s
    for step in range(max((reply.steps for reply in ready.values()), default=0)):
        requests: dict[str, Request] = {
            name: Step(now.number, step, feedback.get(name), shares.get(name))
            for name, reply in ready.items()
            if step < reply.steps and name not in now.refused
        }
        late = time.monotonic() >= end
        if not requests or silent == SILENT_STEPS or late:
            why = f"after {limit_s:g} s" if late else "no client answers"
            logger.warning("round=%d no more steps from %d: %s", now.number, step, why)
            break
        left = {name: kept for name, kept in feedback.items() if name not in requests}
        features = ask_features(context, now, step, requests, shares)
        silent = 0 if features else silent + 1
        feedback = left | answer_features(context, now, step, features)
    return feedback


def _batch_shares(
    context: RoundContext, now: RoundUnderWay, ready: Mapping[str, Ready]
) -> Mapping[str, int]:
    """The batch of each participant, where the method shares it out."""
    rule = context.method.batch_share
    if rule is None or not ready:
        return {}
    batch = max(context.plans[name].training.batch for name in ready)
    return rule({name: now.view.samples[name] for name in ready}, batch, now.view)
