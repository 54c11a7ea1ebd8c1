"""How an agent behaves, in one frozen record: units in the names, checked when built."""

from __future__ import annotations

import math
from dataclasses import dataclass

from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import CODECS, Codec


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """What a user may set.

    Attributes:
        deadline_s: how long `predict` may take when it offloads; it answers by then plus 0.25 s.
        threshold: of the gate; None takes the bundle's.
        codec: of the smashed data; None takes the bundle's.
        offload: False answers every input on the device.
        late_answers: keep queries that got no reply in the outbox until they are answered.
        threads: of one onnxruntime run.
        probe_interval_s: how often an absent server is looked for.
        heartbeat_s: between two telemetry messages.
        max_in_flight: offloads of `predict_many` under way at once.
    """

    deadline_s: float = 1.0
    threshold: float | None = None
    codec: Codec | None = None
    offload: bool = True
    late_answers: bool = False
    threads: int = 1
    probe_interval_s: float = 0.5
    heartbeat_s: float = 30.0
    max_in_flight: int = 32

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
        if self.late_answers and not self.offload:
            raise ConfigurationError("late_answers needs offload: no query would ever be sent")
