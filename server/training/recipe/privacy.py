"""Differential privacy beside any method: what noise is asked for, and what it is worth.

Epsilon is of one client against a server that follows the plan, curious as it may be (one that asks
for less noise gets less): of all that the server gets from a client whose inputs are replaced by
any others, as many of them and with the same labels. In each round a client gives

    features   n_k samples an epoch, each of norm at most C_z, with noise s_z * C_z
    an update  of norm at most C_u, with noise s_u * C_u

Two vectors of norm at most C are at most 2C apart, so each of these is a Gaussian mechanism of
noise multiplier s / 2. Within a round a client's prefix depends on all of its samples, and so does
every batch of features; so all samples' releases count for each sample, and the guarantee is the
client's, not better for a sample. What follows from them (the server's steps, its answers, a back
that learns from these) is post-processing. Losses stay on the client, and devices are
not scored: how many answers are right would be exact. A round that a kill interrupted counts.

No subsampling is claimed: the server knows who takes part, and every sample is used in each epoch.
Where something leaves the client without noise there is no epsilon, and the report says why.

The accountant is opacus' (Renyi differential privacy). Its amplification formula would be wrong
here in any case: it is for Poisson sampling, and rounds choose a fixed number of clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from inspect import unwrap
from typing import Any, Final

from edge_sdk.checks import check_fields
from edge_sdk.errors import ConfigurationError
from edge_sdk.nets.supernet import Supernet
from edge_sdk.records import inline
from edge_sdk.training.protocol.client_part import Noise
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.weights import is_statistic
from profiles.checks import number
from server.training.core.weighted_mean import by_depth_and_loss
from server.training.methods.method import Method

DELTA: Final = 1e-5
# opacus' own default orders stop at 63, where a small epsilon is not yet tight
ORDERS: Final = [1 + x / 10 for x in range(1, 100)] + [*range(11, 64), 128, 256, 512, 1024]
# By their own numbers; a recipe's parts may change that.
NOISED: Final = "fedavg, fedprox, splitfed-v1, splitfed-v2, minibatch-sfl, multi-exit, splitgp,\
 scala, splitlpf and besplit"


@dataclass(frozen=True, slots=True)
class PrivacySettings:
    """The noise that a recipe asks for, and the delta that epsilon is given for.

    Attributes:
        limits: the noise; none by default.
        delta: chance that the bound does not hold; below one over the number of clients.
    """

    limits: Noise = field(default_factory=Noise, metadata=inline())
    delta: float = DELTA

    def __post_init__(self) -> None:
        check_fields(self, delta=number(above=0, below=1))

    def noise(self) -> Noise | None:
        """The noise for the plan; None for a recipe that asks for none."""
        return None if self.limits == Noise() else self.limits


@dataclass(frozen=True, slots=True)
class Mechanism:
    """Gaussian noise, so many times over.

    Attributes:
        of: what is released.
        multiplier: the noise's standard deviation over the sensitivity.
    """

    of: str
    multiplier: float
    releases: int


def guarded(method: Method, noise: Noise | None) -> Method:
    """The method with noise on what its clients give away.

    Raises: ConfigurationError where that cannot be, or where nothing could account for it.
    """
    if noise is None:
        return method
    part = method.client
    if part.whole and (noise.feature_clip is not None or noise.feature_sigma):
        raise ConfigurationError(
            f"privacy: {method.name} sends no features: expected update_clip and update_sigma"
        )
    why = _unaccountable(method, noise)
    if why is not None:
        raise ConfigurationError(
            f"privacy: {method.name} {why}. Take one of {NOISED}, or leave [privacy] out"
        )
    if find_spec("opacus") is None:
        raise ConfigurationError(
            "privacy: expected opacus to account for the noise; install splitedge[privacy]"
        )
    return replace(method, client=replace(part, noise=noise))


def _unaccountable(method: Method, noise: Noise) -> str | None:
    """What the method gives away that no noise covers; None where there is nothing."""
    part = method.client
    if unwrap(method.weigh) is by_depth_and_loss:
        return "weighs clients by their losses, and noise covers no loss"
    if part.meta is not None or part.inversion is not None or part.views:
        return "sends a second view or trains a guard against inversion, which noise does not cover"
    if noise.update_clip is not None and part.exit_head and not method.share_exits:
        return (
            "sends exit heads that stay with their clients beside the update, without noise:"
            " expected shared exits, or no noise on updates"
        )
    return None


def check_network(method: Method, net: Supernet) -> None:
    """See that a sample says nothing outside its own features and the update's weights.

    Raises: ConfigurationError for BatchNorm under noise.
    """
    if method.client.noise is None:
        return
    if any(is_statistic(f".{name}") for name, _ in net.named_buffers()):
        raise ConfigurationError(
            f"privacy: {net.name} has BatchNorm, which mixes samples and whose running statistics"
            ' no noise covers: expected train.norm = "group", or another backbone'
        )


def privacy_of(
    method: Method,
    plans: Mapping[str, Plan],
    rows: Sequence[Mapping[str, Any]],
    delta: float,
    interrupted: Sequence[Mapping[str, int]] = (),
) -> dict[str, Any] | None:
    """What a run gives away of the client it asked most of, as a report has it.

    Args:
        rows: the report's rounds; who was asked counts, whether it answered or not.
        interrupted: n_k by client, of each round that began and is in no row
            (server.training.fleet.started_rounds).
    Returns: None for a run without noise; an epsilon of None where there is none, and `why`.
    """
    noise = method.client.noise
    if noise is None:
        return None
    said: dict[str, Any] = {
        "unit": "client",
        "of": "all inputs of one client, replaced by as many others with the same labels",
        "against": "a server that follows the plan",
        "labels": method.labels,
        "sampling_rate": 1.0,
        "delta": delta,
        "interrupted_rounds": len(interrupted),
    }
    why = uncovered(method)
    if why is not None:
        return said | {"epsilon": None, "why": why}
    asked: Counter[str] = Counter()
    samples: Counter[str] = Counter()
    for row in rows:
        asked.update({*row["participants"], *row["missing"], *row["refused"]})
        samples.update(row["samples"])
    for each in interrupted:
        asked.update(each.keys())
        samples.update(each)
    # plans differ by depth alone; one who was asked before the first checkpoint may have none now
    some = next(iter(plans.values()), None)
    by_client = {
        name: mechanisms(noise, plan, samples[name], rounds)
        for name, rounds in asked.items()
        if (plan := plans.get(name, some)) is not None
    }
    spent = {name: epsilon(each, delta) for name, each in by_client.items()}
    most = max(spent, key=lambda name: spent[name], default=None)
    if most is None:
        return said | {"epsilon": 0.0, "why": None}
    return said | {
        "epsilon": spent[most],
        "why": None,
        "client": most,
        "mechanisms": [
            {"of": m.of, "noise_multiplier": m.multiplier, "releases": m.releases}
            for m in by_client[most]
        ],
        "accountant": f"Renyi, opacus {version('opacus')}",
    }


def uncovered(method: Method) -> str | None:
    """What leaves a client without noise, so that there is no epsilon; None where nothing does."""
    noise = method.client.noise
    if noise is None or not noise.update_sigma:
        return "updates carry what was learnt from the inputs, and there is no noise on them"
    if not method.client.whole and not noise.feature_sigma:
        return "features carry the inputs, and there is no noise on them"
    return None


def mechanisms(noise: Noise, plan: Plan, samples: int, rounds: int) -> list[Mechanism]:
    """What one client gives away in so many rounds.

    Args:
        samples: n_k, summed over the rounds that it began.
    """
    found = [Mechanism("updates", noise.update_sigma / 2, rounds)]
    if not plan.part.whole:
        numbers = plan.training
        counted = numbers.epochs * samples
        if numbers.iterations is not None:
            counted = numbers.iterations * numbers.batch * rounds
        found.append(Mechanism("features", noise.feature_sigma / 2, counted))
    return found


def epsilon(found: Sequence[Mechanism], delta: float) -> float:
    """Of Gaussian mechanisms one after another, each free to depend on what those before it gave.

    A bound: 6 to 12 % above the exact figure (Balle and Wang 2018, Theorem 8) for 1 to 20.

    Returns: infinity where a mechanism has no noise.
    """
    # an optional package, and the import takes a second
    from opacus.accountants.analysis import rdp  # noqa: PLC0415

    live = [m for m in found if m.releases]
    if any(m.multiplier == 0 for m in live):
        return math.inf
    if not live:
        return 0.0
    total = sum(
        rdp.compute_rdp(q=1.0, noise_multiplier=m.multiplier, steps=m.releases, orders=ORDERS)
        for m in live
    )
    spent, _ = rdp.get_privacy_spent(orders=ORDERS, rdp=total, delta=delta)
    return float(spent)
