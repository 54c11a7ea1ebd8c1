"""Depth of a device: the paper's rule (`supersfl`) and ours (`budget`).

`supersfl` uses a device's memory and latency, `budget` the measured cost of every prefix. The
paper's recipes use the first, deployments the second.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from profiles.calibration import DepthCosts
from profiles.checks import number, one_of, whole
from profiles.cost import CostTable
from profiles.device import DeviceProfile
from profiles.errors import AllocationError, InvalidProfileError
from profiles.fields import check_fields, check_value, need

Purpose = Literal["inference", "training"]
Rule = Literal["supersfl", "budget"]

# SuperSFL's "small dummy model (e.g., a 2-layer CNN)": 3x3 convolutions 1-32 at 28x28 and 32-64 at
# 14x14, 2x2 pools behind both; two operations a multiply-add. Its output is 64x7x7 in float32.
DUMMY_FLOPS = 2 * 9 * (28 * 28 * 1 * 32 + 14 * 14 * 32 * 64)
DUMMY_SMASHED_BYTES = 4 * 64 * 7 * 7

MEMORY_SHARE = 0.5
LATENCY_MS = 50.0
# share of the budget that a depth below the present one may take: without this room, a device at a
# limit would change its depth with every small change of its memory or speed
DEEPER_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a device for its prefix.

    Attributes:
        memory_bytes: peak of weights and activations.
        latency_ms: forward pass of one sample through prefix and exit head.
        purpose: whether the peak is that of inference or of training.
        batch: samples at a time; inference on a device has one.
    """

    memory_bytes: int
    latency_ms: float
    purpose: Purpose = "inference"
    batch: int = 1

    def __post_init__(self) -> None:
        check_fields(
            self,
            "budget",
            memory_bytes=whole(0),
            latency_ms=number(above=0),
            purpose=one_of(get_args(Purpose)),
            batch=whole(1),
        )

    @classmethod
    def of(
        cls, profile: DeviceProfile, *, purpose: Purpose = "inference", batch: int = 1
    ) -> Budget:
        """Half of the memory that is free now, and 50 ms.

        Half, because a second bundle is on trial beside the running one, and the application that
        feeds the camera needs some too. Without a measurement the cost table counts tensors only,
        and the rest is for the runtime's own buffers (onnxruntime keeps its arena). 50 ms, because
        up to 100 ms feels immediate, and an offload after the prefix needs the other half.
        """
        memory = int(profile.memory_available_bytes * MEMORY_SHARE)
        return cls(memory_bytes=memory, latency_ms=LATENCY_MS, purpose=purpose, batch=batch)


def supersfl_depth(
    memory_gb: float,
    latency_ms: float,
    latency_min_ms: float,
    latency_max_ms: float,
    stages: int,
    *,
    a: float = 0.5,
    b: float = 4.0,
) -> int:
    """The depth that SuperSFL gives a device.

    d = min(floor(a*m) + floor(b*(lat_max - lat)/(lat_max - lat_min + eps)), L-1), d >= 1
    SuperSFL, Eq. 1 and Alg. 1

    Differs: eps stands for "a zero range gives 0" and nothing else. Left in the quotient it takes
    a whole stage from the fastest device (3.99... of 4), at millisecond ranges more than any fixed
    allowance gives back. Floors are of x + 1e-9, so that 0.1 * 30 counts as 3.

    Args:
        memory_gb: m.
        latency_ms: lat; see `supersfl_latency_ms`.
        latency_min_ms, latency_max_ms: over the fleet seen so far, this device included. With
            one device alone both are its own, and the second term is 0.
        stages: L, at least 2.
        a: stages per GB. b: stages for the fastest device of the fleet.
    Raises: InvalidProfileError for a latency outside the fleet's range or a negative value.
    """
    numbers = {
        "memory_gb": memory_gb,
        "latency_min_ms": latency_min_ms,
        "latency_ms": latency_ms,
        "latency_max_ms": latency_max_ms,
        "a": a,
        "b": b,
    }
    for field, value in numbers.items():
        check_value("supersfl", field, value, number(least=0))
    inside = latency_min_ms <= latency_ms <= latency_max_ms
    fleet = f"within the fleet's {latency_min_ms:g} to {latency_max_ms:g}"
    need(inside, "supersfl", "latency_ms", fleet, latency_ms)
    check_value("supersfl", "stages", stages, whole(2))
    span = latency_max_ms - latency_min_ms
    speed = (latency_max_ms - latency_ms) / span if span > 0 else 0.0
    return max(1, min(_floor(a * memory_gb) + _floor(b * speed), stages - 1))


