"""The fair queue: shares of senders, batches, and who gives way when it is full. No threads."""

from __future__ import annotations

from collections import Counter
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.backend.fair_queue import IDLE_MAX, FairQueue, Taken
from server.backend.jobs import Job
from server.backend.ladder import Entry, LadderEngine

# the queue only asks whether two jobs have the same engine
ENGINE, OTHER = (cast("LadderEngine", object()) for _ in range(2))


def job(
    sender: str,
    rows: int = 1,
    *,
    engine: LadderEngine = ENGINE,
    deadline: float | None = None,
    first: int = 0,
) -> Job:
    """A job whose samples are the numbers from `first` on, one byte each."""
    array = np.arange(first, first + rows, dtype=np.uint8).reshape(rows, 1)
    return Job(engine, Entry(0, array), deadline, lambda _: None, sender)


def queue_of(*jobs: Job, most: int = 100, most_bytes: int = 10_000) -> FairQueue:
    """A queue with those jobs, in which a sample costs 1 s."""
    queue = FairQueue(most, most_bytes)
    for one in jobs:
        assert queue.push(one, 1.0).added
    return queue


def take(queue: FairQueue, rows: int) -> Taken:
    return queue.take(0.0, lambda _: rows)


def shares(taken: Taken) -> list[tuple[str, int]]:
    """Sender and samples of each part of a batch."""
    return [(part.waiting.job.sender, len(part.entry.array)) for part in taken.parts]


def test_one_sender_is_served_in_its_order_and_has_the_whole_batch() -> None:
    queue = queue_of(*(job("a", first=number) for number in range(6)))
    batch = take(queue, 4)
    assert [part.entry.array[0, 0] for part in batch.parts] == [0, 1, 2, 3]
    assert len(queue) == 2


def test_a_sender_that_comes_late_is_in_the_next_batch() -> None:
    queue = queue_of(*(job("flood", 4) for _ in range(20)))
    assert shares(take(queue, 4)) == [("flood", 4)]
    queue.push(job("small"), 1.0)
    assert shares(take(queue, 4))[0] == ("small", 1)


def test_senders_have_equal_samples_whatever_the_length_of_their_queries() -> None:
    """8 samples at a time for one, 1 for the other: after 64 samples each had 32."""
    queue = queue_of(*(job("long", 8) for _ in range(20)), *(job("short") for _ in range(60)))
    served: Counter[str] = Counter()
    for _ in range(8):
        for sender, rows in shares(take(queue, 8)):
            served[sender] += rows
    assert served == {"long": 32, "short": 32}


def test_a_costly_model_counts_by_its_seconds() -> None:
    """3 s a sample against 1 s: a third of the samples."""
    queue = FairQueue(100, 10_000)
    for _ in range(40):
        queue.push(job("costly", engine=OTHER), 3.0)
        queue.push(job("cheap"), 1.0)
    served = Counter(shares(take(queue, 1))[0][0] for _ in range(40))
    assert served == {"costly": 10, "cheap": 30}


def test_an_idle_sender_saves_up_nothing() -> None:
    queue = queue_of(job("idle"), *(job("busy") for _ in range(50)))
    for _ in range(40):
        take(queue, 1)
    for _ in range(10):
        queue.push(job("idle"), 1.0)
    served = Counter(shares(take(queue, 1))[0][0] for _ in range(10))
    assert served == {"busy": 5, "idle": 5}


def test_jobs_of_another_engine_wait_and_the_batch_is_filled_from_other_senders() -> None:
    queue = queue_of(job("a"), job("b", engine=OTHER), job("c"), job("a"))
    assert shares(take(queue, 8)) == [("a", 1), ("c", 1), ("a", 1)]
    assert shares(take(queue, 8)) == [("b", 1)]


def test_only_a_job_longer_than_a_batch_is_split() -> None:
    queue = queue_of(job("a", 10), job("b", 3), job("c", 2))
    batches = [take(queue, 4) for _ in range(5)]
    assert [shares(batch) for batch in batches] == [
        [("c", 2), ("a", 2)],
        [("b", 3), ("a", 1)],
        [("a", 4)],
        [("a", 3)],
        [],
    ]
    parts = [part for batch in batches for part in batch.parts if part.waiting.job.sender == "a"]
    rows = np.concatenate([part.entry.array for part in parts])
    assert rows[:, 0].tolist() == list(range(10))


def test_what_is_left_of_a_failed_job_is_not_computed() -> None:
    queue = queue_of(job("a", 10), job("a"))
    first = take(queue, 4)
    first.parts[0].waiting.over = True
    assert shares(take(queue, 4)) == [("a", 1)]
    assert (len(queue), queue.bytes, queue.cost) == (0, 0, 0)


