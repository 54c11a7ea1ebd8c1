"""The table [keep] of agent.toml: hard inputs are kept, if the user asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_sdk.checks import check_fields
from profiles.checks import number, whole


@dataclass(frozen=True, slots=True)
class KeepTable:
    """Settings of kept inputs.

    Attributes:
        folder: of the kept inputs; None keeps none.
        inputs: most inputs. megabytes: largest size of the files together.
        every: shortest time between two inputs kept without a correction, in seconds.
    """

    folder: Path | None = None
    inputs: int = 1000
    megabytes: int = 100
    every: float = 0.0

    def __post_init__(self) -> None:
        check_fields(
            self,
            inputs=whole(1, 1_000_000),
            megabytes=whole(1, 1_000_000),
            every=number(least=0, most=86_400),
        )
