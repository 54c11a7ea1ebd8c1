"""The cost of a training up to an accuracy: rounds, seconds and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from server.training.run.run import Row


@dataclass(frozen=True, slots=True)
class Reached:
    """Cost up to the first round that reached a target."""

    rounds: int
    seconds: float
    bytes_up: int
    bytes_down: int

    @property
    def bytes_total(self) -> int:
        """Bytes of both directions."""
        return self.bytes_up + self.bytes_down


def cost_to(target: float, rows: Iterable[Row]) -> Reached | None:
    """Rounds, seconds and bytes up to the first round that measured at least `target`.

    Returns: None where no round did.
    """
    seconds, up, down = 0.0, 0, 0
    for rounds, row in enumerate(rows, start=1):
        seconds += row["seconds"]
        up += row["bytes_up"]
        down += row["bytes_down"]
        if row["accuracy"] is not None and row["accuracy"] >= target:
            return Reached(rounds, seconds, up, down)
    return None
