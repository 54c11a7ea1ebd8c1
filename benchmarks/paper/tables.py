"""The papers' tables as recipes: the training at each scale, and the printed figures.

`smoke` shows that a table runs, on the digits. `cpu` is for two cores and shows orderings, on
Fashion-MNIST. `full` has the paper's numbers, as far as it states them, and is for a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from benchmarks.paper.tuned import tuned_numbers

Scale = Literal["smoke", "cpu", "full"]
Changes = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table.

    Attributes:
        recipe: its changes to the scale's recipe.
        paper: the paper's figures in %, by measure (benchmarks.paper.measures).
    """

    name: str
    recipe: Changes
    paper: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Table:
    """One table of a paper; equal to itself alone.

    Attributes:
        source: where in the paper. data: data set of its figures.
        measures: reported for every row (benchmarks.paper.measures).
        scales: the recipe of each scale, which rows change.
        tuned: scales at which methods have the numbers that the sweep chose for them
            (benchmarks.paper.tuned); at the others they have the paper's.
        sweep: its clients (benchmarks.tuning.sweep); None for those of the table's data set.
    """

    title: str
    source: str
    data: str
    measures: Sequence[str]
    rows: Sequence[Row]
    scales: Mapping[Scale, Changes]
    tuned: Sequence[Scale] = ("cpu",)
    sweep: str | None = None

    def tuned_numbers(self, scale: Scale) -> Mapping[str, Changes]:
        """Changes to a recipe by method, that its sweep chose; none at scales that have none."""
        if scale not in self.tuned:
            return {}
        return tuned_numbers(self.sweep or self.scales[scale]["data"]["name"])


def over(base: Changes, changes: Changes) -> dict[str, Any]:
    """`base` with `changes` laid over it, table by table."""
    merged = dict(base)
    for name, value in changes.items():
        inner = merged.get(name)
        if isinstance(value, Mapping) and isinstance(inner, Mapping):
            merged[name] = over(inner, value)
        else:
            merged[name] = value
    return merged


def _smoke(**changes: Any) -> dict[str, Any]:
    """Less than a minute: four clients with a hundred digits each, two rounds."""
    return over(
        {
            "data": {"name": "digits", "clients": 4, "train_max": 400, "test_max": 200},
            "train": {
                "backbone": "tiny",
                "rounds": 2,
                "learning_rate": 0.05,
                "batch": 20,
                "momentum": 0.9,
            },
            "evaluate": {"every": 2},
        },
        changes,
    )


def _cpu(**changes: Any) -> dict[str, Any]:
    """Fashion-MNIST on `cnn6`, about a hundred thousand samples a run."""
    return over(
        {
            "data": {"name": "fashion-mnist", "train_max": 10_000, "test_max": 2_000},
            "train": {
                "backbone": "cnn6",
                "depth": 2,
                "learning_rate": 0.05,
                "batch": 32,
                "momentum": 0.9,
            },
            "evaluate": {"every": 1},
        },
        changes,
    )


def _number(**numbers: Any) -> dict[str, Any]:
    return {"method_numbers": numbers}


_DIRICHLET = {"partition": "dirichlet", "numbers": {"concentration": 0.5}}
_FLEET = {"memory_gb": [1, 6], "latency_ms": [20, 200]}

_SUPERSFL_FUSION: Final = Table(
    "SuperSFL: how the two gradients are joined",
    "SuperSFL, Fig. 6",
    "CIFAR-10, 50 clients",
    ["accuracy"],
    [
        Row(
            "depth and loss",
            _number(fusion="tpgf", normalise_weights=False),
            {"accuracy": 96.93},
        ),
        Row("no loss", _number(fusion="no_loss", normalise_weights=False), {"accuracy": 91.47}),
        Row("no depth", _number(fusion="no_depth", normalise_weights=False), {"accuracy": 88.66}),
        Row("equal", _number(fusion="equal", normalise_weights=False), {"accuracy": 85.89}),
        Row("depth and loss, weights sum to 1", _number(normalise_weights=True)),
    ],
    {
        "smoke": _smoke(method="supersfl", data=_DIRICHLET, train=_FLEET),
        "cpu": _cpu(
            method="supersfl",
            data={"clients": 10, **_DIRICHLET},
            train={"rounds": 10, "depth": None, **_FLEET},
        ),
        "full": {
            "method": "supersfl",
            "data": {"name": "cifar-10", "clients": 50, **_DIRICHLET},
            "train": {
                "backbone": "vgg11",
                "rounds": 100,
                "learning_rate": 0.05,
                "batch": 64,
                "momentum": 0.9,
            },
        },
    },
)

