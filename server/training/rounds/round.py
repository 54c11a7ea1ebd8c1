"""A round as records: its settings, its state under way, its result."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self, TypeVar, get_args

from torch import Tensor

from edge_sdk.checks import check_fields
from edge_sdk.training.protocol.messages import (
    Features,
    OutputGradient,
    Ready,
    Reply,
    Update,
    Weights,
)
from edge_sdk.training.protocol.plan import Plan
from profiles.checks import number, one_of, optional, share, whole
from server.training.core.round_view import RoundView
from server.training.core.spool import Spool
from server.training.core.weighted_mean import Contribution
from server.training.rounds.reply_checks import LARGEST_FEATURE, Fault, Refusal
from server.training.rounds.traffic import TrafficCounter

logger = logging.getLogger(__name__)

# More than any device in our catalogue holds; the recipe for a larger one sets `samples_max`.
DEVICE_SAMPLES_MAX: Final = 1_000_000

Robust = Literal["none", "trimmed"]
R = TypeVar("R", Ready, Features, OutputGradient, Update)


@dataclass(frozen=True, slots=True)
class RoundSettings:
    """Settings of a round.

    Attributes:
        participation: share of the clients asked to each round, above 0; at least one is.
        availability: share of rounds in which the server supervises; in the others clients train
            by themselves and the server only merges.
        cohort: clients that advance together; None for all participants.
        quorum: share of the participants that must send a sound update for the round to count;
            below it the server's weights stay as they were before the round.
        step_deadline_s, round_deadline_s: seconds that a client may take for one message.
        steps_deadline_s: seconds that all steps of a round may take together; a client with
            batches left then ends without them. None for any time in a simulation,
            round_deadline_s with real devices.
        norm_bound: largest L2 norm of an update's change; None for no bound.
        samples_max: most samples that a client may report. They weigh its update and set how many
            batches it sends. None for any number in a simulation, DEVICE_SAMPLES_MAX with real
            devices.
        staleness_max: rounds by which an update may be late and still count; 0 drops late ones.
            Where a recipe with `buffer` leaves it out, it is
            server.training.recipe.recipe.BUFFERED_STALENESS.
        buffer: K; merge as soon as K results are there, while other clients are still at work
            (server.training.rounds.buffered). None for rounds that all begin together.
        staleness_power: a; a result s rounds late counts with (1 + s)^-a of its change.
        robust: how updates are merged: `none` by the method's weights alone, `trimmed` so that a
            few bad clients cannot bend the result (server.training.core.trimmed_mean). None is
            `none` in a simulation and `trimmed` with real devices.
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
        above_0, some = number(above=0, infinite=True), whole(1)
        at_least_1 = number(least=1, infinite=True)
        check_fields(
            self,
            participation=number(above=0, most=1),
            availability=share,
            cohort=optional(some),
            quorum=share,
            step_deadline_s=above_0,
            round_deadline_s=above_0,
            steps_deadline_s=optional(above_0),
            norm_bound=optional(above_0),
            samples_max=optional(some),
            staleness_max=whole(0),
            buffer=optional(some),
            staleness_power=number(least=0),
            robust=optional(one_of(get_args(Robust))),
            clip_factor=at_least_1,
            trim=number(least=0, below=0.5),
            weight_cap=at_least_1,
        )

    @property
    def trimmed(self) -> bool:
        """Whether merges are robust against a few bad clients."""
        return self.robust == "trimmed"

    def quorum_of(self, wanted: int) -> int:
        """Updates needed for a round to count, of those wanted; at least one."""
        # 0.07 * 100 is slightly more than 7
        return max(1, math.ceil(self.quorum * wanted - 1e-9))

    def with_devices(self) -> RoundSettings:
        """The same settings for real devices, which cannot be trusted as simulated clients are."""
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
        loss: mean of the participants' losses by samples; None where no client took part.
        participants: clients with a sound update, which is merged if the round counts.
        missing: clients that were asked and did not reply.
        refused: reasons by client. faults: the kinds of these reasons, by client.
        merged: whether the quorum was reached, so that the round counts.
        missed_steps: batches asked for without a reply, by client.
        stale: rounds late, by client, of the updates of earlier rounds that count in this one.
        processor_s: of this process, in all its threads, from the round's beginning to its end;
            workers and devices have their own.
        weights: each participant's weight in the merge; empty where the round does not count.
        suspects: clients, with the reason, that no server step learnt from, in this round or in
            that of their late update, or that had their update clipped.
        simulated_s: seconds by the simulated clock; None where there is none.
        coding: loss and gain of the updates' codec: mean relative error and cosine, bytes as sent
            and bytes as fp32 would be; empty where updates travel as they are.
        samples: n_k of the clients that began the round.
        clipped: values of features, by client, beyond half precision's range.
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
    processor_s: float = field(compare=False)
    bytes_by_kind: Mapping[str, int] = field(default_factory=dict)
    missed_steps: Mapping[str, int] = field(default_factory=dict)
    stale: Mapping[str, int] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    suspects: Mapping[str, str] = field(default_factory=dict)
    simulated_s: float | None = None
    coding: Mapping[str, float] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    clipped: Mapping[str, int] = field(default_factory=dict)
    faults: Mapping[str, Fault] = field(default_factory=dict)

    def keeps(self, client: str) -> bool:
        """Whether a late update of that client waits for the next round.

        Where nothing was merged it does, unless it was refused. A client with a late update that
        was sound may have been refused for another reply.
        """
        return not self.merged and (client in self.stale or client not in self.refused)


