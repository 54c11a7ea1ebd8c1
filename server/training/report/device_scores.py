"""Scores that devices report at the end: accuracy on samples of their own, and energy."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from edge_sdk.training.protocol.messages import Evaluate, Request, Scores, Weights
from edge_sdk.training.protocol.weights import tensors_of
from profiles.device import DeviceProfile
from profiles.energy import EnergyReading, reference_power
from server.training.report.metrics import ClientSummary, Score, summarise_clients
from server.training.rounds.traffic import TrafficCounter
from server.training.rounds.transport import Transport
from server.training.run.run import Run

logger = logging.getLogger(__name__)

# Seconds and joules of a device's work: more is made up, and a sum over the devices has no number.
LARGEST_COST: Final = 1e12
NO_OOD: Final = "devices test on samples of their own, so on no class that they never saw"


@dataclass(frozen=True, slots=True)
class DeviceScore:
    """One device on its held-out samples.

    Attributes:
        whole: answered together with the server.
        alone: answered by its exit; None without an exit head.
        energy: of its work in training, measured or from a power model.
    """

    device: str
    depth: int
    whole: Score
    alone: Score | None
    energy: EnergyReading

    def to_dict(self) -> dict[str, Any]:
        """The score as a report has it."""
        return {
            "client": self.device,
            "depth": self.depth,
            "tested_id": self.whole.samples,
            "accuracy_id": self.whole.accuracy,
            "accuracy_exit": None if self.alone is None else self.alone.accuracy,
            "seconds": self.energy.seconds,
            "energy_j": self.energy.joules,
            "energy_source": self.energy.source,
            "energy_detail": self.energy.detail,
        }


def ask_scores(
    run: Run,
    transport: Transport,
    profiles: Mapping[str, DeviceProfile],
    number: int,
    traffic: TrafficCounter,
) -> list[DeviceScore]:
    """Ask every device with a plan to score the present network.

    Args:
        number: of the last round.
        traffic: counts the bytes sent.
    Returns: the scores of devices that answered with valid ones.
    """
    requests: dict[str, Request] = {
        name: Evaluate(number, run.last_plan(name), _weights(run, name)) for name in run.plans
    }
    for request in requests.values():
        traffic.sent(request)
    replies = transport.exchange(requests, run.recipe.round.round_deadline_s)
    scores = []
    for name, reply in replies.items():
        fault = scores_fault(reply) if isinstance(reply, Scores) else "no scores"
        if fault is not None or not isinstance(reply, Scores):
            logger.warning("device=%s scores refused: %s", name, fault)
            continue
        exit_right = reply.right_exit
        scores.append(
            DeviceScore(
                name,
                run.plans[name].depth,
                Score(reply.right, reply.samples),
                None if exit_right is None else Score(exit_right, reply.samples),
                energy_of(reply, profiles[name]),
            )
        )
    return scores


def summarise(scores: list[DeviceScore], *, alone: bool) -> ClientSummary:
    """Mean scores of the devices that have held-out samples.

    Args:
        alone: answered by exits, because the server never supervised.
    """
    tested = [score.alone if alone else score.whole for score in scores]
    return summarise_clients([score for score in tested if score is not None])


def fleet_energy(scores: list[DeviceScore]) -> dict[str, Any]:
    """Joules of the devices with known energy, and the source of each device's figure.

    A figure covers the work in training since the device's process started.
    """
    known = {score.device: score.energy for score in scores if score.energy.joules is not None}
    return {
        "joules": math.fsum(e.joules for e in known.values() if e.joules) if known else None,
        "sources": {score.device: score.energy.source for score in scores},
        "seconds": math.fsum(score.energy.seconds for score in scores),
        "of": "the devices' work in training",
    }


def energy_of(scores: Scores, profile: DeviceProfile) -> EnergyReading:
    """Energy that the device measured, or from the catalogue's power model of its board if known.

    E = t * (P_idle + share * (P_busy - P_idle)), the share of its cores that training kept busy.
    """
    if scores.energy_j is not None:
        detail = "measured on the device, with everything that ran there at the time"
        return EnergyReading(scores.energy_j, scores.seconds, scores.energy_source, detail)
    model = reference_power(profile.name)
    if model is None:
        detail = f"the device measures no energy, and {profile.name!r} has no power model"
        return EnergyReading(None, scores.seconds, "none", detail)
    share = scores.cpu_s / scores.seconds / profile.cores if scores.seconds else 0.0
    joules = model.energy_j(scores.seconds, min(1.0, share))
    detail = f"{model.idle_w:g} W idle, {model.busy_w:g} W busy: {model.source}"
    return EnergyReading(joules, scores.seconds, "declared", detail)


def scores_fault(scores: Scores) -> str | None:
    """Why scores are impossible (more right than samples, or a bad cost); None if they are not."""
    counts = (scores.right, scores.right_exit or 0)
    if max(counts) > scores.samples:
        return f"{max(counts)} right of {scores.samples}"
    costs = (scores.seconds, scores.cpu_s, scores.energy_j or 0.0)
    if not all(0 <= cost <= LARGEST_COST for cost in costs):
        return f"costs {costs}: expected numbers from 0 to {LARGEST_COST:g}"
    return None


def _weights(run: Run, name: str) -> Weights:
    """Weights of the whole network as that device and the server run it together."""
    state, plan = run.state, run.plans[name]
    weights = tensors_of(state.net.segment(0, None))
    if not plan.part.whole:
        weights |= tensors_of(state.trunk.suffix(plan.depth))
    if plan.part.exit_head and run.method.share_exits:
        head = tensors_of(state.net.exit_head(plan.depth))
        weights |= {f"exit{plan.depth}.{key}": tensor for key, tensor in head.items()}
    if plan.part.shared_auxiliary:
        weights |= state.auxiliary_tensors(plan.depth)
    return weights
