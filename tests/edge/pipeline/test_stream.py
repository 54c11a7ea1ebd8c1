"""Streams: real agents between sources and sinks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from edge_sdk import AgentSettings, EdgeAgent
from edge_sdk.errors import ConfigurationError
from edge_sdk.pipeline.sinks.function import FunctionWriter
from edge_sdk.pipeline.sinks.sink import Sink
from edge_sdk.pipeline.smoothing import Smoothing
from edge_sdk.pipeline.sources.feed import Array, Feed, Item
from edge_sdk.pipeline.sources.function import FunctionSource
from edge_sdk.pipeline.sources.kinds import Opened
from edge_sdk.pipeline.stream import Handover, Stream, open_stream
from edge_sdk.settings_file.stream_table import StreamTable
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

NEVER_EXIT = -1.0
KEYS = [
    *("time", "input", "label", "class_name", "source", "uncertainty", "threshold"),
    *("latency_ms", "id", "reason", "bytes_up", "bytes_down", "joules"),
]


@pytest.fixture(scope="module")
def agent(digits: Digits) -> Iterator[EdgeAgent]:
    """An agent without a server."""
    with EdgeAgent.from_bundle(digits.models / "digits" / "1" / "bundles" / "d2") as agent:
        yield agent


class Rows:
    """A sink that collects rows, and when they came."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.sink = Sink("rows", FunctionWriter(self._take, "rows"))

    def wait(self, count: int) -> list[dict[str, Any]]:
        wait_until(lambda: len(self.rows) >= count, lambda: self.rows)
        return self.rows

    def _take(self, row: dict[str, Any]) -> None:
        self.times.append(time.monotonic())
        self.rows.append(row)


def stream_of(
    agent: EdgeAgent, function: Callable[[], Any], rows: Rows, **more: Any
) -> tuple[Stream, threading.Event]:
    """A stream of what a function yields, and whether it has ended."""
    ended = threading.Event()
    source = Opened(FunctionSource(function, "own:inputs"), "own:inputs")
    return Stream(agent, source, [rows.sink], on_end=ended.set, **more), ended


def test_every_input_gets_a_row_in_order(agent: EdgeAgent, digits: Digits) -> None:
    rows = Rows()
    before = time.time()
    stream, ended = stream_of(agent, lambda: iter(digits.x[:50]), rows)
    with stream:
        assert ended.wait(10)
    stream.check()
    assert [row["input"] for row in rows.rows] == [f"own:inputs {n}" for n in range(1, 51)]
    assert [row["label"] for row in rows.rows] == [agent.predict(x).label for x in digits.x[:50]]
    row = rows.rows[0]
    assert list(row) == KEYS
    assert row["source"] == "device"
    assert row["class_name"] == agent.manifest.class_names[row["label"]]
    assert before - 0.001 <= datetime.fromisoformat(row["time"]).timestamp() <= time.time()
    assert len({row["id"] for row in rows.rows}) == 50
    counts = agent.status().reports["stream"]
    assert counts["answered"] == 50
    assert counts["source"]["read"] == 50
    assert counts["sinks"][0]["written"] == 50


def test_labels_are_smoothed_next_to_the_answer_s_own(agent: EdgeAgent, digits: Digits) -> None:
    rows = Rows()
    stream, ended = stream_of(
        agent, lambda: iter(digits.x[:9]), rows, smoothing=Smoothing("majority", 10_000, hold=9)
    )
    with stream:
        assert ended.wait(10)
    first = rows.rows[0]["label"]
    assert len({row["label"] for row in rows.rows}) > 1
    assert [row["smoothed_label"] for row in rows.rows] == [first] * 9
    assert rows.rows[8]["smoothed_class_name"] == agent.manifest.class_names[first]


def test_inputs_keep_their_distance(agent: EdgeAgent, digits: Digits) -> None:
    rows = Rows()
    stream, ended = stream_of(agent, lambda: iter(digits.x[:4]), rows, every_s=0.2)
    with stream:
        assert ended.wait(10)
    # a lower bound, which no busy machine can break; rows wait a moment for the sink's thread
    assert rows.times[-1] - rows.times[0] >= 3 * 0.2 - 0.1


