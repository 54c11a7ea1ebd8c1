"""The sweep that every method and baseline gets: eight trials in each world.

Four pairs of learning rate and momentum, each with two values of one number of the method's own; a
method without one has eight pairs. All trials of a world have the same clients, rounds and samples,
and the same seeds, which no table has. A trial is judged on held-out samples, which no client
trains on; the test part is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from benchmarks.jobs.job import Job
from benchmarks.paper.tables.catalog import TABLES
from benchmarks.paper.tables.table import Changes, over

WorldName = Literal[
    "digits", "fashion-mnist", "fashion-mnist-dirichlet", "fashion-mnist-two-classes"
]

RATES: Final[Sequence[tuple[float, float]]] = ((0.2, 0.0), (0.02, 0.9), (0.05, 0.9), (0.1, 0.9))
MORE_RATES: Final[Sequence[tuple[float, float]]] = (
    (0.05, 0.0),
    (0.1, 0.0),
    (0.5, 0.0),
    (0.01, 0.9),
)


@dataclass(frozen=True, slots=True)
class World:
    """The clients of a sweep, and how they train.

    Attributes:
        samples: of a round, of all clients together.
        methods: that are swept; None for all.
        seeds: of each trial; tables have the seeds 0, 1, ... A trial's figure is their mean.
    """

    recipe: Changes
    samples: int
    methods: Sequence[str] | None = None
    seeds: Sequence[int] = (100,)


# Clients differ, but all methods can learn within a few rounds.
_SKEW: Final = {"partition": "dirichlet", "numbers": {"concentration": 0.3}, "held_out": 0.3}

WORLDS: Final[Mapping[WorldName, World]] = {
    "digits": World(
        {
            "data": {"name": "digits", "clients": 10, **_SKEW},
            "train": {"backbone": "tiny", "depth": 2, "rounds": 30, "epochs": 2, "batch": 16},
            "evaluate": {"every": 5},
        },
        samples=2 * 1007,  # all but held-out and test part, twice
    ),
    "fashion-mnist": World(
        {
            "data": {"name": "fashion-mnist", "clients": 10, "train_max": 5_000, **_SKEW},
            "train": {"backbone": "cnn6", "depth": 2, "rounds": 10, "batch": 32},
            "evaluate": {"every": 2},
        },
        samples=5_000,
    ),
    # clients of two tables: a rate that fits ten clients of many classes can be far too high there
    "fashion-mnist-dirichlet": World(
        over(
            TABLES["besplit"].scales["cpu"],
            {"data": {"held_out": 0.3}, "evaluate": {"every": 2}},
        ),
        samples=5_000,
        methods=("fedavg", "feddyn", "splitfed-v1", "mergesfl", "besplit"),
        seeds=(100, 101, 102),
    ),
    "fashion-mnist-two-classes": World(
        over(
            TABLES["scala"].scales["cpu"],
            {"data": {"held_out": 0.3}, "train": {"batch": 32}, "evaluate": {"every": 4}},
        ),
        samples=1_600,  # ten batches of five clients
        methods=("fedlc", "splitfed-v1", "minibatch-sfl", "scala"),
        seeds=(100, 101, 102),
    ),
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


# of MergeSFL's clients in turn, as in its row of BESplit's table
SPEEDS: Final[Sequence[float]] = (1.0, 0.75, 0.5, 0.25)


def _joint(world: World) -> Changes:
    """Joint batches of a round's clients, with as many samples as the others' rounds."""
    recipe = world.recipe
    asked = recipe["data"]["clients"] * recipe.get("round", {}).get("participation", 1)
    batch = round(asked * recipe["train"]["batch"])
    return {"train": {"batch": batch, "iterations": round(world.samples / batch)}}


def _merged(world: World) -> Changes:
    """Steps of batches by speed, with as many samples as the others' rounds.

    The fastest clients have the others' batch.
    """
    recipe = world.recipe
    shares = [SPEEDS[place % len(SPEEDS)] for place in range(recipe["data"]["clients"])]
    return {
        "train": {"iterations": round(world.samples / (recipe["train"]["batch"] * sum(shares)))}
    }


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
    "splitfed-v2": Swept({"method": "splitfed-v2", "round": {"cohort": 1}}),
    "minibatch-sfl": Swept({"method": "minibatch-sfl"}),
    "multi-exit": Swept({"method": "multi-exit"}, ("method_numbers.exit_share", (0.5, 0.2))),
    "splitgp": Swept(
        {"method": "splitgp"}, ("method_numbers.personal_share", (0.2, 0.9)), "rho 0.4"
    ),
    "harmony": Swept(
        {"method": "harmony"}, ("method_numbers.align_weight", (1.0, 10.0)), "rho 0.4"
    ),
    "scala": Swept({"method": "scala"}, ("method_numbers.strength", (1.0, 0.5))),
    "mergesfl": Swept({"method": "mergesfl", "method_numbers": {"speeds": list(SPEEDS)}}),
    "pfsl": Swept({"method": "pfsl"}, measure="rho 0"),
    "splitlpf": Swept({"method": "splitlpf"}, ("method_numbers.dead_zone", (0.0, 0.2)), "rho 0"),
    "supersfl": Swept({"method": "supersfl"}, ("method_numbers.normalise_weights", (False, True))),
    "besplit": Swept({"method": "besplit"}, ("method_numbers.weight_power", (1.0, 0.5))),
    "default": Swept(TABLES["default"].rows[0].recipe, _STRENGTH),
}


def methods_of(name: WorldName) -> Sequence[str]:
    """The methods that are swept in a world."""
    return WORLDS[name].methods or tuple(SWEEP)


def trials_of(method: str, name: WorldName) -> list[Job]:
    """The trials of a method in a world, seed by seed."""
    swept, world = SWEEP[method], WORLDS[name]
    base = over(world.recipe, swept.recipe)
    if method in _COUNTED:
        base = over(base, _COUNTED[method](world))
    pairs = RATES if swept.own else (*RATES, *MORE_RATES)
    own, values = swept.own or ("", (None,))
    jobs = []
    for seed in world.seeds:
        for rate, momentum in pairs:
            for value in values:
                train = {"learning_rate": rate, "momentum": momentum}
                changes = over({"seed": seed, "train": train}, nested(own, value) if own else {})
                row = f"{method}: rate {rate:g}, momentum {momentum:g}"
                label = f", {own.rpartition('.')[2]} {value}" if own else ""
                jobs.append(Job(f"tuning-{name}", row + label, over(base, changes)))
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
