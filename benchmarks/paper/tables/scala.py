"""SCALA: its ablations, where the network is cut, and fewer rounds for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from benchmarks.paper.tables.scales import cpu, number, smoke
from benchmarks.paper.tables.table import Row, Table, over

_SCALA: Final = Table(
    "SCALA and its ablations, two classes a client, a tenth of the clients a round",
    "SCALA, Tables I to III",
    "the paper's figures are lost in extraction",
    ["accuracy"],
    [
        Row("SCALA", {"method": "scala"}),
        Row(
            "local adjustment only",
            {"method": "scala", **number(adjust="local", server="copies")},
        ),
        Row("concatenation only", {"method": "scala", **number(adjust="none")}),
        Row("Minibatch-SFL", {"method": "minibatch-sfl"}),
        Row("SplitFedV1", {"method": "splitfed-v1"}),
        Row("FedLC", {"method": "fedlc"}),
    ],
    {
        "smoke": smoke(
            data={"clients": 5, "partition": "quantity", "numbers": {"per_client": 2}},
            train={"iterations": 3, "batch": 40},
            round={"participation": 0.5},
        ),
        "cpu": cpu(
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

_SCALA_60: Final = replace(
    _SCALA,
    title="SCALA and its ablations on CIFAR-10 with alexnet, 60 rounds in place of 500",
    scales={
        "full": over(
            _SCALA.scales["full"],
            {"train": {"rounds": 60}, "evaluate": {"every": 5}},
        )
    },
)

TABLES: Final[Mapping[str, Table]] = {
    "scala": _SCALA,
    "scala-cut": _SCALA_CUT,
    "scala-60": _SCALA_60,
}
