"""EdgeAgent: answers on the device when sure, asks the server when not, never fails without it."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, cast

import numpy as np

from edge_sdk.bundle import BundleStore
from edge_sdk.errors import (
    InputError,
    LinkError,
    NoBundleError,
    SplitedgeError,
    StorageError,
    UpdateRefusedError,
)
from edge_sdk.gate import Gate, Verdict, gate_from
from edge_sdk.identity import Identity
from edge_sdk.install import run_update
from edge_sdk.manifest import BundleManifest
from edge_sdk.offload import NoReply, Offloader, Outcome, Pending, Target
from edge_sdk.session import Array, Session
from edge_sdk.settings import AgentSettings
from edge_sdk.state import StateLock
from edge_sdk.wire.codecs import encode
from edge_sdk.wire.frames import Tensor
from edge_sdk.wire.messages import RAW_INPUT, Reply

logger = logging.getLogger(__name__)

DEVICE: Final = "device"
SERVER: Final = "server"
FALLBACK: Final = "fallback"
HEALTH_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """One answer, and why it came from where it did.

    Attributes:
        label: index of the likeliest class; `class_name` its name.
        probabilities: (classes,) float32.
        uncertainty: of the exit head, in the gate's unit (nats for entropy).
        threshold: the gate's; below it the device answers alone.
        source: `device` (sure), `server`, or `fallback` (asked in vain: the device's answer).
        latency_ms: from the call to the answer.
        reason: of a fallback, why the server did not answer; empty otherwise.
    """

    label: int
    class_name: str
    probabilities: Array
    uncertainty: float
    threshold: float
    source: str
    latency_ms: float
    reason: str = ""


@dataclass(slots=True)
class Counters:
    """What this agent did since it started."""

    device: int = 0
    server: int = 0
    fallback: int = 0

    @property
    def total(self) -> int:
        """Predictions made."""
        return self.device + self.server + self.fallback


@dataclass(frozen=True, slots=True)
class Status:
    """What an agent is and does, for people and telemetry. bytes_up: of all queries sent."""

    device: str
    bundle: str
    depth: int
    threshold: float
    presence: str
    why_away: str
    bytes_up: int
    counters: Counters = field(default_factory=Counters)


class Engine:
    """A loaded bundle: input checks, the graphs, the gate. Immutable, so that an update swaps it
    between two predictions and not within one.
    """

    def __init__(self, folder: Path, manifest: BundleManifest, settings: AgentSettings) -> None:
        self.manifest = manifest
        self.gate: Gate = gate_from(manifest.gate, settings.threshold)
        self.codec = settings.codec or manifest.smashed.codec
        self.target = Target(manifest.model, manifest.version)
        sessions = {
            name: Session(folder / graph.file, threads=settings.threads)
            for name, graph in manifest.graphs.items()
        }
        self._exit = sessions["exit"]
        self._prefix = sessions.get("prefix")
        self._back = sessions.get("back")
        self._outputs = ["logits"] if self._prefix is not None else ["logits", "z"]
        self._shape = manifest.input.shape
        self._dtype = np.dtype(manifest.input.dtype)
        self._floating = self._dtype.kind == "f"
        # the first run allocates; do it before the first caller waits for it
        self.exit(np.zeros(self._shape, self._dtype))

    def check(self, x: object) -> Array:
        """`x` as the graph takes it.

        Raises: InputError naming expected and got.
        """
        if not isinstance(x, np.ndarray):
            expected = f"a numpy array of {self._dtype} {self._shape}"
            raise InputError(f"input: expected {expected}, got {type(x).__name__}")
        if x.shape != self._shape:
            raise InputError(f"input: expected shape {self._shape}, got {x.shape}")
        if x.dtype != self._dtype:
            hint = f"convert it with x.astype({str(self._dtype)!r})"
            raise InputError(f"input: expected dtype {self._dtype}, got {x.dtype}; {hint}")
        if self._floating:
            flat = x.ravel()
            # one fused pass: a sum of squares is finite unless something in it is not, or is huge
            if not math.isfinite(flat.dot(flat)) and not np.isfinite(flat).all():
                raise InputError("input: expected finite values, got NaN or infinity")
        return x

    def exit(self, x: Array) -> tuple[Verdict, Array | None]:
        """One run of the exit graph and the gate's verdict; z where the graph gives it."""
        outputs = self._exit.run(self._outputs, {RAW_INPUT: x[None]})
        verdict = self.gate.judge(outputs[0][0])
        return verdict, outputs[1] if len(outputs) > 1 else None

    def smashed(self, x: Array, z: Array | None) -> Tensor:
        """What an offload sends: z, encoded."""
        if z is None:
            prefix = cast("Session", self._prefix)
            z = prefix.run(["z"], {RAW_INPUT: x[None]})[0]
        array, parameters = encode(z, self.codec)
        return Tensor(self.manifest.smashed.name, array, parameters)

    def answer(self, reply: Reply) -> Array:
        """The (classes,) logits that a reply stands for.

        Raises: InputError if the reply holds something else.
        """
        if self._back is not None:
            name = next(iter(self._back.inputs))
            features = reply.tensors.get(name)
            if features is None:
                raise InputError(f"reply: expected {name}, got {sorted(reply.tensors)}")
            logits = self._back.run(["logits"], {name: features.astype(np.float32)})[0]
        else:
            logits = reply.tensors.get("logits", np.empty(0))
        classes = len(self.manifest.class_names)
        if logits.shape != (1, classes):
            raise InputError(f"reply: expected logits (1, {classes}), got {logits.shape}")
        answer: Array = logits[0]
        return answer


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
        offloader: Offloader | None = None,
        *,
        lock: StateLock | None = None,
        state: Path | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._offloader = offloader
        self._lock = lock
        self._state = state
        self._counters = Counters()
        self._updating = threading.Lock()
        self._health: threading.Timer | None = None

    @classmethod
    def open(cls, state: Path, settings: AgentSettings | None = None) -> EdgeAgent:
        """Run the bundle installed in `state` and connect to its server in the background.

        An enrolled device without a bundle fetches its own first.

        Raises: StateInUseError if another agent runs there; EnrolmentError if the device is not
            enrolled; NoBundleError if there is no bundle and none can be fetched.
        """
        settings = settings or AgentSettings()
        identity = Identity.load(state)
        lock = StateLock(state)
        try:
            return cls._open(state, settings, identity, lock)
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _open(
        cls, state: Path, settings: AgentSettings, identity: Identity, lock: StateLock
    ) -> EdgeAgent:
        store = BundleStore(state)
        try:
            store.count_start()
            active = store.active()
        except NoBundleError:
            update(state)
            active = store.active()
        engine = Engine(active.folder, active.manifest, settings)
        agent = cls(engine, settings, lock=lock, state=state)
        agent._watch_health()
        if settings.offload:
            agent._connect(identity, state)
        return agent

    @classmethod
    def from_bundle(cls, folder: Path, settings: AgentSettings | None = None) -> EdgeAgent:
        """Run a bundle folder with no server at all: every answer is the device's."""
        settings = settings or AgentSettings(offload=False)
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
        Raises: InputError for a wrong dtype, shape or value; nothing because of the network.
        """
        start = time.perf_counter()
        engine = self._engine
        verdict, z = engine.exit(engine.check(x))
        if verdict.exit or self._offloader is None:
            return self._local(engine, verdict, start)
        pending = self._begin(engine, x, z, start, deadline_s)
        return self._resolve(engine, verdict, self._offloader.finish(pending), start)

    def predict_many(
        self, inputs: Iterable[Array], *, deadline_s: float | None = None
    ) -> Iterator[Prediction]:
        """Classify a stream of inputs, in order, with up to `max_in_flight` offloads under way.

        The device goes on with the next inputs while the server works on the hard ones; each
        offload has the deadline to itself.

        Raises: as `predict`, when it reaches the input at fault.
        """
        waiting: deque[tuple[Engine, Verdict, Pending | None, float]] = deque()
        in_flight = 0
        for x in inputs:
            start = time.perf_counter()
            engine = self._engine
            verdict, z = engine.exit(engine.check(x))
            pending = None
            if not verdict.exit and self._offloader is not None:
                pending = self._begin(engine, x, z, start, deadline_s)
                in_flight += 1
            waiting.append((engine, verdict, pending, start))
            while waiting and (waiting[0][2] is None or in_flight >= self._settings.max_in_flight):
                in_flight -= waiting[0][2] is not None
                yield self._settle(*waiting.popleft())
        while waiting:
            yield self._settle(*waiting.popleft())

    def refresh(self) -> str:
        """Look for a new bundle and change over to it between two predictions.

        Returns: the bundle that runs now.
        Raises: SplitedgeError with the reason when a bundle was refused; the old one goes on.
        """
        if self._state is None:
            return self._engine.manifest.bundle
        with self._updating:
            try:
                update(self._state)
            finally:
                active = BundleStore(self._state).active()
                if active.manifest != self._engine.manifest:
                    self._engine = Engine(active.folder, active.manifest, self._settings)
                    self._watch_health()
                    logger.info("bundle=%s is active", active.manifest.bundle)
        return self._engine.manifest.bundle

    def status(self) -> Status:
        """What this agent is and did."""
        offloader = self._offloader
        manifest = self._engine.manifest
        return Status(
            device="" if self._state is None else Identity.load(self._state).device,
            bundle=manifest.bundle,
            depth=manifest.depth,
            threshold=self._engine.gate.threshold,
            presence="no server" if offloader is None else offloader.presence.value,
            why_away="" if offloader is None else offloader.why_away,
            bytes_up=0 if offloader is None else offloader.bytes_up,
            counters=self._counters,
        )

    def close(self) -> None:
        """Disconnect and free the state folder."""
        if self._health is not None:
            self._health.cancel()
            if self._health.is_alive() and self._counters.total:
                self._confirm()
        if self._offloader is not None:
            self._offloader.close()
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

        def locate() -> Any:
            try:
                return connection(identity, state).address(identity)
            except SplitedgeError as err:
                logger.debug("broker not located: %s", err)
                return None

        self._offloader = Offloader(
            identity,
            known.address(identity),
            max_packet_bytes=known.max_packet_bytes,
            probe_interval_s=self._settings.probe_interval_s,
            heartbeat_s=self._settings.heartbeat_s,
            locate=locate,
            on_command=self._command,
            telemetry=lambda: asdict(self.status()),
        )

    def _watch_health(self) -> None:
        """Take the bundle for sound once it has run for a while, or did its work and closed."""
        self._health = threading.Timer(HEALTH_S, self._confirm)
        self._health.daemon = True
        self._health.start()

    def _confirm(self) -> None:
        try:
            BundleStore(cast("Path", self._state)).confirm()
        except SplitedgeError as err:
            logger.warning("health of the bundle not noted: %s", err)

    def _command(self, command: Mapping[str, Any]) -> None:
        if command.get("op") == "update":
            threading.Thread(target=self._refresh_quietly, daemon=True).start()

    def _refresh_quietly(self) -> None:
        try:
            self.refresh()
        except SplitedgeError as err:
            logger.warning("update: %s", err)

    def _begin(
        self, engine: Engine, x: Array, z: Array | None, start: float, deadline_s: float | None
    ) -> Pending:
        offloader = cast("Offloader", self._offloader)
        left_s = (deadline_s or self._settings.deadline_s) - (time.perf_counter() - start)
        return offloader.begin(lambda: engine.smashed(x, z), engine.target, left_s)

    def _settle(
        self, engine: Engine, verdict: Verdict, pending: Pending | None, start: float
    ) -> Prediction:
        if pending is None:
            return self._local(engine, verdict, start)
        outcome = cast("Offloader", self._offloader).finish(pending)
        return self._resolve(engine, verdict, outcome, start)

    def _local(
        self, engine: Engine, verdict: Verdict, start: float, reason: str = ""
    ) -> Prediction:
        if reason:
            self._counters.fallback += 1
        else:
            self._counters.device += 1
        return Prediction(
            verdict.label,
            engine.manifest.class_names[verdict.label],
            verdict.probabilities,
            verdict.uncertainty,
            verdict.threshold,
            FALLBACK if reason else DEVICE,
            (time.perf_counter() - start) * 1e3,
            reason,
        )

    def _resolve(
        self, engine: Engine, verdict: Verdict, outcome: Outcome, start: float
    ) -> Prediction:
        if isinstance(outcome, NoReply):
            return self._local(engine, verdict, start, outcome.reason)
        if outcome.problem is not None:
            reason = f"server: {outcome.problem}: {outcome.detail}"
            return self._local(engine, verdict, start, reason)
        try:
            answer = engine.gate.judge(engine.answer(outcome))
        except InputError as err:
            return self._local(engine, verdict, start, str(err))
        self._counters.server += 1
        return Prediction(
            answer.label,
            engine.manifest.class_names[answer.label],
            answer.probabilities,
            verdict.uncertainty,
            verdict.threshold,
            SERVER,
            (time.perf_counter() - start) * 1e3,
        )


def update(state: Path) -> None:
    """Fetch the bundle assigned to this device, in a short-lived process, and activate it.

    Raises: UpdateRefusedError, StorageError or LinkError saying why not; what ran before runs on.
    """
    outcome = run_update(state)
    if outcome.status in ("installed", "unchanged"):
        return
    kinds = {"unreachable": LinkError, "no_space": StorageError}
    raise kinds.get(outcome.status, UpdateRefusedError)(f"update: {outcome.reason}")
