"""How an agent behaves, in one frozen record: units in the names, checked when built."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from edge_sdk.errors import ConfigurationError
from edge_sdk.gate.controllers import AgreementController, BudgetController
from edge_sdk.manifest import CODECS, Codec

GRID_SIZE: Final = 10


@dataclass(frozen=True, slots=True)
class Budget:
    """Set the threshold so that offloads stay under a limit: see `thresholds.BudgetController`.

    Attributes:
        limit: per prediction or per second, in the unit of `cost`: by default the share of
            predictions that may offload, in [0, 1].
        cost: of one offload: 1 to limit their number, else its bytes or joules.
        per: what the limit is for.
        floor: answers surer than this never leave, however much budget there is.
    """

    limit: float
    cost: float = 1.0
    per: Literal["prediction", "second"] = "prediction"
    floor: float = -math.inf

    def __post_init__(self) -> None:
        self.controller(start=0.0)  # it says what is wrong with a number

    def controller(self, start: float) -> BudgetController:
        """A fresh one; `start` is the threshold until it has seen enough: the bundle's."""
        return BudgetController(
            self.limit, start=start, cost=self.cost, per=self.per, floor=self.floor
        )


@dataclass(frozen=True, slots=True)
class Agreement:
    """Set the threshold so that what exits agrees with the server: see
    `thresholds.AgreementController`.

    Attributes:
        delta: share of the exits that the server may answer otherwise, in (0, 1).
        confidence: with which that holds, in (0, 1).
        audit_share: of the queries, asked of the server in the background, in (0, 1].
    """

    delta: float
    confidence: float = 0.95
    audit_share: float = 0.02

    def __post_init__(self) -> None:
        self.controller(tuple(map(float, range(GRID_SIZE))))  # it says what is wrong

    def controller(self, grid: tuple[float, ...]) -> AgreementController:
        """A fresh one that chooses among the thresholds of `grid`."""
        return AgreementController(
            self.delta, grid, confidence=self.confidence, audit_share=self.audit_share
        )


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What a user may set.

    Attributes:
        deadline_s: how long `predict` may take when it offloads; it answers by then plus 0.25 s.
        threshold: of the gate; None takes the bundle's.
        controller: finds the threshold while the agent runs, from the device's own data.
        codec: of the smashed data; None takes the bundle's.
        offload: False answers every input on the device.
        late_answers: keep queries that got no reply in the outbox until they are answered.
        threads: of one onnxruntime run.
        probe_interval_s: how often an absent server is looked for.
        heartbeat_s: between two telemetry messages.
        max_in_flight: offloads of `predict_many` under way at once.
        personal: a training this device took part in, to answer with what it learnt there for
            itself (edge_sdk.bundles.personal_weights); None answers with the bundle's.
    """

    deadline_s: float = 1.0
    threshold: float | None = None
    controller: Budget | Agreement | None = None
    codec: Codec | None = None
    offload: bool = True
    late_answers: bool = False
    threads: int = 1
    probe_interval_s: float = 0.5
    heartbeat_s: float = 30.0
    max_in_flight: int = 32
    personal: str | None = None

    def __post_init__(self) -> None:
        for name in ("deadline_s", "probe_interval_s", "heartbeat_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 < value <= 600):
                raise ConfigurationError(f"{name}: expected more than 0, at most 600, got {value}")
        for name, most in (("threads", 256), ("max_in_flight", 200)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigurationError(f"{name}: expected 1 to {most}, got {value}")
        if self.threshold is not None and not math.isfinite(self.threshold):
            raise ConfigurationError(f"threshold: expected a finite number, got {self.threshold}")
        if self.codec is not None and self.codec not in CODECS:
            raise ConfigurationError(f"codec: expected one of {CODECS}, got {self.codec!r}")
        if self.threshold is not None and self.controller is not None:
            raise ConfigurationError("threshold and controller: expected one of them, got both")
        for name in ("late_answers", "controller"):
            if getattr(self, name) and not self.offload:
                raise ConfigurationError(f"{name} needs offload: no query would ever be sent")
