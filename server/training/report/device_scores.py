"""What devices say at the end: how good it is on samples of their own, and what it cost them."""

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

NO_OOD: Final = "devices hold out samples of their own only: nothing of what they never saw"


@dataclass(frozen=True, slots=True)
class DeviceScore:
    """One device on its held-out samples.

    Attributes:
        whole: with the server. alone: by its own exit, None where it has none.
        energy: of its work in training, as it measured or its power model says.
    """

    device: str
    depth: int
    whole: Score
    alone: Score | None
    energy: EnergyReading

    def to_dict(self) -> dict[str, Any]:
        """As a report has it."""
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
    ledger: TrafficCounter,
) -> list[DeviceScore]:
    """Have every device that trained score the network as it is; those that do not are left out.

    Args:
        number: of the last round.
        ledger: the bytes are counted there.
    """
    requests: dict[str, Request] = {
        name: Evaluate(number, plan, _weights(run, name)) for name, plan in run.plans.items()
    }
    for request in requests.values():
        ledger.sent(request)
    replies = transport.exchange(requests, run.recipe.round.round_deadline_s)
    scores = []
    for name, reply in replies.items():
        fault = scores_fault(reply) if isinstance(reply, Scores) else "no scores"
        if fault is not None or not isinstance(reply, Scores):
            logger.warning("device=%s its scores do not count: %s", name, fault)
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
    """Over the devices that have held-out samples.

    Args:
        alone: by their exits, where the server never supervised.
    """
    tested = [score.alone if alone else score.whole for score in scores]
    return summarise_clients([score for score in tested if score is not None])


def fleet_energy(scores: list[DeviceScore]) -> dict[str, Any]:
    """Joules of the devices whose energy is known, and how it is, by device.

    They are of work in training, since each device's process began.
    """
    known = {score.device: score.energy for score in scores if score.energy.joules is not None}
    return {
        "joules": math.fsum(e.joules for e in known.values() if e.joules) if known else None,
        "sources": {score.device: score.energy.source for score in scores},
        "seconds": math.fsum(score.energy.seconds for score in scores),
        "of": "the devices' work in training",
    }


def energy_of(scores: Scores, profile: DeviceProfile) -> EnergyReading:
    """As the device measured it; else by the catalogue's power model of such a board, if known.

    E = t * (P_idle + share * (P_busy - P_idle)), the share of its cores that training kept busy.
    """
    if scores.energy_j is not None:
        detail = "measured on the device, with all that ran there meanwhile"
        return EnergyReading(scores.energy_j, scores.seconds, scores.energy_source, detail)
    model = reference_power(profile.name)
    if model is None:
        detail = f"the device measures none, and no power model of {profile.name!r} is known"
        return EnergyReading(None, scores.seconds, "none", detail)
    share = scores.cpu_s / scores.seconds / profile.cores if scores.seconds else 0.0
    joules = model.energy_j(scores.seconds, min(1.0, share))
    detail = f"{model.idle_w:g} W idle, {model.busy_w:g} W busy: {model.source}"
    return EnergyReading(joules, scores.seconds, "declared", detail)


def scores_fault(scores: Scores) -> str | None:
    """Why they cannot be: more right than there are, or a cost that is no number from 0 up."""
    counts = (scores.right, scores.right_exit or 0)
    if max(counts) > scores.samples:
        return f"{max(counts)} right of {scores.samples}"
    costs = (scores.seconds, scores.cpu_s, scores.energy_j or 0.0)
    if not all(0 <= cost < math.inf for cost in costs):
        return f"costs {costs}: expected numbers from 0 up"
    return None


def _weights(run: Run, name: str) -> Weights:
    """The whole network as that device and the server run it together."""
    state, plan = run.state, run.plans[name]
    weights = tensors_of(state.net.segment(0, None))
    if not plan.part.whole:
        weights |= tensors_of(state.trunk.suffix(plan.depth))
    if plan.part.exit_head and run.method.share_exits:
        head = tensors_of(state.net.exit_head(plan.depth))
        weights |= {f"exit{plan.depth}.{key}": tensor for key, tensor in head.items()}
    return weights
