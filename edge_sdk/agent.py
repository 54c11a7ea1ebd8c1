"""EdgeAgent: answers on the device when sure, asks the server when not, never fails without it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast

from edge_sdk.bundles.personal_weights import PersonalWeights
from edge_sdk.bundles.run_update import run_update
from edge_sdk.bundles.runner import Engine, read_logits
from edge_sdk.bundles.store import ActiveBundle, BundleStore
from edge_sdk.errors import (
    BundleError,
    ConfigurationError,
    InputError,
    LinkError,
    NoBundleError,
    SplitedgeError,
    StorageError,
    UpdateRefusedError,
)
from edge_sdk.gate.controllers import AgreementReport
from edge_sdk.gate.gate import POLICIES, Verdict
from edge_sdk.gate.threshold_control import Audit, Auditor
from edge_sdk.identity import Identity
from edge_sdk.manifest import BundleManifest
from edge_sdk.mqtt import BrokerAddress
from edge_sdk.offload.late_answers import LateAnswers, passing
from edge_sdk.offload.offloader import NoReply, Offloader, Outcome, Pending, Presence
from edge_sdk.offload.outbox import Outbox, Waiting
from edge_sdk.prediction import DEVICE, FALLBACK, SERVER, LateAnswer, Prediction
from edge_sdk.session import Array
from edge_sdk.settings import AgentSettings, Agreement
from edge_sdk.state import StateLock
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import Reply

logger = logging.getLogger(__name__)

HEALTH_S: Final = 10.0
# Closing waits for a look-up of the broker's address that is under way.
LOCATE_TIMEOUT_S: Final = 2.0
# What `predict_many` holds back behind an offload: answers of about a kilobyte each.
WAITING_MAX: Final = 1024


@dataclass(slots=True)
class Counters:
    """What this agent did since it started: predictions by their source, and what went wrong.

    Attributes:
        late_replies: came after the deadline, twice, or unasked; nothing was made of them.
        refused_replies: were no valid frames.
        late_waiting: queries in the outbox without an answer; None if the disk does not tell.
        late_lost: queries that the outbox or its disk had no room for.
    """

    device: int = 0
    server: int = 0
    fallback: int = 0
    late_replies: int = 0
    refused_replies: int = 0
    late_waiting: int | None = 0
    late_lost: int = 0

    @property
    def total(self) -> int:
        """Predictions made."""
        return self.device + self.server + self.fallback


@dataclass(frozen=True, slots=True)
class Status:
    """What an agent is and does, for people and telemetry.

    Attributes:
        personal: the training whose own weights answer; None where the bundle's do.
        bytes_up: of all queries sent.
        agreement: what the `Agreement` controller holds; None without one.
    """

    device: str
    bundle: str
    depth: int
    threshold: float
    personal: str | None
    presence: str
    why_away: str
    bytes_up: int
    counters: Counters = field(default_factory=Counters)
    agreement: AgreementReport | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """An input that the device was not sure of, and what it made of it."""

    engine: Engine
    verdict: Verdict
    audit: bool
    start: float
    pending: Pending
    tensor: Tensor | None  # kept where a late answer may be wanted


class EdgeAgent:
    """Runs the bundle of one state folder.

        with EdgeAgent.open(Path("/var/lib/splitedge")) as agent:
            prediction = agent.predict(image)

    `predict` may be called from several threads.
    """

    def __init__(
        self,
        engine: Engine,
        settings: AgentSettings,
        *,
        lock: StateLock | None = None,
        state: Path | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._lock = lock
        self._state = state
        self._device = ""
        self._offloader: Offloader | None = None
        self._on_command: Callable[[Mapping[str, Any]], None] | None = None
        self._late: LateAnswers | None = None
        self._auditor: Auditor | None = None
        self._counters = Counters()
        self._counting = threading.Lock()
        self._updating = threading.Lock()
        self._update_wanted = threading.Event()
        self._health: threading.Timer | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        state: str | Path,
        settings: AgentSettings | None = None,
        *,
        on_command: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> EdgeAgent:
        """Run the bundle installed in `state` and connect to its server in the background.

        An enrolled device without a bundle fetches its own first.

        A bundle that does not load here makes room for the one before it.

        Args:
            on_command: called with each command of the server, in the network thread, which must
                not wait; the agent follows its own all the same.
        Raises: StateInUseError if another agent runs there; EnrolmentError if the device is not
            enrolled (see `enroll`); NoBundleError if there is no bundle; BundleError if none loads;
            ConfigurationError for settings, own weights or a CA file that cannot be used; why an
            update failed (see `update`) if the first bundle cannot be fetched.
        """
        state = Path(state)
        settings = settings or AgentSettings()
        identity = Identity.load(state)
        lock = StateLock(state)
        try:
            return cls._open(state, settings, identity, lock, on_command)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open(
        cls,
        state: Path,
        settings: AgentSettings,
        identity: Identity,
        lock: StateLock,
        on_command: Callable[[Mapping[str, Any]], None] | None,
    ) -> EdgeAgent:
        store = BundleStore(state)
        try:
            store.count_start()
        except StorageError as err:  # a bundle runs from a read-only disk too
            logger.warning("the start was not noted: %s", err)
        try:
            agent = cls(_load(store, settings), settings, lock=lock, state=state)
            agent._on_command = on_command
            if settings.offload:
                agent._connect(identity, state)
        except SplitedgeError:
            _forget_start(store)  # said in so many words: no crash of the bundle
            raise
        agent._watch_health()
        return agent

    @classmethod
    def from_bundle(cls, folder: str | Path, settings: AgentSettings | None = None) -> EdgeAgent:
        """Run a bundle folder with no server at all: every answer is the device's.

        Raises: ManifestError, BundleError; ConfigurationError for settings that need a server.
        """
        settings = settings or AgentSettings(offload=False)
        if settings.personal is not None:
            raise ConfigurationError("personal needs a state folder: use EdgeAgent.open")
        if settings.late_answers or isinstance(settings.controller, Agreement):
            raise ConfigurationError("late_answers and Agreement need a server: use EdgeAgent.open")
        folder = Path(folder)
        return cls(Engine(folder, BundleManifest.load(folder), settings), settings)

    @property
    def manifest(self) -> BundleManifest:
        """Of the bundle that runs now."""
        return self._engine.manifest

    def predict(self, x: Array, *, deadline_s: float | None = None) -> Prediction:
        """Classify one input.

        Args:
            x: of the manifest's dtype and shape, without a batch axis, not preprocessed.
            deadline_s: in place of the settings' own.
        Raises: InputError for a wrong dtype, shape or value; ConfigurationError for a wrong
            deadline; nothing because of the network or the disk.
        """
        if deadline_s is not None:
            _check_deadline(deadline_s)
        return self._settle(self._begin(x, deadline_s))

    def predict_many(
        self, inputs: Iterable[Array], *, deadline_s: float | None = None
    ) -> Iterator[Prediction]:
        """Classify a stream of inputs, in order, with up to `max_in_flight` offloads under way.

        The device goes on with the next inputs while the server works on the hard ones; each
        offload has the deadline to itself.

        Raises: as `predict`, once the answers to all inputs before the one at fault are given.
        """
        if deadline_s is not None:
            _check_deadline(deadline_s)
        waiting: deque[_Asked | Prediction] = deque()
        asked = 0
        fault: InputError | None = None
        try:
            for x in inputs:
                try:
                    begun = self._begin(x, deadline_s)
                except InputError as err:
                    fault = err
                    break
                waiting.append(begun)
                asked += isinstance(begun, _Asked)
                full = len(waiting) >= WAITING_MAX or asked >= self._settings.max_in_flight
                while waiting and (full or _ready(waiting[0])):
                    asked -= isinstance(waiting[0], _Asked)
                    yield self._settle(waiting.popleft())
                    full = False
            while waiting:
                yield self._settle(waiting.popleft())
        finally:  # whoever stops listening leaves no query behind
            for left in waiting:
                if isinstance(left, _Asked):
                    cast("Offloader", self._offloader).forget(left.pending)
        if fault is not None:
            raise fault

    def late_answers(self) -> list[LateAnswer]:
        """The server's answers to queries that had fallen back, in the order they were asked.

        Each is given again, in later runs too, until it is acknowledged.

        Raises: ConfigurationError without the setting `late_answers`; StorageError if the disk
            cannot be read.
        """
        return self._with_late_answers().answers()

    def acknowledge(self, identifier: str) -> bool:
        """Forget the late answer of that id for good.

        Returns: whether there was one.
        Raises: ConfigurationError without the setting `late_answers`; StorageError if the disk
            took no note of it: the answer is given again then.
        """
        return self._with_late_answers().acknowledge(identifier)

    def refresh(self) -> str:
        """Look for a new bundle and change over to it between two predictions.

        Returns: the bundle that runs now.
        Raises: SplitedgeError with the reason when a bundle was refused; the old one goes on.
        """
        if self._state is None:
            return self._engine.manifest.bundle
        with self._updating:
            self._update_wanted.clear()
            try:
                update(self._state)
            finally:
                self._change_over(BundleStore(self._state))
        return self._engine.manifest.bundle

    def status(self) -> Status:
        """What this agent is and did."""
        offloader, late, engine = self._offloader, self._late, self._engine
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
            bundle=engine.manifest.bundle,
            depth=engine.manifest.depth,
            threshold=engine.gate.threshold,
            personal=engine.personal,
            presence="no server" if offloader is None else offloader.presence.value,
            why_away="" if offloader is None else offloader.why_away,
            bytes_up=0 if offloader is None else offloader.bytes_up,
            counters=counters,
            agreement=None if engine.steering is None else engine.steering.report(),
        )

    def close(self) -> None:
        """Disconnect and free the state folder. May be called twice."""
        if self._closed:
            return
        self._closed = True
        if self._health is not None:
            early = self._health.is_alive()
            self._health.cancel()
            self._health.join()
            if early and self._counters.total:
                self._confirm()
            elif early:
                _forget_start(BundleStore(cast("Path", self._state)))
        # the offloader first: nobody waits for a reply from then on
        for part in (self._offloader, self._auditor, self._late):
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
        from edge_sdk.api import Connection, connection  # noqa: PLC0415 - urllib3, only to connect

        known = Connection.load(state)
        self._device = identity.device

        def locate() -> BrokerAddress | None:
            try:
                found = connection(identity, state, timeout_s=LOCATE_TIMEOUT_S)
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
        if isinstance(settings.controller, Agreement):
            self._auditor = Auditor()
        if settings.late_answers:
            pause_s = settings.probe_interval_s
            self._late = LateAnswers(Outbox(state), offloader, self._read_late, pause_s)

    def _with_late_answers(self) -> LateAnswers:
        if self._late is None:
            raise ConfigurationError(
                "no late answers are kept; set AgentSettings(late_answers=True)"
            )
        return self._late

    def _own(self, state: Path) -> PersonalWeights | None:
        """What this device learnt for itself by now, if it can be read."""
        if self._settings.personal is None:
            return None
        try:
            return PersonalWeights.load(state, self._settings.personal)
        except ConfigurationError as err:
            logger.warning("%s", err)
            return None

    def _change_over(self, store: BundleStore) -> None:
        """Run the bundle that is active now; one that cannot run here makes room for the old one.

        Raises: UpdateRefusedError saying why it cannot.
        """
        active = store.active()
        if active.manifest == self._engine.manifest or self._closed:
            return
        try:
            engine = _engine(active, self._settings, self._own(store.state))
        except (BundleError, InputError) as err:
            store.roll_back(str(err))
            raise UpdateRefusedError(f"{active.manifest.bundle}: {err}") from err
        self._engine = engine
        self._watch_health()
        logger.info("bundle=%s is active", active.manifest.bundle)

    def _watch_health(self) -> None:
        """Take the bundle for sound once it has run for a while, or did its work and closed."""
        if self._health is not None:
            self._health.cancel()
        self._health = threading.Timer(HEALTH_S, self._confirm)
        self._health.daemon = True
        self._health.start()

    def _confirm(self) -> None:
        try:
            BundleStore(cast("Path", self._state)).confirm()
        except SplitedgeError as err:
            logger.warning("health of the bundle not noted: %s", err)

    def _command(self, command: Mapping[str, Any]) -> None:
        if self._on_command is not None:
            self._on_command(command)
        # one at work and one waiting: what came in between is part of what the second one finds
        if command.get("op") == "update" and not self._update_wanted.is_set():
            self._update_wanted.set()
            threading.Thread(target=self._refresh_quietly, daemon=True).start()

    def _refresh_quietly(self) -> None:
        if self._closed:
            return
        try:
            self.refresh()
        except SplitedgeError as err:
            logger.warning("update: %s", err)

    def _begin(self, x: Array, deadline_s: float | None) -> _Asked | Prediction:
        """The device's part: an answer, or a query under way."""
        start = time.perf_counter()
        engine = self._engine
        verdict, z, audit = engine.exit(engine.check(x))
        if verdict.exit or self._offloader is None:
            if audit:
                self._audit_exit(engine, verdict, x, z)
            return self._local(engine, verdict, start)
        tensor = engine.smashed(x, z) if self._late is not None else None
        left_s = (deadline_s or self._settings.deadline_s) - (time.perf_counter() - start)
        pending = self._offloader.begin(
            lambda: tensor or engine.smashed(x, z), engine.target, left_s
        )
        return _Asked(engine, verdict, audit, start, pending, tensor)

    def _settle(self, asked: _Asked | Prediction) -> Prediction:
        if isinstance(asked, Prediction):
            return asked
        outcome = cast("Offloader", self._offloader).finish(asked.pending)
        return self._resolve(asked, outcome)

    def _audit_exit(self, engine: Engine, verdict: Verdict, x: Array, z: Array | None) -> None:
        """Compare an exit with the server, some time after the caller has its answer."""
        if self._auditor is None or engine.steering is None:
            return
        if z is None:
            x = x.copy()  # the caller may fill its buffer with the next image meanwhile

        def ask() -> int | None:
            offloader = cast("Offloader", self._offloader)
            if offloader.presence is not Presence.PRESENT:
                return None
            deadline_s = self._settings.deadline_s
            pending = offloader.begin(lambda: engine.smashed(x, z), engine.target, deadline_s)
            outcome = offloader.finish(pending)
            if isinstance(outcome, NoReply) or outcome.problem is not None:
                return None
            return engine.read(outcome)[0]

        self._auditor.submit(Audit(engine.steering, verdict.label, verdict.uncertainty, ask))

    def _local(self, engine: Engine, verdict: Verdict, start: float) -> Prediction:
        with self._counting:
            self._counters.device += 1
        label = verdict.label
        return Prediction(
            label,
            engine.class_names[label],
            verdict.probabilities,
            verdict.uncertainty,
            verdict.threshold,
            DEVICE,
            (time.perf_counter() - start) * 1e3,
        )

    def _resolve(self, asked: _Asked, outcome: Outcome) -> Prediction:
        if isinstance(outcome, NoReply):
            return self._fall_back(asked, outcome, outcome.reason)
        if outcome.problem is not None:
            return self._fall_back(asked, outcome, f"server: {outcome.problem}: {outcome.detail}")
        engine, verdict = asked.engine, asked.verdict
        try:
            label, probabilities = engine.read(outcome)
        except InputError as err:
            return self._fall_back(asked, outcome, str(err))
        if asked.audit and self._auditor is not None and engine.steering is not None:
            audit = Audit(engine.steering, verdict.label, verdict.uncertainty, lambda: label)
            self._auditor.submit(audit)
        with self._counting:
            self._counters.server += 1
        return Prediction(
            label,
            engine.class_names[label],
            probabilities,
            verdict.uncertainty,
            verdict.threshold,
            SERVER,
            (time.perf_counter() - asked.start) * 1e3,
        )

    def _fall_back(self, asked: _Asked, outcome: Outcome, reason: str) -> Prediction:
        engine, verdict = asked.engine, asked.verdict
        identifier = ""
        if self._late is not None and asked.tensor is not None and passing(outcome):
            identifier = self._late.keep(
                Waiting(
                    id=asked.pending.id,
                    asked_at=time.time(),
                    manifest=engine.manifest,
                    tensor=asked.tensor,
                    uncertainty=verdict.uncertainty,
                    threshold=verdict.threshold,
                )
            )
        with self._counting:
            self._counters.fallback += 1
        return Prediction(
            verdict.label,
            engine.class_names[verdict.label],
            verdict.probabilities,
            verdict.uncertainty,
            verdict.threshold,
            FALLBACK,
            (time.perf_counter() - asked.start) * 1e3,
            reason,
            identifier,
        )

    def _read_late(self, query: Waiting, reply: Reply) -> tuple[int, Array]:
        engine, manifest = self._engine, query.manifest
        if manifest.bundle == engine.manifest.bundle:
            return engine.read(reply)
        if "back" in manifest.graphs:
            raise InputError(f"{manifest.bundle} runs here no more: its graph `back` is needed")
        logits = read_logits(reply, len(manifest.class_names))
        label, probabilities, _ = POLICIES[manifest.gate.policy](logits)
        return label, probabilities


