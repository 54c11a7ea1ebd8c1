"""Load on a running server, from a process of its own: closed loop or open loop, HTTP or MQTT.

    python -P -m benchmarks.load.clients '{"url": "http://127.0.0.1:8000", "device": "pi-1", ...}'

reads a `Load` as JSON and prints a `Tally` as JSON. Closed loop: `in_flight` queries at any time,
each with a pause of `pause_s` after its answer. Open loop (`rate` > 0): queries leave at fixed
times, answered or not, and a latency counts from the time when its query was due.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

import numpy as np
import orjson

from benchmarks.reports import child_environment
from edge_sdk.identity import Identity
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.mqtt.messages import Message
from edge_sdk.offload.offloader import LINK_SHARE, Offloader
from edge_sdk.offload.pending import NoReply, Target
from edge_sdk.wire.answers import HEADER_LENGTH
from edge_sdk.wire.broker_address import BrokerAddress
from edge_sdk.wire.frames import Tensor, encode, unpack
from edge_sdk.wire.messages import Query, new_id, pack_query, read_reply
from edge_sdk.wire.topics import Kind, Topic
from server.listening.descriptors import raise_descriptor_limit
from server.processes import ChildProcess

ANSWERED: Final = "answered"
OVERLOADED: Final = "overloaded"
NO_REPLY: Final = "no reply"
NOT_SENT: Final = "not sent"
# queries that wait for a reply in the agent's own way, each in a thread
_WAITING_MOST: Final = 512
# of the HTTP statuses that a loaded server may answer with
_WORDS: Final[Mapping[int, str]] = {200: ANSWERED, 429: OVERLOADED, 504: "expired"}


@dataclass(frozen=True, slots=True)
class Load:
    """One device's queries.

    Attributes:
        url: `http://HOST:PORT` or `mqtt://HOST:PORT`.
        credential: empty sends none (HTTP on loopback, a broker without logins).
        shape: of one sample; a query has `rows` of them, float32.
        seconds: how long queries are sent; the first `warm_s` of them are not counted.
        rate: queries a second, in an open loop; 0 for a closed loop of `in_flight` queries.
        deadline_ms: 0 sends none.
        patience_s: how long an answer is awaited.
        connections: most that are open over HTTP; further queries wait for one.
        backs_off: the queries go through the agent's own offloader, which sends none while the
            server has told it not to, or while the link is behind. Over MQTT.
    """

    url: str
    device: str
    credential: str
    model: str
    shape: tuple[int, ...]
    seconds: float
    rows: int = 1
    in_flight: int = 1
    pause_s: float = 0.0
    rate: float = 0.0
    deadline_ms: float = 0.0
    warm_s: float = 0.5
    patience_s: float = 30.0
    connections: int = 64
    backs_off: bool = False


@dataclass(slots=True)
class Tally:
    """Outcomes of a load.

    Attributes:
        outcomes: number of queries by outcome. latencies_s: of the answered ones.
        seconds: that were counted.
        with_retry: refusals that said when to come back.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    with_retry: int = 0

    @property
    def rate(self) -> float:
        """Answered queries a second."""
        return self.outcomes[ANSWERED] / self.seconds if self.seconds else 0.0

    def quantile_ms(self, share: float) -> float:
        """The latency below which so many of the answered queries stayed; NaN without any."""
        if not self.latencies_s:
            return float("nan")
        return float(np.quantile(self.latencies_s, share)) * 1e3

    def within(self, deadline_s: float) -> float:
        """Queries a second that were answered within the deadline."""
        in_time = sum(latency <= deadline_s for latency in self.latencies_s)
        return in_time / self.seconds if self.seconds else 0.0

    @classmethod
    def from_json(cls, raw: str) -> Tally:
        """Read what a load process printed."""
        fields = orjson.loads(raw)
        return cls(
            Counter(fields["outcomes"]),
            fields["latencies_s"],
            fields["seconds"],
            fields["with_retry"],
        )


class LoadProcess:
    """A load in a process of its own."""

    def __init__(self, load: Load) -> None:
        command = [
            sys.executable,
            "-P",
            "-m",
            "benchmarks.load.clients",
            orjson.dumps(load).decode(),
        ]
        self._process = ChildProcess(
            f"the load of {load.device}", command, environment=child_environment()
        )
        self._process.expect("ready", "did not start")

    def go(self) -> None:
        """Begin."""
        self._process.write_line("go")

    def tally(self) -> Tally:
        """Wait for its end."""
        line = self._process.expect("{", "gave no result")
        self._process.close()
        return Tally.from_json(line)


