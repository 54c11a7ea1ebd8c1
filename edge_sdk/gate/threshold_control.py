"""Thresholds that find themselves: the controllers of `edge_sdk.gate.controllers` at a gate's
lever.

A controller takes one thread at a time and predictions come from many, so what belongs together is
done under a lock: judging and observing (else a budget would be charged by another threshold than
the one that let the query go), choosing a threshold and writing it to the gate.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import Full, Queue
from typing import Final, Protocol

from edge_sdk.errors import SplitedgeError
from edge_sdk.gate.controllers import (
    AgreementController,
    AgreementReport,
    BudgetController,
    grid_from_curve,
)
from edge_sdk.gate.gate import Floats, Gate, Verdict
from edge_sdk.manifest import GateSpec
from edge_sdk.settings import GRID_SIZE, Agreement, Budget

logger = logging.getLogger(__name__)

# Audits that wait for the server; one more is dropped, which costs a sample and biases nothing.
AUDITS_WAITING: Final = 64


class Steering(Protocol):
    """A gate whose threshold moves."""

    def judge(self, logits: Floats) -> tuple[Verdict, bool]:
        """The verdict on one sample's logits, and whether to audit it."""

    def audited(self, uncertainty: float, agreed: bool) -> None:
        """Take in what became of one audit."""

    def report(self) -> AgreementReport | None:
        """The bound it holds, if it holds one."""


class BudgetSteering:
    """Moves the threshold after every prediction."""

    def __init__(self, gate: Gate, controller: BudgetController) -> None:
        self._gate = gate
        self._controller = controller
        self._lock = threading.Lock()
        gate.threshold = controller.threshold

    def judge(self, logits: Floats) -> tuple[Verdict, bool]:
        """The verdict on one sample's logits; nothing is ever audited."""
        with self._lock:
            verdict = self._gate.judge(logits)
            self._controller.observe(verdict.uncertainty)
            self._gate.threshold = self._controller.threshold
        return verdict, False

    def audited(self, uncertainty: float, agreed: bool) -> None:
        """Nothing to learn."""

    def report(self) -> AgreementReport | None:
        """None: a budget says nothing of answers."""
        return None


class AgreementSteering:
    """Moves the threshold as audits come in."""

    def __init__(self, gate: Gate, controller: AgreementController) -> None:
        self._gate = gate
        self._controller = controller
        self._lock = threading.Lock()
        gate.threshold = controller.threshold

    def judge(self, logits: Floats) -> tuple[Verdict, bool]:
        """The verdict on one sample's logits, and whether the coin chose it for an audit."""
        with self._lock:
            return self._gate.judge(logits), self._controller.wants_audit()

    def audited(self, uncertainty: float, agreed: bool) -> None:
        """Take in whether the server gave the exit head's label."""
        with self._lock:
            self._controller.audited(uncertainty, agreed)
            self._gate.threshold = self._controller.threshold

    def report(self) -> AgreementReport | None:
        """The threshold in force and what it stands on."""
        return self._controller.report()


def steering_from(
    settings: Budget | Agreement | None, spec: GateSpec, gate: Gate
) -> Steering | None:
    """What moves the threshold of `gate`; None leaves it where it is.

    Raises: ConfigurationError if the bundle's curve gives no thresholds to choose among.
    """
    if isinstance(settings, Budget):
        return BudgetSteering(gate, settings.controller(start=spec.threshold))
    if isinstance(settings, Agreement):
        grid = grid_from_curve(spec.curve, GRID_SIZE)
        return AgreementSteering(gate, settings.controller(grid))
    return None


@dataclass(frozen=True, slots=True)
class Audit:
    """One comparison to make.

    Attributes:
        label, uncertainty: the exit head's.
        ask: gets the server's label, None where there is none; may wait for it.
    """

    steering: Steering
    label: int
    uncertainty: float
    ask: Callable[[], int | None]


class Auditor:
    """Makes comparisons one after another, in a thread that no prediction waits for."""

    def __init__(self) -> None:
        self._queue: Queue[Audit | None] = Queue(AUDITS_WAITING)
        self._thread = threading.Thread(target=self._work, name="splitedge-audit", daemon=True)
        self._thread.start()

    def submit(self, audit: Audit) -> None:
        """Make this comparison when there is time; drop it if many wait already."""
        try:
            self._queue.put_nowait(audit)
        except Full:
            logger.debug("an audit dropped: %d wait", AUDITS_WAITING)

    def close(self) -> None:
        """End the thread; call it once the server is asked no more, so that nothing waits long."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (audit := self._queue.get()) is not None:
            try:
                label = audit.ask()
                if label is not None:
                    audit.steering.audited(audit.uncertainty, label == audit.label)
            except SplitedgeError as err:
                logger.debug("an audit dropped: %s", err)
            except Exception:  # outermost loop of this thread: one bad audit must not be the last
                logger.exception("audit failed")
