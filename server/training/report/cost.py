"""Cost of a run: bytes by kind, seconds and joules of training, modelled latency of answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import cycle
from typing import Any, Final

from torch import nn

from profiles.energy import EnergyReading
from server.training.report.metrics import CLIENT_POWER, ClientLoad, modelled_latency
from server.training.run.run import Row, Run

_KWH_J: Final = 3.6e6


def training_cost(rows: Sequence[Row]) -> dict[str, Any]:
    """Seconds and payload bytes of all rounds together."""
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds.update(row["bytes_by_kind"])
    return {
        "seconds": sum(row["seconds"] for row in rows),
        "bytes_up": sum(row["bytes_up"] for row in rows),
        "bytes_down": sum(row["bytes_down"] for row in rows),
        "bytes_by_kind": dict(sorted(kinds.items())),
    }


def answer_latency(
    run: Run, tested: Mapping[str, int], offload_rates: Mapping[str, float]
) -> dict[str, Any]:
    """Modelled latency of all clients' test samples (HARMONY, Eq. 12), in the paper's units.

    Args:
        tested: number of test samples by client.
        offload_rates: share of samples that went to the server by client: 1 without exits, 0 by
            exits alone. A client below 1 runs its exit head on every sample.
    """
    powers = dict(
        zip(run.plans, cycle(run.recipe.evaluate.powers or (CLIENT_POWER,)), strict=False)
    )
    loads = {
        name: _load(run, name, samples, offload_rates[name], powers[name])
        for name, samples in tested.items()
    }
    return {
        "modelled": modelled_latency(loads.values()),
        "unit": "relative, not seconds: HARMONY, Eq. 12; its tables print it / 10^8",
        "means": "parameters run and channels sent for all samples, over its powers and bandwidth",
        "samples": sum(tested.values()),
        "offload_rate": (
            sum(load.samples * load.offload_rate for load in loads.values()) / sum(tested.values())
            if any(tested.values())
            else None
        ),
        "each": {
            name: {
                "power": load.power,
                "samples": load.samples,
                "offload_rate": load.offload_rate,
                "modelled": modelled_latency([load]),
            }
            for name, load in loads.items()
        },
    }


def energy_report(
    reading: EnergyReading,
    what: str,
    rounds: int,
    *,
    accuracy: float | None = None,
    co2_g_kwh: float | None = None,
) -> dict[str, Any]:
    """Joules as a report has them: their source, what they cover, and over how many rounds.

    `watts` is their mean over the time, `watts_per_point` that mean over the accuracy in percent
    (SuperSFL, Table II), and `co2_g` the grams of CO2 for them. Each is None where it is not known.

    Args:
        accuracy: at the end, 0 to 1. co2_g_kwh: grams of CO2 for a kilowatt hour.
    """
    joules = reading.joules
    watts = joules / reading.seconds if joules is not None and reading.seconds > 0 else None
    return asdict(reading) | {
        "of": what,
        "rounds": rounds,
        "watts": watts,
        "watts_per_point": watts / (100 * accuracy) if watts is not None and accuracy else None,
        "co2_g": None if joules is None or co2_g_kwh is None else joules / _KWH_J * co2_g_kwh,
    }


def _load(run: Run, name: str, samples: int, offload_rate: float, power: float) -> ClientLoad:
    plan, net = run.plans[name], run.state.net
    if plan.part.whole:
        return ClientLoad(samples, _size(net.segment(0, None)), 0, 0, 0, 0.0, power)
    return ClientLoad(
        samples=samples,
        front=_size(net.prefix(plan.depth)),
        head=_size(net.exit_head(plan.depth)) if offload_rate < 1 else 0,
        cut_channels=run.state.shape_at(plan.depth)[0],
        suffix=_size(run.state.trunk.suffix(plan.depth)),
        offload_rate=offload_rate,
        power=power,
    )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
