"""Observers of the engine: what each batch took, and how each query ended."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from edge_sdk.session import Array
from server.backend.ladder import LadderEngine
from server.errors import ServerError

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Told of all batches and queries, in the threads that run them; it must not wait."""

    def ran(
        self, engine: LadderEngine, rows: int, waits_s: Sequence[float], seconds: float
    ) -> None:
        """Take a batch of `rows` samples that has run for `seconds`.

        Args:
            waits_s: how long each of its queries had waited for the engine.
        """

    def settled(self, engine: LadderEngine, seconds: float, outcome: Array | ServerError) -> None:
        """Take the outcome of a query, and the seconds since it was decoded."""


class Observers:
    """Observers that are told one after the other; the failure of one is logged."""

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()

    def add(self, observer: Observer) -> None:
        """Tell one more from now on."""
        self._all = (*self._all, observer)

    def ran(
        self, engine: LadderEngine, rows: int, waits_s: Sequence[float], seconds: float
    ) -> None:
        """Tell all of a batch."""
        for one in self._all:
            try:
                one.ran(engine, rows, waits_s, seconds)
            except Exception:  # the engine's thread must live on
                logger.exception("an observer of batches failed")

    def settled(self, engine: LadderEngine, seconds: float, outcome: Array | ServerError) -> None:
        """Tell all of a query's outcome."""
        for one in self._all:
            try:
                one.settled(engine, seconds, outcome)
            except Exception:  # the engine's thread must live on
                logger.exception("an observer of queries failed")