def test_a_source_waits_for_a_slow_sink_and_no_answer_is_dropped(
    agent: EdgeAgent, digits: Digits
) -> None:
    got: list[str] = []
    most = 0

    def slow(row: dict[str, Any]) -> None:
        nonlocal most
        most = max(most, sink.counts.waiting)
        got.append(row["input"])

    sink = Sink("slow", FunctionWriter(slow, "own:slow"), waiting_max=3)
    ended = threading.Event()
    source = Opened(FunctionSource(lambda: iter(digits.x), "own:x"), "own:x")
    with Stream(agent, source, [sink], on_end=ended.set):
        assert ended.wait(30)
    assert got == [f"own:x {n}" for n in range(1, len(digits.x) + 1)]
    assert most <= 3
    assert sink.counts.dropped == 0


def test_a_sink_that_is_stuck_holds_the_stream_up_no_longer(
    agent: EdgeAgent, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_sdk.pipeline.sinks.sink.STUCK_S", 0.3)
    released, rows, ended = threading.Event(), Rows(), threading.Event()
    stuck = Sink("stuck", FunctionWriter(lambda _row: released.wait(30), "own:x"), waiting_max=2)
    source = Opened(FunctionSource(lambda: iter(digits.x[:30]), "own:x"), "own:x")
    with Stream(agent, source, [stuck, rows.sink], on_end=ended.set):
        assert ended.wait(30)  # the source is read to its end
        rows.wait(30)
        assert 30 - stuck.counts.dropped in (1 + 2, 2 + 2)  # one or two are being taken, two wait
        released.set()


def test_what_a_source_raises_ends_the_stream_and_reaches_the_caller(
    agent: EdgeAgent, digits: Digits
) -> None:
    def inputs() -> Iterator[Array]:
        yield digits.x[0]
        raise ZeroDivisionError("own fault")

    rows = Rows()
    stream, ended = stream_of(agent, inputs, rows)
    with stream:
        assert ended.wait(10)
        with pytest.raises(ZeroDivisionError, match="own fault"):
            stream.check()
    assert len(rows.rows) == 1


class Mixed:
    """A source whose second item is not of the model's shape, as after an update."""

    newest = False
    patient = False

    def __init__(self, x: Array) -> None:
        self.marks: list[int] = []
        self._x = x

    def items(self, feed: Feed) -> Iterator[Item]:
        wrong = np.zeros((3, 3), np.float32)
        for number, x in enumerate((self._x, wrong, self._x), 1):
            yield Item(f"item {number}", x, number)

    def answered(self, mark: int) -> None:
        self.marks.append(mark)

    def close(self) -> None:
        self.marks.append(-1)


def test_an_input_that_the_model_no_longer_takes_is_counted_and_the_stream_goes_on(
    agent: EdgeAgent, digits: Digits, caplog: pytest.LogCaptureFixture
) -> None:
    rows, source, ended = Rows(), Mixed(digits.x[0]), threading.Event()
    with Stream(agent, Opened(source, "mixed"), [rows.sink], on_end=ended.set) as stream:
        assert ended.wait(10)
    stream.check()
    assert [row["input"] for row in rows.rows] == ["item 1", "item 3"]
    assert stream.counts()["source"]["refused"] == 1
    assert "skipped: item 2: input: expected shape (1, 8, 8), got (3, 3)" in caplog.text
    assert source.marks == [1, 3, -1]


def test_of_a_live_source_the_agent_gets_the_newest_item(digits: Digits) -> None:
    feed = Feed("camera", lambda: None)  # type: ignore[arg-type,return-value]
    handover = Handover(feed, newest=True)
    for number in range(5):
        handover.put(Item(f"frame {number}", digits.x[0]))
    item = handover.take(0)
    assert item is not None
    assert item.name == "frame 4"
    assert feed.counts.skipped == 4
    assert handover.take(0) is None


@pytest.mark.deadline
def test_a_fast_source_waits_for_the_agent(digits: Digits) -> None:
    feed = Feed("fast", lambda: None)  # type: ignore[arg-type,return-value]
    handover = Handover(feed, newest=False)
    put = []

    def fill() -> None:
        for number in range(20):
            handover.put(Item(str(number), digits.x[0]))
            put.append(number)
        handover.end()

    thread = threading.Thread(target=fill)
    thread.start()
    wait_until(lambda: len(put) == 8, lambda: put)
    taken = []
    while not handover.over:
        item = handover.take(1.0)
        if item is not None:
            taken.append(item.name)
            assert len(put) <= len(taken) + 8
    thread.join()
    assert taken == [str(number) for number in range(20)]
    assert feed.counts.skipped == 0


@pytest.mark.deadline
def test_offloads_overlap_and_a_slow_source_holds_no_answer_back(
    fleet: Fleet, digits: Digits
) -> None:
    rows = Rows()
    under_way: list[int] = []

    def inputs() -> Iterator[Array]:
        for x in digits.x[:40]:
            yield x
            under_way.append(len(sent))
        rows.wait(40)  # all are answered although no input follows
        yield digits.x[40]

    settings = AgentSettings(threshold=NEVER_EXIT, deadline_s=5.0, max_in_flight=8)
    with EdgeAgent.open(fleet.device("stream"), settings) as agent:
        agent.predict(digits.x[0])
        assert agent._offloader is not None
        sent = (
            agent._offloader._packs._packs
        )  # an entry for each offload, which may share a message
        stream, ended = stream_of(agent, inputs, rows)
        with stream:
            assert ended.wait(20)
        stream.check()
    assert [row["source"] for row in rows.rows] == ["server"] * 41
    assert [row["label"] for row in rows.rows] == digits.logits[:41].argmax(1).tolist()
    assert max(under_way) > 1
    assert all(row["bytes_up"] > 0 and row["bytes_down"] > 0 for row in rows.rows)


def test_a_stream_that_is_closed_answers_what_was_read(agent: EdgeAgent, digits: Digits) -> None:
    released = threading.Event()

    def inputs() -> Iterator[Array]:
        yield from digits.x[:3]
        released.wait(10)

    rows = Rows()
    stream, ended = stream_of(agent, inputs, rows)
    with stream:
        rows.wait(3)
    assert ended.is_set()
    released.set()
    assert len(rows.rows) == 3


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (StreamTable(sinks=("-",)), "needs a source; see --source"),
        (StreamTable(smooth="majority:3"), "needs a source; see --source"),
        (StreamTable("folder:in", ("jsonl:a", "printer:")), "sink printer:: expected one of"),
        (StreamTable("folder:in", smooth="median:3"), "expected majority:N or mean:N"),
        (StreamTable("fold:in"), "put fold.py in"),
        (StreamTable("fold:in"), "other sources are folder:DIR, camera:0"),
    ],
)
def test_a_wrong_table_is_refused_and_leaves_nothing_running(
    table: StreamTable, message: str, agent: EdgeAgent, tmp_path: Path
) -> None:
    before = threading.active_count()
    with pytest.raises(ConfigurationError) as refused:
        open_stream(agent, table, tmp_path, source_base=tmp_path, sink_base=tmp_path)
    assert message in str(refused.value)
    assert threading.active_count() == before


def test_a_stream_holds_no_samples_while_answers_are_awaited(digits: Digits) -> None:
    held: list[int] = []

    class Watching(EdgeAgent):
        def predict_many(self, inputs: Any, **more: Any) -> Iterator[Any]:
            answers = [super(Watching, self).predict(x) for x in inputs if x is not None]
            held.append(sum(np.asarray(item.sample).nbytes for item in stream._given))
            assert len(stream._given) == 40
            yield from answers

    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    rows = Rows()
    with Watching.from_bundle(folder) as agent:
        stream, ended = stream_of(agent, lambda: iter(digits.x[:40]), rows)
        with stream:
            assert ended.wait(10)
        stream.check()
    assert held == [0]
    assert len(rows.rows) == 40
