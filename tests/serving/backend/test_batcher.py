"""The queue before the engine: no waiting when idle, batches when busy, one outcome each."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

import server.backend.batcher
from server.backend.batcher import HANDOVER_S, Batcher
from server.backend.jobs import Job
from server.backend.ladder import Entry, LadderEngine
from server.errors import BadRequestError, ExpiredError, OverloadedError, ServerError
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.serving.conftest import Exported

Array = NDArray[Any]


class GatedEngine(LadderEngine):
    """The real engine, held at a gate that a test opens, and counting what it is given.

    It fails on any batch that holds a sample of nothing but 16s, and where two threads run it.
    """

    def __init__(self, exported: Exported) -> None:
        super().__init__(exported.folder, exported.manifest)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.batches: list[int] = []
        self.threads: list[str] = []
        self._running = threading.Lock()

    def run(self, entries: Sequence[Entry]) -> list[Array]:
        assert self._running.acquire(blocking=False), "two batches at once"
        try:
            self.batches.append(len(entries))
            self.threads.append(threading.current_thread().name)
            self.entered.set()
            assert self.gate.wait(20)
            if any((entry.array == 16).all() for entry in entries):
                raise ValueError("all white")
            return super().run(entries)
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


def hold(batcher: Batcher, engine: GatedEngine, x: Array) -> Asked:
    """Have the engine busy with one query until the gate opens."""
    engine.gate.clear()
    engine.entered.clear()
    first = Asked(batcher, engine, x)
    assert engine.entered.wait(10)
    return first


def sample(exported: Exported, index: int) -> Array:
    return exported.x[index : index + 1]


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
