"""The start of a roll-out: what is asked for is checked against what there is."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Final

from server.errors import BadRequestError, ConflictError, UnknownModelError
from server.registry.database import Registry
from server.registry.records import Device, FleetModel
from server.registry.rollouts.records import Rollout, RolloutPlan
from server.rollouts.health import parse_health

SHARES_MOST: Final = 20
WAIT_MOST_S: Final = 30 * 86_400.0


def start_rollout(registry: Registry, plan: RolloutPlan, *, who: str = "operator") -> Rollout:
    """Begin a roll-out; a running server moves the first share within seconds.

    Raises: BadRequestError, UnknownModelError, ConflictError saying what to do.
    """
    check_plan(plan)
    there = registry.catalogue.versions()
    if not any((one.name, one.version) == (plan.model, plan.version) for one in there):
        known = ", ".join(map(str, there)) or "none"
        raise UnknownModelError(f"model {plan}: not published; available: {known}")
    pins = registry.capabilities.pinned().items()
    pinned = {device for device, pin in pins if pin.bundle is not None}
    base = _base(plan, registry.catalogue.fleets(), registry.devices(), pinned)
    return registry.rollouts.start(plan, base, who=who)


def check_plan(plan: RolloutPlan) -> None:
    """Check a plan's numbers.

    Raises: BadRequestError.
    """
    shares = plan.shares
    ascending = all(one < other for one, other in pairwise(shares))
    within = bool(shares) and all(0.0 < share <= 1.0 for share in shares)
    if not within or not ascending or shares[-1] != 1.0 or len(shares) > SHARES_MOST:
        raise BadRequestError(
            "shares: expected ascending shares above 0% that end with 100%, such as 10%, 50%, 100%,"
            f" got {', '.join(f'{100 * share:g}%' for share in shares) or 'none'}"
        )
    if not 0.0 <= plan.wait_s <= WAIT_MOST_S:
        raise BadRequestError(f"wait: expected 0 s to 30 days, got {plan.wait_s:g} s")
    if plan.answers_min < 1:
        raise BadRequestError(f"answers: expected at least 1, got {plan.answers_min}")
    if plan.failures_max < 0:
        raise BadRequestError(f"tolerate: expected at least 0, got {plan.failures_max}")
    parse_health(plan.health)


def _base(
    plan: RolloutPlan,
    fleets: Iterable[FleetModel],
    devices: Iterable[Device],
    pinned: Collection[str],
) -> int:
    """The version that the chosen devices should run now.

    Raises: ConflictError if no device may move.
    """
    known = {one.fleet: one for one in fleets}
    chosen = [device for device in devices if plan.selection.matches(device)]
    if not chosen:
        raise ConflictError(
            f"no device of this server is chosen by {plan.selection}; see `splitedge server"
            " devices`"
        )
    wanted = {device.fleet: known[device.fleet] for device in chosen if device.fleet in known}
    of_model = {name: one for name, one in wanted.items() if one.model == plan.model}
    if not of_model:
        runs = ", ".join(f"{name} has {one.model}" for name, one in sorted(wanted.items()))
        raise ConflictError(
            f"{plan}: no chosen device is of a fleet with the model {plan.model} ({runs}); give a"
            f" fleet the model first: `splitedge server models assign FLEET {plan.model}`"
        )
    free = {
        name: one
        for name, one in of_model.items()
        if not one.pinned or plan.selection.fleet is not None
    }
    if not free:
        name, one = next(iter(sorted(of_model.items())))
        raise ConflictError(
            f"{plan}: fleet {name} is pinned to {plan.model}/{one.version}, and pins come first;"
            f" roll out to it with --fleet {name}, or run `splitedge server models assign {name}"
            f" {plan.model}`"
        )
    if all(device.id in pinned for device in chosen if device.fleet in free):
        raise ConflictError(
            f"{plan}: each chosen device is pinned to a bundle, and pins come first; run `splitedge"
            " server unpin DEVICE`"
        )
    (base,) = {one.version for one in free.values()}
    if base == plan.version:
        raise ConflictError(
            f"{plan} is what these devices should run already: a new version becomes active at"
            " once, unless the server runs with --new-versions hold; go back first with"
            f" `splitedge server models rollback {plan.model}`"
        )
    assert base is not None  # the fleets have a model
    return base
