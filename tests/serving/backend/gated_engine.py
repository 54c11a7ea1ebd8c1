"""An engine held at a gate, and queries that note what becomes of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from server.backend.batcher import Batcher
from server.backend.jobs import Job
from server.backend.ladder import Entry, LadderEngine
from server.errors import ServerError
from tests.serving.held_engine import HeldEngine

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

Array = NDArray[Any]


class GatedEngine(HeldEngine):
    """An engine behind a gate that is open at first, and counting what it is given.

    It fails on any batch that holds a sample of nothing but 16s, and where two threads run it.
    """

    def __init__(self, exported: Exported) -> None:
        super().__init__(exported)
        self.gate.set()
        self.batches: list[int] = []
        self.threads: list[str] = []
        self._running = threading.Lock()

    def run(self, entries: Sequence[Entry]) -> list[Array]:
        assert self._running.acquire(blocking=False), "two batches at once"
        try:
            self.batches.append(len(entries))
            self.threads.append(threading.current_thread().name)
            answers = super().run(entries)
            if any((entry.array == 16).all() for entry in entries):
                raise ValueError("all white")
            return answers
        finally:
            self._running.release()


class Asked:
    """One submitted query and its outcomes, of which there must be one."""

    def __init__(self, batcher: Batcher, engine: LadderEngine, x: Array, **more: Any) -> None:
        self._settled = threading.Event()
        self.outcomes: list[Array | ServerError] = []
        entry = Entry(more.get("depth", 0), x)
        sender = more.get("sender", "")
        job = Job(engine, entry, more.get("deadline"), self._done, sender)
        batcher.submit(job, may_run_here=more.get("may_run_here", False))

    @property
    def outcome(self) -> Array | ServerError:
        assert self._settled.wait(20), "no outcome"
        return self.outcomes[0]

    @property
    def answer(self) -> Array:
        assert not isinstance(self.outcome, ServerError), self.outcome
        return self.outcome

    def _done(self, outcome: Array | ServerError) -> None:
        self.outcomes.append(outcome)
        self._settled.set()


def hold(batcher: Batcher, engine: GatedEngine, x: Array) -> Asked:
    """Have the engine busy with one query until the gate opens."""
    engine.gate.clear()
    engine.entered.clear()
    first = Asked(batcher, engine, x)
    assert engine.entered.wait(10)
    return first


def sample(exported: Exported, index: int) -> Array:
    return exported.x[index : index + 1]
