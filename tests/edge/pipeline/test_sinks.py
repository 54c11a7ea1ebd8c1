"""Sinks: bounded, counted, and back without a restart, whatever happens to them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.mqtt.link import MqttLink
from edge_sdk.pipeline.answer import Row
from edge_sdk.pipeline.sinks.function import FunctionWriter
from edge_sdk.pipeline.sinks.json_lines import FileWriter, StreamWriter
from edge_sdk.pipeline.sinks.kinds import open_sink
from edge_sdk.pipeline.sinks.sink import Sink, Writer
from tests.edge.brokers import Inbox, Mosquitto
from tests.edge.fault_proxy import FaultProxy
from tests.edge.full_disk import full_disk
from tests.waiting import wait_until


def row(label: int, **more: Any) -> Row:
    return {"input": f"x{label}", "label": label, **more}


@pytest.fixture
def sink_of() -> Iterator[Callable[..., Sink]]:
    """Builds sinks, and closes them."""
    made: list[Sink] = []

    def build(writer: Writer | str, base: Path = Path(), **more: Any) -> Sink:
        sink = open_sink(writer, base) if isinstance(writer, str) else Sink("test", writer, **more)
        made.append(sink)
        return sink

    yield build
    for sink in made:
        sink.close()


def wait_lost(sink: Sink) -> None:
    """Wait until the sink's link to its broker is seen as lost."""
    writer: Any = sink._writer
    wait_until(lambda: not writer._link.connected, "the loss was not seen")


def wait_written(sink: Sink, count: int) -> None:
    wait_until(lambda: sink.counts.written >= count, lambda: sink.counts)


def labels(path: Path) -> list[int]:
    return [json.loads(line)["label"] for line in path.read_text().splitlines()]


class Door:
    """A writer that is away until it is opened, and may be slow."""

    def __init__(self) -> None:
        self.there = False
        self.got: list[int] = []
        self.tried = threading.Semaphore(0)

    def write(self, rows: Sequence[Row]) -> int:
        self.tried.release()
        if not self.there:
            raise LinkError("the door is closed")
        self.got.append(rows[0]["label"])
        return 1  # the rest must wait

    def close(self, timeout_s: float) -> int:
        self.there = False
        return 0


@pytest.mark.deadline
def test_a_sink_that_is_away_keeps_the_newest_rows_in_order(
    sink_of: Callable[..., Sink], caplog: pytest.LogCaptureFixture
) -> None:
    door = Door()
    sink = sink_of(door, waiting_max=5)
    for label in range(8):
        sink.put(row(label))
    assert door.tried.acquire(timeout=10)
    wait_until(lambda: sink.counts.away == "the door is closed", "it is not said why")
    wait_until(lambda: sink.counts.waiting == 5, lambda: sink.counts)
    assert sink.counts.dropped == 3
    door.there = True
    wait_written(sink, 5)
    assert door.got == [3, 4, 5, 6, 7]
    assert sink.counts.away == ""
    assert caplog.text.count("is away: the door is closed; answers wait for it") == 1
    assert caplog.text.count("test is back; 3 answers were dropped so far") == 1


def test_putting_a_row_never_waits_for_the_sink(sink_of: Callable[..., Sink]) -> None:
    held, begun = threading.Event(), threading.Event()

    def slow(_row: Row) -> None:
        begun.set()
        held.wait(10)

    sink = sink_of(FunctionWriter(slow, "own:slow"), waiting_max=100)
    sink.put(row(0))
    assert begun.wait(10)
    for label in range(1000):
        sink.put(row(label))  # would not end if it waited
    assert sink.counts.waiting == 100
    assert sink.counts.dropped == 900
    held.set()
    wait_written(sink, 101)


