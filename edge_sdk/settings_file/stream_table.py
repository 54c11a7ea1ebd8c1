"""The table [stream] of agent.toml: a source that the agent reads, and sinks of its answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from edge_sdk.checks import check_fields
from profiles.checks import number

EVERY_MOST_S: Final = 86_400.0
TEMPLATE: Final = """\
# [stream] reads inputs from a source, and writes the answers to sinks.
[stream]
# folder:DIR, camera:0, csv:FILE, serial:/dev/ttyUSB0, - for standard input, or module:function.
#source = "folder:pictures"
# -, jsonl:FILE, mqtt://HOST/TOPIC, mqtts://HOST/TOPIC or module:function; by default "-".
#sinks = ["jsonl:answers.jsonl", "mqtt://127.0.0.1/door/answers"]
# majority:N or mean:N smooths the labels of the last N answers.
#smooth = "majority:5"
# Seconds between two inputs, at least; 0 takes them as they come.
#every = 0.0
"""


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
