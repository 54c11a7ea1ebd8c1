"""The table [stream] of agent.toml: a source that the agent reads, and sinks of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edge_sdk.checks import check_fields
from profiles.checks import number

EVERY_MOST_S: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class StreamTable:
    """Settings of a stream, as words that edge_sdk.pipeline reads.

    Attributes:
        source: where inputs come from; None for no stream.
        sinks: where answers go; empty for standard output.
        smooth: of the answers' labels; None for none.
        every: shortest time between two inputs, in seconds.
    """

    source: str | None = None
    sinks: tuple[str, ...] = ()
    smooth: str | None = None
    every: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, every=number(least=0, most=EVERY_MOST_S))

    @property
    def asked(self) -> bool:
        """Whether the table sets anything."""
        return self != StreamTable()
