from __future__ import annotations

import threading

import pytest

from server.backend.answering import AnsweringThread
from tests.waiting import wait_until


def test_a_piece_of_work_that_fails_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answering, done = AnsweringThread(), threading.Event()

    def fails() -> None:
        raise ValueError("a broken asker")

    assert answering.take(fails)
    wait_until(lambda: answering.free, "the end of the work that fails")
    assert "a broken asker" in caplog.text
    assert answering.take(done.set)
    assert done.wait(10)
    answering.stop()


def test_the_thread_takes_one_piece_of_work_at_a_time() -> None:
    answering, go = AnsweringThread(), threading.Event()

    def waits() -> None:
        assert go.wait(10)

    assert answering.take(waits)
    assert not answering.take(lambda: None)
    go.set()
    answering.stop()
    assert answering.free
