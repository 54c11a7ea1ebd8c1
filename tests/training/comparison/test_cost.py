"""The cost of a training up to an accuracy, by hand-made curves."""

from __future__ import annotations

from typing import Any

from server.training.comparison.cost import Reached, cost_to


def test_cost_counts_every_round_up_to_the_first_that_reaches_it() -> None:
    rows: list[dict[str, Any]] = [
        {"accuracy": 0.3, "seconds": 1.5, "bytes_up": 10, "bytes_down": 20},
        # not measured, but paid for
        {"accuracy": None, "seconds": 1.0, "bytes_up": 10, "bytes_down": 20},
        {"accuracy": 0.6, "seconds": 2.0, "bytes_up": 11, "bytes_down": 22},
        {"accuracy": 0.5, "seconds": 9.0, "bytes_up": 99, "bytes_down": 99},
    ]
    assert cost_to(0.6, rows) == Reached(3, 4.5, 31, 62)
    assert cost_to(0.2, rows) == Reached(1, 1.5, 10, 20)
    assert cost_to(0.61, rows) is None
    assert cost_to(0.1, []) is None
    assert Reached(3, 4.5, 31, 62).bytes_total == 93
