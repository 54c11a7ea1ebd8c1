"""Recipes of a scale that several tables start from, and parts that they share."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.paper.tables.table import over

DIRICHLET: Final = {"partition": "dirichlet", "numbers": {"concentration": 0.5}}
FLEET: Final = {"memory_gb": [1, 6], "latency_ms": [20, 200]}


def smoke(**changes: Any) -> dict[str, Any]:
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


def cpu(**changes: Any) -> dict[str, Any]:
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


def number(**numbers: Any) -> dict[str, Any]:
    """A change of the method's own numbers."""
    return {"method_numbers": numbers}