def test_at_the_end_what_waits_is_written_if_it_can_be(
    sink_of: Callable[..., Sink], caplog: pytest.LogCaptureFixture
) -> None:
    door = Door()
    door.there = True
    sink = sink_of(door)
    for label in range(50):
        sink.put(row(label))
    sink.close()
    assert door.got == list(range(50))
    closed = sink_of(Door())
    closed.put(row(1))
    closed.close(0.2)
    assert "test: 1 answers were not written at the end" in caplog.text


def test_only_changes_of_the_label_are_written(
    tmp_path: Path, sink_of: Callable[..., Sink]
) -> None:
    sink = sink_of("jsonl:a.jsonl?only=changes", tmp_path)
    for label in (1, 1, 2, 2, 2, 1):
        sink.put(row(label))
    sink.put(row(1, smoothed_label=4))
    sink.put(row(2, smoothed_label=4))
    sink.close()
    assert labels(tmp_path / "a.jsonl") == [1, 2, 1, 1]


def test_a_file_is_rotated_at_its_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    writer = FileWriter(path, size_max=60)
    for label in range(5):  # 26 bytes each
        assert writer.write([row(label)]) == 1
    writer.close(0)
    assert labels(path) == [3, 4]
    assert labels(tmp_path / "a.jsonl.1") == [0, 1, 2]


def test_a_file_that_another_program_moves_or_removes_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    writer = FileWriter(path)
    writer.write([row(1)])
    path.rename(tmp_path / "old.jsonl")
    writer.write([row(2)])
    path.unlink()
    writer.write([row(3), row(4)])
    writer.close(0)
    assert labels(tmp_path / "old.jsonl") == [1]
    assert labels(path) == [3, 4]


@pytest.mark.deadline
def test_a_folder_that_comes_later_gets_what_waited(
    tmp_path: Path, sink_of: Callable[..., Sink]
) -> None:
    sink = sink_of("jsonl:later/a.jsonl?queue=2", tmp_path)
    for label in range(4):
        sink.put(row(label))
    wait_until(lambda: sink.counts.away, "not away")
    assert "No such file or directory" in sink.counts.away
    (tmp_path / "later").mkdir()
    wait_written(sink, 2)
    sink.close()
    assert labels(tmp_path / "later" / "a.jsonl") == [2, 3]
    assert sink.counts.dropped == 2


def test_on_a_full_disk_the_file_ends_with_a_whole_line_and_goes_on_later(tmp_path: Path) -> None:
    """FAULTS row 6."""
    path = tmp_path / "a.jsonl"
    writer = FileWriter(path)
    writer.write([row(0)])
    with full_disk(path.stat().st_size + 30):  # room for one row and a piece of another
        with pytest.raises(OSError, match="File too large"):
            writer.write([row(1), row(2), row(3)])
        assert labels(path) == [0]
    writer.write([row(1), row(2), row(3)])
    writer.close(0)
    assert labels(path) == [0, 1, 2, 3]


def test_on_a_full_disk_standard_output_gets_each_line_once_and_goes_on_later(
    tmp_path: Path,
) -> None:
    """FAULTS row 6."""
    path = tmp_path / "a.jsonl"
    with path.open("ab") as stream:
        writer = StreamWriter(stream)
        assert writer.write([row(0)]) == 1
        with full_disk(path.stat().st_size + 30):  # room for one row and a piece of another
            assert writer.write([row(1), row(2), row(3)]) == 2
            for _ in range(3):
                with pytest.raises(OSError, match="File too large"):
                    writer.write([row(3)])
        assert writer.write([row(3), row(4)]) == 2
        writer.close(0)
    assert labels(path) == [0, 1, 2, 3, 4]


def test_the_rest_of_a_line_is_written_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("ab") as stream:
        writer = StreamWriter(stream)
        with full_disk(10):
            assert writer.write([row(0)]) == 1
        writer.close(0)
    assert labels(path) == [0]


