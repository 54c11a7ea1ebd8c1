"""The real engine behind a gate: queries wait for as long as a test wants."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from server.backend.batcher import Batcher
from server.backend.jobs import Job
from server.backend.ladder import Entry, LadderEngine

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


class HeldEngine(LadderEngine):
    """The real engine behind a gate that is closed at first.

    Attributes:
        gate: set it, and the engine runs. entered: set once it has a batch.
    """

    def __init__(self, exported: Exported) -> None:
        super().__init__(exported.folder, exported.manifest)
        self.gate, self.entered = threading.Event(), threading.Event()

    def run(self, entries: Sequence[Entry]) -> list[NDArray[Any]]:
        self.entered.set()
        assert self.gate.wait(20)
        return super().run(entries)


@contextmanager
def kept_busy(batcher: Batcher, exported: Exported) -> Iterator[threading.Event]:
    """The batcher's engine thread is busy until the event is set, or the block ends."""
    engine = HeldEngine(exported)
    done = threading.Event()
    batcher.submit(Job(engine, Entry(0, exported.x[:1]), None, lambda _: done.set()))
    assert engine.entered.wait(10)
    try:
        yield engine.gate
    finally:
        engine.gate.set()
    assert done.wait(10)
