"""The event loop whose sockets are called without asyncio's queue."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from server.listening.direct_loop import READ, WRITE, DirectLoop


def run(main: Callable[[DirectLoop], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=DirectLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, DirectLoop)
        runner.run(main(loop))


@contextlib.contextmanager
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def test_owner_is_called_beside_tasks_timers_and_readers_of_asyncio() -> None:
    async def main(loop: DirectLoop) -> None:
        with pair() as (ours, theirs), pair() as (reading, writing):
            got: asyncio.Queue[bytes] = asyncio.Queue()
            loop.watch(ours.fileno(), READ, lambda _: got.put_nowait(ours.recv(10)))
            loop.add_reader(reading, lambda: got.put_nowait(reading.recv(10)))
            loop.call_later(0.01, theirs.send, b"direct")
            assert await asyncio.wait_for(got.get(), 10) == b"direct"
            loop.call_later(0.01, writing.send, b"asyncio")
            assert await asyncio.wait_for(got.get(), 10) == b"asyncio"
            loop.remove_reader(reading)
            loop.watch(ours.fileno(), 0, print)

    run(main)


def test_fault_of_one_owner_is_told_and_the_others_go_on() -> None:
    told: list[dict[str, Any]] = []

    async def main(loop: DirectLoop) -> None:
        loop.set_exception_handler(lambda _, context: told.append(context))
        with pair() as (bad, to_bad), pair() as (good, to_good):
            done = asyncio.Event()

            def fail(_events: int) -> None:
                bad.recv(10)
                raise RuntimeError("a fault of ours")

            loop.watch(bad.fileno(), READ, fail)
            loop.watch(good.fileno(), READ, lambda _: done.set() if good.recv(10) else None)
            to_bad.send(b"x")
            to_good.send(b"x")
            await asyncio.wait_for(done.wait(), 10)
            loop.watch(bad.fileno(), 0, fail)
            loop.watch(good.fileno(), 0, fail)

    run(main)
    assert [str(context["exception"]) for context in told] == ["a fault of ours"]


def test_owner_that_another_one_has_ended_in_the_same_turn_is_not_called() -> None:
    async def main(loop: DirectLoop) -> None:
        with pair() as (first, to_first), pair() as (second, to_second):
            called: list[socket.socket] = []

            def end_both(ours: socket.socket) -> None:
                called.append(ours)
                for sock in (first, second):
                    loop.watch(sock.fileno(), 0, print)
                    sock.close()

            to_first.send(b"x")
            to_second.send(b"x")
            loop.watch(first.fileno(), READ, lambda _: end_both(first))
            loop.watch(second.fileno(), READ, lambda _: end_both(second))
            for _ in range(3):
                await asyncio.sleep(0)  # a turn of the loop
            assert len(called) == 1

    run(main)


def test_change_of_the_events_keeps_the_owner() -> None:
    async def main(loop: DirectLoop) -> None:
        with pair() as (ours, _theirs):
            heard: asyncio.Queue[int] = asyncio.Queue()

            def ready(events: int) -> None:
                heard.put_nowait(events)
                loop.watch(ours.fileno(), 0, ready)

            loop.watch(ours.fileno(), READ, ready)
            loop.watch(ours.fileno(), READ | WRITE, ready)
            assert await asyncio.wait_for(heard.get(), 10) == WRITE

    run(main)


def test_a_loop_that_is_closed_closes_no_descriptor_of_others() -> None:
    """Twice closed, a number may be another socket's by then: its connection went dead."""
    loop = DirectLoop()
    loop.close()
    with contextlib.ExitStack() as sockets:
        taken = [end for _ in range(10) for end in sockets.enter_context(pair())]
        del loop
        gc.collect()
        for end in taken:
            os.fstat(end.fileno())
