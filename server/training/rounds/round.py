"""A round as a record: how it is to be run, what is known of it under way, what came of it."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self, TypeVar, get_args

from torch import Tensor

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.protocol.messages import (
    Features,
    OutputGradient,
    Ready,
    Reply,
    Update,
    Weights,
)
from edge_sdk.training.protocol.plan import Plan
from server.training.core.round_view import RoundView
from server.training.core.spool import Spool
from server.training.core.weighted_mean import Contribution
from server.training.rounds.traffic import TrafficCounter

logger = logging.getLogger(__name__)

# More than any device of ours holds; a recipe for one that does says so.
DEVICE_SAMPLES_MAX: Final = 1_000_000

Robust = Literal["none", "trimmed"]
R = TypeVar("R", Ready, Features, OutputGradient, Update)


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """How rounds are run.

    Attributes:
        participation: share of the clients asked to each round, above 0; at least one is.
        availability: share of rounds in which the server supervises; in the others clients train
            by themselves and the server only merges.
        cohort: clients that advance together; None for all participants.
        quorum: share of the participants whose updates must come for the round to count; below it
            the server's weights stay as they were before the round.
        step_deadline_s, round_deadline_s: what a client may take for one message.
        steps_deadline_s: what all steps of a round may take together; who has batches left then
            ends without them. None for any time in a simulation, round_deadline_s with real
            devices.
        norm_bound: largest L2 norm of an update's change; None for no bound.
        samples_max: most samples a client may say it has, which weigh its update and say how many
            batches it sends. None for any number in a simulation, DEVICE_SAMPLES_MAX with real
            devices.
        staleness_max: rounds by which an update may be late and still count; 0 drops late ones. A
            recipe with `buffer` that leaves it out has
            server.training.recipe.recipe.BUFFERED_STALENESS.
        buffer: K; merge as soon as K results are there, whoever is still at work
            (server.training.rounds.buffered). None for rounds that all begin together.
        staleness_power: a; of a result s rounds late (1 + s)^-a of the change counts.
        robust: how updates are merged: `none` by the method's weights alone, `trimmed` so that a
            few bad clients cannot bend it (server.training.core.trimmed_mean). None is `none` in a
            simulation and `trimmed` with real devices.
        clip_factor, trim, weight_cap: numbers of `trimmed`.
    """

    participation: float = 1.0
    availability: float = 1.0
    cohort: int | None = None
    quorum: float = 0.5
    step_deadline_s: float = 5.0
    round_deadline_s: float = 600.0
    steps_deadline_s: float | None = None
    norm_bound: float | None = None
    samples_max: int | None = None
    staleness_max: int = 0
    buffer: int | None = None
    staleness_power: float = 0.5
    robust: Robust | None = None
    clip_factor: float = 3.0
    trim: float = 0.2
    weight_cap: float = 10.0

    def __post_init__(self) -> None:
        for name in ("participation", "availability", "quorum"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigurationError(f"{name}: expected 0 to 1, got {value}")
        if not self.participation:
            raise ConfigurationError("participation: expected above 0, got 0: nobody would train")
        if self.cohort is not None and self.cohort < 1:
            raise ConfigurationError(f"cohort: expected at least 1, got {self.cohort}")
        for name in ("step_deadline_s", "round_deadline_s", "steps_deadline_s", "norm_bound"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigurationError(f"{name}: expected more than 0, got {value}")
        if self.samples_max is not None and self.samples_max < 1:
            raise ConfigurationError(f"samples_max: expected at least 1, got {self.samples_max}")
        self._check_late()
        self._check_robust()

    def _check_late(self) -> None:
        if self.staleness_max < 0:
            raise ConfigurationError(f"staleness_max: expected 0 or more, got {self.staleness_max}")
        if self.buffer is not None and self.buffer < 1:
            raise ConfigurationError(f"buffer: expected at least 1, got {self.buffer}")
        if not 0 <= self.staleness_power < math.inf:
            raise ConfigurationError(
                f"staleness_power: expected a number from 0 up, got {self.staleness_power}"
            )

    def _check_robust(self) -> None:
        if self.robust not in {None, *get_args(Robust)}:
            raise ConfigurationError(f"robust: expected none or trimmed, got {self.robust!r}")
        if not 0 <= self.trim < 0.5:
            raise ConfigurationError(f"trim: expected 0 to below 0.5, got {self.trim}")
        for name in ("clip_factor", "weight_cap"):
            if not getattr(self, name) >= 1:
                raise ConfigurationError(f"{name}: expected 1 or more, got {getattr(self, name)}")

    @property
    def trimmed(self) -> bool:
        """Whether merges are robust against a few bad clients."""
        return self.robust == "trimmed"

    def with_devices(self) -> RoundSettings:
        """The same where clients are real devices, which nobody vouches for."""
        return replace(
            self,
            robust=self.robust or "trimmed",
            samples_max=self.samples_max or DEVICE_SAMPLES_MAX,
            steps_deadline_s=self.steps_deadline_s or self.round_deadline_s,
        )


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round, as the report has it.

    Attributes:
        loss: mean of the participants' losses by samples; None where nobody took part.
        participants: those whose update was sound, and merged if the round counts;
            missing: those asked in vain; refused: reasons by client.
        merged: whether the quorum was reached, so that the round counts.
        missed_steps: batches asked for in vain, by client.
        stale: updates of earlier rounds that count in this one: rounds late, by client.
        weights: what each participant counted in the merge; empty where the round does not count.
        suspects: whose batches stepped nothing, in this round or in that of its late update, or
            whose update was clipped, and why.
        simulated_s: what it took by the simulated clock; None where there is none.
        coding: of the updates' codec: mean relative error and cosine, bytes as sent and bytes as
            fp32 would be; empty where updates travel as they are.
        samples: n_k of those who began the round.
    """

    round: int
    loss: float | None
    participants: tuple[str, ...]
    missing: tuple[str, ...]
    refused: Mapping[str, str]
    merged: bool
    bytes_up: int
    bytes_down: int
    seconds: float
    bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    missed_steps: Mapping[str, int] = field(default_factory=dict)
    stale: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    suspects: Mapping[str, str] = field(default_factory=dict)
    simulated_s: float | None = None
    coding: Mapping[str, float] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class RoundUnderWay:
    """One round under way, or one client's round where rounds have no common beginning.

    Attributes:
        supervised: whether the server answers features.
        view: what the method's parts may know of it.
        momentum: the server's as the round began, should the round not count.
        spool: where contributions wait; None for memory.
    """

    number: int
    supervised: bool
    view: RoundView
    samples: dict[str, int]
    label_counts: dict[str, tuple[int, ...]]
    momentum: Mapping[tuple[int, int], Tensor] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    traffic: TrafficCounter = field(default_factory=TrafficCounter)
    contributions: dict[str, Contribution] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    codings: list[dict[str, float]] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    spool: Spool | None = None
    suspects: dict[str, str] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        number: int,
        plans: Mapping[str, Plan],
        sent: Weights,
        memory: Mapping[str, Tensor],
        supervised: bool,
    ) -> Self:
        """A round that nothing is known of yet but the weights it begins with."""
        samples: dict[str, int] = {}
        counts: dict[str, tuple[int, ...]] = {}
        view = RoundView(
            number,
            plans=plans,
            sent=sent,
            samples=samples,
            label_counts=counts,
            memory=dict(memory),
        )
        return cls(number, supervised, view, samples, counts)

    def add(self, other: RoundUnderWay) -> None:
        """Take in the records of a client's round, all but its contribution."""
        self.traffic.add(other.traffic)
        self.missed += other.missed
        self.codings += other.codings
        self.samples |= other.samples
        self.label_counts |= other.label_counts
        self.refused |= other.refused
        self.suspects |= other.suspects

    def refuse(self, client: str, reason: str) -> None:
        self.refused[client] = reason
        logger.warning("round=%d client=%s refused: %s", self.number, client, reason)

    def suspect(self, client: str, reason: str) -> None:
        """Name a client that stands out; the first reason of a round is kept."""
        if client not in self.suspects:
            self.suspects[client] = reason
            logger.warning("round=%d client=%s stands out: %s", self.number, client, reason)


def replies_of(kind: type[R], replies: Mapping[str, Reply], number: int) -> dict[str, R]:
    """The replies of one kind and round; others count as none."""
    return {
        name: reply
        for name, reply in replies.items()
        if isinstance(reply, kind) and reply.round == number
    }


def coding_of(arrived: Update, update: Update) -> dict[str, float]:
    """What an update's codec lost, as its sender measured it, and what it saved."""
    if arrived.error is None or arrived.cosine is None:
        return {}
    return {
        "error": arrived.error,
        "cosine": arrived.cosine,
        "bytes": sum(tensor.nbytes for tensor in arrived.weights.values()),
        "raw_bytes": sum(tensor.nbytes for tensor in update.weights.values()),
    }


def mean_coding(codings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the updates, but of bytes the sums."""
    if not codings:
        return {}
    sums = {key: sum(coding[key] for coding in codings) for key in codings[0]}
    return {k: v if k.endswith("bytes") else v / len(codings) for k, v in sums.items()}


def mean_loss(contributions: Mapping[str, Contribution]) -> float | None:
    samples = sum(c.update.samples for c in contributions.values())
    if not samples:
        return None
    return sum(c.update.loss * c.update.samples for c in contributions.values()) / samples
