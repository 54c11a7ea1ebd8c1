"""The load on a server under comparison: one request, sent over and over on open connections.

    python -P -m benchmarks.peers.load

It is a process of its own, and the same for all servers. Each line in is an `Order` as JSON, each
line out a `Tally`. A closed loop: as many requests are under way as there are connections, and an
answer is followed by the next request at once. The bytes are written and read on bare sockets, so
that the load leaves the machine to the server.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from dataclasses import dataclass
from typing import Final

import orjson

GOOD: Final = b"HTTP/1.1 200"
LENGTH: Final = b"content-length:"
PATIENCE_S: Final = 30.0
READ_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Order:
    """A load.

    Attributes:
        host, port: of the server. path: of the request. body: its JSON.
        in_flight: connections, each with one request under way.
        seconds: how long requests are sent.
    """

    host: str
    port: int
    path: str
    body: str
    in_flight: int
    seconds: float

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
        return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass(frozen=True, slots=True)
class Tally:
    """The answers to a load.

    Attributes:
        latencies_us: of each answer, in microseconds. seconds: from the first request to the last
            answer. answer: the body of the last one.
    """

    latencies_us: list[int]
    seconds: float
    answer: str


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
        tally = run(Order(**orjson.loads(line)))
        sys.stdout.write(orjson.dumps(tally).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
