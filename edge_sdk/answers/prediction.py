"""Answers of an agent: predictions, and late answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import NDArray

if TYPE_CHECKING:
    from profiles.energy import EnergySource


DEVICE: Final = "device"
SERVER: Final = "server"
FALLBACK: Final = "fallback"


@dataclass(slots=True)
class Prediction:
    """One answer, its source and the reason for that source.

    Treat it as read-only: freezing it would cost 3 us an answer.

    Attributes:
        label: index of the likeliest class; `class_name` is its name.
        probabilities: (classes,) float32.
        uncertainty: of the exit head, in the gate's unit (nats for entropy).
        threshold: of the gate; an uncertainty below it exits on the device.
        source: `device` (the gate let it exit, or the server was not to be asked: `local=True`,
            offloading switched off), `server`, or `fallback` (the server gave no answer in time,
            so it is the device's).
        latency_ms: from the call to the answer.
        reason: why a fallback got no answer from the server; empty otherwise.
        id: names the answer for `EdgeAgent.correct`, and a fallback for its late answer, which has
            the same id. Empty if the agent has no observers and no late answer follows.
        late: whether a late answer follows: the query of this fallback is on the disk.
        bytes_up, bytes_down: payloads of the query that was sent and of the reply that came.
        joules: of the device for this answer, above rest; None without `AgentSettings.power`, or
            where no watts are known.
        energy_source: where those watts are from: `rapl` or `ina` (sensors), `declared` (a power
            model) or `none`.
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
    late: bool = False
    bytes_up: int = 0
    bytes_down: int = 0
    joules: float | None = None
    energy_source: EnergySource = "none"


@dataclass(frozen=True, slots=True)
class LateAnswer:
    """The server's answer to a query that had fallen back.

    Attributes:
        id: of the fallback.
        prediction: the server's; its latency is by the wall clock, from the query to the late
            answer. None if the server refused the query for good.
        asked_at: time of the query, seconds since 1970, by the device's clock.
        reason: why there is no prediction; empty otherwise.
    """

    id: str
    prediction: Prediction | None
    asked_at: float
    reason: str = ""
