"""The queue before the engine: no waiting when idle, batches when busy."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

import server.backend.batcher
from server.backend.batcher import HANDOVER_S, Batcher
from server.backend.jobs import Job
from server.backend.ladder import Entry, LadderEngine
from server.errors import ServerError
from tests.serving.backend.gated_engine import Array, Asked, GatedEngine, hold, sample
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


def test_a_lone_query_starts_at_once(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher, x = start(), sample(exported, 0)
    direct, queued = [], []
    for _ in range(50):
        began = time.perf_counter()
        engine.run([Entry(0, x)])
        direct.append(time.perf_counter() - began)
        began = time.perf_counter()
        assert Asked(batcher, engine, x).answer.shape == (1, 10)
        queued.append(time.perf_counter() - began)
    # two changes of thread; a batching window of 5 ms, say, would show at once
    assert sorted(queued)[25] < sorted(direct)[25] + 0.003


@pytest.mark.deadline
def test_a_quick_model_runs_where_its_query_arrives_if_the_queue_is_empty(
    start: Callable[..., Batcher],
    engine: GatedEngine,
    exported: Exported,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server.backend.batcher, "HANDOVER_S", 10.0)  # quick on any machine
    batcher, x = start(), sample(exported, 0)
    here = threading.current_thread().name
    first = Asked(batcher, engine, x, may_run_here=True)  # its speed is not known yet
    assert first.answer.shape == (1, 10)
    # the answer is out before the engine's thread has noted the time it took
    wait_until(lambda: not batcher._busy, "the engine's thread stays busy")
    assert engine.threads == ["splitedge-engine"]

    asked = Asked(batcher, engine, x, may_run_here=True)

    assert len(asked.outcomes) == 1  # by the time submit is back
    assert engine.threads[-1] == here
    hold(batcher, engine, x)
    waiting = Asked(batcher, engine, x, may_run_here=True)  # and does not wait for the gate
    assert waiting.outcomes == []
    engine.gate.set()
    assert waiting.answer.shape == (1, 10)
    assert engine.threads[-2:] == ["splitedge-engine"] * 2


def test_a_slow_model_never_holds_up_who_brings_a_query(
    start: Callable[..., Batcher],
    engine: GatedEngine,
    exported: Exported,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server.backend.batcher, "HANDOVER_S", 0.0)  # slow on any machine
    batcher, x = start(), sample(exported, 0)
    for _ in range(3):
        assert Asked(batcher, engine, x, may_run_here=True).answer.shape == (1, 10)
    assert engine.threads == ["splitedge-engine"] * 3


def test_what_piles_up_while_the_engine_is_busy_is_one_batch(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher = start()
    first = hold(batcher, engine, sample(exported, 0))
    others = [Asked(batcher, engine, sample(exported, 1 + i)) for i in range(10)]
    assert batcher.waiting == 10

    engine.gate.set()

    answers = np.concatenate([asked.answer for asked in (first, *others)])
    expected = exported.logits(exported.x[:11])
    np.testing.assert_allclose(answers, expected, atol=1e-4, rtol=0)
    assert engine.batches == [1, 10]
    assert (batcher.load.batches, batcher.load.queries) == (2, 11)


def test_a_batch_holds_at_most_so_many_samples(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher = start(batch_max=8)
    hold(batcher, engine, sample(exported, 0))
    asked = [Asked(batcher, engine, exported.x[:rows]) for rows in (3, 5, 1, 7, 8, 2, 2)]
    engine.gate.set()
    assert [len(one.answer) for one in asked] == [3, 5, 1, 7, 8, 2, 2]
    assert engine.batches == [1, 2, 2, 1, 2]  # 3 + 5, 1 + 7, 8, 2 + 2


def test_queries_of_another_model_wait_for_a_batch_of_their_own(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher, other = start(), GatedEngine(exported)
    hold(batcher, engine, sample(exported, 0))
    asked = [
        Asked(batcher, which, sample(exported, i))
        for i, which in enumerate((engine, engine, other, other, other, engine))
    ]
    engine.gate.set()
    answers = np.concatenate([one.answer for one in asked])
    np.testing.assert_allclose(answers, exported.logits(exported.x[:6]), atol=1e-4, rtol=0)
    assert (engine.batches, other.batches) == ([1, 2, 1], [3])


def test_a_query_longer_than_a_batch_is_computed_in_parts(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher = start(batch_max=8)
    hold(batcher, engine, sample(exported, 0))
    long = Asked(batcher, engine, exported.x[:30], sender="long")
    small = Asked(batcher, engine, sample(exported, 31), sender="small")
    engine.gate.set()
    np.testing.assert_allclose(long.answer, exported.logits(exported.x[:30]), atol=1e-4, rtol=0)
    np.testing.assert_allclose(small.answer, exported.logits(exported.x[31:32]), atol=1e-4, rtol=0)
    assert engine.batches == [1, 2, 1, 1, 1]  # 1 + 7, 8, 8, 7


@pytest.mark.parametrize("senders", [1, 2])
def test_batches_are_short_only_while_several_senders_are_active(
    start: Callable[..., Batcher],
    engine: GatedEngine,
    exported: Exported,
    monkeypatch: pytest.MonkeyPatch,
    senders: int,
) -> None:
    """A lone device has batches of any size; beside another, of so many seconds."""
    monkeypatch.setattr(server.backend.batcher, "SHARED_BATCH_S", 0.0)
    monkeypatch.setattr(server.backend.batcher, "EIGHT_ROWS_S", 1e9)  # eight rows, on any machine
    batcher, x = start(), sample(exported, 0)
    for sender in ("other", "")[-senders:]:
        assert Asked(batcher, engine, x, sender=sender).answer is not None
    hold(batcher, engine, x)
    engine.batches.clear()
    asked = [Asked(batcher, engine, x) for _ in range(24)]
    engine.gate.set()
    assert all(one.answer.shape == (1, 10) for one in asked)
    assert engine.batches == ([24] if senders == 1 else [8, 8, 8])


class Answered:
    """A submitted query whose answer is given for as long as a test wants."""

    def __init__(self, batcher: Batcher, engine: LadderEngine, x: Array) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.thread = ""
        batcher.submit(Job(engine, Entry(0, x), None, self._done))

    def _done(self, _outcome: Array | ServerError) -> None:
        self.thread = threading.current_thread().name
        self.begun.set()
        assert self.go_on.wait(20)


def open_late(engine: GatedEngine) -> None:
    """Open the gate once the batch takes long enough for another thread to give its answers."""
    time.sleep(2 * HANDOVER_S)
    engine.gate.set()


def test_the_engine_computes_the_next_batch_while_the_last_one_is_answered(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher = start(batch_max=1)
    engine.gate.clear()
    slow = Answered(batcher, engine, sample(exported, 0))
    assert engine.entered.wait(10)
    others = [Asked(batcher, engine, sample(exported, at)) for at in (1, 2)]
    open_late(engine)
    assert slow.begun.wait(10)
    for other, at in zip(others, (1, 2), strict=True):
        expected = exported.logits(exported.x[at : at + 1])
        np.testing.assert_allclose(other.answer, expected, atol=1e-4, rtol=0)
    assert not batcher.idle, "one has no answer yet"
    slow.go_on.set()
    wait_until(lambda: batcher.idle, "an answer was not given")


def test_the_engine_gets_one_batch_ahead_of_the_answers_and_no_further(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher = start(batch_max=1)
    engine.gate.clear()
    slow = [Answered(batcher, engine, sample(exported, at)) for at in (0, 1, 2)]
    assert engine.entered.wait(10)
    open_late(engine)
    assert slow[0].begun.wait(10)
    assert slow[1].begun.wait(10)
    assert (slow[0].thread, slow[1].thread) == ("splitedge-answers", "splitedge-engine")
    assert not slow[2].begun.is_set()
    assert engine.batches == [1, 1], "the third waits until the engine's thread is free"
    for each in slow:
        each.go_on.set()
    assert slow[2].begun.wait(10)


def test_stop_waits_for_the_answers_that_are_being_given(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher = start(batch_max=1)
    engine.gate.clear()
    slow = Answered(batcher, engine, sample(exported, 0))
    assert engine.entered.wait(10)
    other = Asked(batcher, engine, sample(exported, 1))
    open_late(engine)
    assert slow.begun.wait(10)
    assert other.answer.shape == (1, 10)
    threading.Timer(0.05, slow.go_on.set).start()
    batcher.stop()
    assert slow.go_on.is_set()
