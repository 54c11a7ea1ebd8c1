"""Learning of the exit head in a running agent, in a thread of its own, without torch.

The agent tells of each answer in microseconds: z and the label are put into a short queue. The
thread computes the head's features from z, learns in short turns with pauses between them, and
gives the learnt head to the running graph as overridable initialisers.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

import numpy as np

from edge_sdk.answers.observer import Answered, AnswerObserver
from edge_sdk.answers.prediction import DEVICE, SERVER
from edge_sdk.bundles.golden import read_golden
from edge_sdk.bundles.initialisers import read_initialisers
from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.errors import SplitedgeError, StorageError
from edge_sdk.gate_form import EVIDENCE, read_gate
from edge_sdk.learning.features import Features, find_features, norms_of
from edge_sdk.learning.head import Floats, Head
from edge_sdk.learning.kept_head import identity_of, load_head, save_head
from edge_sdk.learning.personalise import Personalisation, Sample, Score
from edge_sdk.settings import Learn

logger = logging.getLogger(__name__)

# Answers that wait for the thread, at most, and bytes of their z; more are left out.
QUEUE_MOST: Final = 64
QUEUE_BYTES: Final = 8_000_000
# Without a label the thread takes what waits this often, and lets go of a bundle that was replaced.
LOOK_S: Final = 5.0
# One in so many answers of the device itself is learnt from (Personalisation.anchor).
ANCHOR_EVERY: Final = 8
# New labels after which learning begins, and the turns that it then takes.
LABELS_AT_ONCE: Final = 8
TURNS_AT_ONCE: Final = 4
# Pause after a turn, as a multiple of the turn's own time, and at least so long.
PAUSE_SHARE: Final = 4.0
PAUSE_S: Final = 0.2
# The disk is written no more often than this, and when the agent closes.
SAVE_S: Final = 300.0
NICENESS: Final = 10
# Bytes of the samples' features.
FEATURES_BYTES: Final = 4_000_000
SAMPLES_LEAST: Final = 32
# Largest difference of a logit from the graph's, as a share of the largest.
FORM_TOLERANCE: Final = {"fp32": 1e-3, "int8": 0.1}


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An answer in the queue; without a target it is the device's own."""

    runner: BundleRunner
    z: Any
    target: Floats | None


@dataclass(slots=True)
class _Counts:
    """Numbers of the report, since the agent started."""

    corrections: int = 0
    server: int = 0
    left_out: int = 0
    turns: int = 0
    drops: int = 0


