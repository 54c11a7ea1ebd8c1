"""Jobs of one turn of an event loop: one batch, where the model is quick and the engine idle."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

import server.backend.batcher
from server.backend.batcher import Batcher, _Ran
from server.backend.jobs import Job
from server.backend.ladder import Entry, LadderEngine
from server.backend.turns import JOBS_MOST, Turn
from server.errors import OverloadedError, ServerError
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

Array = NDArray[Any]
Outcomes = list[Array | ServerError]


class CountingEngine(LadderEngine):
    """The real engine, which keeps the sizes of its batches and who ran them."""

    def __init__(self, exported: Exported) -> None:
        super().__init__(exported.folder, exported.manifest)
        self.batches: list[int] = []
        self.threads: set[str] = set()

    def run(self, entries: Sequence[Entry]) -> list[Array]:
        self.batches.append(len(entries))
        self.threads.add(threading.current_thread().name)
        return super().run(entries)


@pytest.fixture
def batcher() -> Iterator[Batcher]:
    batcher = Batcher()
    yield batcher
    batcher.stop()


@pytest.fixture
def engine(exported: Exported) -> CountingEngine:
    return CountingEngine(exported)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the seconds below which a batch is quick."""
    return lambda seconds: monkeypatch.setattr(server.backend.batcher, "HANDOVER_S", seconds)


def learn(batcher: Batcher, engine: CountingEngine, x: Array) -> None:
    """Have an engine timed, by its thread."""
    done = threading.Event()
    batcher.submit(Job(engine, Entry(0, x), None, lambda _: done.set()))
    assert done.wait(10)
    wait_until(lambda: batcher.idle, "the engine stays busy")
    engine.batches.clear()
    engine.threads.clear()


def in_one_turn(batcher: Batcher, jobs: Sequence[tuple[LadderEngine, Array]]) -> list[Outcomes]:
    """The outcomes of jobs that are submitted in one turn of a loop."""
    outcomes: list[Outcomes] = [[] for _ in jobs]

    async def run() -> None:
        turn = Turn(batcher)
        for (engine, x), own in zip(jobs, outcomes, strict=True):
            turn.submit(Job(engine, Entry(0, x), None, own.append))
        await asyncio.sleep(0)  # the end of the turn

    asyncio.run(run())
    wait_until(lambda: all(outcomes), "a job has no outcome")
    assert all(len(own) == 1 for own in outcomes)
    return outcomes


def rows(exported: Exported, count: int) -> list[Array]:
    return [exported.x[number : number + 1] for number in range(count)]


def test_jobs_of_a_turn_are_one_batch_with_an_outcome_each(
    batcher: Batcher, engine: CountingEngine, exported: Exported, quick: Callable[[float], None]
) -> None:
    quick(10.0)
    learn(batcher, engine, exported.x[:1])
    found = in_one_turn(batcher, [(engine, x) for x in rows(exported, 7)])
    answers = np.concatenate([own[0] for own in found])
    np.testing.assert_allclose(answers, exported.logits(exported.x[:7]), atol=1e-4, rtol=0)
    assert engine.batches == [7]
    assert engine.threads == {threading.current_thread().name}
    assert batcher.load.queries == 8


def test_a_job_that_is_alone_in_its_turn_is_computed_at_once(
    batcher: Batcher, engine: CountingEngine, exported: Exported, quick: Callable[[float], None]
) -> None:
    quick(10.0)
    learn(batcher, engine, exported.x[:1])
    outcomes: Outcomes = []

    async def run() -> None:
        turn = Turn(batcher, lambda: True)
        turn.submit(Job(engine, Entry(0, exported.x[:1]), None, outcomes.append))
        assert len(outcomes) == 1

    asyncio.run(run())


def test_each_engine_has_a_batch_of_its_own(
    batcher: Batcher, engine: CountingEngine, exported: Exported, quick: Callable[[float], None]
) -> None:
    quick(10.0)
    other = CountingEngine(exported)
    for each in (engine, other):
        learn(batcher, each, exported.x[:1])
    x = exported.x[:1]
    in_one_turn(batcher, [(engine, x), (engine, x), (other, x), (other, x), (other, x)])
    assert (engine.batches, other.batches) == ([2], [3])


def test_a_batch_is_no_longer_than_a_quick_one_or_than_batches_may_be(
    batcher: Batcher, engine: CountingEngine, exported: Exported, quick: Callable[[float], None]
) -> None:
    quick(10.0)
    learn(batcher, engine, exported.x[:1])
    x = exported.x[:12]
    in_one_turn(batcher, [(engine, x), (engine, x), (engine, x)])
    assert engine.batches == [2, 1]  # 24 rows, then 12: at most 32
    engine.batches.clear()
    batcher._pace(engine).typical_row_s = 4.0
    in_one_turn(batcher, [(engine, one) for one in rows(exported, 4)])
    assert engine.batches[0] == 2  # 8 s; 12 would not be quick


def test_a_slow_engine_gets_its_jobs_at_once_and_in_its_thread(
    batcher: Batcher, engine: CountingEngine, exported: Exported, quick: Callable[[float], None]
) -> None:
    quick(0.0)
    learn(batcher, engine, exported.x[:1])
    in_one_turn(batcher, [(engine, x) for x in rows(exported, 5)])
    assert engine.threads == {"splitedge-engine"}


def test_jobs_of_a_turn_are_bounded(
    batcher: Batcher, engine: CountingEngine, exported: Exported, quick: Callable[[float], None]
) -> None:
    quick(10.0)
    learn(batcher, engine, exported.x[:1])
    in_one_turn(batcher, [(engine, exported.x[:1])] * (JOBS_MOST + 3))
    assert engine.batches == [JOBS_MOST, 3]


def test_a_job_that_is_refused_at_the_end_of_its_turn_is_told(
    batcher: Batcher, engine: CountingEngine, exported: Exported, quick: Callable[[float], None]
) -> None:
    quick(10.0)
    learn(batcher, engine, exported.x[:1])
    outcomes: Outcomes = []

    async def run() -> None:
        turn = Turn(batcher)
        for x in rows(exported, 2):
            turn.submit(Job(engine, Entry(0, x), None, outcomes.append))
        batcher.stop()
        await asyncio.sleep(0)

    asyncio.run(run())
    assert len(outcomes) == 2
    assert all(isinstance(outcome, OverloadedError) for outcome in outcomes)


def test_who_waits_for_pythons_lock_is_quick_and_who_waits_by_itself_is_not(
    batcher: Batcher, engine: CountingEngine
) -> None:
    """The engine's thread waits for that lock as long as requests keep the event loop at work."""
    pace = batcher._pace(engine)
    for number in range(100):  # it seldom has the lock at once
        held_up = number % 10 != 0
        pace.note(0.1, _Ran(seconds=5e-3 if held_up else 1e-4, processor_s=1e-4), rows=1)
    assert pace.is_quick(1)
    other = Batcher()
    try:
        waits = other._pace(engine)
        for _ in range(100):  # for a device of its own, say
            waits.note(0.1, _Ran(seconds=5e-2, processor_s=1e-5), rows=1)
        assert not waits.is_quick(1)
    finally:
        other.stop()