@pytest.mark.deadline
def test_a_pipe_whose_reader_left_is_gone_for_good(sink_of: Callable[..., Sink]) -> None:
    near, far = os.pipe()
    with os.fdopen(far, "wb", buffering=0) as stream:
        sink = sink_of(StreamWriter(stream))
        sink.put(row(1))
        wait_written(sink, 1)
        assert json.loads(os.read(near, 100)) == row(1)
        os.close(near)
        sink.put(row(2))
        wait_until(lambda: sink.gone, "it still writes")


def test_a_function_that_fails_for_a_row_gets_the_next(
    tmp_path: Path, sink_of: Callable[..., Sink], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own_sink.py").write_text(
        "got = []\n"
        "def take(row):\n"
        "    got.append(row['label'])\n"
        "    if row['label'] % 2:\n"
        "        raise ValueError('odd')\n"
    )
    sink = sink_of("own_sink:take", tmp_path)
    for label in range(4):
        sink.put(row(label))
    sink.close()
    import own_sink  # type: ignore[import-not-found]  # the test wrote it

    assert own_sink.got == [0, 1, 2, 3]
    assert caplog.text.count("sink own_sink:take failed for x1") == 1
    assert "sink own_sink:take: 2 calls failed" in caplog.text


@pytest.fixture
def subscriber() -> Iterator[Callable[[Mosquitto], Inbox]]:
    """Listens to a topic at a broker, also after the broker was away."""
    links: list[MqttLink] = []

    def listen(broker: Mosquitto) -> Inbox:
        inbox = Inbox()
        link = MqttLink(broker.address, client_id=f"listener-{len(links)}")
        link.subscribe("home/door/answers", inbox)
        link.start()
        links.append(link)
        link.wait_connected(10)
        return inbox

    yield listen
    for link in links:
        link.stop()


def told(inbox: Inbox) -> list[int]:
    return [json.loads(message.payload)["label"] for message in inbox.messages]


@pytest.mark.broker
@pytest.mark.deadline
def test_after_a_lost_link_the_broker_gets_what_waited(
    mosquitto: Mosquitto,
    make_proxy: Callable[[int], FaultProxy],
    sink_of: Callable[..., Sink],
    subscriber: Callable[[Mosquitto], Inbox],
) -> None:
    inbox = subscriber(mosquitto)
    proxy = make_proxy(mosquitto.address.port)
    sink = sink_of(f"mqtt://127.0.0.1:{proxy.port}/home/door/answers?queue=5")
    sink.put(row(0))
    inbox.wait(1)
    proxy.hole()
    proxy.reset()
    wait_lost(sink)
    for label in range(1, 9):
        sink.put(row(label))
    wait_until(lambda: sink.counts.away, "it is not away")
    assert sink.counts.dropped == 3
    proxy.lift()
    wait_written(sink, 6)
    inbox.wait(6)
    assert told(inbox) == [0, 4, 5, 6, 7, 8]


@pytest.mark.broker
@pytest.mark.deadline
def test_a_broker_that_was_killed_is_used_again(
    mosquitto: Mosquitto, sink_of: Callable[..., Sink], subscriber: Callable[[Mosquitto], Inbox]
) -> None:
    sink = sink_of(f"mqtt://127.0.0.1:{mosquitto.address.port}/home/door/answers")
    sink.put(row(0))
    wait_written(sink, 1)
    mosquitto.stop()
    wait_lost(sink)
    sink.put(row(1))
    wait_until(lambda: sink.counts.away, "it is not away")
    mosquitto.start()
    wait_written(sink, 2)  # to whoever listened then
    inbox = subscriber(mosquitto)
    sink.put(row(2))
    wait_until(lambda: 2 in told(inbox), lambda: told(inbox))


