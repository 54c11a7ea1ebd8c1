"""Threshold controls: a controller of `edge_sdk.gate.controllers`, applied to a gate.

A controller needs one thread at a time, and predictions come from many. So a lock covers each pair
of steps that belong together: a decision and its observation (else a budget would be charged by
another threshold than the one that was used), and a new threshold and its write to the gate.
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
    BudgetReport,
    grid_from_curve,
)
from edge_sdk.gate.gate import Decision, Floats, Gate
from edge_sdk.manifest import GateSpec
from edge_sdk.settings import GRID_SIZE, Agreement, Budget

logger = logging.getLogger(__name__)

# Audits that wait for the server. One more is dropped: that costs a sample and adds no bias.
AUDITS_WAITING: Final = 64


class ThresholdControl(Protocol):
    """A gate with a threshold that adapts."""

    def decide(self, logits: Floats) -> tuple[Decision, bool]:
        """The gate's decision for one sample's logits, and whether to audit it."""

    def record_audit(self, uncertainty: float, agreed: bool) -> None:
        """Count the result of one audit."""

    def report(self) -> AgreementReport | None:
        """The bound that the threshold guarantees; None for a control without one."""

    def spending(self) -> BudgetReport | None:
        """Income and spending of its budget; None for a control without one."""


class BudgetControl:
    """Adapts the threshold after every prediction."""

    def __init__(self, gate: Gate, controller: BudgetController) -> None:
        self._gate = gate
        self._controller = controller
        self._lock = threading.Lock()
        gate.threshold = controller.threshold

    def decide(self, logits: Floats) -> tuple[Decision, bool]:
        """The gate's decision for one sample's logits; it is never audited."""
        with self._lock:
            decision = self._gate.decide(logits)
            self._controller.observe(decision.uncertainty)
            self._gate.threshold = self._controller.threshold
        return decision, False

    def record_audit(self, uncertainty: float, agreed: bool) -> None:
        """Ignore the audit: a budget does not depend on answers."""

    def report(self) -> AgreementReport | None:
        """None: a budget guarantees nothing about answers."""
        return None

    def spending(self) -> BudgetReport | None:
        """Income and spending so far."""
        with self._lock:
            return self._controller.report()


class AgreementControl:
    """Adapts the threshold as the results of audits arrive."""

    def __init__(self, gate: Gate, controller: AgreementController) -> None:
        self._gate = gate
        self._controller = controller
        self._lock = threading.Lock()
        gate.threshold = controller.threshold

    def decide(self, logits: Floats) -> tuple[Decision, bool]:
        """The gate's decision for one sample's logits, and whether it was chosen for an audit."""
        with self._lock:
            return self._gate.decide(logits), self._controller.wants_audit()

    def record_audit(self, uncertainty: float, agreed: bool) -> None:
        """Count whether the server gave the exit head's label."""
        with self._lock:
            self._controller.record_audit(uncertainty, agreed)
            self._gate.threshold = self._controller.threshold

    def report(self) -> AgreementReport | None:
        """The threshold in force and the audits behind it."""
        return self._controller.report()

    def spending(self) -> BudgetReport | None:
        """None: offloads have no limit."""
        return None


def control_from(
    settings: Budget | Agreement | None, spec: GateSpec, gate: Gate
) -> ThresholdControl | None:
    """The control of `gate` that the settings ask for; None keeps its threshold fixed.

    Raises: ConfigurationError if the bundle's curve gives no thresholds to choose from.
    """
    match settings:
        case Budget(limit=limit, cost=cost, per=per, floor=floor):
            budget = BudgetController(limit, start=gate.threshold, cost=cost, per=per, floor=floor)
            return BudgetControl(gate, budget)
        case Agreement(delta=delta, confidence=confidence, audit_share=share):
            grid = grid_from_curve(spec.curve, GRID_SIZE)
            agreement = AgreementController(delta, grid, confidence=confidence, audit_share=share)
            return AgreementControl(gate, agreement)
        case None:
            return None


@dataclass(frozen=True, slots=True)
class Audit:
    """One comparison of an exit head's answer with the server's.

    Attributes:
        label, uncertainty: of the exit head.
        ask: returns the server's label, or None without a reply; may wait for it.
    """

    control: ThresholdControl
    label: int
    uncertainty: float
    ask: Callable[[], int | None]


class Auditor:
    """Runs audits one after another, in a thread of its own: predictions do not wait for them."""

    def __init__(self) -> None:
        self._queue: Queue[Audit | None] = Queue(AUDITS_WAITING)
        self._thread = threading.Thread(target=self._work, name="splitedge-audit", daemon=True)
        self._thread.start()

    def submit(self, audit: Audit) -> None:
        """Queue an audit; drop it if the queue is full."""
        try:
            self._queue.put_nowait(audit)
        except Full:
            logger.debug("an audit was dropped: %d are waiting", AUDITS_WAITING)

    def close(self) -> None:
        """End the thread. Close the offloader first, so that no audit waits for a reply."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (audit := self._queue.get()) is not None:
            try:
                label = audit.ask()
                if label is not None:
                    audit.control.record_audit(audit.uncertainty, label == audit.label)
            except SplitedgeError as err:
                logger.debug("an audit was dropped: %s", err)
            except Exception:  # outermost loop of this thread: one bad audit must not end it
                logger.exception("an audit failed")