_SUPERSFL: Final = Table(
    "SuperSFL against split and federated learning",
    "SuperSFL, Table I",
    "CIFAR-10, 50 clients; the paper's SFL, and its DFL, of which there is none here",
    ["accuracy", "exits"],
    [
        Row("SuperSFL", {"method": "supersfl"}, {"accuracy": 96.93}),
        Row("SplitFedV1", {"method": "splitfed-v1"}, {"accuracy": 78.84}),
        Row("SplitFedV2", {"method": "splitfed-v2"}),
        Row("multi-exit", {"method": "multi-exit"}),
        Row("FedAvg", {"method": "fedavg"}),
    ],
    _SUPERSFL_FUSION.scales,
)

_BESPLIT: Final = Table(
    "BESplit and its ablations",
    "BESplit, Tables 1 and 4",
    "F-MNIST, 100 clients, kappa 1",
    ["accuracy", "auxiliary"],
    [
        Row("BESplit", {"method": "besplit"}, {"accuracy": 74.89, "auxiliary": 74.11}),
        Row(
            "no evidential aggregation",
            {"method": "besplit", **_number(ablation="no_ea")},
            {"accuracy": 73.04},
        ),
        Row(
            "weights by samples",
            {"method": "besplit", **_number(ablation="no_ea", no_ea="samples")},
        ),
        Row("own auxiliary models", {"method": "besplit", **_number(auxiliary="personal")}),
        # a head that pools to a grid of 3 x 3, where the paper pools to one value a channel
        Row(
            "auxiliary models with an exit head",
            {"method": "besplit", **_number(auxiliary_head="exit")},
        ),
        Row(
            "no evidence",
            {"method": "besplit", **_number(ablation="no_evidence")},
            {"accuracy": 73.47},
        ),
        Row(
            "no aleatoric uncertainty",
            {"method": "besplit", **_number(ablation="no_aleatoric")},
            {"accuracy": 74.38},
        ),
        Row(
            "no epistemic uncertainty",
            {"method": "besplit", **_number(ablation="no_epistemic")},
            {"accuracy": 74.11},
        ),
        Row(
            "no collaboration",
            {"method": "besplit", **_number(ablation="no_bcc")},
            {"accuracy": 72.14},
        ),
        Row("SplitFed", {"method": "splitfed-v1"}, {"accuracy": 71.80}),
        Row(
            "MergeSFL",
            {"method": "mergesfl", **_number(speeds=[1.0, 0.75, 0.5, 0.25])},
            {"accuracy": 72.62},
        ),
        Row("FedAvg", {"method": "fedavg"}, {"accuracy": 71.10}),
        Row("FedDyn", {"method": "feddyn"}, {"accuracy": 72.35}),
    ],
    {
        "smoke": _smoke(data=_DIRICHLET),
        "cpu": _cpu(
            data={
                "clients": 20,
                "train_max": 5_000,
                "partition": "dirichlet",
                "numbers": {"concentration": 0.1},
            },
            train={"rounds": 15},
        ),
        "full": {
            "data": {
                "name": "fashion-mnist",
                "clients": 100,
                "partition": "dirichlet",
                "numbers": {"concentration": 1.0},
            },
            "train": {
                "backbone": "resnet18",
                "depth": 2,
                "rounds": 300,
                "learning_rate": 1e-4,
                "batch": 32,
            },
            "round": {"participation": 0.4, "cohort": None},
        },
    },
)

