"""Spans: named times of a trace, with their place in it. Pure: nothing is sent here."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from edge_sdk.wire.traceparent import TraceContext

Attribute = str | int | float | bool
Kind = Literal["internal", "client", "server"]

TEXT_MAX: Final = 200


@dataclass(frozen=True, slots=True)
class Span:
    """One span that has ended.

    Attributes:
        context: its own place. parent: None for the first span of a trace.
        begin_ns, end_ns: wall time, nanoseconds since 1970.
        links: spans of other traces that it has to do with.
        error: why it did not do what it was for; empty if it did.
    """

    name: str
    kind: Kind
    context: TraceContext
    parent: TraceContext | None
    begin_ns: int
    end_ns: int
    attributes: Mapping[str, Attribute] = field(default_factory=dict)
    links: tuple[TraceContext, ...] = ()
    error: str = ""


class Sampler:
    """Chooses what is traced, and makes ids. Several threads may use it.

    Args:
        share: of what is offered that is traced, in [0, 1].
    """

    def __init__(self, share: float) -> None:
        self._share = share
        # its own, from the system's entropy: a program that calls random.seed(0) would otherwise
        # give every device the same ids
        self._random = random.Random()  # noqa: S311 - ids of traces are no secrets

    def chooses(self) -> bool:
        """Whether the next one is traced."""
        return self._random.random() < self._share

    def root(self) -> TraceContext:
        """The place of the first span of a new trace."""
        return TraceContext(self._random.getrandbits(128) or 1, self._span_id())

    def child(self, parent: TraceContext) -> TraceContext:
        """The place of a new span under `parent`."""
        return TraceContext(parent.trace_id, self._span_id())

    def _span_id(self) -> int:
        return self._random.getrandbits(64) or 1


class WallClock:
    """Wall time of moments that a monotonic clock told.

    It looks at both clocks once, when it is made, so that the times of one trace fit together
    whatever happens to the wall clock.

    Args:
        now_s: the monotonic clock's time now, in seconds.
    """

    __slots__ = ("_offset_ns",)

    def __init__(self, now_s: float) -> None:
        self._offset_ns = time.time_ns() - round(now_s * 1e9)

    def ns(self, moment_s: float) -> int:
        """Nanoseconds since 1970 at a moment of the monotonic clock."""
        return self._offset_ns + round(moment_s * 1e9)
