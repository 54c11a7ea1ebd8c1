"""SplitLPF: three ways in which clients differ, and its weight of samples against direction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.paper.tables.scales import cpu, number, smoke
from benchmarks.paper.tables.table import Changes, Row, Table, over

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
        {"method": "splitgp", **number(personal_share=0.2)},
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
            "smoke": smoke(
                data={"clients": 10, "train_max": 1_000, "partition": partition, **tested}
                | ({"numbers": {"smallest": 30}} if partition == "uds" else {}),
                evaluate={"local": True},
            ),
            "cpu": cpu(
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
                {"method": "splitlpf", **number(alpha=alpha, dead_zone=0.2)},
            )
            for alpha in (0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 0.9)
        ),
        *(
            Row(
                f"alpha {alpha}, no dead zone",
                {"method": "splitlpf", **number(alpha=alpha, dead_zone=0)},
            )
            for alpha in (0.1, 0.2, 0.5)
        ),
        *(
            Row(
                f"alpha {alpha}, as printed",
                {"method": "splitlpf", **number(alpha=alpha, dead_zone=0, signed=False)},
            )
            for alpha in (0.1, 0.5)
        ),
    ],
    {
        "smoke": smoke(data={"clients": 10, "train_max": 1_000, "partition": "udd"}),
        "cpu": smoke(
            data={"clients": 10, "train_max": 1_437, "test_max": 360, "partition": "udd"},
            train={"rounds": 30, "epochs": 2, "batch": 16},
            evaluate={"every": 30},
        ),
        "full": over(_SPLITLPF_FULL, {"data": {"partition": "udd"}}),
    },
)

TABLES: Final[Mapping[str, Table]] = {
    "splitlpf-udd": _splitlpf("UDD", "udd", (87.28, 87.40, 86.30, 85.67, 86.70, 86.19, 86.14)),
    "splitlpf-uds": _splitlpf("UDS", "uds", (82.95, 82.43, 82.13, 78.77, 81.28, 81.98, 80.69)),
    "splitlpf-udds": _splitlpf("UDDS", "udds", (92.85, 92.32, 91.93, 88.44, 91.60, 91.72, 91.71)),
    "splitlpf-alpha": _SPLITLPF_ALPHA,
}