_BESPLIT_IID: Final = Table(
    "BESplit where clients do not differ",
    "none: ours",
    "digits, equal label shares",
    ["accuracy", "auxiliary"],
    [
        # the paper's global pool leaves the small maps of `tiny` too little
        Row("BESplit", {"method": "besplit", **_number(auxiliary_head="exit")}),
        Row("SplitFed", {"method": "splitfed-v1"}),
    ],
    {
        "smoke": _smoke(),
        "cpu": {
            "data": {"name": "digits", "clients": 10},
            "train": {
                "backbone": "tiny",
                "depth": 2,
                "rounds": 30,
                "epochs": 2,
                "learning_rate": 0.05,
                "batch": 16,
                "momentum": 0.9,
            },
            "evaluate": {"every": 1},
        },
    },
)

_SCALA: Final = Table(
    "SCALA and its ablations, two classes a client, a tenth of the clients a round",
    "SCALA, Tables I to III",
    "the paper's figures are lost in extraction",
    ["accuracy"],
    [
        Row("SCALA", {"method": "scala"}),
        Row(
            "local adjustment only",
            {"method": "scala", **_number(adjust="local", server="copies")},
        ),
        Row("concatenation only", {"method": "scala", **_number(adjust="none")}),
        Row("Minibatch-SFL", {"method": "minibatch-sfl"}),
        Row("SplitFedV1", {"method": "splitfed-v1"}),
        Row("FedLC", {"method": "fedlc"}),
    ],
    {
        "smoke": _smoke(
            data={"clients": 5, "partition": "quantity", "numbers": {"per_client": 2}},
            train={"iterations": 3, "batch": 40},
            round={"participation": 0.5},
        ),
        "cpu": _cpu(
            data={
                "clients": 50,
                "partition": "quantity",
                "numbers": {"per_client": 2},
            },
            train={
                "rounds": 40,
                "iterations": 10,
                "batch": 160,
                "learning_rate": 0.03,
                "weight_decay": 5e-4,
            },
            round={"participation": 0.1},
            evaluate={"every": 2},
        ),
        "full": {
            "data": {
                "name": "cifar-10",
                "clients": 100,
                "partition": "quantity",
                "numbers": {"per_client": 2},
            },
            "train": {
                "backbone": "alexnet",
                "depth": 2,
                "rounds": 500,
                "iterations": 20,
                "learning_rate": 0.01,
                "momentum": 0.9,
                "weight_decay": 5e-4,
                "server_clip": 10.0,
                "batch": 320,
            },
            "round": {"participation": 0.1},
        },
    },
    sweep="fashion-mnist-two-classes",
)

_HARMONY: Final = Table(
    "HARMONY against SplitGP, in and out of distribution",
    "HARMONY, Fig. 2(b)",
    "F-MNIST, 50 clients, Shard-2, cnn8",
    ["rho 0", "rho 0.2", "rho 0.4", "rho 0.6", "rho 0.8"],
    [
        Row("HARMONY", {"method": "harmony"}, {"rho 0": 98.10, "rho 0.8": 82.61}),
        Row(
            "SplitGP, lambda 0.2",
            {"method": "splitgp", **_number(personal_share=0.2)},
            {"rho 0": 92.80, "rho 0.8": 77.32},
        ),
        Row(
            "SplitGP, lambda 0.9",
            {"method": "splitgp", **_number(personal_share=0.9)},
            {"rho 0": 98.18, "rho 0.8": 59.25},
        ),
        # the paper prints these three in its Tables 2 to 5 alone
        Row(
            "SplitGP, lambda 0.2, fine-tuned",
            {
                "method": "splitgp",
                **_number(personal_share=0.2, finetune_steps=3, finetune_rate=0.01),
            },
        ),
        Row("multi-exit", {"method": "multi-exit"}),
        Row("SplitFed", {"method": "splitfed-v1"}),
        Row(
            "SplitGP, lambda 0.9, aligned",
            {
                "method": "splitgp",
                **_number(personal_share=0.9),
                "parts": {"align": {"method": "harmony"}},
            },
        ),
        Row("no alignment", {"method": "harmony", **_number(align_weight=0.0)}),
        Row("no stochastic depth", {"method": "harmony", **_number(stochastic_depth=False)}),
        Row(
            "all at one depth",
            {"method": "harmony", "train": {"depth": 3, "depths": None}},
        ),
    ],
    {
        "smoke": _smoke(
            data={"partition": "shards", "numbers": {"per_client": 2, "total": 8}},
            train={"depth": None, **_FLEET},
        ),
        "cpu": _cpu(
            data={
                "clients": 20,
                "train_max": 3_000,
                "partition": "shards",
                "numbers": {"per_client": 2, "total": 40},
            },
            train={
                "rounds": 12,
                "depth": None,
                "depths": [2, 3],
                "batch": 15,
            },
            evaluate={"every": 6},
        ),
        "full": {
            "data": {
                "name": "fashion-mnist",
                "clients": 50,
                "partition": "shards",
                "numbers": {"per_client": 2},
            },
            "train": {
                "backbone": "cnn8",
                "rounds": 120,
                "learning_rate": 0.025,
                "momentum": 0.9,
                "batch": 50,
                "memory_gb": [2, 8],
            },
        },
    },
)


