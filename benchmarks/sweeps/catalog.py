"""The sweeps: for each, the recipes of examples/recipes with one value in place of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.reports import RECIPES
from server.training.comparison.values import with_values
from server.training.recipe.recipe import Recipe, load_recipe

Kind = Literal["plain", "auxiliary", "privacy", "cost", "start"]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a sweep's table: a recipe of examples/recipes and what is changed in it.

    Attributes:
        values: by dotted name, as `round.participation`.
        data: data set of the recipe.
        pretrained: whether the training starts from weights that held-out samples gave
            (benchmarks.sweeps.pretraining).
        world: tells lines apart whose last changes are the same.
    """

    recipe: str
    values: Mapping[str, Any]
    data: str = "digits"
    pretrained: bool = False
    world: str = ""

    @property
    def name(self) -> str:
        """Name of the trainings' folders: the recipe, and the last change."""
        key, value = list(self.values.items())[-1]
        words = [self.recipe, self.world.lower(), "pretrained" if self.pretrained else ""]
        return f"{'-'.join(filter(None, words))}_{key.rpartition('.')[2]}-{value}"

    def read(self, rounds: int, *, curve: bool = False, folder: Path | None = None) -> Recipe:
        """The whole recipe, evaluated after the last round alone.

        Args:
            curve: evaluate after every round.
            folder: of the data set's files.
        """
        recipe = load_recipe(RECIPES / f"{self.recipe}-{self.data}.toml")
        recipe = with_values(recipe, self.values)
        if folder is not None and self.data != "digits":
            recipe = replace(recipe, data=replace(recipe.data, folder=folder))
        return replace(
            recipe,
            train=replace(recipe.train, rounds=rounds),
            evaluate=replace(recipe.evaluate, every=1 if curve else rounds),
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Lines of one table."""

    title: str
    lines: Sequence[Line]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep.

    Attributes:
        kind: columns beside the accuracies: none, BESplit-A, epsilon, power and classes, or rounds
            up to an accuracy.
        rounds: of each training.
        about: sentences above the tables.
        first_seed: of the trainings, the others follow.
        held_out: whether held-out samples judge in place of the test part: for sweeps that choose.
    """

    title: str
    kind: Kind
    rounds: int
    groups: Sequence[Group]
    about: str
    first_seed: int = 0
    held_out: bool = False

    @property
    def lines(self) -> Mapping[str, Line]:
        """The lines of all tables by name; one that stands in several tables is trained once."""
        return {line.name: line for group in self.groups for line in group.lines}


def _over(
    recipe: str,
    name: str,
    values: Sequence[Any],
    common: Mapping[str, Any] | None = None,
    data: str = "digits",
) -> list[Line]:
    return [Line(recipe, {**(common or {}), name: value}, data) for value in values]


PARTICIPATION: Final = Sweep(
    "Shares of the clients that take part in a round",
    "plain",
    30,
    [
        Group(method, _over(method, "round.participation", [0.2, 0.5, 1.0]))
        for method in ("scala", "minibatch-sfl", "supersfl", "besplit", "splitfed-v1", "fedavg")
    ],
    "SCALA's Table IV varies the share of the clients that each round draws, here of ten. All else"
    " is as in the recipes; a smaller share trains on fewer samples in as many rounds.",
)
BESPLIT: Final = Sweep(
    "BESplit's own numbers, one at a time",
    "auxiliary",
    20,
    [
        Group("tau", _over("besplit", "method_numbers.tau", [1.0, 2.0, 5.0, 10.0])),
        Group(
            "weight of KD_C (client_share)",
            _over("besplit", "method_numbers.client_share", [0.0, 0.1, 0.2, 0.5, 1.0]),
        ),
        Group(
            "weight of KD_G (server_share)",
            _over("besplit", "method_numbers.server_share", [0.0, 0.1, 0.3, 0.5, 1.0]),
        ),
    ],
    "BESplit's Fig. 6 varies its temperature and the weights of its two distillations, on"
    " Fashion-MNIST; here it is the digits. They train the auxiliary models alone (BESplit-A), so"
    " the whole network (BESplit-G) is the same, bit for bit. A recipe's own value stands in every"
    " table.",
)
SPLITLPF: Final = Sweep(
    "SplitLPF's own numbers, one at a time",
    "plain",
    20,
    [
        Group(
            "alpha",
            _over("splitlpf", "method_numbers.alpha", [0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9, 1.0]),
        ),
        Group("dead_zone", _over("splitlpf", "method_numbers.dead_zone", [0.0, 0.2, 0.4])),
        Group("dropout", _over("splitlpf", "method_numbers.dropout", [0.0, 0.25, 0.5])),
        Group("refit_epochs", _over("splitlpf", "method_numbers.refit_epochs", [0, 1, 2])),
    ],
    "The paper varies alpha; the other numbers are ours. A value of the recipe itself stands"
    " in every table. `clients` is the figure to look at: each client has a last layer of its own.",
)
# equal mixes and more epochs; at this rate some seeds learn little without noise, so the table says
# how much noise a training bears, not what noise costs
_CLEAN: Final = {
    "data.partition": "iid",
    "data.numbers": {},
    "data.held_out": 0.0,
    "train.learning_rate": 0.1,
    "train.momentum": 0.0,
    "train.epochs": 3,
    "privacy.update_clip": 1.0,
}
NOISE: Final = Sweep(
    "Noise on updates and features",
    "privacy",
    20,
    [
        Group(
            "FedAvg: update_sigma",
            [
                Line("fedavg", _CLEAN | {"privacy.update_sigma": sigma})
                for sigma in (0.0, 0.02, 0.05, 0.1, 0.2, 1.0)
            ],
        ),
        Group(
            "SplitFedV1: feature_sigma (update_sigma 0.05)",
            [
                Line(
                    "splitfed-v1",
                    _CLEAN
                    | {
                        "privacy.update_sigma": 0.05,
                        "privacy.feature_clip": 8.0,
                        "privacy.feature_sigma": sigma,
                    },
                )
                for sigma in (0.01, 0.05, 0.1)
            ],
        ),
        Group(
            "HARMONY: noise on returned gradients",
            _over("harmony", "method_numbers.noise", [0.0, 1.0, 10.0]),
        ),
    ],
    "The first two tables are of ten clients with equal mixes of classes, nothing held out, a"
    " learning rate of 0.1 without momentum, three epochs a round and `update_clip = 1`. Epsilon is"
    " a client's, at delta 1e-5 (decision 0008). HARMONY's is its own recipe, where noise on the"
    " gradients that a client returns hides labels, without an epsilon; with 1000, which hides them"
    " from the first round on, one of two seeds diverged and the other guessed.",
)
# roughly a desktop with two cores; only ratios between the methods are read from it
_POWER: Final = {"energy.idle_w": 30.0, "energy.busy_w": 90.0, "energy.co2_g_kwh": 400.0}
METHODS: Final = Sweep(
    "Accuracy by class, and power for a point of accuracy",
    "cost",
    30,
    [
        Group(
            "the digits",
            [
                Line(method, _POWER)
                for method in (
                    "supersfl", "besplit", "scala", "harmony", "splitlpf",
                    "splitfed-v1", "splitfed-v2", "fedavg",
                )
            ],
        )
    ],
    "SuperSFL's Fig. 5 and Table II set power and CO2 beside accuracy. This machine has no meter:"
    " 30 W at rest, 90 W with all cores busy and 400 g of CO2 a kWh are declared, as a user does"
    " in a recipe, and only the ratios between the methods say something. Watts are the mean over"
    " training; a method that trains longer at the same power emits more.",
)  # fmt: skip

# small enough for a minute a training on one core
_SMALL: Final = {"data.clients": 10, "data.train_max": 5_000, "data.test_max": 2_000}


def _started(recipe: str, common: Mapping[str, Any], data: str = "digits") -> list[Line]:
    values = {**common, "data.held_out": 0.1}
    return [Line(recipe, values, data, pretrained) for pretrained in (False, True)]


START: Final = Sweep(
    "A pre-trained start",
    "start",
    20,
    [
        Group(method, _started(method, {}))
        for method in ("supersfl", "splitfed-v1", "fedavg", "besplit")
    ],
    "SuperSFL has 70 % after five rounds, which suggests that it starts from trained weights; the"
    " paper does not say so. Here the weights of `[train] start` were trained on the held-out tenth"
    " of the training part alone, as on a small public set that the server has; no client has these"
    " samples, in either line.",
)
START_FASHION: Final = Sweep(
    "A pre-trained start on Fashion-MNIST",
    "start",
    8,
    [
        Group(method, _started(method, _SMALL, "fashion-mnist"))
        for method in ("supersfl", "splitfed-v1")
    ],
    f"{START.about} Ten clients, 5,000 samples.",
)
BESPLIT_FASHION: Final = Sweep(
    "BESplit's own numbers on Fashion-MNIST, one at a time",
    "auxiliary",
    10,
    [
        Group(name, _over("besplit", f"method_numbers.{number}", values, _SMALL, "fashion-mnist"))
        for name, number, values in (
            ("tau", "tau", [1.0, 5.0, 10.0]),
            ("weight of KD_C (client_share)", "client_share", [0.0, 0.2, 1.0]),
            ("weight of KD_G (server_share)", "server_share", [0.0, 0.3, 1.0]),
        )
    ],
    "BESplit's Fig. 6 varies its temperature and the weights of its two distillations. Here it is"
    " ten clients with 5,000 samples of Fashion-MNIST. A recipe's own value stands in every table.",
)
SPLITLPF_FASHION: Final = Sweep(
    "SplitLPF's own numbers on Fashion-MNIST, one at a time",
    "plain",
    10,
    [
        Group(
            number, _over("splitlpf", f"method_numbers.{number}", values, _SMALL, "fashion-mnist")
        )
        for number, values in (
            ("alpha", [0.1, 0.5, 0.9]),
            ("dead_zone", [0.0, 0.2, 0.4]),
            ("dropout", [0.0, 0.25, 0.5]),
            ("refit_epochs", [0, 1, 2]),
        )
    ],
    "The paper varies alpha; the other numbers are ours. Ten clients with 5,000 samples of"
    " Fashion-MNIST. A value of the recipe itself stands in every table. `clients` is the figure to"
    " look at: each client has a last layer of its own.",
)
# rate, momentum and dead zone are those that the sweep of all methods chose
_CPU_SCALE: Final = {
    "data.clients": 10,
    "data.train_max": 13_000,
    "data.test_max": 2_000,
    "data.held_out": 0.1,
    "train.learning_rate": 0.2,
    "train.momentum": 0.0,
    "method_numbers.dead_zone": 0.0,
    "method_numbers.refit_epochs": 0,
}
_MIXES: Final[Mapping[str, Mapping[str, Any]]] = {
    "UDD": {"data.partition": "udd", "data.numbers": {}},
    "UDDS": {"data.partition": "udds", "data.numbers": {}, "data.split": "own-mix"},
}
SPLITLPF_DROPOUT: Final = Sweep(
    "SplitLPF's dropout before the personal layer, judged on held-out samples",
    "plain",
    10,
    [
        Group(
            mix,
            [
                Line(
                    "splitlpf",
                    {**_CPU_SCALE, **changes, "method_numbers.dropout": dropout},
                    "fashion-mnist",
                    world=mix,
                )
                for dropout in (0.0, 0.5)
            ],
        )
        for mix, changes in _MIXES.items()
    ],
    "The clients, samples and rounds of the `cpu` scale of the paper's tables, with other seeds."
    " Held-out samples, which no client trains on, stand in the place of the test part.",
    first_seed=200,
    held_out=True,
)

SWEEPS: Final[Mapping[str, Sweep]] = {
    "participation": PARTICIPATION,
    "besplit": BESPLIT,
    "splitlpf": SPLITLPF,
    "noise": NOISE,
    "methods": METHODS,
    "start": START,
    "start-fashion-mnist": START_FASHION,
    "besplit-fashion-mnist": BESPLIT_FASHION,
    "splitlpf-fashion-mnist": SPLITLPF_FASHION,
    "splitlpf-dropout": SPLITLPF_DROPOUT,
}