@dataclass(slots=True)
class RoundUnderWay:
    """One round under way, or one client's round where rounds have no common beginning.

    Attributes:
        supervised: whether the server answers features.
        view: what the method's parts may know of it.
        spool: where contributions wait; None for memory.
    """

    number: int
    supervised: bool
    view: RoundView
    samples: dict[str, int]
    label_counts: dict[str, tuple[int, ...]]
    started: float = field(default_factory=time.perf_counter)
    processor_started: float = field(default_factory=time.process_time)
    traffic: TrafficCounter = field(default_factory=TrafficCounter)
    contributions: dict[str, Contribution] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    codings: list[dict[str, float]] = field(default_factory=list)
    missed: Counter[str] = field(default_factory=Counter)
    clipped: Counter[str] = field(default_factory=Counter)
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
        self.clipped += other.clipped
        self.codings += other.codings
        self.samples |= other.samples
        self.label_counts |= other.label_counts
        self.refused |= other.refused
        self.faults |= other.faults
        self.suspects |= other.suspects

    def refuse(self, client: str, reason: str | Refusal) -> None:
        """Leave a client out of the round; the report names it with the reason."""
        refusal = Refusal(reason) if isinstance(reason, str) else reason
        self.refused[client], self.faults[client] = refusal.why, refusal.fault
        logger.warning("round=%d client=%s refused: %s", self.number, client, refusal.why)

    def clip(self, client: str, values: int) -> None:
        """Count values of a client's features that half precision cannot hold."""
        if client not in self.clipped:
            logger.warning(
                "round=%d client=%s: features beyond %g are clipped; its network may diverge",
                self.number,
                client,
                LARGEST_FEATURE,
            )
        self.clipped[client] += values

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
    """The error of an update's codec, as its sender measured it, and the bytes that it saved."""
    if arrived.error is None or arrived.cosine is None:
        return {}
    return {
        "error": arrived.error,
        "cosine": arrived.cosine,
        "bytes": sum(tensor.nbytes for tensor in arrived.weights.values()),
        "raw_bytes": sum(tensor.nbytes for tensor in update.weights.values()),
    }


def mean_coding(codings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the updates; bytes are summed."""
    if not codings:
        return {}
    sums = {key: sum(coding[key] for coding in codings) for key in codings[0]}
    return {k: v if k.endswith("bytes") else v / len(codings) for k, v in sums.items()}


def mean_loss(contributions: Mapping[str, Contribution]) -> float | None:
    """Mean of the clients' losses by samples; None where there are no samples."""
    samples = sum(c.update.samples for c in contributions.values())
    if not samples:
        return None
    return sum(c.update.loss * (c.update.samples / samples) for c in contributions.values())
