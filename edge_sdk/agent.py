"""EdgeAgent: answers on the device where it is sure, and asks the server where it is not.

Its bundle is looked after by edge_sdk.bundles.lifecycle, its link by edge_sdk.offload.offloader.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from edge_sdk.answering.answering import Answering
from edge_sdk.answering.audits import Audits
from edge_sdk.answers.heartbeat import heartbeat_content
from edge_sdk.answers.observer import AnswerObserver
from edge_sdk.answers.prediction import LateAnswer, Prediction
from edge_sdk.answers.price import AnswerMeter
from edge_sdk.answers.status import Status
from edge_sdk.bundles.lifecycle import BundleLifecycle, FixedBundle
from edge_sdk.bundles.run_update import UpdateOutcome
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.bundles.store import BundleStore
from edge_sdk.checks import check_value
from edge_sdk.errors import ConfigurationError, SplitedgeError
from edge_sdk.identity import Identity
from edge_sdk.installation import why_clock_is_untrusted
from edge_sdk.manifest import BundleManifest
from edge_sdk.membership.orders import Membership
from edge_sdk.membership.rotation import current_identity
from edge_sdk.monitor.monitor import Limits, Monitor
from edge_sdk.offload.late_answers import LateAnswers
from edge_sdk.offload.link_meter import LinkSample
from edge_sdk.offload.offloader import Offloader
from edge_sdk.offload.outbox import Outbox
from edge_sdk.offload.switch import OffloadSwitch
from edge_sdk.providers.choice import check_available
from edge_sdk.session import Array, available_providers
from edge_sdk.settings import SECONDS, AgentSettings, Agreement
from edge_sdk.settings_file.settings_file import SettingsFile
from edge_sdk.state import StateLock
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.clear_text import is_clear
from edge_sdk.wire.messages import new_id
from profiles.checks import number

if TYPE_CHECKING:
    from edge_sdk.tracing.predictions import PredictionTraces

logger = logging.getLogger(__name__)

# `close` waits for a request for the broker's address that is under way.
LOCATE_TIMEOUT_S: Final = 2.0


class EdgeAgent:
    """Runs the bundle of one state folder.

        with EdgeAgent.open("/var/lib/splitedge/agent") as agent:
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
        traces: PredictionTraces | None = None,
    ) -> None:
        self._bundle = bundle
        self._settings = settings
        self._lock = lock
        self._device = ""
        self._offloader: Offloader | None = None
        self._switch: OffloadSwitch | None = None
        self._on_command: Callable[[Mapping[str, Any]], None] | None = None
        self._late: LateAnswers | None = None
        self._membership: Membership | None = None
        self._audits: Audits | None = None
        self._meter = None if settings.power is None else AnswerMeter(settings.power)
        self._answering = Answering(bundle, settings, tuple(observers), self._meter, traces)
        self._traces = traces
        self._run, self._started = new_id()[:16], time.monotonic()
        self._monitor: Monitor | None = None
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
        identity = current_identity(state)
        if is_clear(identity.server):
            logger.warning("%s has no encryption: others see the credential", identity.server)
        settings = settings or SettingsFile.load(state).agent
        traces = _traces(settings, identity.device)
        lock = StateLock(state)
        try:
            bundle = BundleLifecycle.start(state, settings)
            agent = cls(bundle, settings, lock=lock, observers=observers, traces=traces)
            agent._device = identity.device
            agent._switch = OffloadSwitch(state)
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
        check_available(settings.provider, available_providers())
        runner = BundleRunner(folder, BundleManifest.load(folder), settings)
        traces = _traces(settings, "")
        agent = cls(FixedBundle(runner), settings, observers=observers, traces=traces)
        if agent._meter is not None:
            agent._meter.start()
        agent._learn(None)
        return agent

    @property
    def manifest(self) -> BundleManifest:
        """Manifest of the bundle that runs now."""
        return self._bundle.runner.manifest

    @property
    def deadline_s(self) -> float:
        """Time that a prediction may wait for the server, unless it is called with another."""
        return self._settings.deadline_s

    @property
    def offloading(self) -> bool:
        """Whether this agent asks its server; False for one without a server.

        Set it to False, and the device answers every input alone and sends no input, audit or late
        query, in later runs too, until it is set to True. The link stays: heartbeats and updates go
        on.

        Raises: when set, ConfigurationError for an agent that was opened without a server;
            StorageError if the disk cannot keep it: then it holds until the agent ends.
        """
        return self._answering.offloading

    @offloading.setter
    def offloading(self, on: bool) -> None:
        if on and self._offloader is None:
            raise ConfigurationError(
                "offloading: this agent was opened without a server; open it without --local, or"
                " without `offload = false` in agent.toml"
            )
        if self._switch is None:
            return
        try:
            self._switch.turn(on)
        finally:
            if self._offloader is not None:
                self._answering.offloading = self._switch.on
                self._offloader.send_heartbeat_soon()

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
            deadline or threshold; OutOfMemoryError if the device has no memory for its bundle, and
            no smaller one took its place by the deadline; nothing because of the network or the
            disk.
        """
        return self._answering.predict(x, *_of_call(deadline_s, threshold), local)

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
        return self._answering.predict_many(inputs, *_of_call(deadline_s, threshold), local)

    def add_observer(self, observer: AnswerObserver) -> None:
        """Tell an observer of every answer and correction from now on; the agent closes it."""
        self._answering.add_observer(observer)

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
        return self._answering.correct(identifier, label)

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

    def rotate(self) -> None:
        """Replace this device's credential, and connect again with the new one.

        A power cut at any moment leaves a credential that works.

        Raises: ConfigurationError for an agent without a server; LinkError if the server cannot be
            reached; EnrolmentError if it does not accept this device; StorageError.
        """
        if self._membership is None:
            raise ConfigurationError("rotate: this agent has no server")
        self._membership.rotate()

    def status(self) -> Status:
        """State of this agent and its counters."""
        offloader, late, runner = self._offloader, self._late, self._bundle.runner
        counters, observers = self._answering.counters, self._answering.observers
        if offloader is not None:
            counters.late_replies = offloader.late_replies
            counters.refused_replies = offloader.refused_replies
        if late is not None:
            counters.late_waiting = late.unanswered()
            counters.late_lost = late.lost
        reports = {} if observers is None else observers.reports()
        if self._traces is not None:
            reports["traces"] = self._traces.report()
        return Status(
            device=self._device,
            bundle=runner.manifest.bundle,
            depth=runner.manifest.depth,
            gate=self._settings.gate or runner.manifest.gate.policy,
            threshold=runner.gate.threshold,
            personal=runner.personal,
            offloading=self._answering.offloading,
            provider=runner.provider,
            presence="no server" if offloader is None else offloader.presence.value,
            why_away="" if offloader is None else offloader.why_away,
            bytes_up=0 if offloader is None else offloader.bytes_up,
            bytes_down=0 if offloader is None else offloader.bytes_down,
            counters=counters,
            agreement=None if runner.control is None else runner.control.report(),
            budget=None if runner.control is None else runner.control.spending(),
            trouble=self._bundle.trouble,
            clock=why_clock_is_untrusted(),
            energy=None if self._meter is None else self._meter.report(),
            reports=reports,
        )

    def telemetry(self) -> dict[str, Any]:
        """The content of a heartbeat: the status and histograms (edge_sdk.answers.heartbeat)."""
        offloader = self._offloader
        return heartbeat_content(
            self.status(),
            self._answering.tally,
            run=self._run,
            uptime_s=time.monotonic() - self._started,
            round_trip_ms=None if offloader is None else offloader.meter.round_trip_ms,
        )

    def close(self) -> None:
        """Disconnect and release the state folder. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._bundle.close(answered=self._answering.counters.total > 0)
        # the offloader first: after it nothing waits for a reply
        parts = (
            *(self._offloader, self._audits, self._late, self._answering.observers),
            *(self._meter, self._monitor, self._traces),
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

        known = FleetBroker.known(state, identity)

        def changed(new: Identity) -> None:
            offloader.change_identity(new)
            if self._monitor is not None:
                self._monitor.change_identity(new)

        def lift(bundle: str) -> None:
            BundleStore(state).lift(bundle)
            self._bundle.request_update()

        membership = self._membership = Membership(state, identity, changed=changed, lift=lift)

        def locate() -> BrokerAddress | None:
            try:
                identity = membership.look()
                found = locate_broker(identity, state, timeout_s=LOCATE_TIMEOUT_S)
                return found.address(identity)
            except SplitedgeError as err:
                logger.debug("broker not located: %s", err)
                return None

        settings = self._settings
        offloader = Offloader(
            identity,
            known.address(identity),
            max_packet_bytes=known.max_packet_bytes,
            deadline_s=settings.deadline_s,
            probe_interval_s=settings.probe_interval_s,
            heartbeat_s=settings.heartbeat_s,
            locate=locate,
            on_command=self._command,
            telemetry=self.telemetry,
        )
        self._offloader = offloader
        if isinstance(self._bundle, BundleLifecycle):
            self._bundle.on_switch = offloader.send_heartbeat_soon
        if settings.report_change:
            limits = Limits(settings.report_change, settings.report_after_s)
            self._monitor = Monitor(state, identity, self, limits)
        if isinstance(settings.controller, Agreement):
            self._audits = Audits(offloader, settings.deadline_s, may_ask=self._may_ask)
        if settings.late_answers:
            pause_s = settings.probe_interval_s
            read = self._answering.read_late
            self._late = LateAnswers(Outbox(state), offloader, read, pause_s, may_ask=self._may_ask)
        on = self._switch is None or self._switch.on
        self._answering.connect(offloader, self._audits, self._late, offloading=on)

    # for the monitor

    def running_bundle(self) -> tuple[str, str]:
        """Name of the bundle that runs, and the digest of its content; "" for a folder's."""
        return self.manifest.bundle, self._bundle.digest

    def take_latency_ms(self) -> float | None:
        """Time of the device's part of the last prediction, once; None if there was no other."""
        return self._answering.take_latency_ms()

    def take_link(self) -> LinkSample:
        """Round trip and bandwidth of the link since the last call."""
        return LinkSample() if self._offloader is None else self._offloader.meter.take()

    def measure_bundles(self, bundles: Sequence[str]) -> UpdateOutcome:
        """Measure bundles that do not run here; `unchanged` where all were measured."""
        return self._bundle.measure(bundles)

    def _may_ask(self) -> bool:
        return self._answering.offloading

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
        elif self._membership is not None:
            self._membership.follow(command)

    def _learn(self, state: Path | None) -> None:
        """Learn the exit head, if the settings ask for it; kept in the state folder, if any."""
        if self._settings.learn is None:
            return
        from edge_sdk.learning.learner import HeadLearner  # noqa: PLC0415 - only when asked for

        bundle = self._bundle
        self.add_observer(HeadLearner(self._settings.learn, lambda: bundle.runner, state))


def _of_call(
    deadline_s: float | None, threshold: float | None
) -> tuple[float | None, float | None]:
    """Deadline and threshold of one call, as Python's own floats.

    Raises: ConfigurationError for a wrong one.
    """
    if deadline_s is not None:
        check_value("deadline_s", deadline_s, SECONDS)
        deadline_s = float(deadline_s)
    if threshold is not None:
        check_value("threshold", threshold, number(infinite=True))
        threshold = float(threshold)
    return deadline_s, threshold


def _traces(settings: AgentSettings, device: str) -> PredictionTraces | None:
    """The traces that the settings ask for.

    Raises: ConfigurationError if opentelemetry is not installed, or no collector is named.
    """
    if settings.traces is None:
        return None
    from edge_sdk.tracing.predictions import open_predictions  # noqa: PLC0415 - only when asked for

    return open_predictions(settings.traces, device)
