"""Differential privacy for any method: the noise that a recipe asks for, and its epsilon.

Epsilon is that of one client against a server that follows the plan but is curious (a server that
asks for less noise gets less). It compares all that the server receives from a client with what it
would receive if the client's inputs were replaced by any others, as many and with the same labels.
In each round a client sends

    features   n_k samples an epoch, each of norm at most C_z, with noise s_z * C_z
    an update  of norm at most C_u, with noise s_u * C_u

Two vectors of norm at most C are at most 2C apart, so each release is a Gaussian mechanism of noise
multiplier s / 2. Within a round a client's prefix depends on all of its samples, and so does every
batch of features. So all samples' releases count for each sample: the guarantee is the client's,
and is not better for a single sample. The server's steps, its answers and a last layer that learns
from them are post-processing. Losses stay on the client, and devices are not scored, because a
count of right answers has no noise. A round that a kill interrupted counts.

No subsampling is claimed: the server knows the participants, and each epoch uses every sample.
If something leaves the client without noise there is no epsilon, and the report says why.

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
from edge_sdk.installation import install_command
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
# by their own numbers; a recipe's parts may change that
NOISED: Final = "fedavg, fedprox, feddyn, fedlc, fedper, ditto, splitfed-v1, splitfed-v2,\
 minibatch-sfl, mergesfl, multi-exit, splitgp, scala, pfsl, splitlpf and besplit"


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
    """A number of releases with Gaussian noise.

    Attributes:
        of: what is released.
        multiplier: the noise's standard deviation over the sensitivity.
    """

    of: str
    multiplier: float
    releases: int


def with_noise(method: Method, noise: Noise | None) -> Method:
    """The method with noise on what its clients send.

    Raises: ConfigurationError for a method that sends something that noise cannot cover, or that
        the accountant cannot count.
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
            f"privacy: expected opacus to account for the noise; run `{install_command('privacy')}`"
        )
    return replace(method, client=replace(part, noise=noise))


def _unaccountable(method: Method, noise: Noise) -> str | None:
    """Part of what the method sends that no noise covers, in words; None if there is none."""
    part = method.client
    if unwrap(method.weigh) is by_depth_and_loss:
        return "weighs clients by their losses, and noise covers no loss"
    if part.meta is not None or part.inversion is not None or part.views:
        return "sends a second view or trains a guard against inversion, which noise does not cover"
    if noise.update_clip is not None and part.exit_head and not method.share_exits:
        return (
            "sends exit heads of the clients' own with the update, without noise: expected shared"
            " exits, or no noise on updates"
        )
    return None


def check_network(method: Method, net: Supernet) -> None:
    """Check that samples do not mix in the network.

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
    """The privacy of the client that was asked most in a run, as a report has it.

    Args:
        rows: the report's rounds; every client that was asked counts, whether it answered or not.
        interrupted: n_k by client, of each round that started and is in no row
            (server.training.fleet.started_rounds).
    Returns: None for a run without noise; epsilon is None, with `why`, if there is none.
    """
    noise = method.client.noise
    if noise is None:
        return None
    figures: dict[str, Any] = {
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
        return figures | {"epsilon": None, "why": why}
    asked: Counter[str] = Counter()
    samples: Counter[str] = Counter()
    for row in rows:
        asked.update({*row["participants"], *row["missing"], *row["refused"]})
        samples.update(row["samples"])
    for each in interrupted:
        asked.update(each.keys())
        samples.update(each)
    # plans differ by depth alone; a client asked before the first checkpoint may have none now
    some = next(iter(plans.values()), None)
    by_client = {
        name: mechanisms(noise, plan, samples[name], rounds)
        for name, rounds in asked.items()
        if (plan := plans.get(name, some)) is not None
    }
    spent = {name: epsilon(each, delta) for name, each in by_client.items()}
    most = max(spent, key=lambda name: spent[name], default=None)
    if most is None:
        return figures | {"epsilon": 0.0, "why": None}
    return figures | {
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
    """Data that leave a client without noise, so that there is no epsilon; None if nothing does."""
    noise = method.client.noise
    if noise is None or not noise.update_sigma:
        return "updates carry what was learnt from the inputs, and there is no noise on them"
    if not method.client.whole and not noise.feature_sigma:
        return "features carry the inputs, and there is no noise on them"
    return None


def mechanisms(noise: Noise, plan: Plan, samples: int, rounds: int) -> list[Mechanism]:
    """The releases of one client in so many rounds.

    Args:
        samples: n_k, summed over the rounds that it started.
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
    """Epsilon of Gaussian mechanisms in a row; each may depend on the releases before it.

    It is a bound, 6 to 12 % above the exact figure (Balle and Wang 2018, Theorem 8) for 1 to 20.

    Returns: infinity for a mechanism without noise.
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
