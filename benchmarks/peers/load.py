"""The load on a server under comparison: one request, sent over and over on open connections.

    python -P -m benchmarks.peers.load

It is a process of its own, and the same for all servers. Each line in is an `Order` as JSON, each
line out a `Tally`. The bytes are written and read on bare sockets, so that the load leaves the
machine to the server.

A closed loop: as many requests are under way as there are connections, and an answer is followed by
the next request at once. An open loop: requests come by a Poisson process, whether the ones before
are answered or not; one that finds no free connection waits for it, and its latency counts from
when it came.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import orjson

GOOD: Final = b"HTTP/1.1 200"
LENGTH: Final = b"content-length:"
PATIENCE_S: Final = 30.0
READ_BYTES: Final = 65_536
# of an open loop: the last requests have so long for their answers
GRACE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Order:
    """A load.

    Attributes:
        host, port: of the server. path: of the request. body: its JSON.
        in_flight: connections, each with one request under way, or at most one in an open loop.
        seconds: how long requests are sent.
        rate: requests a second of an open loop; None for a closed one.
        key: of the login; None sends none.
    """

    host: str
    port: int
    path: str
    body: str
    in_flight: int
    seconds: float
    rate: float | None = None
    key: str | None = None

    @property
    def request(self) -> bytes:
        """The request's bytes."""
        body = self.body.encode()
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
        ]
        if self.key is not None:
            lines.append(f"Authorization: Bearer {self.key}")
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(frozen=True, slots=True)
class Tally:
    """The answers to a load.

    Attributes:
        latencies_us: of each answer, in microseconds. seconds: from the first request to the last
            answer. answer: the body of the last one.
        left: requests without an answer at the end, in an open loop.
    """

    latencies_us: list[int]
    seconds: float
    answer: str
    left: int = 0


def run(order: Order) -> Tally:
    """Apply a load.

    Raises: ValueError for an answer that is not 200; OSError.
    """
    request = order.request
    sockets = [_connect(order) for _ in range(order.in_flight)]
    by_number = {each.fileno(): each for each in sockets}
    poll = select.epoll()
    for each in sockets:
        poll.register(each, select.EPOLLIN)
    latencies_us: list[int] = []
    sent = dict.fromkeys(by_number, 0.0)
    parts = dict.fromkeys(by_number, b"")
    answer = b""
    begin = time.perf_counter()
    end = begin + order.seconds
    for number, each in by_number.items():
        sent[number] = time.perf_counter()
        each.sendall(request)
    under_way = len(sockets)
    while under_way:
        ready = poll.poll(PATIENCE_S)
        if not ready:
            raise ValueError(f"{order.path}: no answer for {PATIENCE_S:.0f} s")
        for number, _ in ready:
            each = by_number[number]
            raw = parts[number] + each.recv(READ_BYTES)
            if not _is_whole(raw, order.path):
                parts[number] = raw
                continue
            parts[number], answer = b"", raw
            now = time.perf_counter()
            latencies_us.append(round(1e6 * (now - sent[number])))
            if now < end:
                sent[number] = now
                each.sendall(request)
            else:
                under_way -= 1
    seconds = time.perf_counter() - begin
    poll.close()
    for each in sockets:
        each.close()
    return Tally(latencies_us, seconds, answer.partition(b"\r\n\r\n")[2].decode())


def run_open(order: Order, rate: float) -> Tally:
    """Apply a load in an open loop.

    Args:
        rate: requests a second.
    Raises: ValueError for an answer that is not 200; OSError.
    """
    request = order.request
    free = [_connect(order) for _ in range(order.in_flight)]
    connections = list(free)
    gaps = random.Random(0)
    waits = accumulate(iter(lambda: gaps.expovariate(rate), None))
    begin = time.perf_counter()
    end = begin + order.seconds
    due = begin + next(waits)
    waiting: deque[float] = deque()
    came: dict[socket.socket, float] = {}
    parts: dict[socket.socket, bytes] = {}
    latencies_us: list[int] = []
    answer = b""
    now = begin
    while now < end + GRACE_S and (due < end or waiting or came):
        while due < end and due <= now:
            waiting.append(due)
            due = begin + next(waits)
        while waiting and free:
            each = free.pop()
            came[each], parts[each] = waiting.popleft(), b""
            each.sendall(request)
        # unlike epoll, it waits for less than a millisecond
        until = due if due < end else end + GRACE_S
        ready = select.select(list(came), [], [], max(0.0, until - time.perf_counter()))[0]
        now = time.perf_counter()
        for each in ready:
            parts[each] += each.recv(READ_BYTES)
            if _is_whole(parts[each], order.path):
                answer = parts[each]
                latencies_us.append(round(1e6 * (now - came.pop(each))))
                free.append(each)
    left = len(waiting) + len(came)
    while due < end:  # this process itself stood still until after the end
        left += 1
        due = begin + next(waits)
    for each in connections:
        each.close()
    return Tally(latencies_us, now - begin, answer.partition(b"\r\n\r\n")[2].decode(), left)


def _connect(order: Order) -> socket.socket:
    connection = socket.create_connection((order.host, order.port), PATIENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _is_whole(raw: bytes, path: str) -> bool:
    """Whether the bytes are a whole answer.

    Raises: ValueError for one that is not 200, or for the end of the connection.
    """
    if not raw.startswith(GOOD):
        raise ValueError(f"{path}: expected an answer with status 200, got {raw[:300]!r}")
    head = raw.find(b"\r\n\r\n")
    if head < 0:
        return False
    at = raw.lower().index(LENGTH) + len(LENGTH)
    return len(raw) - head - 4 >= int(raw[at : raw.index(b"\r", at)])


def main() -> None:
    """Apply the loads that standard input names, until it ends."""
    for line in sys.stdin:
        order = Order(**orjson.loads(line))
        tally = run(order) if order.rate is None else run_open(order, order.rate)
        sys.stdout.write(orjson.dumps(tally).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
