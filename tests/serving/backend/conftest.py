"""An engine held at a gate, and batchers before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from server.backend.batcher import Batcher
from tests.serving.backend.gated_engine import GatedEngine

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


@pytest.fixture(scope="module")
def shared_engine(exported: Exported) -> GatedEngine:
    return GatedEngine(exported)


@pytest.fixture
def engine(shared_engine: GatedEngine) -> Iterator[GatedEngine]:
    shared_engine.batches.clear()
    shared_engine.entered.clear()
    shared_engine.threads.clear()
    yield shared_engine
    shared_engine.gate.set()


@pytest.fixture
def start(engine: GatedEngine) -> Iterator[Callable[..., Batcher]]:
    """Starts batchers and stops them, with the gate open or closed."""
    started: list[Batcher] = []

    def make(**options: int) -> Batcher:
        started.append(Batcher(**options))
        return started[-1]

    yield make
    engine.gate.set()
    for batcher in started:
        batcher.stop()
