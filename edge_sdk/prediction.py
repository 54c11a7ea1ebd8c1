"""What an agent answers: at once, and late."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from numpy.typing import NDArray

DEVICE: Final = "device"
SERVER: Final = "server"
FALLBACK: Final = "fallback"


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
        id: of a fallback that the server will still be asked for: its late answer has the same.
            Once it is not empty the query is on the disk. Empty otherwise.
    """

    label: int
    class_name: str
    probabilities: NDArray[Any]
    uncertainty: float
    threshold: float
    source: str
    latency_ms: float
    reason: str = ""
    id: str = ""


@dataclass(frozen=True, slots=True)
class LateAnswer:
    """What the server said to a query that had fallen back.

    Attributes:
        id: that of the fallback.
        prediction: the server's, its latency by the wall clock and with all the waiting; None if
            the server refused the query for good.
        asked_at: seconds since 1970, by the device's clock.
        reason: why there is no prediction; empty otherwise.
    """

    id: str
    prediction: Prediction | None
    asked_at: float
    reason: str = ""
