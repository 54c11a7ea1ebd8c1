"""Audits: answers of the device compared with the server's, for the controller `Agreement`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from edge_sdk.bundles.runner import BundleRunner
from edge_sdk.gate.gate import Decision
from edge_sdk.gate.threshold_control import Audit, Auditor
from edge_sdk.offload.availability import Presence
from edge_sdk.offload.offloader import Offloader
from edge_sdk.offload.pending import NoReply
from edge_sdk.session import Array


class Audits:
    """Compares exits and offloads that the controller of a bundle's threshold chose.

    Args:
        deadline_s: seconds in which the server answers the query of an audit.
        may_ask: whether the user lets the device ask now; else an audit is dropped.
    """

    def __init__(
        self,
        offloader: Offloader,
        deadline_s: float,
        *,
        may_ask: Callable[[], bool] = lambda: True,
    ) -> None:
        self._offloader = offloader
        self._deadline_s = deadline_s
        self._may_ask = may_ask
        self._auditor = Auditor()

    def audit_exit(
        self, runner: BundleRunner, decision: Decision, x: Array, z: Array | None
    ) -> None:
        """Compare an exit with the server, after the caller has its answer."""
        if runner.control is None or not self._may_ask():
            return
        if z is None:
            x = x.copy()  # the caller may reuse its buffer for the next input
        ask = partial(self._ask_label, runner, x, z)
        self._auditor.submit(Audit(runner.control, decision.label, decision.uncertainty, ask))

    def audit_offload(self, runner: BundleRunner, decision: Decision, label: int) -> None:
        """Compare the exit head's answer to an offloaded input with the server's label."""
        if runner.control is None:
            return
        audit = Audit(runner.control, decision.label, decision.uncertainty, lambda: label)
        self._auditor.submit(audit)

    def close(self) -> None:
        """End the audits; those that wait are dropped."""
        self._auditor.close()

    def _ask_label(self, runner: BundleRunner, x: Array, z: Array | None) -> int | None:
        """The server's label, or None without a reply in time."""
        if self._offloader.presence is not Presence.PRESENT or not self._may_ask():
            return None
        pending = self._offloader.begin(
            lambda: runner.smashed(x, z), runner.target, self._deadline_s
        )
        outcome = self._offloader.finish(pending)
        if isinstance(outcome, NoReply) or outcome.problem is not None:
            return None
        return runner.read(outcome)[0]