def supersfl_latency_ms(profile: DeviceProfile) -> float:
    """The latency of Eq. 1: a small dummy model's forward pass and a round trip of its output.

    SuperSFL, Section II-A: "a forward pass through a small dummy model (e.g., a 2-layer CNN) and
    [...] the round-trip time to transmit a representative smashed activation". It is computed from
    the profile's compute score and link, without another measurement. The reply counts as large as
    the activation, as gradients are. See docs/decisions/0001-latency-in-allocation.md.

    Raises: InvalidProfileError if the profile's link is not known.
    """
    if profile.link is None:
        raise InvalidProfileError(
            f"profile {profile.name}: link: expected latency and bandwidth, got "
            f"{profile.link_latency_ms} ms and {profile.link_bandwidth_mbps} Mbit/s; measure it "
            "with measure_link, or allocate with rule 'budget'"
        )
    compute_ms = DUMMY_FLOPS / (profile.compute_score_gflops * 1e6)
    return compute_ms + profile.link.round_trip_ms(DUMMY_SMASHED_BYTES)


def budget_depth(
    profile: DeviceProfile,
    cost: CostTable,
    budget: Budget | None = None,
    *,
    cuts: Collection[int] | None = None,
    costs: DepthCosts | None = None,
    present: int | None = None,
) -> int:
    """The deepest prefix whose peak memory and latency fit the device.

    Every prefix is checked, because an early stage can be wider than a later one. A prefix deeper
    than `present` has to fit DEEPER_SHARE of the budget.

    Args:
        budget: default `Budget.of(profile)`.
        cuts: depths to choose from; default all the table has.
        costs: for inference, what each depth takes as far as the device measured it; default the
            table's estimates.
        present: the depth at which the device runs; None for none.
    Raises: AllocationError if not even the shallowest fits; InvalidProfileError for a cut the
        table does not have.
    """
    budget = budget or Budget.of(profile)
    allowed = cost.depths if cuts is None else _ascending(cuts)
    costs = costs or DepthCosts(cost, profile.core_score_gflops)
    fitting = [depth for depth in allowed if _fits(cost, costs, budget, depth, present)]
    if fitting:
        return fitting[-1]
    memory = _peak_bytes(cost, costs, budget, allowed[0])
    latency = costs.latency_ms(allowed[0])
    raise AllocationError(
        f"device {profile.name}: {budget.purpose} at depth {allowed[0]}, the shallowest, takes "
        f"{memory} bytes and {latency:.3g} ms; expected at most {budget.memory_bytes} bytes and "
        f"{budget.latency_ms:.3g} ms; raise the budget, lower the batch or use a smaller backbone"
    )


def fit_to_cut(depth: int, cuts: Collection[int]) -> int:
    """The deepest allowed cut that is not deeper than `depth`; if there is none, the shallowest.

    Raises: InvalidProfileError if there are no cuts.
    """
    allowed = _ascending(cuts)
    return max((cut for cut in allowed if cut <= depth), default=allowed[0])


def allocate(
    rule: Rule,
    profile: DeviceProfile,
    cost: CostTable,
    *,
    fleet: Iterable[DeviceProfile] = (),
    budget: Budget | None = None,
    cuts: Collection[int] | None = None,
    costs: DepthCosts | None = None,
    present: int | None = None,
) -> int:
    """The depth that `rule` gives the device, at an allowed cut.

    Args:
        rule: "supersfl" (Eq. 1, its default coefficients) or "budget".
        fleet: the devices seen so far, without this one; only for "supersfl".
        budget, costs, present: only for "budget"; see `budget_depth`.
        cuts: depths to choose from; default all the table has.
    Raises: AllocationError if no prefix fits under "budget"; InvalidProfileError for an unknown
        rule, or for a device with an unknown link under "supersfl".
    """
    if rule == "budget":
        return budget_depth(profile, cost, budget, cuts=cuts, costs=costs, present=present)
    check_value("allocate", "rule", rule, one_of(get_args(Rule)))
    own = supersfl_latency_ms(profile)
    latencies = [own, *(supersfl_latency_ms(device) for device in fleet)]
    depth = supersfl_depth(
        profile.memory_total_gb, own, min(latencies), max(latencies), len(cost.stages)
    )
    return fit_to_cut(depth, cost.depths if cuts is None else cuts)


def _floor(value: float) -> int:
    return math.floor(value + 1e-9)


def _ascending(cuts: Collection[int]) -> tuple[int, ...]:
    need(bool(cuts), "allocation", "cuts", "at least one depth", tuple(cuts))
    return tuple(sorted(cuts))


def _fits(
    cost: CostTable, costs: DepthCosts, budget: Budget, depth: int, present: int | None
) -> bool:
    share = 1.0 if present is None or depth <= present else DEEPER_SHARE
    fast_enough = costs.latency_ms(depth) <= share * budget.latency_ms
    return fast_enough and _peak_bytes(cost, costs, budget, depth) <= share * budget.memory_bytes


def _peak_bytes(cost: CostTable, costs: DepthCosts, budget: Budget, depth: int) -> int:
    if budget.purpose == "training":
        return cost.prefix(depth, batch=budget.batch).training_peak_bytes
    if budget.batch > 1:
        return cost.prefix(depth, batch=budget.batch).inference_peak_bytes
    return costs.memory_bytes(depth)