_SCALA_CUT: Final = Table(
    "SCALA by where the network is cut",
    "ours, after SCALA's split points",
    "the paper's figures are lost in extraction",
    ["accuracy"],
    [
        Row(f"{name}, cut after stage {depth}", {"method": method, "train": {"depth": depth}})
        for depth in (2, 3)  # after stage 1, cnn6 and alexnet have no exit head and so no cut
        for name, method in (("SCALA", "scala"), ("SplitFedV1", "splitfed-v1"))
    ],
    {
        "smoke": _SCALA.scales["smoke"],
        "cpu": over(_SCALA.scales["cpu"], {"train": {"rounds": 20}}),
        "full": _SCALA.scales["full"],
    },
    sweep="fashion-mnist-two-classes",
)


_SPLITLPF_FULL: Final[Changes] = {
    "data": {"name": "fashion-mnist", "clients": 10},
    "train": {
        "backbone": "cnn6",
        "depth": 2,
        "rounds": 100,
        "epochs": 2,
        "learning_rate": 0.05,
        "momentum": 0.9,
        "batch": 128,
    },
}


def _splitlpf(name: str, partition: str, figures: Sequence[float]) -> Table:
    names = ("SplitLPF", "PFSL", "SplitGP", "SplitFed", "Ditto", "FedPer", "FedAvg")
    methods: Sequence[Changes] = (
        {"method": "splitlpf"},
        {"method": "pfsl"},
        {"method": "splitgp", **_number(personal_share=0.2)},
        {"method": "splitfed-v1"},
        {"method": "ditto"},
        {"method": "fedper"},
        {"method": "fedavg"},
    )
    # each client is tested on its own classes; where all have all classes, on its own class mix
    tested: Changes = {} if partition == "udd" else {"split": "own-mix"}
    return Table(
        f"SplitLPF on {name}",
        "SplitLPF, Table 2",
        "F-MNIST, 10 clients, 3 + 3 CNN",
        [
            *("clients", "refitted", "local", "jain", "std", "pearson", "local pearson"),
            "zeroed",
        ],
        [
            Row(row, method, {"clients": figure})
            for row, method, figure in zip(names, methods, figures, strict=True)
        ],
        {
            "smoke": _smoke(
                data={"clients": 10, "train_max": 1_000, "partition": partition, **tested}
                | ({"numbers": {"smallest": 30}} if partition == "uds" else {}),
                evaluate={"local": True},
            ),
            "cpu": _cpu(
                data={"clients": 10, "train_max": 13_000, "partition": partition, **tested},
                train={"rounds": 10},
                evaluate={"local": True},
            ),
            "full": over(
                _SPLITLPF_FULL,
                {
                    "data": {"partition": partition, **tested},
                    # all 60,000 samples a round, and ten networks: each round's would take an hour
                    "evaluate": {"local": True, "every": 1 if partition == "uds" else 10},
                },
            ),
        },
    )


