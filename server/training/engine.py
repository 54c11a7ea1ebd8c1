"""The one round loop: every method, in simulation and with real devices.

    start      the participants get a plan and the weights of their stages
    step       features come in, the method's server step answers each with a gradient
    end        updates come in, are checked whole, and are merged

Participants advance in lockstep, because a server step sees all of them at once; methods whose
clients do not meet there may be run in cohorts, so that memory does not grow with participants.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.training.messages import (
    EndRound,
    Features,
    Feedback,
    Ready,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
    Weights,
)
from edge_sdk.training.plan import Plan
from edge_sdk.training.weights import check_weights
from server.training.aggregation import Contribution, merge
from server.training.ledger import Ledger
from server.training.method import Method
from server.training.server_steps import Arrival
from server.training.state import ServerState
from server.training.transports import Transport

logger = logging.getLogger(__name__)

R = TypeVar("R", Ready, Features, Update)


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """How rounds are run.

    Attributes:
        participation: share of the clients asked to each round; at least one.
        availability: share of rounds in which the server supervises; in the others clients train
            by themselves and the server only merges.
        cohort: clients that advance together; None for all participants.
        quorum: share of the participants whose updates must come for the round to count.
        step_deadline_s, round_deadline_s: what a client may take for one message.
        norm_bound: largest L2 norm of an update's change; None for no bound.
    """

    participation: float = 1.0
    availability: float = 1.0
    cohort: int | None = None
    quorum: float = 0.5
    step_deadline_s: float = 5.0
    round_deadline_s: float = 600.0
    norm_bound: float | None = None

    def __post_init__(self) -> None:
        for name in ("participation", "availability", "quorum"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigurationError(f"{name}: expected 0 to 1, got {value}")
        if self.cohort is not None and self.cohort < 1:
            raise ConfigurationError(f"cohort: expected at least 1, got {self.cohort}")


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round, as the report has it.

    Attributes:
        loss: mean of the participants' losses by samples; None where nobody took part.
        participants: those whose update was merged; missing: those asked in vain;
        refused: reasons by client.
        merged: whether the quorum was reached.
    """

    round: int
    loss: float | None
    participants: tuple[str, ...]
    missing: tuple[str, ...]
    refused: Mapping[str, str]
    merged: bool
    bytes_up: int
    bytes_down: int
    seconds: float
    bytes_by_kind: Mapping[str, int] = field(default_factory=dict)