@pytest.mark.broker
def test_the_broker_has_every_row_when_the_sink_is_closed(
    mosquitto: Mosquitto, sink_of: Callable[..., Sink], subscriber: Callable[[Mosquitto], Inbox]
) -> None:
    inbox = subscriber(mosquitto)
    sink = sink_of(f"mqtt://127.0.0.1:{mosquitto.address.port}/home/door/answers")
    for label in range(600):
        sink.put(row(label))
    sink.close(10)
    inbox.wait(600)
    assert told(inbox) == list(range(600))


@pytest.mark.broker
@pytest.mark.deadline
def test_rows_that_the_broker_never_got_count_as_dropped_at_the_end(
    mosquitto: Mosquitto,
    make_proxy: Callable[[int], FaultProxy],
    sink_of: Callable[..., Sink],
    subscriber: Callable[[Mosquitto], Inbox],
    caplog: pytest.LogCaptureFixture,
) -> None:
    inbox = subscriber(mosquitto)
    proxy = make_proxy(mosquitto.address.port)
    sink = sink_of(f"mqtt://127.0.0.1:{proxy.port}/home/door/answers")
    sink.put(row(0))
    inbox.wait(1)
    proxy.hole()
    for label in (1, 2, 3):
        sink.put(row(label))
    wait_written(sink, 4)  # handed to the link
    sink.close(0.5)
    assert (sink.counts.written, sink.counts.dropped) == (1, 3)
    assert "it did not confirm 3 answers; they may be lost" in caplog.text


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("stdout", "expected one of -, jsonl:FILE, mqtt://HOST/TOPIC"),
        ("jsonl:", "expected a file, as in jsonl:answers.jsonl"),
        ("jsonl:.", "expected a file, got a folder"),
        ("jsonl:a?max_mb=0", "max_mb: expected a whole number of at least 1, got 0"),
        ("jsonl:a?only=new", "only: expected all or changes, got new"),
        ("-?keep=1", "expected options only, queue, got keep"),
        ("mqtt://host", "expected a host and a topic without + and #"),
        ("mqtt://host/a/#", "expected a host and a topic without + and #"),
        ("mqtt://host:port/a", "broker URL"),
        ("mqtt://host/a?qos=2", "qos: expected 0 or 1, got 2"),
        ("mqtt://host/a?retain=yes", "retain: expected true or false, got yes"),
        ("mqtt://host/a?ca=ca.pem", "expected options only, queue, qos, retain, got ca"),
        ("mqtts://host/a?ca=none.pem", "none.pem"),
        ("none_of_ours:take", "expected a module none_of_ours; put none_of_ours.py in"),
    ],
)
def test_a_wrong_sink_is_named(word: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_sink(word, tmp_path)
    assert message in str(refused.value)


@pytest.mark.deadline
@pytest.mark.broker
def test_a_password_stays_out_of_names_and_logs(
    sink_of: Callable[..., Sink], free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    sink = sink_of(f"mqtt://me:hunter2@127.0.0.1:{free_port}/home")
    sink.put(row(1))
    wait_until(lambda: sink.counts.away, "it is not away")
    assert "connection refused" in sink.counts.away
    assert sink.name == f"mqtt://127.0.0.1:{free_port}/home"
    assert "hunter2" not in caplog.text


@pytest.mark.deadline
def test_a_row_that_cannot_be_written_is_dropped_and_the_next_one_is_written(
    tmp_path: Path, sink_of: Callable[..., Sink], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "answers.jsonl"
    sink = sink_of(FileWriter(path))
    sink.put(row(0, extra=object()))
    wait_until(lambda: sink.counts.dropped == 1, lambda: sink.counts)
    sink.put(row(1))
    wait_written(sink, 1)
    assert labels(path) == [1]
    assert "1 answers cannot be written" in caplog.text


@pytest.mark.parametrize("end", ["home?qos=7", "home?color=red", "home?qos", "#"])
def test_a_password_stays_out_of_errors(end: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="mqtt://broker/") as fault:
        open_sink(f"mqtt://me:hunter2@broker/{end}", tmp_path)
    assert "hunter2" not in str(fault.value)
