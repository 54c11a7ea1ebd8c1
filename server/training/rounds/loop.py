"""The one round loop: every method, in simulation and with real devices.

    start      the participants get a plan and the weights of their stages
    step       features come in, the method's server step answers each with a gradient
    end        updates come in, are checked whole, and are merged

Participants advance in lockstep, because a server step sees all of them at once; methods whose
clients do not meet there may be run in cohorts, so that memory does not grow with participants.
Everyone starts from the weights of the round's start, whatever the cohort; what a cohort brought
waits on the disk for the others.

A client whose reply is not sound is out for the rest of the round and named in the result. What it
sent is not used; a server with one model for all may have stepped on its earlier, sound batches.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
from torch import Tensor

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.training.protocol.feature_codec import decode_batch
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Feedback,
    OutputGradient,
    Outputs,
    Ready,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
    Weights,
)
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.update_transfer import decoded
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.core.spool import Spool
from server.training.core.trimmed_mean import cap_weights, change_ratios, suspects, trimmed_merge
from server.training.core.weighted_mean import Contribution, merge
from server.training.methods.method import Method
from server.training.methods.steps import ClientBatch, ClientBatches
from server.training.rounds.outliers import ROUNDS_REMEMBERED, forget, outliers
from server.training.rounds.reply_checks import (
    features_fault,
    gradient_fault,
    ready_fault,
    samples_fault,
    shapes_fault,
    update_fault,
)
from server.training.rounds.round import (
    RoundResult,
    RoundSettings,
    RoundUnderWay,
    coding_of,
    mean_coding,
    mean_loss,
)
from server.training.rounds.staleness import flatten_by_round, rebase_update, unflatten_by_round
from server.training.rounds.transport import Transport

logger = logging.getLogger(__name__)

# Steps in a row that nobody answered, after which nobody is asked for more. A single one may be a
# batch that its device declines, or a link that was gone for seconds.
SILENT_STEPS: Final = 3

R = TypeVar("R", Ready, Features, OutputGradient, Update)


class RoundLoop:
    """Runs rounds of a method.

    Args:
        plans: by client, in the order in which floats are added; depth included.
        state: the server's network; changed by every round.
        folder: where contributions wait on the disk while rounds run in cohorts; the system's
            temporary folder where None.
    """

    def __init__(
        self,
        method: Method,
        plans: Mapping[str, Plan],
        state: ServerState,
        transport: Transport,
        settings: RoundSettings | None = None,
        *,
        folder: Path | None = None,
    ) -> None:
        self._method = method
        self._state = state
        self._settings = settings or RoundSettings()
        self._folder = folder
        # whatever reads or changes the state holds it: rounds may be under way in several threads
        self._using_state = threading.RLock()
        self._sent: dict[int, Weights] = {}  # what rounds began with that may still be heard of
        self._outlying: set[tuple[str, int]] = set()  # (client, round), as long as it may be late
        self.set_clients(plans, transport)

    def set_clients(self, plans: Mapping[str, Plan], transport: Transport) -> None:
        """Have these clients in the rounds to come, reached like this."""
        method = self._method
        if method.batch_share is not None and not all(
            p.training.iterations for p in plans.values()
        ):
            raise ConfigurationError(
                f"{method.name}: shares each batch out, so rounds are counted in batches:"
                " expected train.iterations"
            )
        self._plans = dict(plans)
        self._transport = transport

    def paused(self) -> AbstractContextManager[object]:
        """Between two rounds: nothing changes the state inside it, whoever is at work."""
        return self._using_state

    def close(self) -> None:
        """Leave what is under way; nobody is, between rounds that begin together."""

    def run_round(
        self, number: int, seed: int, late: Mapping[str, Update] | None = None
    ) -> RoundResult:
        """One round; the same number and seed give the same weights.

        Args:
            late: updates of earlier rounds that came since the last one; a client that gives one
                of this round too is heard with that.
        Raises: StorageError if what came cannot be kept on the disk.
        """
        with ExitStack() as stack:
            now = self._open(number, seed)
            most = self._settings.staleness_max
            self._sent[number] = now.view.sent
            self._sent = {r: sent for r, sent in self._sent.items() if number - r <= most}
            asked = self._choose(number, seed)
            if self._settings.cohort is not None and self._settings.cohort < len(asked):
                now.spool = stack.enter_context(Spool(self._folder))
            size = self._settings.cohort or len(asked)
            for at in range(0, len(asked), size):
                now.contributions |= self._accept(now, self._train(now, asked[at : at + size]))
                self._state.copies.clear()  # those trained in vain
            stale = self._take_late(now, late or {})
            return self._close(now, asked, len(asked), stale)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """What is under way between two rounds, for a checkpoint, as JSON and tensors: what the
        rounds began with whose updates may still come late, and whose of these teach nothing.
        """
        return self._said(), flatten_by_round(self._sent) if self._settings.staleness_max else {}

    def load_state_dict(self, said: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take up what `state_dict` gave.

        Raises: FrameError where it is no such thing.
        """
        sent = unflatten_by_round(tensors)
        self._outlying = outlying(said)
        self._sent = sent

    def _said(self) -> dict[str, Any]:
        return {"outlying": sorted(self._outlying)} if self._outlying else {}

    def _close(
        self, now: RoundUnderWay, asked: Sequence[str], wanted: int, stale: Mapping[str, int]
    ) -> RoundResult:
        """Merge what came, if it is a quorum of those wanted."""
        enough = self._enough(len(now.contributions), wanted)
        weights: Mapping[str, float] = {}
        if enough:
            weights = self._merge(now)
        else:
            count = len(now.contributions)
            logger.warning("round=%d not merged: %d of %d updates", now.number, count, wanted)
            self._state.write(now.view.sent)
            self._state.set_momentum(now.momentum)
        heard = now.contributions.keys() | now.refused.keys()
        return RoundResult(
            round=now.number,
            # noise covers no loss, so clients keep theirs to themselves
            loss=mean_loss(now.contributions) if self._method.client.noise is None else None,
            participants=tuple(now.contributions),
            missing=tuple(name for name in asked if name not in heard),
            refused=now.refused,
            merged=enough,
            bytes_up=now.ledger.up,
            bytes_down=now.ledger.down,
            seconds=time.perf_counter() - now.started,
            bytes_by_kind=now.ledger.by_kind,
            missed_steps=now.missed,
            stale=stale,
            weights=weights,
            suspects=now.suspects,
            coding=mean_coding(now.codings),
            samples=now.samples,
        )

    def _open(self, number: int, seed: int) -> RoundUnderWay:
        samples: dict[str, int] = {}
        counts: dict[str, tuple[int, ...]] = {}
        view = RoundView(
            number,
            plans=self._plans,
            sent=self._state.read(),
            samples=samples,
            label_counts=counts,
            memory=dict(self._state.memory),
        )
        self._state.begin(number)
        most = self._settings.staleness_max
        self._outlying = {(name, r) for name, r in self._outlying if number - r <= most}
        # one at work since then is still known
        forget(self._state, self._plans, number - max(ROUNDS_REMEMBERED, most))
        supervised = self._supervises(number, seed)
        momentum = {key: tensor.clone() for key, tensor in self._state.momentum().items()}
        return RoundUnderWay(
            number, supervised, view, momentum, samples=samples, label_counts=counts
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

    def _enough(self, updates: int, wanted: int) -> bool:
        # 0.07 * 100 is a little more than 7
        return updates >= max(1, math.ceil(self._settings.quorum * wanted - 1e-9))

    def _train(self, now: RoundUnderWay, names: Sequence[str]) -> dict[str, Update]:
        """One cohort from its weights to its updates."""
        requests: dict[str, Request] = {name: self._start(now, name) for name in names}
        ready = self._ready(now, requests)
        shares = self._shares(now, ready)
        feedback: dict[str, Feedback] = {}
        limit_s, silent = self._settings.steps_deadline_s, 0
        end = math.inf if limit_s is None else time.monotonic() + limit_s
        for step in range(max((reply.steps for reply in ready.values()), default=0)):
            orders: dict[str, Request] = {
                name: Step(now.number, step, feedback.get(name), shares.get(name))
                for name, reply in ready.items()
                if step < reply.steps and name not in now.refused
            }
            late = time.monotonic() >= end
            if not orders or silent == SILENT_STEPS or late:
                why = f"after {limit_s:g} s" if late else "nobody answers"
                logger.warning("round=%d no more steps from %d: %s", now.number, step, why)
                break
            left = {name: kept for name, kept in feedback.items() if name not in orders}
            features = self._features(now, step, orders, shares)
            silent = 0 if features else silent + 1
            # a client that ran out of batches gets its last feedback with the end of its round
            feedback = left | (self._answer(now, step, features) if now.supervised else {})
        ends: dict[str, Request] = {
            name: EndRound(now.number, feedback.get(name))
            for name in ready
            if name not in now.refused
        }
        replies = self._exchange(now, ends, self._settings.round_deadline_s)
        return _only(Update, replies, now.number)

    def _start(self, now: RoundUnderWay, name: str) -> StartRound:
        plan = self._plans[name]
        rate = self._state.slowed(plan.training.learning_rate, now.number)
        training = replace(plan.training, learning_rate=rate)
        return StartRound(now.number, replace(plan, training=training), self._sent_to(now, name))

    def _sent_to(self, now: RoundUnderWay, name: str) -> Weights:
        """What that client starts from."""
        plan = self._plans[name]
        exit_head = plan.part.exit_head and self._method.share_exits
        return _part(now.view.sent, plan, exit_head=exit_head)

    def _ready(self, now: RoundUnderWay, requests: Mapping[str, Request]) -> dict[str, Ready]:
        replies = self._exchange(now, requests, self._settings.round_deadline_s)
        ready = {}
        for name, reply in _only(Ready, replies, now.number).items():
            fault = ready_fault(reply, self._plans[name])
            fault = fault or samples_fault(reply.samples, self._settings.samples_max)
            if fault is not None:
                now.refuse(name, fault)
                continue
            now.samples[name] = reply.samples
            now.label_counts[name] = reply.label_counts
            ready[name] = reply
        if self._settings.robust == "trimmed":
            # who boasts shall not fill the joint batches, nor bend what the others learn by
            most = cap_weights(now.samples, self._settings.weight_cap)
            now.view.samples = {name: int(count) for name, count in most.items()}
        return ready

    def _shares(self, now: RoundUnderWay, ready: Mapping[str, Ready]) -> Mapping[str, int]:
        """The batch of each participant, where the method shares it out."""
        rule = self._method.batch_share
        if rule is None or not ready:
            return {}
        batch = max(self._plans[name].training.batch for name in ready)
        return rule({name: now.view.samples[name] for name in ready}, batch)

    def _features(
        self,
        now: RoundUnderWay,
        step: int,
        orders: Mapping[str, Request],
        shares: Mapping[str, int],
    ) -> dict[str, Features]:
        """Features of the step, decoded and found sound."""
        replies = self._exchange(now, orders, self._settings.step_deadline_s)
        found = _only(Features, replies, now.number)
        features = {}
        for name in orders:
            if name not in found or found[name].step != step:
                now.missed[name] += 1
                continue
            try:
                features[name] = self._taken(found[name], self._plans[name], shares.get(name))
            except FrameError as err:
                now.refuse(name, str(err))
        return features

    def _taken(self, features: Features, plan: Plan, batch: int | None) -> Features:
        """As the sender computed them, up to the codec's error.

        Raises: FrameError for what is not sound.
        """
        with self._using_state:
            fault = shapes_fault(features, plan, self._state.shape_at, batch)
        if fault is not None:
            raise FrameError(fault)
        z = decode_batch(features.features, features.ranges)
        view = None if features.view is None else decode_batch(features.view, features.view_ranges)
        decoded = replace(features, features=z, ranges=None, view=view, view_ranges=None)
        fault = features_fault(decoded)
        if fault is not None:
            raise FrameError(fault)
        return decoded

    def _answer(
        self, now: RoundUnderWay, step: int, features: Mapping[str, Features]
    ) -> dict[str, Feedback]:
        """What the server's step returns: to the others, and apart from them to who stands out, by
        whose batches the one suffix for all is not stepped.
        """
        if self._method.server_step is None or not features:
            return {}
        now.view.step = step
        arrivals = {
            name: ClientBatch(self._plans[name].depth, f, self._method.align)
            for name, f in features.items()
        }
        apart = self._outliers(now, arrivals)
        together = {name: each for name, each in arrivals.items() if name not in apart}
        feedback = self._server_step(now, together, frozen=False) if together else {}
        if apart:
            memory = dict(now.view.memory)
            feedback |= self._server_step(now, apart, frozen=True)
            # in place: in a simulation of buffered rounds views share it
            now.view.memory.clear()
            now.view.memory.update(memory)
        return feedback

    def _outliers(self, now: RoundUnderWay, arrivals: ClientBatches) -> ClientBatches:
        """What came from clients that stand out, where robustness is asked for."""
        if self._settings.robust != "trimmed":
            return {}
        with self._using_state:
            found = outliers(self._state, arrivals, now.view, self._settings.clip_factor)
            self._outlying |= {(name, now.number) for name in found}
        for name, why in found.items():
            now.suspect(name, why)
        return {name: arrivals[name] for name in arrivals if name in found}

    def _server_step(
        self, now: RoundUnderWay, arrivals: ClientBatches, *, frozen: bool
    ) -> dict[str, Feedback]:
        """The method's server step; it may ask the clients before it answers."""
        assert self._method.server_step is not None
        step = now.view.step
        with self._stepping(frozen=frozen):
            answer = self._method.server_step(self._state, arrivals, now.view)
        if not isinstance(answer, Generator):
            return answer
        try:
            with self._stepping(frozen=frozen):
                outputs = next(answer)
            while True:
                gradients = self._gradients(now, step, outputs)
                with self._stepping(frozen=frozen):
                    outputs = answer.send(gradients)
        except StopIteration as done:
            feedback: dict[str, Feedback] = done.value
            return feedback

    @contextmanager
    def _stepping(self, *, frozen: bool) -> Iterator[None]:
        with self._using_state, self._state.frozen() if frozen else nullcontext():
            yield

    def _gradients(
        self, now: RoundUnderWay, step: int, outputs: Mapping[str, Tensor]
    ) -> dict[str, OutputGradient]:
        """Of the clients' losses with respect to the server's outputs, found sound."""
        requests: dict[str, Request] = {
            name: Outputs(now.number, step, tensor) for name, tensor in outputs.items()
        }
        replies = self._exchange(now, requests, self._settings.step_deadline_s)
        found = _only(OutputGradient, replies, now.number)
        gradients = {}
        for name, asked in outputs.items():
            if name not in found or found[name].step != step:
                now.missed[name] += 1
                continue
            fault = gradient_fault(found[name], asked)
            if fault is not None:
                now.refuse(name, fault)
                continue
            gradients[name] = found[name]
        return gradients

    def _accept(self, now: RoundUnderWay, updates: Mapping[str, Update]) -> dict[str, Contribution]:
        """The updates that are sound; one that learnt from no batch has nothing to say."""
        accepted = {}
        for name, arrived in updates.items():
            plan = self._plans[name]
            try:
                update = decoded(arrived, plan, self._sent_to(now, name))
            except FrameError as err:
                now.refuse(name, str(err))
                continue
            sent = _part(now.view.sent, plan, exit_head=plan.part.exit_head)
            fault = update_fault(update, sent, now.samples[name], self._settings.norm_bound)
            if fault is not None:
                now.refuse(name, fault)
            elif update.steps:
                if coding := coding_of(arrived, update):
                    now.codings.append(coding)
                copy = {} if update.round < now.number else self._state.take_copy(name)
                brought = Contribution(plan.depth, self._merged_part(update), copy)
                accepted[name] = brought if now.spool is None else brought.spool(now.spool)
        return accepted

    def _merged_part(self, update: Update) -> Update:
        if self._method.share_exits:
            return update
        weights = {k: v for k, v in update.weights.items() if not k.startswith("exit")}
        return replace(update, weights=weights)  # heads stay on their clients

    def _take_late(self, now: RoundUnderWay, late: Mapping[str, Update]) -> dict[str, int]:
        """Add what earlier rounds still owe, within the limit; by client, how many rounds late.

        Of each its change since its own round's start, discounted, on the weights of this one's.
        """
        stale = {}
        for name, update in late.items():
            if name not in self._plans or name in now.contributions or name in now.refused:
                continue
            rounds = now.number - update.round
            if rounds > self._settings.staleness_max:
                most = self._settings.staleness_max
                now.refuse(name, f"an update {rounds} rounds late: expected at most {most}")
                continue
            fault = samples_fault(update.samples, self._settings.samples_max)
            if fault is not None:
                now.refuse(name, fault)
                continue
            sent = self._sent.get(update.round)
            if sent is None:
                now.refuse(
                    name, f"an update of round {update.round}: it is not known to have begun"
                )
                continue
            now.samples[name] = update.samples
            then = replace(now, view=replace(now.view, sent=sent), spool=None)
            self._recall(now, name, update.round)
            share = (1 + rounds) ** -self._settings.staleness_power
            for brought in self._accept(then, {name: update}).values():
                logger.info("round=%d client=%s update merged %d late", now.number, name, rounds)
                moved = rebase_update(brought, sent, now.view.sent, share) if rounds else brought
                now.contributions[name] = moved if now.spool is None else moved.spool(now.spool)
                stale[name] = rounds
        # in client order, as floats are added
        now.contributions = {
            name: now.contributions[name] for name in self._plans if name in now.contributions
        }
        return stale

    def _recall(self, now: RoundUnderWay, name: str, number: int) -> None:
        """Learn nothing from the late update of one that stood out in its own round."""
        if (name, number) in self._outlying:
            now.suspect(name, f"stood out in round {number}, of which its update is")

    def _exchange(
        self, now: RoundUnderWay, requests: Mapping[str, Request], deadline_s: float
    ) -> dict[str, Reply]:
        for request in requests.values():
            now.ledger.sent(request)
        replies = self._transport.exchange(requests, deadline_s) if requests else {}
        in_order = {name: replies[name] for name in requests if name in replies}
        for reply in in_order.values():
            now.ledger.received(reply)
        return in_order

    def _merge(self, now: RoundUnderWay) -> Mapping[str, float]:
        """Merge what came into the server's weights; with which weight each client counted."""
        # nothing is learnt from who stood out, on either side of the cut
        heard = {name: c for name, c in now.contributions.items() if name not in now.suspects}
        weights = self._method.weigh(heard, now.view)
        own = self._state.read()
        if self._settings.robust == "trimmed":
            weights = {name: weights.get(name, 0.0) for name in now.contributions}
            weights = cap_weights(weights, self._settings.weight_cap)
            merged = self._trimmed(now, weights, own)
        else:
            merged = merge(now.contributions, weights, own, self._method.server_weight)
        self._state.write(merged)
        self._state.memory = now.view.memory
        return weights

    def _trimmed(self, now: RoundUnderWay, weights: Mapping[str, float], own: Weights) -> Weights:
        settings = self._settings
        ratios = change_ratios(now.contributions, now.view.sent)
        for client, why in suspects(ratios, settings.clip_factor).items():
            now.suspect(client, why)
        return trimmed_merge(
            now.contributions,
            weights,
            own,
            self._method.server_weight,
            start=now.view.sent,
            ratios=ratios,
            clip_factor=settings.clip_factor,
            trim=settings.trim,
        )


def outlying(said: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Who stood out and when, as a checkpoint has it.

    Raises: FrameError where it is no such thing.
    """
    try:
        return {(str(name), int(number)) for name, number in said.get("outlying", ())}
    except (TypeError, ValueError) as err:
        raise FrameError(f"checkpoint: outlying: expected names with rounds ({err})") from err


def _only(kind: type[R], replies: Mapping[str, Reply], number: int) -> dict[str, R]:
    return {
        name: reply
        for name, reply in replies.items()
        if isinstance(reply, kind) and reply.round == number
    }


def _part(weights: Weights, plan: Plan, *, exit_head: bool) -> Weights:
    """Those of the stages a client trains, by its plan."""
    starts = [f"stage{stage}." for stage in range(1, plan.depth + 1)]
    if plan.part.whole:
        starts += ["stage", "head."]
    if exit_head:
        starts.append(f"exit{plan.depth}.")
    return {name: t for name, t in weights.items() if name.startswith(tuple(starts))}
