"""The source `serial:DEV`: windows of rows, behind what a board says first; and lost ports."""

from __future__ import annotations

import os
import pty
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import TensorSpec
from edge_sdk.pipeline.sources.rows import UNFIT_MOST, RowKeys, SerialSource, serial_port
from tests.edge.pipeline.reading import (
    NEXT_TO_EACH_OTHER,
    SPEC,
    Reading,
    first_channel,
    reading,
)
from tests.waiting import wait_until


class Port:
    """A pair of pseudo-terminals under a fixed name: what is written at one end is read at it."""

    def __init__(self, name: Path) -> None:
        self.name = name
        self._near = -1

    def plug_in(self) -> None:
        self._near, far = pty.openpty()
        tty.setraw(far)
        self.name.unlink(missing_ok=True)
        self.name.symlink_to(os.ttyname(far))
        self._far = far

    def write(self, text: str) -> None:
        os.write(self._near, text.encode())

    def unplug(self) -> None:
        if self._near >= 0:
            os.close(self._near)
            os.close(self._far)
            self.name.unlink()
            self._near = -1


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    made = Port(tmp_path / "ttyTEST")
    yield made
    made.unplug()


@contextmanager
def reading_port(port: Port, keys: RowKeys, spec: TensorSpec) -> Iterator[Reading]:
    """What is read at a port that is plugged in now, once it is open: earlier lines are lost."""
    opened = threading.Event()

    def open_port() -> Any:
        opened_port = serial_port(str(port.name), 115_200)
        opened.set()
        return opened_port

    port.plug_in()
    with reading(SerialSource(open_port, keys), spec, str(port.name)) as got:
        assert opened.wait(10)
        yield got


@pytest.mark.deadline
def test_windows_of_a_serial_port_that_is_unplugged_and_plugged_in(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    opened = threading.Semaphore(0)

    def open_port() -> Any:
        opened_port = serial_port(str(port.name), 115_200)
        opened.release()  # what was written before is flushed
        return opened_port

    port.plug_in()
    source = SerialSource(open_port, NEXT_TO_EACH_OTHER)
    with reading(source, SPEC, str(port.name)) as got:
        assert opened.acquire(timeout=10)
        port.write("9 9\n")  # its beginning may have been missed
        port.write("1 1\n2;2\n3,3\n4\t4\n5 bad\n6 6\n7 7\n8 ")
        port.write("8\n")
        got.wait(2)
        port.write("9 9\n")
        port.unplug()
        wait_until(lambda: got.feed.counts.lost == 1, "not missed")
        port.plug_in()
        assert opened.acquire(timeout=10)
        port.write("0 0\n1 1\n2 2\n3 3\n")
        got.wait(3)
    assert first_channel(got) == [[1, 2, 3], [6, 7, 8], [1, 2, 3]]
    assert got.feed.counts.holes == 1
    assert caplog.text.count("is away") == 1
    assert caplog.text.count("is back") == 1
    assert got.items[2].name == f"{port.name} window 3"


@pytest.mark.parametrize(
    ("text", "columns", "seen"),
    [
        ("sensor ready\n", "", [[1, 2]]),  # two words are no header of three columns
        ("sensor ready now\nax ay az\n", "ay", [[4, 5]]),
        ("ax ay az\nstarted\n", "2", [[4, 5]]),
        ("", "3", [[7, 8]]),  # attached while the device was sending
    ],
)
def test_text_before_the_rows_of_a_serial_port_is_a_header_if_it_fits_them(
    port: Port, text: str, columns: str, seen: list[list[float]]
) -> None:
    channels = 1 if columns else 3
    keys = RowKeys(window=2, step=2, columns=(columns,) if columns else ())
    spec = TensorSpec("float32", (channels, 2))
    with reading_port(port, keys, spec) as got:
        port.write(f"the first line may be half of one\n{text}1 4 7\n2 5 8\n")
        got.wait(1)
    assert first_channel(got) == seen
    assert got.feed.counts.holes == 0


def read_window(port: Port, columns: tuple[str, ...], before: str) -> Reading:
    """What is read of two rows of three columns that come behind other lines."""
    keys = RowKeys(columns, window=2, step=2)
    with reading_port(port, keys, TensorSpec("float32", (3, 2))) as got:
        port.write(f"the first line may be half of one\n{before}1 4 7\n2 5 8\n")
        got.wait(1)
    assert first_channel(got) == [[1, 2]]
    return got


@pytest.mark.parametrize("columns", [(), ("1", "2", "3"), ("ax", "ay", "az")])
@pytest.mark.parametrize("greeting", ["baud 115200", "MPU6050 firmware 2", "2 ready"])
def test_a_greeting_with_a_number_in_it_is_a_hole_and_no_table(
    port: Port, greeting: str, columns: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    got = read_window(port, columns, f"ax ay az\n{greeting}\n")
    assert got.feed.counts.holes == 1
    assert f"the line {greeting}: column" in caplog.text


@pytest.mark.parametrize("columns", [(), ("1", "2", "3"), ("ax", "ay", "az")])
@pytest.mark.parametrize("greeting", ["115200", "2024 1", "115200\n115200\n" * 9 + "115200"])
def test_a_greeting_of_numbers_alone_is_a_hole_and_no_table(
    port: Port, greeting: str, columns: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    got = read_window(port, columns, f"{greeting}\nax ay az\n")
    assert got.feed.counts.holes == len(greeting.splitlines())
    assert f"the line {greeting.splitlines()[0]}: " in caplog.text


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ((), "the model takes (2, 3), which 4 columns (1, 2, 3, 4) cannot fill"),
        (("ax", "ay"), "column ax: expected one of 1, 2, 3, 4"),
    ],
)
def test_a_serial_port_on_which_no_row_fits_ends_the_reading_with_a_sentence(
    port: Port, columns: tuple[str, ...], message: str
) -> None:
    with reading_port(port, RowKeys(columns), SPEC) as got:
        port.write("the first line may be half of one\n" + "1 4 7 9\n" * (UNFIT_MOST + 1))
        got.wait_ended()
    assert isinstance(got.fault, ConfigurationError)
    assert str(got.fault).startswith(f"{port.name}: {message}")
    assert got.feed.counts.holes == UNFIT_MOST


def test_a_text_column_of_a_serial_port_that_is_not_asked_for_is_no_hole(port: Port) -> None:
    keys = RowKeys(("2", "3"), window=2, step=2)
    with reading_port(port, keys, TensorSpec("float32", (2, 2))) as got:
        port.write("the first line may be half of one\n12:00:01 1 4\n12:00:02 2 5\n")
        got.wait(1)
    assert first_channel(got) == [[1, 2]]
    assert got.feed.counts.holes == 0