class HeadLearner(AnswerObserver):
    """Learns the exit head of the bundle that runs, and answers with it while it is no worse.

    Args:
        running: gives the bundle that answers now.
        state: folder in which the head is kept over restarts; None keeps nothing.
    """

    name = "learning"

    def __init__(
        self, settings: Learn, running: Callable[[], BundleRunner], state: Path | None = None
    ) -> None:
        self._settings = settings
        self._running = running
        self._state = state
        self._corrections = settings.labels in {"corrections", "both"}
        self._server = settings.labels in {"server", "both"}
        self.remembers = frozenset({"z"}) if self._corrections else frozenset()
        self._labelled: deque[_Waiting] = deque()
        self._own: deque[_Waiting] = deque()
        self._own_seen = 0
        self._counts = _Counts()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._working = threading.Lock()
        self._new_labels = 0
        self._saved_at = monotonic()
        self._unsaved = False
        self._active = False
        self._scores: tuple[Score, Score] | None = None
        self._subject = _Subject(running(), settings, state)
        self._apply()
        self._report: Mapping[str, Any] = self._describe()
        self._thread = threading.Thread(target=self._work, name="learning", daemon=True)
        self._thread.start()

    def answered(self, answered: Answered) -> None:
        """Queue an answer of the server, or one in ANCHOR_EVERY of the device's own."""
        if answered.z is None:
            return
        source = answered.prediction.source
        if source == SERVER and self._server:
            self._offer(answered, answered.prediction.probabilities)
            self._counts.server += 1
        elif source == DEVICE:
            self._own_seen += 1
            if self._own_seen % ANCHOR_EVERY == 0:
                self._queue(self._own, answered, None)

    def corrected(self, answered: Answered, label: int) -> None:
        """Queue the user's label."""
        target = np.zeros(len(answered.manifest.class_names), np.float32)
        target[label] = 1.0
        self._counts.corrections += 1
        self._offer(answered, target)

    def learn_now(self) -> None:
        """Take the answers that wait, and learn for one turn, in the calling thread."""
        with self._working:
            self._turn()

    def report(self) -> Mapping[str, Any]:
        """State of learning, as of the last turn."""
        return self._report

    def close(self) -> None:
        """End the thread, and keep what was learnt."""
        self._closing.set()
        self._wake.set()
        self._thread.join()
        with self._working:
            self._save()

    def _offer(self, answered: Answered, target: Floats) -> None:
        self._counts.left_out += self._queue(self._labelled, answered, target)
        self._wake.set()

    def _queue(self, queue: deque[_Waiting], answered: Answered, target: Floats | None) -> int:
        """Let an answer wait for the thread; returns how many older ones are left out for it."""
        runner, z = self._running(), answered.z
        if z is None or answered.manifest is not runner.manifest:
            return 0  # of a bundle that runs no more
        most = min(QUEUE_MOST, max(1, QUEUE_BYTES // z.nbytes))
        left_out = 0
        with suppress(IndexError):  # the thread takes them meanwhile
            while len(queue) >= most:
                queue.popleft()
                left_out += 1
        queue.append(_Waiting(runner, z, target))
        return left_out

    def _work(self) -> None:
        with suppress(OSError, AttributeError):  # of this thread alone, on Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        left = 0
        while not self._closing.is_set():
            if not left:
                self._wake.wait(LOOK_S)
                self._wake.clear()
            start = monotonic()
            try:
                with self._working:
                    self._take()
                    if self._new_labels >= LABELS_AT_ONCE:
                        self._new_labels, left = 0, TURNS_AT_ONCE
                    if not left:
                        continue
                    left -= 1
                    self._turn()
            except Exception:  # learning must not end with one bad sample, nor unseen
                logger.exception("learning failed; it goes on with the next samples")
                left = 0
            self._closing.wait(max(PAUSE_S, PAUSE_SHARE * (monotonic() - start)))

    def _turn(self) -> None:
        self._take()
        own = self._subject.own
        if own is None:
            return
        turn = own.turn()
        self._counts.turns += 1
        self._unsaved = True
        if turn.bundle is not None and turn.learnt is not None:
            self._scores = turn.bundle, turn.learnt
        if turn.outcome == "dropped":
            self._counts.drops += 1
            assert turn.bundle is not None
            assert turn.learnt is not None
            logger.log(
                logging.WARNING if self._active else logging.INFO,  # if answers change by it
                "learning: dropped: %.1f %% of %d held-out samples right, bundle: %.1f %%",
                100 * turn.learnt.accuracy,
                len(own.held_out),
                100 * turn.bundle.accuracy,
            )
        self._apply()
        if monotonic() - self._saved_at >= SAVE_S:
            self._save()
        self._report = self._describe()

    def _take(self) -> None:
        """Compute the features of what waits."""
        runner = self._running()
        if runner is not self._subject.runner:
            self._save()
            self._subject = _Subject(runner, self._settings, self._state)
            self._scores = None
            self._apply()
            self._report = self._describe()
        own, features = self._subject.own, self._subject.features
        for queue in (self._labelled, self._own):
            while queue:
                waiting = queue.popleft()
                if waiting.runner is not runner or own is None or features is None:
                    continue
                values = features(waiting.z[0])
                if not np.isfinite(values).all():
                    continue
                if waiting.target is None:
                    own.anchor(values)
                else:
                    own.add(Sample(values, waiting.target))
                    self._new_labels += 1

    def _apply(self) -> None:
        """Answer with the head of now."""
        own, subject = self._subject.own, self._subject
        if own is None:
            return
        active = own.head is not own.base
        if active or self._active:
            subject.runner.override_exit(
                {subject.weight: own.head.weight, subject.bias: own.head.bias}
            )
        if active and not self._active:
            logger.info("learning: a head of this device's own answers from now on")
        self._active = active

    def _save(self) -> None:
        subject, own = self._subject, self._subject.own
        if self._state is None or own is None or not self._unsaved:
            return
        self._unsaved, self._saved_at = False, monotonic()
        try:
            save_head(self._state, subject.identity, own)
        except StorageError as err:
            logger.warning("learning: not kept: %s", err)

    def _describe(self) -> dict[str, Any]:
        own, counts = self._subject.own, self._counts
        report: dict[str, Any] = {
            "labels": self._settings.labels,
            "active": self._active,
            "why_not": self._subject.why_not,
            "learnt": 0 if own is None else len(own.learnt),
            "held_out": 0 if own is None else len(own.held_out),
            "corrections": counts.corrections,
            "server_answers": counts.server,
            "left_out": counts.left_out,
            "turns": counts.turns,
            "drops": counts.drops,
        }
        if self._scores is not None:
            bundle, learnt = self._scores
            report |= {"bundle_accuracy": bundle.accuracy, "learnt_accuracy": learnt.accuracy}
        return report


class _Subject:
    """The exit head of one running bundle.

    Attributes:
        own: None if this head cannot be learnt; `why_not` then says why.
        features: of one sample's z.
        weight, bias: names in the graph.
    """

    def __init__(self, runner: BundleRunner, settings: Learn, state: Path | None) -> None:
        self.runner = runner
        self.own: Personalisation | None = None
        self.features: Features | None = None
        self.weight = self.bias = self.identity = ""
        try:
            self.why_not = self._prepare(runner, settings, state)
        except SplitedgeError as err:
            self.why_not = str(err)
        if self.why_not:
            logger.warning("learning: %s: %s", runner.manifest.bundle, self.why_not)

    def _prepare(self, runner: BundleRunner, settings: Learn, state: Path | None) -> str:
        """Find the head's layer and features; the reason if that cannot be done."""
        manifest = runner.manifest
        graph = manifest.graphs["exit"]
        if "prefix" in manifest.graphs:
            return "its exit is a model of its own, without an exit head on shared features"
        if read_gate(manifest.gate.policy).first in EVIDENCE:
            return "its exit head gives evidence, which labels alone do not teach"
        weights = read_initialisers(runner.folder / graph.file, graph.overridable)
        weights |= {name: np.asarray(v, np.float32) for name, v in runner.exit_overrides.items()}
        classes = len(manifest.class_names)
        layers = [
            (name, f"{name.removesuffix('weight')}bias")
            for name, value in weights.items()
            if name.endswith("weight") and value.ndim == 2 and len(value) == classes
        ]
        layers = [names for names in layers if names[1] in weights]
        if not layers:
            return "its exit head does not end in a linear layer with overridable weights"
        self.weight, self.bias = layers[-1]
        base = Head(weights[self.weight], weights[self.bias])
        samples = min(settings.samples, FEATURES_BYTES // base.weight[0].nbytes)
        if samples < SAMPLES_LEAST:
            most = FEATURES_BYTES // SAMPLES_LEAST // 4
            return f"its exit head has {base.features} features, and {most} are the most"
        x, _ = read_golden(runner.folder / manifest.golden)
        outputs = [runner.exit_outputs(sample) for sample in x]
        zs = [z[0] for _, z in outputs if z is not None]
        logits = np.stack([each for each, _ in outputs])
        found = find_features(base, norms_of(weights), zs, logits)
        allowed = FORM_TOLERANCE[graph.precision] * float(np.abs(logits).max(initial=1e-6))
        if found is None or found[1] > allowed:
            return "the features of its exit head could not be found in its smashed data"
        self.features = found[0]
        self.own = Personalisation(base, samples=samples, rate=settings.rate, pull=settings.pull)
        self.identity = identity_of(manifest.bundle, base)
        if state is not None and load_head(state, self.identity, self.own):
            logger.info("learning: goes on with %d samples", len(self.own.learnt))
        return ""
