"""EdgeAgent: answers on the device where it is sure, and asks the server where it is not.

Its bundle is looked after by edge_sdk.bundles.lifecycle, its link by edge_sdk.offload.offloader.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast

from edge_sdk.answers.observer import Answered, AnswerObserver, Observers
from edge_sdk.answers.prediction import DEVICE, FALLBACK, SERVER, LateAnswer, Prediction
from edge_sdk.answers.price import AnswerMeter
from edge_sdk.answers.status import Counters, Status
from edge_sdk.bundles.lifecycle import BundleLifecycle, FixedBundle
from edge_sdk.bundles.runner import BundleRunner, read_logits
from edge_sdk.checks import check_value
from edge_sdk.errors import ConfigurationError, InputError, OutOfMemoryError, SplitedgeError, shown
from edge_sdk.gate.gate import Decision, answer_policy
from edge_sdk.gate.threshold_control import Audit, Auditor
from edge_sdk.identity import Identity
from edge_sdk.manifest import BundleManifest
from edge_sdk.monitor.monitor import Limits, Monitor
from edge_sdk.mqtt import BrokerAddress
from edge_sdk.offload.availability import Presence
from edge_sdk.offload.late_answers import LateAnswers, is_retryable
from edge_sdk.offload.link_meter import LinkSample
from edge_sdk.offload.offloader import Offloader
from edge_sdk.offload.outbox import Outbox, QueuedQuery
from edge_sdk.offload.pending import NoReply, Outcome, Pending
from edge_sdk.session import Array
from edge_sdk.settings import SECONDS, AgentSettings, Agreement
from edge_sdk.settings_file.settings_file import SettingsFile
from edge_sdk.state import StateLock
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Reply
from profiles.checks import is_whole
from profiles.energy import EnergySource

logger = logging.getLogger(__name__)

# `close` waits for a request for the broker's address that is under way.
LOCATE_TIMEOUT_S: Final = 2.0
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


class EdgeAgent:
    """Runs the bundle of one state folder.

        with EdgeAgent.open(Path("/var/lib/splitedge")) as agent:
            prediction = agent.predict(image)

    `predict` may be called from several threads.
    """

    def __init__(
        self,
        bundle: BundleLifecycle | FixedBundle,
        settings: AgentSettings,
        *,
        lock: StateLock | None = None,
        observers: Iterable[AnswerObserver] = (),
    ) -> None:
        self._bundle = bundle
        self._settings = settings
        self._lock = lock
        self._device = ""
        self._offloader: Offloader | None = None
        self._on_command: Callable[[Mapping[str, Any]], None] | None = None
        self._late: LateAnswers | None = None
        self._auditor: Auditor | None = None
        observers = tuple(observers)
        self._observers = Observers(observers) if observers else None
        self._meter = None if settings.power is None else AnswerMeter(settings.power)
        self._counters = Counters()
        self._counting = threading.Lock()
        self._monitor: Monitor | None = None
        # of the last prediction, without the server's part; the monitor takes it now and then
        self._device_ms: float | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        state: str | Path,
        settings: AgentSettings | None = None,
        *,
        on_command: Callable[[Mapping[str, Any]], None] | None = None,
        observers: Iterable[AnswerObserver] = (),
    ) -> EdgeAgent:
        """Run the bundle installed in `state` and connect to its server in the background.

        An enrolled device without a bundle fetches one first. A bundle that does not load is
        replaced by the one before it.

        Args:
            settings: None reads them from `agent.toml` in the state folder.
            on_command: called with each command of the server, in the network thread, so it must
                not block; the agent follows its own commands as well.
            observers: told of every answer and correction; the agent closes them.
        Raises: StateInUseError if another agent runs there; EnrolmentError if the device is not
            enrolled (see `enroll`); NoBundleError if there is no bundle; BundleError if none loads;
            ConfigurationError for settings, personal weights or a CA file that cannot be used; the
            reason of a failed update if the first bundle cannot be fetched.
        """
        state = Path(state)
        identity = Identity.load(state)
        settings = settings or SettingsFile.load(state).agent
        lock = StateLock(state)
        try:
            bundle = BundleLifecycle.start(state, settings)
            agent = cls(bundle, settings, lock=lock, observers=observers)
            agent._on_command = on_command
            agent._learn(state)
            if settings.offload:
                try:
                    agent._connect(identity, state)
                except SplitedgeError:
                    bundle.forget_start()
                    raise
            bundle.watch_health()
        except BaseException:
            lock.release()
            raise
        if agent._meter is not None:
            agent._meter.start()
        return agent

    @classmethod
    def from_bundle(
        cls,
        folder: str | Path,
        settings: AgentSettings | None = None,
        *,
        observers: Iterable[AnswerObserver] = (),
    ) -> EdgeAgent:
        """Run a bundle folder without a server: the device answers every input.

        Args:
            observers: told of every answer and correction; the agent closes them.
        Raises: ManifestError, BundleError; ConfigurationError for settings that need a server.
        """
        settings = settings or AgentSettings(offload=False)
        if settings.personal is not None:
            raise ConfigurationError("personal needs a state folder: use EdgeAgent.open")
        if settings.late_answers or isinstance(settings.controller, Agreement):
            raise ConfigurationError("late_answers and Agreement need a server: use EdgeAgent.open")
        folder = Path(folder)
        runner = BundleRunner(folder, BundleManifest.load(folder), settings)
        agent = cls(FixedBundle(runner), settings, observers=observers)
        if agent._meter is not None:
            agent._meter.start()
        agent._learn(None)
        return agent

    @property
    def manifest(self) -> BundleManifest:
        """Manifest of the bundle that runs now."""
        return self._bundle.runner.manifest

    def predict(
        self,
        x: Array,
        *,
        deadline_s: float | None = None,
        threshold: float | None = None,
        local: bool = False,
    ) -> Prediction:
        """Classify one input.

        Args:
            x: raw input, of the manifest's dtype and shape, without a batch axis.
            deadline_s: replaces the settings' deadline.
            threshold: replaces the gate's, for this input.
            local: True never asks the server about this input.
        Raises: InputError for a wrong dtype, shape or value; ConfigurationError for a wrong
            deadline; OutOfMemoryError if the device has no memory for its bundle, and no smaller
            one took its place by the deadline; nothing because of the network or the disk.
        """
        if deadline_s is not None:
            check_value("deadline_s", deadline_s, SECONDS)
        return self._finish(self._begin(x, deadline_s, threshold, local))

    def predict_many(
        self,
        inputs: Iterable[Array | None],
        *,
        deadline_s: float | None = None,
        threshold: float | None = None,
        local: bool = False,
    ) -> Iterator[Prediction]:
        """Classify a stream of inputs, in order, with up to `max_in_flight` offloads under way.

        The device goes on with the next inputs while the server answers the offloaded ones. The
        deadline holds for each offload by itself.

        Args:
            inputs: each as `predict` takes it. None stands for no input at the moment: the answers
                that are ready are given, so that a slow source holds none of them back.
            deadline_s: replaces the settings' deadline.
            threshold: replaces the gate's, for these inputs.
            local: True never asks the server about these inputs.
        Raises: as `predict`, after the answers to all inputs before the faulty one.
        """
        if deadline_s is not None:
            check_value("deadline_s", deadline_s, SECONDS)
        held: deque[_Offload | Prediction] = deque()
        in_flight = 0
        fault: InputError | OutOfMemoryError | None = None
        try:
            for x in inputs:
                if x is not None:
                    try:
                        begun = self._begin(x, deadline_s, threshold, local)
                    except (InputError, OutOfMemoryError) as err:
                        fault = err
                        break
                    held.append(begun)
                    in_flight += isinstance(begun, _Offload)
                full = len(held) >= HELD_ANSWERS_MAX or in_flight >= self._settings.max_in_flight
                while held and (full or _ready(held[0])):
                    in_flight -= isinstance(held[0], _Offload)
                    yield self._finish(held.popleft())
                    full = False
            while held:
                yield self._finish(held.popleft())
        finally:  # a caller that stops early leaves no query pending
            for left in held:
                if isinstance(left, _Offload):
                    cast("Offloader", self._offloader).forget(left.pending)
                    self._drop(left.mark)
        if fault is not None:
            raise fault

    def add_observer(self, observer: AnswerObserver) -> None:
        """Tell an observer of every answer and correction from now on; the agent closes it."""
        if self._observers is None:
            self._observers = Observers([observer])
        else:
            self._observers.add(observer)

    def correct(self, identifier: str, label: int | str) -> bool:
        """Tell the agent the right label of an answer, for its observers to learn from or to keep.

        Args:
            identifier: `Prediction.id` of the answer.
            label: index or name of the class.
        Returns: whether the answer was still remembered. The newest are, at most REMEMBERED_MAX of
            edge_sdk.answers.observer, and each can be corrected once.
        Raises: InputError for a label that the bundle does not have; ConfigurationError if no
            observer takes corrections.
        """
        observers = self._observers
        if observers is None or not observers.correctable:
            raise ConfigurationError(
                "correct: nothing here takes corrections; tell the agent to keep inputs (--keep) or"
                " to learn (--learn), or open it with an observer that takes them"
            )
        return observers.correct(identifier, _label_index(label, self.manifest.class_names))

    def late_answers(self) -> list[LateAnswer]:
        """The server's answers to queries that had fallen back, in the order of the queries.

        Each is returned again, in later runs too, until it is acknowledged.

        Raises: ConfigurationError without the setting `late_answers`; StorageError if the disk
            cannot be read.
        """
        return self._with_late_answers().answers()

    def acknowledge(self, identifier: str) -> bool:
        """Delete the late answer with that id.

        Returns: whether there was one.
        Raises: ConfigurationError without the setting `late_answers`; StorageError if the disk
            cannot be written: the answer is then returned again.
        """
        return self._with_late_answers().acknowledge(identifier)

    def refresh(self) -> str:
        """Fetch the assigned bundle and switch to it between two predictions.

        Returns: the bundle that runs now.
        Raises: SplitedgeError with the reason if the bundle was refused; the old one goes on.
        """
        self._bundle.refresh()
        return self.manifest.bundle

    def status(self) -> Status:
        """State of this agent and its counters."""
        offloader, late, runner = self._offloader, self._late, self._bundle.runner
        with self._counting:
            counters = replace(self._counters)
        if offloader is not None:
            counters.late_replies = offloader.late_replies
            counters.refused_replies = offloader.refused_replies
        if late is not None:
            counters.late_waiting = late.unanswered()
            counters.late_lost = late.lost
        return Status(
            device=self._device,
            bundle=runner.manifest.bundle,
            depth=runner.manifest.depth,
            gate=self._settings.gate or runner.manifest.gate.policy,
            threshold=runner.gate.threshold,
            personal=runner.personal,
            presence="no server" if offloader is None else offloader.presence.value,
            why_away="" if offloader is None else offloader.why_away,
            bytes_up=0 if offloader is None else offloader.bytes_up,
            bytes_down=0 if offloader is None else offloader.bytes_down,
            counters=counters,
            agreement=None if runner.control is None else runner.control.report(),
            trouble=self._bundle.trouble,
            energy=None if self._meter is None else self._meter.report(),
            reports={} if self._observers is None else self._observers.reports(),
        )

    def close(self) -> None:
        """Disconnect and release the state folder. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._bundle.close(answered=self._counters.total > 0)
        # the offloader first: after it nothing waits for a reply
        parts = (
            *(self._offloader, self._auditor, self._late, self._observers, self._meter),
            self._monitor,
        )
        for part in parts:
            if part is not None:
                part.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _connect(self, identity: Identity, state: Path) -> None:
        from edge_sdk.api import FleetBroker, locate_broker  # noqa: PLC0415 - urllib3, only to connect

        known = FleetBroker.load(state)
        self._device = identity.device

        def locate() -> BrokerAddress | None:
            try:
                found = locate_broker(identity, state, timeout_s=LOCATE_TIMEOUT_S)
            except SplitedgeError as err:
                logger.debug("broker not located: %s", err)
                return None
            return found.address(identity)

        settings = self._settings
        offloader = Offloader(
            identity,
            known.address(identity),
            max_packet_bytes=known.max_packet_bytes,
            probe_interval_s=settings.probe_interval_s,
            heartbeat_s=settings.heartbeat_s,
            locate=locate,
            on_command=self._command,
            telemetry=lambda: asdict(self.status()),
        )
        self._offloader = offloader
        if isinstance(self._bundle, BundleLifecycle):
            self._bundle.on_switch = offloader.send_heartbeat_soon
        if settings.report_change:
            limits = Limits(settings.report_change, settings.report_after_s)
            self._monitor = Monitor(state, identity, self, limits)
        if isinstance(settings.controller, Agreement):
            self._auditor = Auditor()
        if settings.late_answers:
            pause_s = settings.probe_interval_s
            self._late = LateAnswers(Outbox(state), offloader, self._read_late, pause_s)

    # for the monitor

    def running_bundle(self) -> tuple[str, str]:
        """Name of the bundle that runs, and the digest of its content; "" for a folder's."""
        return self.manifest.bundle, self._bundle.digest

    def take_latency_ms(self) -> float | None:
        """Time of the device's part of the last prediction, once; None if there was no other."""
        latency_ms, self._device_ms = self._device_ms, None
        return latency_ms

    def take_link(self) -> LinkSample:
        """Round trip and bandwidth of the link since the last call."""
        return LinkSample() if self._offloader is None else self._offloader.meter.take()

    def _with_late_answers(self) -> LateAnswers:
        if self._late is None:
            raise ConfigurationError(
                "no late answers are kept; set AgentSettings(late_answers=True)"
            )
        return self._late

    def _command(self, command: Mapping[str, Any]) -> None:
        if self._on_command is not None:
            self._on_command(command)
        if command.get("op") == "update":
            self._bundle.request_update()

    def _learn(self, state: Path | None) -> None:
        """Learn the exit head, if the settings ask for it; kept in the state folder, if any."""
        if self._settings.learn is None:
            return
        from edge_sdk.learning.learner import HeadLearner  # noqa: PLC0415 - only when asked for

        bundle = self._bundle
        self.add_observer(HeadLearner(self._settings.learn, lambda: bundle.runner, state))

    def _begin(
        self, x: Array, deadline_s: float | None, threshold: float | None, local: bool
    ) -> _Offload | Prediction:
        """The device's part: an answer, or a query under way."""
        if self._meter is None:
            return self._begin_at(None, x, deadline_s, threshold, local)
        mark = self._meter.begin()
        try:
            return self._begin_at(mark, x, deadline_s, threshold, local)
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
        if decision.exit or local or self._offloader is None:
            if audit and not local:
                self._audit_exit(runner, decision, x, z)
            with self._counting:
                self._counters.device += 1
            cost = FREE if mark is None else self._cost(mark, DEVICE)
            observers = self._observers
            if observers is None:
                answer = _prediction(runner, decision, DEVICE, start, cost)
                self._device_ms = answer.latency_ms
                return answer
            identifier = observers.new_id()
            answer = _prediction(runner, decision, DEVICE, start, cost, identifier=identifier)
            self._device_ms = answer.latency_ms
            observers.answered(Answered(answer, decision, runner.manifest, x, z))
            return answer
        device_s = time.perf_counter() - start
        self._device_ms = 1e3 * device_s
        left_s = (deadline_s or self._settings.deadline_s) - device_s
        tensor = None
        try:
            tensor = runner.smashed(x, z) if self._late is not None else None
            pending = self._offloader.begin(
                lambda: tensor or runner.smashed(x, z), runner.target, left_s
            )
        except MemoryError as err:  # the exit head has answered
            self._leave_for_smaller(runner, err)
            pending = Pending.refused(f"out of memory: {err}")
        # the caller may reuse its buffer before the reply comes
        kept = None if self._observers is None else x.copy()
        return _Offload(runner, decision, audit, start, pending, tensor, kept, z, mark)

    def _finish(self, begun: _Offload | Prediction) -> Prediction:
        """The prediction, once the offload has its outcome."""
        if isinstance(begun, Prediction):
            return begun
        try:
            answer = self._answer_offload(begun)
        except BaseException:
            self._drop(begun.mark)
            raise
        observers = self._observers
        if observers is not None and begun.x is not None:
            manifest = begun.runner.manifest
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
        if begun.audit and self._auditor is not None and runner.control is not None:
            label = answer[0]
            audit = Audit(runner.control, decision.label, decision.uncertainty, lambda: label)
            self._auditor.submit(audit)
        with self._counting:
            self._counters.server += 1
        identifier = "" if begun.x is None else begun.pending.id
        cost = self._cost(begun.mark, SERVER, begun.pending)
        return _prediction(
            runner, decision, SERVER, begun.start, cost, answer=answer, identifier=identifier
        )

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
        with self._counting:
            self._counters.fallback += 1
        identifier = begun.pending.id if late or begun.x is not None else ""
        return _prediction(
            runner,
            decision,
            FALLBACK,
            begun.start,
            self._cost(begun.mark, FALLBACK, begun.pending),
            reason=reason,
            identifier=identifier,
            late=late,
        )

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

    def _audit_exit(
        self, runner: BundleRunner, decision: Decision, x: Array, z: Array | None
    ) -> None:
        """Compare an exit with the server, after the caller has its answer."""
        if self._auditor is None or runner.control is None:
            return
        if z is None:
            x = x.copy()  # the caller may reuse its buffer for the next input
        ask = partial(self._ask_label, runner, x, z)
        self._auditor.submit(Audit(runner.control, decision.label, decision.uncertainty, ask))

    def _ask_label(self, runner: BundleRunner, x: Array, z: Array | None) -> int | None:
        """The server's label, or None without a reply in time."""
        offloader = cast("Offloader", self._offloader)
        if offloader.presence is not Presence.PRESENT:
            return None
        deadline_s = self._settings.deadline_s
        pending = offloader.begin(lambda: runner.smashed(x, z), runner.target, deadline_s)
        outcome = offloader.finish(pending)
        if isinstance(outcome, NoReply) or outcome.problem is not None:
            return None
        return runner.read(outcome)[0]

    def _read_late(self, query: QueuedQuery, reply: Reply) -> tuple[int, Array]:
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