# Rows name every number by which they differ: one that the sweep chose must not make two rows one.
_SPLITLPF_ALPHA: Final = Table(
    "SplitLPF by alpha: samples against direction, and the cosine's sign",
    "ours, over the paper's grid",
    "the paper prints no figures of its sweep",
    ["clients", "jain", "std", "zeroed"],
    [
        *(
            Row(
                f"alpha {alpha}",
                {"method": "splitlpf", **_number(alpha=alpha, dead_zone=0.2)},
            )
            for alpha in (0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9)
        ),
        *(
            Row(
                f"alpha {alpha}, no dead zone",
                {"method": "splitlpf", **_number(alpha=alpha, dead_zone=0)},
            )
            for alpha in (0.1, 0.2, 0.5)
        ),
        *(
            Row(
                f"alpha {alpha}, as printed",
                {"method": "splitlpf", **_number(alpha=alpha, dead_zone=0, signed=False)},
            )
            for alpha in (0.1, 0.5)
        ),
    ],
    {
        "smoke": _smoke(data={"clients": 10, "train_max": 1_000, "partition": "udd"}),
        "cpu": _smoke(
            data={"clients": 10, "train_max": 1_437, "test_max": 360, "partition": "udd"},
            train={"rounds": 30, "epochs": 2, "batch": 16},
            evaluate={"every": 30},
        ),
        "full": over(_SPLITLPF_FULL, {"data": {"partition": "udd"}}),
    },
)

_UNSEEN: Final = {"rho": 0.4}  # tests clients on classes that they lack too
_PART_OF_DEFAULT: Final = {
    "method": "scala",
    "numbers": {
        "adjust": "local",
        "server": "in_turn",
        "share_batches": False,
        "strength": 0.5,
        "least_share": 0.01,
    },
}
_DEFAULT: Final = Table(
    "The default recipe against each paper's",
    "ours",
    "no paper has them side by side",
    ["accuracy", "ood", "MB to 80"],
    [
        Row(
            "default",
            {
                "method": "supersfl",
                "parts": {"server": _PART_OF_DEFAULT},
                "train": {"codec": "int8"},
            },
        ),
        Row("SuperSFL", {"method": "supersfl"}),
        Row("SuperSFL, int8", {"method": "supersfl", "train": {"codec": "int8"}}),
        Row("BESplit", {"method": "besplit"}),
        Row("SCALA", {"method": "scala", "train": {"batch": 160}}),
        Row("HARMONY", {"method": "harmony", "train": {"codec": "fp16"}}),
        Row("SplitLPF", {"method": "splitlpf"}),
    ],
    {
        "smoke": _smoke(data=_DIRICHLET, train=_FLEET, evaluate=_UNSEEN),
        "cpu": {
            "evaluate": _UNSEEN,
            "data": {
                "name": "digits",
                "clients": 10,
                "partition": "dirichlet",
                "numbers": {"concentration": 0.1},
            },
            "train": {
                "backbone": "tiny",
                "rounds": 30,
                "epochs": 2,
                "batch": 16,
                "learning_rate": 0.05,
                "momentum": 0.8,
                **_FLEET,
            },
        },
        "full": {
            "evaluate": _UNSEEN,
            "data": {
                "name": "fashion-mnist",
                "clients": 50,
                "partition": "dirichlet",
                "numbers": {"concentration": 0.1},
            },
            "train": {
                "backbone": "cnn8",
                "rounds": 100,
                "batch": 50,
                "learning_rate": 0.025,
                "momentum": 0.9,
                "memory_gb": [2, 8],
            },
        },
    },
)

TABLES: Final[Mapping[str, Table]] = {
    "default": _DEFAULT,
    "supersfl": _SUPERSFL,
    "supersfl-fusion": _SUPERSFL_FUSION,
    "besplit": _BESPLIT,
    "besplit-iid": _BESPLIT_IID,
    "scala": _SCALA,
    "scala-cut": _SCALA_CUT,
    "harmony": _HARMONY,
    "splitlpf-alpha": _SPLITLPF_ALPHA,
    "splitlpf-udd": _splitlpf("UDD", "udd", (87.28, 87.40, 86.30, 85.67, 86.70, 86.19, 86.14)),
    "splitlpf-uds": _splitlpf("UDS", "uds", (82.95, 82.43, 82.13, 78.77, 81.28, 81.98, 80.69)),
    "splitlpf-udds": _splitlpf("UDDS", "udds", (92.85, 92.32, 91.93, 88.44, 91.60, 91.72, 91.71)),
}
