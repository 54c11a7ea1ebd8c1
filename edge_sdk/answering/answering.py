"""Answering: the device's part of an answer, the gate's decision, and the server's part.

It knows nothing of how the bundle got here, or how long it stays: edge_sdk.agent looks after that.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

from edge_sdk.answering.audits import Audits
from edge_sdk.answers.observer import Answered, AnswerObserver, Observers
from edge_sdk.answers.prediction import DEVICE, FALLBACK, SERVER, Prediction
from edge_sdk.answers.price import AnswerMeter
from edge_sdk.answers.status import Counters
from edge_sdk.answers.tally import AnswerTally
from edge_sdk.bundles.lifecycle import BundleLifecycle, FixedBundle
from edge_sdk.bundles.runner import BundleRunner, read_logits
from edge_sdk.errors import ConfigurationError, InputError, OutOfMemoryError, shown
from edge_sdk.gate.gate import Decision, answer_policy
from edge_sdk.offload.late_answers import LateAnswers, is_retryable
from edge_sdk.offload.offloader import Offloader
from edge_sdk.offload.outbox import QueuedQuery
from edge_sdk.offload.pending import NoReply, Outcome, Pending
from edge_sdk.session import Array
from edge_sdk.settings import AgentSettings
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Reply
from profiles.checks import is_whole
from profiles.energy import EnergySource

if TYPE_CHECKING:
    from edge_sdk.tracing.predictions import OffloadTrace, PredictionTraces

# Answers that `predict_many` holds behind an offload, of about a kilobyte each.
HELD_ANSWERS_MAX: Final = 1024
# bytes up, bytes down, joules, and the source of the joules: the last fields of a `Prediction`
Cost = tuple[int, int, float | None, EnergySource]
FREE: Final[Cost] = (0, 0, None, "none")


@dataclass(frozen=True, slots=True)
class _Offload:
    """An input that the gate did not let exit, and its query under way."""

    runner: BundleRunner
    decision: Decision
    audit: bool
    start: float
    pending: Pending
    tensor: Tensor | None  # kept for a late answer, if the settings ask for those
    x: Array | None  # a copy for the observers, if there are any
    z: Array | None
    mark: float | None  # of the meter, if answers are priced
    trace: OffloadTrace | None  # if this prediction is traced


class Answering:
    """Answers inputs with the bundle that runs now; several threads may call it.

    Args:
        bundle: its runner is replaced between two answers.
        meter: prices answers; None for no prices.
        traces: traces a share of the answers; None for no traces.
    Attributes:
        offloading: whether the server is asked; False until `connect`.
    """

    def __init__(
        self,
        bundle: BundleLifecycle | FixedBundle,
        settings: AgentSettings,
        observers: Sequence[AnswerObserver] = (),
        meter: AnswerMeter | None = None,
        traces: PredictionTraces | None = None,
    ) -> None:
        self._bundle = bundle
        self._settings = settings
        self._observers = Observers(observers) if observers else None
        self._meter = meter
        self._traces = traces
        self.offloading = False
        self._offloader: Offloader | None = None
        self._audits: Audits | None = None
        self._late: LateAnswers | None = None
        self._counters = Counters()
        self._counting = threading.Lock()
        # of the last answer, without the server's part
        self._device_ms: float | None = None

    def connect(
        self,
        offloader: Offloader,
        audits: Audits | None,
        late: LateAnswers | None,
        *,
        offloading: bool = True,
    ) -> None:
        """Offload from now on.

        Args:
            offloading: False leaves the attribute as it is: the user turned it off.
            audits: compare answers with the server's; None for none.
            late: keeps queries that fell back; None keeps none.
        """
        self._audits = audits
        self._late = late
        self._offloader = offloader
        self.offloading = offloading

    @property
    def counters(self) -> Counters:
        """Copy of the counters of this object."""
        with self._counting:
            return replace(self._counters)

    @property
    def tally(self) -> AnswerTally:
        """Copy of the histograms of the bundle that runs now."""
        with self._counting:
            return self._bundle.runner.tally.copy()

    @property
    def observers(self) -> Observers | None:
        """The observers, who are told of every answer and correction; None without any."""
        return self._observers

    def add_observer(self, observer: AnswerObserver) -> None:
        """Tell an observer of every answer and correction from now on."""
        if self._observers is None:
            self._observers = Observers([observer])
        else:
            self._observers.add(observer)

    def take_latency_ms(self) -> float | None:
        """Time of the device's part of the last answer, once; None if there was no other."""
        latency_ms, self._device_ms = self._device_ms, None
        return latency_ms

    def predict(
        self, x: Array, deadline_s: float | None, threshold: float | None, local: bool
    ) -> Prediction:
        """Classify one input, as `EdgeAgent.predict` does."""
        begun = self._begin(x, deadline_s, threshold, local)
        return begun if isinstance(begun, Prediction) else self._finish(begun)

    def predict_many(
        self,
        inputs: Iterable[Array | None],
        deadline_s: float | None,
        threshold: float | None,
        local: bool,
    ) -> Iterator[Prediction]:
        """Classify a stream of inputs in order, as `EdgeAgent.predict_many` does."""
        held: deque[_Offload | Prediction] = deque()
        in_flight = 0
        fault: InputError | OutOfMemoryError | None = None
        try:
            for x in inputs:
                if x is not None:
                    try:
                        begun = self._begin(x, deadline_s, threshold, local, together=True)
                    except (InputError, OutOfMemoryError) as err:
                        fault = err
                        break
                    held.append(begun)
                    in_flight += isinstance(begun, _Offload)
                else:
                    self._send_gathered()
                full = len(held) >= HELD_ANSWERS_MAX or in_flight >= self._settings.max_in_flight
                while held and (full or _ready(held[0])):
                    in_flight -= isinstance(held[0], _Offload)
                    yield self._finish(held.popleft())
                    full = False
            self._send_gathered()
            while held:
                yield self._finish(held.popleft())
        finally:  # a caller that stops early leaves no query pending
            for left in held:
                if isinstance(left, _Offload):
                    cast("Offloader", self._offloader).forget(left.pending)
                    self._drop(left.mark)
        if fault is not None:
            raise fault

    def correct(self, identifier: str, label: int | str) -> bool:
        """Tell the observers the right label of an answer, as `EdgeAgent.correct` does."""
        observers = self._observers
        if observers is None or not observers.correctable:
            raise ConfigurationError(
                "correct: nothing here takes corrections; tell the agent to keep inputs (--keep) or"
                " to learn (--learn), or open it with an observer that takes them"
            )
        class_names = self._bundle.runner.manifest.class_names
        return observers.correct(identifier, _label_index(label, class_names))

    def read_late(self, query: QueuedQuery, reply: Reply) -> tuple[int, Array]:
        """Label and probabilities of a late reply, also for a bundle that runs no more."""
        runner, manifest = self._bundle.runner, query.manifest
        if manifest.bundle == runner.manifest.bundle:
            return runner.read(reply)
        if "back" in manifest.graphs:
            raise InputError(
                f"{manifest.bundle} was replaced, and this reply needs its graph `back`"
            )
        logits = read_logits(reply, len(manifest.class_names))
        label, probabilities, _ = answer_policy(manifest.gate)(logits)
        return label, probabilities

    def _begin(
        self,
        x: Array,
        deadline_s: float | None,
        threshold: float | None,
        local: bool,
        *,
        together: bool = False,
    ) -> _Offload | Prediction:
        """The device's part: an answer, or a query under way, which may leave with others."""
        if self._meter is None:
            return self._begin_at(None, x, deadline_s, threshold, local, together=together)
        mark = self._meter.begin()
        try:
            return self._begin_at(mark, x, deadline_s, threshold, local, together=together)
        except BaseException:
            self._drop(mark)
            raise

    def _begin_at(
        self,
        mark: float | None,
        x: Array,
        deadline_s: float | None,
        threshold: float | None,
        local: bool,
        *,
        together: bool,
    ) -> _Offload | Prediction:
        start = time.perf_counter()
        runner = self._bundle.runner
        try:
            decision, z, audit = runner.exit(runner.check(x))
        except MemoryError as err:
            # a smaller bundle answers, if it is there in time
            left_s = (deadline_s or self._settings.deadline_s) - (time.perf_counter() - start)
            runner = self._bundle.leave(runner, err, left_s)
            decision, z, audit = runner.exit(runner.check(x))
        if threshold is not None:
            decision = _at_threshold(decision, threshold)
        if decision.exit or local or not self.offloading:
            if audit and not local and self._audits is not None:
                self._audits.audit_exit(runner, decision, x, z)
            cost = FREE if mark is None else self._cost(mark, DEVICE)
            observers = self._observers
            identifier = "" if observers is None else observers.new_id()
            answer = _prediction(runner, decision, DEVICE, start, cost, identifier=identifier)
            self._device_ms = answer.latency_ms
            with self._counting:
                self._counters.device += 1
                runner.tally.count(answer)
            if self._traces is not None:
                self._traces.exited(runner.manifest, answer, start)
            if observers is None:
                return answer
            observers.answered(Answered(answer, decision, runner.manifest, x, z))
            return answer
        device_s = time.perf_counter() - start
        self._device_ms = 1e3 * device_s
        own_s = self._settings.deadline_s
        left_s = (deadline_s or own_s) - device_s
        tensor = None
        trace = None if self._traces is None else self._traces.begin()
        try:
            tensor = runner.smashed(x, z) if self._late is not None else None
            pending = cast("Offloader", self._offloader).begin(
                lambda: tensor or runner.smashed(x, z),
                runner.target,
                left_s,
                trace=None if trace is None else trace.offload,
                together=together,
                short=deadline_s is not None and deadline_s < own_s,
            )
        except MemoryError as err:  # the exit head has answered
            self._leave_for_smaller(runner, err)
            pending = Pending.refused(f"out of memory: {err}")
        # the caller may reuse its buffer before the reply comes
        kept = None if self._observers is None else x.copy()
        return _Offload(runner, decision, audit, start, pending, tensor, kept, z, mark, trace)

    def _send_gathered(self) -> None:
        """Let no query wait for another: there is no input at the moment."""
        if self._offloader is not None:
            self._offloader.send_gathered()

    def _finish(self, begun: _Offload | Prediction) -> Prediction:
        """The prediction, once the offload has its outcome."""
        if isinstance(begun, Prediction):
            return begun
        try:
            answer = self._answer_offload(begun)
        except BaseException:
            self._drop(begun.mark)
            raise
        manifest = begun.runner.manifest
        if begun.trace is not None and self._traces is not None:
            self._traces.ended(begun.trace, manifest, answer, begun.pending, begun.start)
        observers = self._observers
        if observers is not None and begun.x is not None:
            answered = Answered(answer, begun.decision, manifest, begun.x, begun.z)
            observers.answered(answered, owned=True)
        return answer

    def _answer_offload(self, begun: _Offload) -> Prediction:
        """The server's answer, or else the device's own."""
        outcome = cast("Offloader", self._offloader).finish(begun.pending)
        if isinstance(outcome, NoReply):
            return self._fall_back(begun, outcome, outcome.reason)
        if outcome.problem is not None:
            return self._fall_back(begun, outcome, f"server: {outcome.problem}: {outcome.detail}")
        runner, decision = begun.runner, begun.decision
        try:
            answer = runner.read(outcome)
        except MemoryError as err:
            self._leave_for_smaller(runner, err)
            return self._fall_back(begun, outcome, f"out of memory: {err}")
        except InputError as err:
            return self._fall_back(begun, outcome, str(err))
        if begun.audit and self._audits is not None:
            self._audits.audit_offload(runner, decision, answer[0])
        identifier = "" if begun.x is None else begun.pending.id
        cost = self._cost(begun.mark, SERVER, begun.pending)
        prediction = _prediction(
            runner, decision, SERVER, begun.start, cost, answer=answer, identifier=identifier
        )
        with self._counting:
            self._counters.server += 1
            runner.tally.count(prediction)
        return prediction

    def _leave_for_smaller(self, runner: BundleRunner, error: MemoryError) -> None:
        """Begin to replace a bundle that ran out of memory, and do not wait for the other one."""
        with contextlib.suppress(OutOfMemoryError):
            self._bundle.leave(runner, error, 0.0)

    def _fall_back(self, begun: _Offload, outcome: Outcome, reason: str) -> Prediction:
        """The device's answer in place of the server's; the query is kept for a late answer."""
        runner, decision = begun.runner, begun.decision
        late = False
        if self._late is not None and begun.tensor is not None and is_retryable(outcome):
            query = QueuedQuery(
                id=begun.pending.id,
                asked_at=time.time(),
                manifest=runner.manifest,
                tensor=begun.tensor,
                uncertainty=decision.uncertainty,
                threshold=decision.threshold,
            )
            late = bool(self._late.keep(query))
        identifier = begun.pending.id if late or begun.x is not None else ""
        prediction = _prediction(
            runner,
            decision,
            FALLBACK,
            begun.start,
            self._cost(begun.mark, FALLBACK, begun.pending),
            reason=reason,
            identifier=identifier,
            late=late,
        )
        with self._counting:
            self._counters.fallback += 1
            runner.tally.count(prediction)
        return prediction

    def _cost(self, mark: float | None, source: str, pending: Pending | None = None) -> Cost:
        """The price of an answer that is made now."""
        up, down = (0, 0) if pending is None else (pending.bytes_up, pending.bytes_down)
        if self._meter is None or mark is None:
            return up, down, None, "none"
        return up, down, *self._meter.end(mark, source, up + down)

    def _drop(self, mark: float | None) -> None:
        """Price nothing for an answer that is not made."""
        if self._meter is not None and mark is not None:
            self._meter.drop()