class Engine:
    """Runs rounds of a method.

    Args:
        plans: by client, in the order in which floats are added; depth included.
        state: the server's network; changed by every round.
    """

    def __init__(
        self,
        method: Method,
        plans: Mapping[str, Plan],
        state: ServerState,
        transport: Transport,
        settings: RoundSettings | None = None,
    ) -> None:
        if method.labels == "private" and method.server_step is not None:
            raise ConfigurationError(f"{method.name}: its server step needs labels")
        self._method = method
        self._plans = dict(plans)
        self._state = state
        self._transport = transport
        self._settings = settings or RoundSettings()

    def run_round(self, number: int, seed: int) -> RoundResult:
        """One round; the same number and seed give the same weights."""
        start = time.perf_counter()
        asked = self._choose(number, seed)
        supervised = self._supervises(number, seed)
        ledger = Ledger()
        contributions: dict[str, Contribution] = {}
        refused: dict[str, str] = {}
        size = self._settings.cohort or len(asked)
        for at in range(0, len(asked), size):
            updates = self._train(number, asked[at : at + size], supervised, ledger)
            self._state.fold_copies({name: u.samples for name, u in updates.items()})
            for name, update in updates.items():
                reason = self._refusal(name, update)
                if reason is None:
                    contributions[name] = Contribution(self._plans[name].depth, update)
                else:
                    refused[name] = reason
                    logger.warning("round=%d client=%s update refused: %s", number, name, reason)
        enough = len(contributions) >= max(1, self._settings.quorum * len(asked))
        if enough:
            self._merge(contributions)
        else:
            logger.warning(
                "round=%d not merged: %d of %d updates", number, len(contributions), len(asked)
            )
        self._state.drop_copies()
        return RoundResult(
            round=number,
            loss=_mean_loss(contributions),
            participants=tuple(contributions),
            missing=tuple(
                name for name in asked if name not in contributions and name not in refused
            ),
            refused=refused,
            merged=enough,
            bytes_up=ledger.up,
            bytes_down=ledger.down,
            seconds=time.perf_counter() - start,
            bytes_by_kind=ledger.by_kind,
        )

    def _choose(self, number: int, seed: int) -> list[str]:
        names = list(self._plans)
        count = max(1, round(self._settings.participation * len(names)))
        if count == len(names):
            return names
        chosen = np.random.default_rng([seed, number, 1]).choice(len(names), count, replace=False)
        return [names[index] for index in sorted(chosen)]

    def _supervises(self, number: int, seed: int) -> bool:
        if self._method.server_step is None:
            return False
        draw = np.random.default_rng([seed, number, 2]).random()
        return bool(draw < self._settings.availability)

    def _train(
        self, number: int, names: Sequence[str], supervised: bool, ledger: Ledger
    ) -> dict[str, Update]:
        """One cohort from its weights to its updates."""
        requests: dict[str, Request] = {name: self._start(number, name) for name in names}
        ready = _only(Ready, self._exchange(requests, self._settings.round_deadline_s, ledger))
        feedback: dict[str, Feedback] = {}
        for step in range(max((reply.steps for reply in ready.values()), default=0)):
            going = [name for name in ready if step < ready[name].steps]
            orders: dict[str, Request] = {
                name: Step(number, step, feedback.get(name)) for name in going
            }
            left = {name: kept for name, kept in feedback.items() if name not in orders}
            replies = self._exchange(orders, self._settings.step_deadline_s, ledger)
            features = _only(Features, replies)
            # a client that ran out of batches gets its last feedback with the end of its round
            feedback = left | (self._answer(features) if supervised else {})
        ends: dict[str, Request] = {name: EndRound(number, feedback.get(name)) for name in ready}
        return _only(Update, self._exchange(ends, self._settings.round_deadline_s, ledger))

    def _start(self, number: int, name: str) -> StartRound:
        plan = self._plans[name]
        weights = self._state.weights(
            plan.depth, whole=plan.whole, exit_head=plan.exit_head and self._method.share_exits
        )
        return StartRound(number, plan, weights)

    def _answer(self, features: Mapping[str, Features]) -> dict[str, Feedback]:
        if self._method.server_step is None or not features:
            return {}
        arrivals = {name: Arrival(self._plans[name].depth, f) for name, f in features.items()}
        return self._method.server_step(self._state, arrivals)

    def _exchange(
        self, requests: Mapping[str, Request], deadline_s: float, ledger: Ledger
    ) -> dict[str, Reply]:
        for name, request in requests.items():
            ledger.sent(request, self._plans[name].codec)
        replies = self._transport.exchange(requests, deadline_s) if requests else {}
        in_order = {name: replies[name] for name in requests if name in replies}
        for name, reply in in_order.items():
            ledger.received(reply, self._plans[name].codec)
        return in_order

    def _refusal(self, name: str, update: Update) -> str | None:
        """Why an update is not merged: checked whole, before any of it is added."""
        plan = self._plans[name]
        expected = self._state.weights(plan.depth, whole=plan.whole, exit_head=plan.exit_head)
        try:
            check_weights(update.weights, expected)
        except FrameError as err:
            return str(err)
        if update.samples < 1 or not np.isfinite(update.loss):
            return f"samples {update.samples}, loss {update.loss}: expected at least 1 and finite"
        bound = self._settings.norm_bound
        if bound is not None:
            change = [
                float((tensor - expected[key]).norm())
                for key, tensor in update.weights.items()
                if not key.startswith("exit")
            ]
            norm = float(np.linalg.norm(change))
            if norm > bound:
                return f"change of norm {norm:.3g}: expected at most {bound:g}"
        return None

    def _merge(self, contributions: Mapping[str, Contribution]) -> None:
        method = self._method
        if not method.share_exits:  # heads stay on their clients
            contributions = {
                name: replace(c, update=replace(c.update, weights=_without_exits(c.update)))
                for name, c in contributions.items()
            }
        own = self._state.read()
        folded, share = self._state.folded()
        weights = method.weigh(contributions)
        server_weight = dict.fromkeys(own, method.server_weight) | share
        self._state.write(merge(contributions, weights, own | folded, server_weight))


def _only(kind: type[R], replies: Mapping[str, Reply]) -> dict[str, R]:
    return {name: reply for name, reply in replies.items() if isinstance(reply, kind)}


def _without_exits(update: Update) -> Weights:
    return {name: t for name, t in update.weights.items() if not name.startswith("exit")}


def _mean_loss(contributions: Mapping[str, Contribution]) -> float | None:
    samples = sum(c.update.samples for c in contributions.values())
    if not samples:
        return None
    return sum(c.update.loss * c.update.samples for c in contributions.values()) / samples
