"""A job of the engine: one admitted query, its sender, and who is told of the outcome."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from edge_sdk.session import Array
from server.backend.ladder import Entry, LadderEngine
from server.errors import ServerError
from server.tracing.query_traces import QueryTrace

Done = Callable[[Array | ServerError], None]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One admitted query.

    Attributes:
        deadline: on the monotonic clock, or None.
        done: called once, in the engine's thread, with the outputs or the error; must not wait.
        sender: the device, or the address, whose share of the engine it takes.
        at: when it came, on the monotonic clock.
        trace: of the query, if it is traced.
    """

    engine: LadderEngine
    entry: Entry
    deadline: float | None
    done: Done
    sender: str = ""
    at: float = field(default_factory=time.monotonic)
    trace: QueryTrace | None = None

    @property
    def rows(self) -> int:
        """Number of samples."""
        return len(self.entry.array)
