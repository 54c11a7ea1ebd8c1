"""What fails, leaves or stops: every other query gets its one outcome."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from server.backend.batcher import Batcher
from server.backend.jobs import Job
from server.backend.ladder import Entry
from server.errors import BadRequestError, ExpiredError, OverloadedError, ServerError
from tests.serving.backend.gated_engine import Array, Asked, GatedEngine, hold, sample
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported


def test_a_part_that_fails_ends_its_query_once(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher = start(batch_max=8)
    hold(batcher, engine, sample(exported, 0))
    bad = np.concatenate([np.full((1, 1, 8, 8), 16, np.uint8), exported.x[:23]])
    bad[:8] = 16  # the whole first part
    long = Asked(batcher, engine, bad)
    after = Asked(batcher, engine, sample(exported, 1))
    engine.gate.set()
    assert type(long.outcome) is ServerError
    assert after.answer.shape == (1, 10)
    assert len(long.outcomes) == 1
    assert engine.batches == [1, 1, 1]  # nothing of it but the first part


def test_an_answer_that_fails_takes_no_later_one_with_it(
    start: Callable[..., Batcher], exported: Exported
) -> None:
    """After the engine has run, too: here by an answer that is no number."""

    class Wordy(GatedEngine):
        def run(self, entries: Sequence[Entry]) -> list[Array]:
            return [
                np.full(answer.shape, "no number") if (entry.array == 15).all() else answer
                for entry, answer in zip(entries, super().run(entries), strict=True)
            ]

    engine = Wordy(exported)
    batcher = start()
    odd = np.full((1, 1, 8, 8), 15, np.uint8)
    assert type(Asked(batcher, engine, odd).outcome) is ServerError
    assert Asked(batcher, engine, sample(exported, 1)).answer.shape == (1, 10)


def test_one_query_that_fails_takes_no_other_with_it(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher = start()
    hold(batcher, engine, sample(exported, 0))
    bad = np.full((1, 1, 8, 8), 16, np.uint8)
    asked = [Asked(batcher, engine, x) for x in (sample(exported, 1), bad, sample(exported, 2))]

    engine.gate.set()

    failed = asked[1].outcome
    assert type(failed) is ServerError
    assert "ValueError" in str(failed)
    answers = np.concatenate([asked[0].answer, asked[2].answer])
    np.testing.assert_allclose(answers, exported.logits(exported.x[1:3]), atol=1e-4, rtol=0)
    assert batcher.load.failed == 1


def test_an_input_beyond_float32_fails_alone_and_is_the_peers_fault(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher = start()
    hold(batcher, engine, sample(exported, 0))
    huge = np.full_like(exported.smashed(2, exported.x[:1]), 3e38)
    bad = Asked(batcher, engine, huge, depth=2)
    good = Asked(batcher, engine, sample(exported, 3))

    engine.gate.set()

    assert isinstance(bad.outcome, BadRequestError)
    np.testing.assert_allclose(good.answer, exported.logits(exported.x[3:4]), atol=1e-4, rtol=0)
    assert engine.batches == [1, 2]


def test_an_asker_that_has_gone_does_not_end_the_thread(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher, x = start(), sample(exported, 0)

    def gone(_: Array | ServerError) -> None:
        raise RuntimeError("Event loop is closed")

    hold(batcher, engine, x)
    batcher.submit(Job(engine, Entry(0, x), None, gone))
    batcher.submit(Job(engine, Entry(0, x), time.monotonic(), gone))
    after = Asked(batcher, engine, x)
    engine.gate.set()
    assert after.answer.shape == (1, 10)


def test_stop_answers_all_that_wait_and_refuses_what_comes(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported
) -> None:
    batcher, x = start(), sample(exported, 0)
    running = hold(batcher, engine, x)
    waiting = [Asked(batcher, engine, x) for _ in range(5)]
    stopping = threading.Thread(target=batcher.stop, daemon=True)
    stopping.start()
    assert all(isinstance(asked.outcome, OverloadedError) for asked in waiting)
    with pytest.raises(OverloadedError):
        Asked(batcher, engine, x)
    engine.gate.set()
    stopping.join(10)
    assert not stopping.is_alive()
    assert running.answer.shape == (1, 10)
    assert engine.batches == [1]


@pytest.mark.deadline
@pytest.mark.parametrize("seed", range(3))
def test_every_query_gets_exactly_one_outcome(
    start: Callable[..., Batcher], engine: GatedEngine, exported: Exported, seed: int
) -> None:
    """Four threads, a small queue, deadlines, bad queries, and a stop in the middle of it."""
    batcher = start(queue_max=12, batch_max=8)
    bad = np.full((1, 1, 8, 8), 16, np.uint8)
    taken: list[tuple[int, Asked]] = []
    refused: list[int] = []

    def ask(thread: int) -> None:
        rng = random.Random(1000 * seed + thread)
        for i in range(150):
            which = rng.randrange(100)
            deadline = time.monotonic() + rng.choice((-1, 0.002, 5)) if i % 3 else None
            x = bad if rng.random() < 0.05 else sample(exported, which)
            try:
                here = rng.random() < 0.5
                asked = Asked(batcher, engine, x, deadline=deadline, may_run_here=here)
            except OverloadedError:
                refused.append(which)
                time.sleep(0.001)  # a client that is refused backs off
            else:
                taken.append((-1 if x is bad else which, asked))

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    if seed == 2:
        wait_until(lambda: len(taken) > 20, "no query was taken")
        batcher.stop()
    for thread in threads:
        thread.join(30)

    assert len(taken) + len(refused) == 600
    labels = exported.logits(exported.x[:100]).argmax(axis=1)
    answered = 0
    for which, asked in taken:
        outcome = asked.outcome
        if isinstance(outcome, ServerError):
            assert which == -1 or isinstance(outcome, ExpiredError | OverloadedError)
        else:
            answered += 1
            assert outcome.argmax() == labels[which]
    batcher.stop()
    assert all(len(asked.outcomes) == 1 for _, asked in taken)
    assert answered == batcher.load.queries > 0
    assert len(refused) == batcher.load.refused
