"""A queue that is full, queries that would be late, and senders that flood: who is refused."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from server.backend.batcher import Batcher
from server.errors import ExpiredError, OverloadedError, ServerError
from tests.serving.backend.gated_engine import Array, Asked, GatedEngine, hold, sample
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


@pytest.mark.deadline
def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    """FAULTS row 8."""
    batcher, x = start(queue_max=4, batch_max=2), sample(exported, 0)
    assert Asked(batcher, engine, x).answer is not None
    hold(batcher, engine, x)
    waiting = [Asked(batcher, engine, x) for _ in range(4)]
    assert batcher.full

    began = time.monotonic()
    with pytest.raises(OverloadedError, match="4 queries") as refused:
        Asked(batcher, engine, x)
    assert time.monotonic() - began < 0.5
    assert 0.05 <= refused.value.retry_after_s <= 10
    assert batcher.load.refused == 1

    engine.gate.set()
    assert all(asked.answer.shape == (1, 10) for asked in waiting)
    assert Asked(batcher, engine, x).answer.shape == (1, 10)


def test_retry_after_grows_with_what_the_engine_needs(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher, x = start(queue_max=8, batch_max=1), sample(exported, 0)
    first = hold(batcher, engine, x)
    time.sleep(0.5)  # how long the engine takes
    engine.gate.set()
    assert first.answer is not None
    hold(batcher, engine, x)
    for _ in range(8):
        Asked(batcher, engine, x)
    with pytest.raises(OverloadedError) as refused:
        Asked(batcher, engine, x)
    # one batch took 0.5 s, a fifth of which enters the mean: 8 batches of 0.1 s
    assert 0.8 <= refused.value.retry_after_s < 8


@pytest.mark.deadline
def test_a_query_whose_deadline_passed_is_never_computed(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    """FAULTS row 8."""
    batcher, x = start(), sample(exported, 0)
    hold(batcher, engine, x)
    now = time.monotonic()
    late = [Asked(batcher, engine, x, deadline=now + 0.01) for _ in range(3)]
    good = Asked(batcher, engine, x, deadline=now + 60)
    wait_until(lambda: time.monotonic() > now + 0.01, "time stands still")

    engine.gate.set()

    assert all(isinstance(asked.outcome, ExpiredError) for asked in late)
    assert good.answer.shape == (1, 10)
    assert engine.batches == [1, 1]
    assert batcher.load.expired == 3


def test_a_query_whose_deadline_would_pass_in_the_queue_is_refused_at_once(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    """FAULTS row 8: what is accepted can still be answered in time."""
    batcher, x = start(), sample(exported, 0)
    slow = hold(batcher, engine, x)
    time.sleep(0.4)
    engine.gate.set()
    assert slow.answer is not None  # one sample took 0.4 s
    hold(batcher, engine, x)
    soon, later = time.monotonic() + 0.2, time.monotonic() + 60

    with pytest.raises(OverloadedError, match="beyond its deadline"):
        Asked(batcher, engine, x, deadline=soon)
    patient = Asked(batcher, engine, x, deadline=later)

    engine.gate.set()
    assert patient.answer.shape == (1, 10)
    assert (batcher.load.refused, batcher.load.expired) == (1, 0)


@pytest.mark.deadline
def test_an_idle_engine_takes_a_query_whatever_it_expects(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    """Else one slow batch would refuse every query for good, because none would be timed."""
    batcher, x = start(), sample(exported, 0)
    slow = hold(batcher, engine, x)
    time.sleep(0.5)
    engine.gate.set()
    assert slow.answer is not None
    wait_until(lambda: not batcher._busy, "the engine's thread stays busy")
    # more than a query takes on a busy machine, less than 1.5 times the slow one
    asked = Asked(batcher, engine, x, deadline=time.monotonic() + 0.6)
    assert asked.answer.shape == (1, 10)


def test_what_is_computed_after_its_deadline_is_not_answered(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    """FAULTS row 8: no accepted query is answered after its deadline."""
    batcher, x = start(), sample(exported, 0)
    engine.gate.clear()
    engine.entered.clear()
    asked = Asked(batcher, engine, x, deadline=time.monotonic() + 0.2)
    assert engine.entered.wait(10)
    time.sleep(0.3)
    engine.gate.set()
    assert isinstance(asked.outcome, ExpiredError)
    assert (batcher.load.queries, batcher.load.expired) == (0, 1)


class Recorded(list[Any]):
    """Outcomes of a query, which note the order in which queries get theirs."""

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__()
        self._name = name
        self._order = order

    def append(self, outcome: Array | ServerError) -> None:
        """Take an outcome."""
        self._order.append(self._name)
        super().append(outcome)


def test_a_query_does_not_wait_behind_a_flood(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    """FAULTS row 22: a device with one query is in the next batch, whatever others queued."""
    batcher = start(batch_max=8)
    hold(batcher, engine, sample(exported, 0))
    flood = [Asked(batcher, engine, exported.x[:8], sender="flood") for _ in range(20)]
    small = Asked(batcher, engine, sample(exported, 1), sender="small")
    order: list[str] = []
    small.outcomes = Recorded("small", order)
    for asked in flood:
        asked.outcomes = Recorded("flood", order)
    engine.gate.set()
    assert all(asked.answer.shape == (8, 10) for asked in flood)
    assert order.index("small") <= 1


def test_in_a_full_queue_a_flood_gives_way_to_others(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    """FAULTS row 22: a flood that fills the queue shuts nobody out."""
    batcher, x = start(queue_max=4), sample(exported, 0)
    hold(batcher, engine, x)
    flood = [Asked(batcher, engine, x, sender="flood") for _ in range(4)]
    small = Asked(batcher, engine, x, sender="small")
    assert isinstance(flood[-1].outcome, OverloadedError)
    with pytest.raises(OverloadedError, match="the queue is full"):
        Asked(batcher, engine, x, sender="flood")
    engine.gate.set()
    assert small.answer.shape == (1, 10)
    assert all(asked.answer.shape == (1, 10) for asked in flood[:3])
    assert batcher.load.refused == 2


def test_the_queue_is_bounded_in_bytes_too(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher = start(queue_max=100, queue_bytes=1000)
    first = hold(batcher, engine, sample(exported, 0))
    waiting = [Asked(batcher, engine, exported.x[:8])]  # 8 samples of 64 bytes: 512
    assert not batcher.full
    waiting.append(Asked(batcher, engine, exported.x[:8]))  # 1024: this one reaches the bound
    assert batcher.full
    with pytest.raises(OverloadedError, match="2 queries of 1024 bytes are waiting"):
        Asked(batcher, engine, sample(exported, 0))

    engine.gate.set()

    assert [len(asked.answer) for asked in (first, *waiting)] == [1, 8, 8]
    assert not batcher.full
    assert len(Asked(batcher, engine, sample(exported, 0)).answer) == 1