def update(state: Path) -> None:
    """Fetch the bundle assigned to this device, in a short-lived process, and activate it.

    A running agent goes on with the one it has until its `refresh`.

    Raises: UpdateRefusedError, StorageError or LinkError saying why not; what ran before runs on.
    """
    outcome = run_update(state)
    if outcome.status in ("installed", "unchanged"):
        return
    kinds = {"unreachable": LinkError, "no_space": StorageError}
    raise kinds.get(outcome.status, UpdateRefusedError)(f"update: {outcome.reason}")


def _load(store: BundleStore, settings: AgentSettings) -> Engine:
    """The active bundle, fetched where there is none; the one before it if it does not load."""
    try:
        active = store.active()
    except NoBundleError:
        update(store.state)
        active = store.active()
    own = (
        None if settings.personal is None else PersonalWeights.load(store.state, settings.personal)
    )
    try:
        return _engine(active, settings, own)
    except BundleError as err:
        # with nothing to go back to it stays: another onnxruntime may load it
        if not store.has_way_back():
            raise
        logger.warning("bundle=%s does not load: %s", active.manifest.bundle, err)
        return _engine(store.roll_back(str(err)), settings, own)


def _engine(active: ActiveBundle, settings: AgentSettings, own: PersonalWeights | None) -> Engine:
    """The engine of a bundle. The server chooses bundles, at any time, so what the device learnt
    for itself is left out where it does not go with one: answers are wanted all the same.
    """
    try:
        return Engine(active.folder, active.manifest, settings, own)
    except ConfigurationError as err:
        if own is None:
            raise
        logger.warning(
            "bundle=%s answers, not what was learnt here: %s", active.manifest.bundle, err
        )
        return Engine(active.folder, active.manifest, settings)


def _forget_start(store: BundleStore) -> None:
    try:
        store.forget_start()
    except StorageError as err:
        logger.warning("the start was not taken back: %s", err)


def _ready(waiting: _Asked | Prediction) -> bool:
    return isinstance(waiting, Prediction) or waiting.pending.done


def _check_deadline(deadline_s: float) -> None:
    if not (math.isfinite(deadline_s) and 0 < deadline_s <= 600):
        raise ConfigurationError(f"deadline_s: expected more than 0, at most 600, got {deadline_s}")
