"""The sweep that every method and baseline gets: eight trials on each data set.

Four pairs of learning rate and momentum, each with two values of one number of the method's own; a
method without one has eight pairs. All trials of a data set have the same clients, rounds and
samples, and the same seed, which no table has. A trial is judged on held-out samples, which no
client trains on; the test part is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from benchmarks.jobs.job import Job
from benchmarks.paper.tables import TABLES, Changes, over

DataName = Literal["digits", "fashion-mnist"]

# Tables have the seeds 0, 1, ...
SEED: Final = 100
RATES: Final[Sequence[tuple[float, float]]] = ((0.2, 0.0), (0.02, 0.9), (0.05, 0.9), (0.1, 0.9))
MORE_RATES: Final[Sequence[tuple[float, float]]] = (
    (0.05, 0.0),
    (0.1, 0.0),
    (0.5, 0.0),
    (0.01, 0.9),
)
# Clients differ, but all methods can learn within a few rounds.
_SKEW: Final = {"partition": "dirichlet", "numbers": {"concentration": 0.3}, "held_out": 0.3}

WORLDS: Final[Mapping[DataName, Changes]] = {
    "digits": {
        "data": {"name": "digits", "clients": 10, **_SKEW},
        "train": {"backbone": "tiny", "depth": 2, "rounds": 30, "epochs": 2, "batch": 16},
        "evaluate": {"every": 5},
    },
    "fashion-mnist": {
        "data": {"name": "fashion-mnist", "clients": 10, "train_max": 5_000, **_SKEW},
        "train": {"backbone": "cnn6", "depth": 2, "rounds": 10, "batch": 32},
        "evaluate": {"every": 2},
    },
}


@dataclass(frozen=True, slots=True)
class Swept:
    """One method in the sweep.

    Attributes:
        recipe: its changes to the data set's recipe.
        own: dotted name of its own number in the recipe, and the values; None where it has none.
        measure: judges a trial (benchmarks.paper.measures).
    """

    recipe: Changes
    own: tuple[str, Sequence[Any]] | None = None
    measure: str = "accuracy"


# Samples of a round: of the digits, all but held-out and test part, twice.
SAMPLES: Final[Mapping[DataName, int]] = {"digits": 2 * 1007, "fashion-mnist": 5_000}
# of MergeSFL's clients in turn, as in its row of BESplit's table
SPEEDS: Final[Sequence[float]] = (1.0, 0.75, 0.5, 0.25)


def _joint(data: DataName) -> Changes:
    """Joint batches of all clients, with as many samples as the others' rounds."""
    world = WORLDS[data]
    batch = world["data"]["clients"] * world["train"]["batch"]
    return {"train": {"batch": batch, "iterations": round(SAMPLES[data] / batch)}}


def _merged(data: DataName) -> Changes:
    """Steps of batches by speed, with as many samples as the others' rounds.

    The fastest clients have the others' batch.
    """
    world = WORLDS[data]
    shares = [SPEEDS[place % len(SPEEDS)] for place in range(world["data"]["clients"])]
    return {"train": {"iterations": round(SAMPLES[data] / (world["train"]["batch"] * sum(shares)))}}


# methods whose rounds are counted in steps
_COUNTED: Final = {"scala": _joint, "mergesfl": _merged}

_STRENGTH: Final = ("parts.server.numbers.strength", (0.5, 0.25))

SWEEP: Final[Mapping[str, Swept]] = {
    "fedavg": Swept({"method": "fedavg"}),
    "fedprox": Swept({"method": "fedprox"}, ("method_numbers.mu", (0.01, 0.1))),
    "feddyn": Swept({"method": "feddyn"}, ("method_numbers.alpha", (0.01, 0.1))),
    "fedlc": Swept({"method": "fedlc"}, ("method_numbers.tau", (1.0, 0.1))),
    "fedper": Swept({"method": "fedper"}, measure="rho 0"),
    "ditto": Swept({"method": "ditto"}, ("method_numbers.strength", (0.1, 1.0)), "rho 0"),
    "splitfed-v1": Swept({"method": "splitfed-v1"}),
    "splitfed-v2": Swept({"method": "splitfed-v2"}),
    "minibatch-sfl": Swept({"method": "minibatch-sfl"}),
    "multi-exit": Swept({"method": "multi-exit"}, ("method_numbers.exit_share", (0.5, 0.2))),
    "splitgp": Swept(
        {"method": "splitgp"}, ("method_numbers.personal_share", (0.2, 0.9)), "rho 0.4"
    ),
    "harmony": Swept({"method": "harmony"}, ("method_numbers.align_weight", (0.1, 1.0)), "rho 0.4"),
    "scala": Swept({"method": "scala"}, ("method_numbers.strength", (1.0, 0.5))),
    "mergesfl": Swept({"method": "mergesfl", "method_numbers": {"speeds": list(SPEEDS)}}),
    "pfsl": Swept({"method": "pfsl"}, measure="rho 0"),
    "splitlpf": Swept({"method": "splitlpf"}, ("method_numbers.dead_zone", (0.0, 0.2)), "rho 0"),
    "supersfl": Swept({"method": "supersfl"}, ("method_numbers.normalise_weights", (False, True))),
    "besplit": Swept({"method": "besplit"}, ("method_numbers.weight_power", (1.0, 0.5))),
    "default": Swept(TABLES["default"].rows[0].recipe, _STRENGTH),
}


def trials_of(method: str, data: DataName) -> list[Job]:
    """The trials of a method on a data set."""
    swept = SWEEP[method]
    base = over(over(WORLDS[data], swept.recipe), {"seed": SEED})
    if method in _COUNTED:
        base = over(base, _COUNTED[method](data))
    pairs = RATES if swept.own else (*RATES, *MORE_RATES)
    name, values = swept.own or ("", (None,))
    jobs = []
    for rate, momentum in pairs:
        for value in values:
            own = nested(name, value) if name else {}
            train = {"learning_rate": rate, "momentum": momentum}
            row = f"{method}: rate {rate:g}, momentum {momentum:g}"
            label = f", {name.rpartition('.')[2]} {value}" if name else ""
            jobs.append(Job(f"tuning-{data}", row + label, over(over(base, own), {"train": train})))
    return jobs


def method_of(row: str) -> str:
    """The method of a trial, by the name of its row."""
    return row.partition(":")[0]


def nested(name: str, value: Any) -> dict[str, Any]:
    """Tables with one value under a dotted name."""
    for part in reversed(name.split(".")):
        value = {part: value}
    found: dict[str, Any] = value
    return found