def _prediction(
    runner: BundleRunner,
    decision: Decision,
    source: str,
    start: float,
    cost: Cost,
    *,
    answer: tuple[int, Array] | None = None,
    reason: str = "",
    identifier: str = "",
    late: bool = False,
) -> Prediction:
    """The answer to return: the server's label and probabilities, or else the exit head's."""
    label, probabilities = answer or (decision.label, decision.probabilities)
    # by position, in this one place: names would take 0.3 us of every prediction
    return Prediction(
        label,
        runner.class_names[label],
        probabilities,
        decision.uncertainty,
        decision.threshold,
        source,
        (time.perf_counter() - start) * 1e3,
        reason,
        identifier,
        late,
        *cost,
    )


def _at_threshold(decision: Decision, threshold: float) -> Decision:
    """The decision that the gate makes with another threshold."""
    uncertainty = decision.uncertainty
    return Decision(
        uncertainty < threshold, decision.label, decision.probabilities, uncertainty, threshold
    )


def _label_index(label: int | str, class_names: Sequence[str]) -> int:
    """Index of a class that is given by index or name."""
    if isinstance(label, str):
        if label in class_names:
            return class_names.index(label)
    elif is_whole(label) and 0 <= label < len(class_names):
        return int(label)
    known = ", ".join(class_names)
    raise InputError(
        f"label: expected 0 to {len(class_names) - 1} or one of {known:.300}, got {shown(label)}"
    )


def _ready(held: _Offload | Prediction) -> bool:
    return isinstance(held, Prediction) or held.pending.done