def test_expired_jobs_take_no_room_in_the_batch() -> None:
    queue = queue_of(*(job("a", deadline=1.0) for _ in range(5)), job("a", deadline=3.0))
    taken = queue.take(2.0, lambda _: 2)
    assert len(taken.expired) == 5
    assert shares(taken) == [("a", 1)]


def test_a_batch_takes_a_quarter_of_the_time_to_a_deadline() -> None:
    """A sample takes 1 s: 4 of them where 16 s are left, and a tighter query is not in it."""
    queue = queue_of(*(job("a", deadline=16.0) for _ in range(6)))
    assert shares(take(queue, 32)) == [("a", 1)] * 4
    queue = queue_of(*(job("a") for _ in range(6)), job("b", deadline=8.0), job("c", 3))
    assert shares(take(queue, 32)) == [("a", 1), ("b", 1)]
    queue = queue_of(job("a", 5, deadline=4.0), job("a", deadline=400.0))
    assert shares(take(queue, 32)) == [("a", 5)]  # the first is computed whatever it takes


def test_in_a_full_queue_the_sender_with_most_gives_way_by_its_newest_job() -> None:
    jobs = [job("flood", first=number) for number in range(4)]
    queue = queue_of(*jobs, most=4)
    assert not queue.push(job("flood"), 1.0).added

    pushed = queue.push(job("small"), 1.0)

    assert pushed.added
    assert [waiting.job for waiting in pushed.given_way] == [jobs[3]]
    assert queue.push(job("small"), 1.0).added  # two each
    assert not queue.push(job("small"), 1.0).added
    assert not queue.push(job("flood"), 1.0).added
    assert queue.push(job("third"), 1.0).added
    assert len(queue) == 4


def test_in_a_queue_full_of_bytes_the_longest_give_way() -> None:
    queue = queue_of(job("flood", 60), job("flood", 60), most_bytes=100)
    pushed = queue.push(job("small", 10), 1.0)
    assert (pushed.added, len(pushed.given_way)) == (True, 1)
    assert queue.bytes == 70


def test_the_wait_is_that_of_a_share() -> None:
    queue = queue_of(*(job("flood") for _ in range(20)))
    assert queue.wait_s("flood", 1.0) == 21.0
    assert queue.wait_s("small", 1.0) == 2.0  # it and as much of the flood


def test_senders_without_jobs_are_forgotten() -> None:
    queue = queue_of(*(job("flood") for _ in range(50)), most=1000)
    for number in range(1000):
        queue.push(job(f"device-{number}"), 1.0)
        take(queue, 1)
    assert queue.senders <= 2 * (1 + IDLE_MAX)
    while len(queue):
        take(queue, 100)
    assert queue.senders == 0


@given(
    lengths=st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9)), max_size=60),
    room=st.integers(1, 12),
)
def test_shares_differ_by_no_more_than_the_two_longest_jobs(
    lengths: list[tuple[str, int]], room: int
) -> None:
    """The bound of start-time fair queueing, with a batch as the grain of service."""
    queue = queue_of(*(job(sender, rows) for sender, rows in lengths), most_bytes=10_000)
    left: Counter[str] = Counter()
    for sender, rows in lengths:
        left[sender] += rows
    served: Counter[str] = Counter()
    longest = max((rows for _, rows in lengths), default=0)
    while left["a"] and left["b"]:
        for sender, rows in shares(take(queue, room)):
            served[sender] += rows
            left[sender] -= rows
        if left["a"] and left["b"]:
            assert abs(served["a"] - served["b"]) <= 2 * longest + room


@given(st.data())
def test_every_job_comes_out_once_whole_and_the_queue_is_bounded(data: st.DataObject) -> None:
    queue = FairQueue(6, 40)
    pushed: list[Job] = []
    gone: list[Job] = []
    computed: Counter[int] = Counter()

    def drain(rows: int) -> None:
        for part in take(queue, rows).parts:
            computed[id(part.waiting.job)] += len(part.entry.array)

    for _ in range(data.draw(st.integers(0, 40))):
        if data.draw(st.booleans()):
            one = job(data.draw(st.sampled_from("abc")), data.draw(st.integers(1, 9)))
            result = queue.push(one, data.draw(st.sampled_from([0.0, 0.5, 2.0])))
            pushed += [one] if result.added else []
            gone += [waiting.job for waiting in result.given_way]
        else:
            drain(data.draw(st.integers(1, 7)))
        assert len(queue) <= 6
        assert queue.bytes < 40 + 9
    while len(queue):
        drain(5)
    assert not {id(one) for one in gone} & computed.keys()
    assert computed == {id(one): one.rows for one in pushed if one not in gone}
    assert queue.cost == pytest.approx(0)