def measure(*loads: Load) -> list[Tally]:
    """Run loads at the same time, each in a process of its own."""
    processes = [LoadProcess(load) for load in loads]
    for process in processes:
        process.go()
    return [process.tally() for process in processes]


def median(values: list[float]) -> float:
    """The median; NaN of none."""
    return statistics.median(values) if values else float("nan")


class Asker(Protocol):
    """One way to a server."""

    async def ask(self) -> tuple[str, bool]:
        """Send a query; its outcome, and whether a refusal said when to come back."""

    async def close(self) -> None:
        """Close the connections."""


class _Http:
    """Queries over HTTP/1.1 on connections that stay open; the bytes of all are the same."""

    def __init__(self, load: Load) -> None:
        parts = urlsplit(load.url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._room = asyncio.Semaphore(load.connections)
        deadline = {"deadline_ms": load.deadline_ms} if load.deadline_ms else {}
        header: dict[str, Any] = {"parameters": {"binary_data_output": True, **deadline}}
        text, raw = encode(header, [_tensor(load)], key="inputs")
        body = b"".join([text, *raw])
        lines = [
            f"POST /v2/models/{load.model}/infer HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            f"{HEADER_LENGTH}: {len(text)}",
            f"Content-Length: {len(body)}",
        ]
        if load.credential:
            lines.append(f"Authorization: Bearer {load.device}:{load.credential}")
        self._request = "\r\n".join([*lines, "", ""]).encode() + body

    async def ask(self) -> tuple[str, bool]:
        async with self._room:
            reader, writer = self._open() or await self._connect()
            try:
                status, fields = await self._exchange(reader, writer)
            except BaseException:  # such as the end of our patience: the answer may still come
                writer.close()
                raise
            if fields.get(b"connection") == b"close":
                writer.close()
            else:
                self._idle.append((reader, writer))
        return _WORDS.get(status, f"status {status}"), b"retry-after" in fields

    async def close(self) -> None:
        for _, writer in self._idle:
            writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[int, dict[bytes, bytes]]:
        """Send the request; the status of the answer, and the fields of its head."""
        writer.write(self._request)
        head: bytes = (await reader.readuntil(b"\r\n\r\n")).lower()
        lines = [line.partition(b": ") for line in head.split(b"\r\n")[1:]]
        fields: dict[bytes, bytes] = {name: value for name, _, value in lines}
        await reader.readexactly(int(fields[b"content-length"]))
        return int(head.split(b" ", 2)[1].decode()), fields

    def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """An idle connection that the server has not closed meanwhile."""
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.close()
        return None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return reader, writer


class _Mqtt:
    """Queries over MQTT, on one connection."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[str, asyncio.Future[tuple[str, bool]]] = {}
        self._topic = str(Topic("default", load.device, Kind.QUERY))
        address = BrokerAddress.parse(load.url)
        self._link = MqttLink(address, client_id=load.device, password=load.credential)
        self._link.subscribe(str(Topic("default", load.device, Kind.REPLY)), self._receive)
        self._link.start()
        self._link.wait_connected(10)
        self._tensor = _tensor(load)

    async def ask(self) -> tuple[str, bool]:
        behind_s = self._link.behind_s(time.monotonic())
        if self._load.deadline_ms and behind_s > LINK_SHARE * self._load.deadline_ms / 1e3:
            return NOT_SENT, False
        identifier = new_id()
        future: asyncio.Future[tuple[str, bool]] = self._loop.create_future()
        self._waiting[identifier] = future
        deadline_ms = self._load.deadline_ms or None
        query = Query(identifier, self._load.model, None, self._tensor, deadline_ms)
        if not self._link.publish(self._topic, pack_query(query)):
            del self._waiting[identifier]
            await asyncio.sleep(0.001)  # the link's queue is full
            return NOT_SENT, False
        try:
            return await future
        finally:
            self._waiting.pop(identifier, None)

    async def close(self) -> None:
        self._link.stop()

    def _receive(self, message: Message) -> None:
        reply = read_reply(unpack(message.payload))
        outcome = ANSWERED if reply.problem is None else str(reply.problem)
        self._loop.call_soon_threadsafe(self._settle, reply.id, outcome, reply.retry_after_s > 0)

    def _settle(self, identifier: str, outcome: str, retry: bool) -> None:
        future = self._waiting.get(identifier)
        if future is not None and not future.done():
            future.set_result((outcome, retry))


class _Agent:
    """Queries as an agent sends them: over MQTT, by its offloader."""

    def __init__(self, load: Load) -> None:
        identity = Identity("http://127.0.0.1:9", load.device, "default", load.credential)
        self._offloader = Offloader(identity, BrokerAddress.parse(load.url))
        self._target = Target(load.model, "1")
        self._tensor = _tensor(load)
        self._deadline_s = load.deadline_ms / 1e3 or load.patience_s
        self._threads = ThreadPoolExecutor(_WAITING_MOST)

    async def ask(self) -> tuple[str, bool]:
        pending = self._offloader.begin(lambda: self._tensor, self._target, self._deadline_s)
        if pending.done and pending.sent_at is None:
            return NOT_SENT, False
        wait = partial(self._offloader.finish, pending)
        outcome = await asyncio.get_running_loop().run_in_executor(self._threads, wait)
        if isinstance(outcome, NoReply):
            return NO_REPLY, False
        word = ANSWERED if outcome.problem is None else str(outcome.problem)
        return word, outcome.retry_after_s > 0

    async def close(self) -> None:
        await asyncio.to_thread(self._offloader.close)
        self._threads.shutdown()


class _Counting:
    """Asks and counts, once the warm-up is over."""

    def __init__(self, load: Load, asker: Asker, began: float) -> None:
        self._load = load
        self._asker = asker
        self._count_from = began + load.warm_s
        self.tally = Tally(seconds=load.seconds - load.warm_s)

    async def ask(self, due: float) -> None:
        """Ask once; the latency counts from `due`."""
        try:
            outcome, retry = await asyncio.wait_for(self._asker.ask(), self._load.patience_s)
        except TimeoutError:
            outcome, retry = NO_REPLY, False
        except (OSError, EOFError) as err:
            outcome, retry = type(err).__name__, False
        if due < self._count_from:
            return
        self.tally.outcomes[outcome] += 1
        self.tally.with_retry += retry
        if outcome == ANSWERED:
            self.tally.latencies_s.append(time.perf_counter() - due)


async def run(load: Load, start: Callable[[], Awaitable[None]]) -> Tally:
    """Apply a load.

    Args:
        start: awaited once the first connection may be made.
    """
    asker = asker_of(load)
    await start()
    began = time.perf_counter()
    counting = _Counting(load, asker, began)
    loop = _open_loop if load.rate else _closed_loop
    await loop(load, counting, began)
    await asker.close()
    return counting.tally


def asker_of(load: Load) -> Asker:
    """Sender of the queries of a load, which waits for their answers."""
    if load.backs_off:
        return _Agent(load)
    return _Mqtt(load) if urlsplit(load.url).scheme == "mqtt" else _Http(load)


async def _closed_loop(load: Load, counting: _Counting, began: float) -> None:
    async def one() -> None:
        while (now := time.perf_counter()) < began + load.seconds:
            await counting.ask(now)
            if load.pause_s:
                await asyncio.sleep(load.pause_s)

    await asyncio.gather(*(one() for _ in range(load.in_flight)))


async def _open_loop(load: Load, counting: _Counting, began: float) -> None:
    under_way: set[asyncio.Task[None]] = set()
    for number in range(int(load.rate * load.seconds)):
        due = began + number / load.rate
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        task = asyncio.create_task(counting.ask(due))
        under_way.add(task)
        task.add_done_callback(under_way.discard)
    await asyncio.gather(*under_way)


def _tensor(load: Load) -> Tensor:
    samples = np.random.default_rng(0).normal(size=(load.rows, *load.shape))
    return Tensor("x", samples.astype(np.float32))


async def _main(raw: str) -> None:
    raise_descriptor_limit()
    fields = orjson.loads(raw)
    load = Load(**{**fields, "shape": tuple(fields["shape"])})

    async def start() -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)

    tally = await run(load, start)
    sys.stdout.write(orjson.dumps(tally).decode() + "\n")


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
