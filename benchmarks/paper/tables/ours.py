"""Tables that no paper has: the default recipe against the papers', and a row for a test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from benchmarks.paper.tables.scales import DIRICHLET, FLEET, smoke
from benchmarks.paper.tables.table import Row, Table

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
        "smoke": smoke(data=DIRICHLET, train=FLEET, evaluate=_UNSEEN),
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
                **FLEET,
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


_REPEATED: Final = Table(
    "A row that a test trains again: whether committed figures still come out",
    "ours",
    "no paper has it",
    ["accuracy", "clients"],
    [
        Row("SuperSFL", {"method": "supersfl", "method_numbers": {"share_exits": True}}),
    ],
    {
        "smoke": {
            "data": {
                "name": "digits",
                "clients": 3,
                "partition": "dirichlet",
                "numbers": {"concentration": 10.0},
            },
            "train": {
                "backbone": "tiny",
                "depths": [2, 3],
                "rounds": 6,
                "learning_rate": 0.1,
                # without momentum and in small batches, small differences grow least
                "batch": 8,
                # a measured choice would change the bits from run to run
                "memory_format": "contiguous",
            },
            "evaluate": {"every": 6},
        }
    },
)

TABLES: Final[Mapping[str, Table]] = {
    "default": _DEFAULT,
    "repeated": _REPEATED,
}
