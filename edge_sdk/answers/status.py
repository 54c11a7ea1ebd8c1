"""State of an agent: its bundle, its link, and counts of its predictions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edge_sdk.answers.price import EnergyReport
from edge_sdk.gate.controllers import AgreementReport, BudgetReport


@dataclass(slots=True)
class Counters:
    """Predictions of this agent since its start, by source, and faults.

    Attributes:
        late_replies: replies that came after the deadline, twice or unasked; they were dropped.
        refused_replies: replies that were no valid frames.
        late_waiting: queries in the outbox without an answer; None if the disk cannot be read.
        late_lost: queries for which the outbox or its disk had no room.
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
        """Number of predictions."""
        return self.device + self.server + self.fallback


@dataclass(frozen=True, slots=True)
class Status:
    """State of an agent, for people and telemetry.

    Attributes:
        gate: what answers are judged by, as text (edge_sdk.gate_form); the user's or the bundle's.
        offloading: whether the device asks its server; False where the user turned it off, and
            without a server.
        personal: the training that the personal weights are from; None if the bundle's weights
            answer.
        bytes_up, bytes_down: payloads of all queries that were sent, audits and late answers
            included, and of all replies.
        provider: the execution provider that runs the bundle's graphs.
        agreement: the guarantee of the `Agreement` controller; None without one.
        budget: what the `Budget` controller has spent; None without one.
        trouble: the last failure for want of memory, and when; empty if there was none.
        clock: why this device's clock is not believed; empty where it is.
        energy: of the answers, by `AgentSettings.power`; None without.
        reports: of the agent's observers, by name, and of its traces.
    """

    device: str
    bundle: str
    depth: int
    threshold: float
    personal: str | None
    presence: str
    why_away: str
    bytes_up: int
    bytes_down: int = 0
    gate: str = ""
    provider: str = "cpu"
    counters: Counters = field(default_factory=Counters)
    agreement: AgreementReport | None = None
    budget: BudgetReport | None = None
    offloading: bool = True
    trouble: str = ""
    clock: str = ""
    energy: EnergyReport | None = None
    reports: dict[str, Mapping[str, Any]] = field(default_factory=dict)
