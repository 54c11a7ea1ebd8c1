"""The source `csv:FILE`: windows of rows, with holes, rotation and files that were away."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orjson
import pytest

from edge_sdk.errors import ConfigurationError
from edge_sdk.manifest import TensorSpec
from edge_sdk.pipeline.sources.feed import Feed
from edge_sdk.pipeline.sources.lines import GrowingFile, LineSplitter
from edge_sdk.pipeline.sources.memory import SavedPlace
from edge_sdk.pipeline.sources.rows import (
    CsvSource,
    RowKeys,
    window_length,
)
from tests.edge.pipeline.reading import (
    NEXT_TO_EACH_OTHER,
    SPEC,
    Reading,
    first_channel,
    reading,
)
from tests.waiting import wait_until


def csv_source(
    path: Path, keys: RowKeys = NEXT_TO_EACH_OTHER, memory: Path | None = None, end: bool = False
) -> CsvSource:
    place = SavedPlace(memory)
    return CsvSource(GrowingFile(path, place.place, from_end=end), place, keys)


def write(path: Path, text: str) -> None:
    """Write behind what is there."""
    with path.open("a") as file:
        file.write(text)


def append(path: Path, *lines: str) -> None:
    write(path, "".join(f"{line}\n" for line in lines))


def wait_read(got: Reading, path: Path, half: str = "") -> None:
    """Wait until a file is read up to its end, where half a line is."""
    file: GrowingFile = got.source._file
    end, begun = path.stat().st_size - len(half), half.encode()
    wait_until(lambda: (file._end, file._splitter.begun) == (end, begun), "not read")


def test_lines_out_of_chunks() -> None:
    splitter = LineSplitter(limit=5)
    assert list(splitter.push(b"ab\ncd")) == [b"ab\n"]
    assert list(splitter.push(b"e\n\nf")) == [b"cde\n", b"\n"]
    assert list(splitter.push(b"ghijklm")) == []  # above the limit, and not at its end
    assert list(splitter.push(b"nop\nq\n")) == [b"q\n"]
    assert splitter.too_long == 1
    assert list(splitter.push(b"rest")) == []
    assert splitter.rest() == b"rest"
    assert splitter.rest() == b""


@pytest.mark.parametrize(
    ("shape", "channels", "length"),
    [
        ((9, 128), 9, 128),
        ((128, 9), 9, 128),
        ((1, 9, 128), 9, 128),
        ((9, 1, 128), 9, 128),
        ((4,), 4, 1),
        ((50,), 1, 50),
        ((1, 50), 1, 50),
        ((1,), 1, 1),
        ((9, 128), 3, None),
        ((3, 32, 32), 3, None),
        ((50,), 4, None),
    ],
)
def test_rows_of_a_window_for_a_model(
    shape: tuple[int, ...], channels: int, length: int | None
) -> None:
    assert window_length(TensorSpec("float32", shape), channels) == length


@pytest.mark.deadline
def test_windows_of_a_file_that_grows(tmp_path: Path) -> None:
    file = tmp_path / "motion.csv"
    append(file, "t,ax,ay", "0,1,10", "0,2,20", "0,3,30", "0,4,40")
    keys = RowKeys(("ax", "ay"), step=2)
    with reading(csv_source(file, keys), SPEC, "motion.csv") as got:
        got.wait(1)
        append(file, "0,5,50")
        got.wait(2)
        with file.open("a") as half:
            half.write("0,6,60\n0,7,7")  # the last row is not whole
            half.flush()
            wait_until(lambda: got.source._file._end >= 41, "the row was not read")
            assert len(got.items) == 2
            half.write("0\n")
        items = got.wait(3)
    assert np.asarray(items[0].sample).tolist() == [[1, 2, 3], [10, 20, 30]]
    assert np.asarray(items[2].sample).tolist() == [[5, 6, 7], [50, 60, 70]]
    assert items[0].name == "motion.csv line 4"


def test_layout_and_dtype_are_the_model_s(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    append(file, "1,10", "2,20", "3,30")
    with reading(csv_source(file), TensorSpec("float16", (1, 3, 2))) as got:
        sample = np.asarray(got.wait(1)[0].sample)
    assert sample.dtype == np.float16
    assert sample.tolist() == [[[1, 10], [2, 20], [3, 30]]]


LONG = "9" * 1_100_000  # a line above the limit


@pytest.mark.parametrize("columns", [(), ("ax", "ay")])
@pytest.mark.parametrize(
    "top", [("", " "), ("\ufeff", ""), ("\ufeff \r", "\r"), ("", LONG), (LONG, "\u00a0")]
)
def test_lines_before_the_header_are_passed_over_also_after_a_restart(
    tmp_path: Path, top: tuple[str, ...], columns: tuple[str, ...]
) -> None:
    file, memory = tmp_path / "a.csv", tmp_path / "place.json"
    append(file, *top, "ax,ay", "1,10", "2,20", "3,30")
    keys = RowKeys(columns, step=3)
    with reading(csv_source(file, keys, memory), SPEC, "a.csv") as first:
        first.wait(1)
        first.answer_all()
    append(file, "4,40", "5,50", "6,60")
    with reading(csv_source(file, keys, memory), SPEC, "a.csv") as second:
        second.wait(1)
    assert first_channel(first) == [[1, 2, 3]]
    assert first_channel(second) == [[4, 5, 6]]
    assert second.names == ["a.csv line 9"]
    assert first.feed.counts.holes == second.feed.counts.holes == 0


def test_a_table_begins_behind_a_first_line_above_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    append(file, LONG, "1,10", "2,20", "3,30")
    with reading(csv_source(file), SPEC) as got:
        got.wait(1)
    assert first_channel(got) == [[1, 2, 3]]


def test_a_byte_order_mark_is_no_part_of_a_number(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    append(file, "\ufeff1,10", "2,20", "3,30")
    with reading(csv_source(file), SPEC) as got:
        got.wait(1)
    assert first_channel(got) == [[1, 2, 3]]
    assert got.feed.counts.holes == 0


def test_a_window_that_the_model_s_dtype_cannot_hold_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.csv"
    append(file, "1,1", "300,1", "2,2", "1,1", "1.5,1", "2,2", "-1,0", "0,0", "0,0")
    append(file, "7,8", "9,10", "255,12")
    with reading(csv_source(file), TensorSpec("uint8", (2, 3)), "a.csv") as got:
        got.wait(1)
    assert first_channel(got) == [[7, 9, 255]]
    assert got.feed.counts.refused == 3
    assert "skipped: a.csv line 3: expected uint8 values" in caplog.text


def test_holes_are_named_counted_and_begin_a_new_window(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.csv"
    append(file, "ax,ay", "1,1", "2,", "3,3", "nan,4", "5,5", "x,6", "7,7", "8,8", "9,9")
    with reading(csv_source(file), SPEC, str(file)) as got:
        got.wait(1)
    assert first_channel(got) == [[7, 8, 9]]
    counts = got.feed.counts
    assert (counts.holes, counts.windows_lost) == (3, 3)
    assert f"{file} line 3: column ay: expected a finite number, got nothing" in caplog.text
    assert f"{file} line 7: column ax: expected a finite number, got x" in caplog.text


def test_many_holes_are_not_all_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "a.csv"
    append(file, "1,1", *["2,"] * 100, "7,7", "8,8", "9,9")
    with reading(csv_source(file), SPEC) as got:
        got.wait(1)
    assert got.feed.counts.holes == 100
    assert caplog.text.count("hole: ") == 5


@pytest.mark.deadline
def test_rotation_loses_no_row(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    append(file, "ax,ay", "1,1", "2,2")
    with reading(csv_source(file), SPEC, str(file)) as got:
        wait_until(lambda: got.source._file._number == 3, "not read")
        file.rename(tmp_path / "a.csv.1")
        append(tmp_path / "a.csv.1", "3,3", "4,4")  # its writer has not noticed yet
        append(file, "ax,ay", "5,5", "6,6", "7,7", "8,8", "9,9")
        got.wait(3)
    assert first_channel(got) == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert got.feed.counts.lost == 0


@pytest.mark.deadline
def test_columns_by_name_survive_another_order_after_rotation(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    append(file, "ax,ay", "1,-1", "2,-2")
    with reading(csv_source(file, RowKeys(("ax", "ay"), step=3)), SPEC) as got:
        wait_until(lambda: got.source._file._number == 3, "not read")
        file.rename(tmp_path / "a.csv.1")
        append(file, "ay,ax", "-5,5", "-6,6", "-7,7")
        got.wait(1)
    assert np.asarray(got.items[0].sample).tolist() == [[1, 2, 5], [-1, -2, -5]]


@pytest.mark.deadline
@pytest.mark.parametrize("top", ["\ufeff", LONG])
def test_a_file_after_rotation_may_begin_with_a_line_that_is_none(top: str, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    append(file, "ax,ay", "1,1", "2,2", "3,3")
    with reading(csv_source(file), SPEC) as got:
        got.wait(1)
        file.rename(tmp_path / "a.csv.1")
        append(file, top, "ay,ax", "4,4", "5,5", "6,6")
        got.wait(2)
    assert first_channel(got) == [[1, 2, 3], [4, 5, 6]]
    assert got.feed.counts.holes == 0


@pytest.mark.deadline
def test_a_file_that_is_cut_short_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    append(file, *[f"{n},{n}" for n in (1, 2, 3)])
    with reading(csv_source(file), SPEC) as got:
        got.wait(1)
        file.write_text("4,4\n")  # as logrotate's copytruncate
        wait_until(lambda: got.source._file._end == 4, "not noticed")
        append(file, "5,5", "6,6")
        got.wait(2)
    assert first_channel(got) == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.deadline
def test_a_file_that_vanishes_is_waited_for_and_no_window_spans_the_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.csv"
    with reading(csv_source(file), SPEC, str(file)) as got:
        wait_until(lambda: got.feed.counts.lost == 1, "not missed")
        append(file, "1,1", "2,2")
        wait_until(lambda: got.source._file._number == 2, "not read")
        file.unlink()
        wait_until(lambda: got.feed.counts.lost == 2, "not missed again")
        append(file, "3,3", "4,4", "5,5")
        got.wait(1)
    assert first_channel(got) == [[3, 4, 5]]
    assert caplog.text.count("is away: No such file or directory; waiting for it") == 2


def point(link: Path, target: Path) -> None:
    """Let a link lead to another place, in one step."""
    new = link.with_name("new")
    new.symlink_to(target)
    new.rename(link)


@pytest.mark.deadline
@pytest.mark.parametrize("header", [(), ("ax,ay",), ("", "ax,ay")])
@pytest.mark.parametrize("why", ["No such file or directory", "Not a directory"])
def test_a_file_that_was_away_for_a_moment_goes_on_behind_its_last_row(
    why: str, header: tuple[str, ...], tmp_path: Path
) -> None:
    disk, mount = tmp_path / "disk", tmp_path / "mount"
    nowhere = tmp_path / "none"
    if why == "Not a directory":  # then the file is open still, and cannot be looked at
        nowhere.touch()
    disk.mkdir()
    file = disk / "a.csv"
    append(file, *header, "1,1", "2,2", "3,3", "4,4")
    point(mount, disk)
    with reading(csv_source(mount / "a.csv"), SPEC, "a.csv") as got:
        for time, half in (1, "1"), (2, ""):  # of a row: the rest comes while the file is away
            write(file, half)
            wait_read(got, file, half)
            point(mount, nowhere)
            wait_until(lambda: got.feed.why_away == why, "not missed")
            rows = "".join(f"{n},{n}\n" for n in range(10 * time, 10 * time + 4))
            write(file, rows.removeprefix(half))
            point(mount, disk)
            got.wait(1 + time)
    assert first_channel(got) == [[1, 2, 3], [10, 11, 12], [20, 21, 22]]
    assert got.names[-1] == f"a.csv line {len(header) + 11}"
    assert (got.feed.counts.lost, got.feed.counts.holes) == (2, 0)


@pytest.mark.deadline
@pytest.mark.parametrize("top", ["", "\n"])
def test_a_file_that_was_away_with_half_of_its_header_is_a_table_still(
    top: str, tmp_path: Path
) -> None:
    disk, mount = tmp_path / "disk", tmp_path / "mount"
    disk.mkdir()
    file = disk / "a.csv"
    write(file, f"{top}ax,a")
    point(mount, disk)
    with reading(csv_source(mount / "a.csv", RowKeys(("ay", "ax"), step=3)), SPEC) as got:
        wait_read(got, file, "ax,a")
        point(mount, tmp_path / "none")
        wait_until(lambda: got.feed.why_away, "not missed")
        write(file, "y\n-1,1\n-2,2\n-3,3\n")
        point(mount, disk)
        got.wait(1)
    assert first_channel(got) == [[1, 2, 3]]
    assert got.feed.counts.holes == 0


@pytest.mark.parametrize("dropped", [False, True])
def test_a_file_that_is_back_at_once_goes_on_in_the_middle_of_its_row(
    dropped: bool, tmp_path: Path
) -> None:
    disk, mount = tmp_path / "disk", tmp_path / "mount"
    disk.mkdir()
    file = disk / "a.csv"
    append(file, "1,1", *[LONG] * dropped)
    write(file, "2,")
    point(mount, disk)

    class Flicker(Feed):
        """The disk is away from the first pause of the source to the second."""

        pauses = 0

        def wait(self, seconds: float) -> bool:
            self.pauses += 1
            if self.pauses == 1:
                point(mount, tmp_path / "none")
            elif self.pauses == 2:
                point(mount, disk)
            else:
                write(file, "2\n3,3\n")
            return super().wait(0)

    feed = Flicker("a.csv", lambda: SPEC)
    source = GrowingFile(mount / "a.csv")
    lines = []
    for line in source.lines(feed):
        lines.append((line.text, line.number, line.again, line.gap))
        if line.text == "3,3":
            feed.stop()
    source.close()
    assert lines == [
        ("1,1", 1, False, False),
        ("1,1", 1, True, False),
        ("2,2", 2 + dropped, False, dropped),
        ("3,3", 3 + dropped, False, False),
    ]


@pytest.mark.deadline
@pytest.mark.parametrize("rows", ["1,1\n2,2\n3,3", "3,3"])
@pytest.mark.parametrize("away", [True, False])
def test_the_last_line_of_a_file_needs_no_end_once_another_file_has_its_name(
    away: bool, rows: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.csv"
    write(file, rows)
    with reading(csv_source(file, RowKeys(step=1)), TensorSpec("float32", (2,)), "a.csv") as got:
        wait_read(got, file, "3,3")
        if away:
            file.unlink()  # the next file may get its inode
            wait_until(lambda: got.feed.why_away, "not missed")
        write(tmp_path / "new", "4,4\n5,5\n")
        (tmp_path / "new").rename(file)
        got.wait(rows.count("\n") + 3)
    values = [int(np.asarray(item.sample)[0]) for item in got.items]
    assert values == [int(row[0]) for row in rows.split("\n")] + [4, 5]


@pytest.mark.deadline
def test_from_the_end_also_where_the_file_cannot_be_read_at_first(tmp_path: Path) -> None:
    file = tmp_path / "real.csv"
    append(file, "ax,ay", "1,1", "2,2", "3,3")
    point(tmp_path / "a.csv", Path("/proc/self/mem"))  # its first bytes give EIO
    with reading(csv_source(tmp_path / "a.csv", end=True), SPEC) as got:
        wait_until(lambda: got.feed.why_away == "Input/output error", "not missed")
        point(tmp_path / "a.csv", file)
        wait_until(lambda: got.source._file._end == file.stat().st_size, "not read")
        append(file, "4,4", "5,5", "6,6")
        got.wait(1)
    assert first_channel(got) == [[4, 5, 6]]


def test_after_a_restart_the_next_window_is_the_one_that_would_have_come(tmp_path: Path) -> None:
    file, memory = tmp_path / "a.csv", tmp_path / "place.json"
    append(file, "ax,ay", *[f"{n},0" for n in range(1, 7)])
    keys = RowKeys(step=1)
    with reading(csv_source(file, keys, memory), SPEC, str(file)) as first:
        first.wait(4)  # 123, 234, 345, 456
        for item in first.items[:2]:
            first.source.answered(item.mark)
    append(file, "7,0")
    with reading(csv_source(file, keys, memory), SPEC, str(file)) as second:
        second.wait(3)
    assert first_channel(second) == [[3, 4, 5], [4, 5, 6], [5, 6, 7]]
    assert second.items[0].name == f"{file} line 6"


def test_after_a_restart_another_file_of_that_name_is_read_from_its_start(tmp_path: Path) -> None:
    file, memory = tmp_path / "a.csv", tmp_path / "place.json"
    append(file, *[f"{n},0" for n in range(1, 7)])
    with reading(csv_source(file, memory=memory), SPEC) as first:
        first.wait(2)
        first.answer_all()
    file.rename(tmp_path / "a.csv.1")
    append(file, *[f"{n},0" for n in range(11, 18)])
    with reading(csv_source(file, memory=memory), SPEC) as second:
        second.wait(2)
    assert first_channel(second) == [[11, 12, 13], [14, 15, 16]]


def test_after_a_restart_a_new_file_with_the_inode_of_the_old_one_is_read_from_its_start(
    tmp_path: Path,
) -> None:
    file, memory = tmp_path / "a.csv", tmp_path / "place.json"
    append(file, *[f"{n},0" for n in range(1, 7)])
    with reading(csv_source(file, memory=memory), SPEC) as first:
        first.wait(2)
        first.answer_all()
    inode = file.stat().st_ino
    file.write_text("".join(f"{n},0\n" for n in range(11, 30)))
    assert file.stat().st_ino == inode
    with reading(csv_source(file, memory=memory), SPEC) as second:
        second.wait(1)
    assert first_channel(second)[0] == [11, 12, 13]


@pytest.mark.parametrize("older", [True, False])
def test_after_a_restart_the_place_of_this_release_and_of_the_one_before_holds(
    tmp_path: Path, older: bool
) -> None:
    file, memory = tmp_path / "a.csv", tmp_path / "place.json"
    append(file, "ax,ay", "9" * 1_100_000)  # a line above the limit
    append(file, *[f"{n},0" for n in range(1, 41)])
    with reading(csv_source(file, memory=memory), SPEC) as first:
        first.wait(13)
        first.answer_all()
    place = orjson.loads(memory.read_bytes())
    if older:
        del place["before"]
    memory.write_bytes(orjson.dumps(place))
    append(file, "41,0", "42,0")
    with reading(csv_source(file, memory=memory), SPEC) as second:
        second.wait(1)
    assert first_channel(second) == [[40, 41, 42]]


@pytest.mark.deadline
def test_from_the_end_only_new_rows_count(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    append(file, "ax,ay", "1,1", "2,2", "3,3")
    with reading(csv_source(file, end=True), SPEC) as got:
        wait_until(lambda: got.source._file._end > 0, "not opened")
        append(file, "4,4", "5,5", "6,6")
        got.wait(1)
    assert first_channel(got) == [[4, 5, 6]]


@pytest.mark.parametrize(
    ("header", "keys", "message"),
    [
        ("t,ax,ay,c", RowKeys(), "takes (2, 3), which 4 columns (t, ax, ay, c) cannot fill"),
        ("ax,ay", RowKeys(("ax", "az")), "column az: expected one of ax, ay"),
        ("ax,ay", RowKeys(window=4), "with window=4 cannot fill"),
    ],
)
def test_columns_that_do_not_fit_end_the_reading_with_a_sentence(
    header: str, keys: RowKeys, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.csv"
    append(file, header, "1,2,3,0", "4,5,6,0")
    with reading(csv_source(file, keys), SPEC, "a.csv") as got:
        got.wait_ended()
    assert isinstance(got.fault, ConfigurationError)
    assert message in str(got.fault)


@pytest.mark.parametrize("line", ["1,2\r3,4", "9" * 200_000])
def test_a_line_that_is_no_row_of_a_table_is_a_hole(tmp_path: Path, line: str) -> None:
    path = tmp_path / "motion.csv"
    append(path, "a,b", "1,2", line, "3,4", "5,6", "7,8")
    with reading(csv_source(path), SPEC) as got:
        got.wait(1)
    assert got.feed.counts.holes == 1
    assert first_channel(got) == [[3, 5, 7]]


def test_a_line_above_the_limit_is_a_gap_and_the_place_after_it_is_right(tmp_path: Path) -> None:
    path = tmp_path / "motion.csv"
    append(path, "a,b", "1,2", "9" * 1_100_000, "3,4")
    feed = Feed("motion", lambda: SPEC)
    file = GrowingFile(path)
    lines = []
    for line in file.lines(feed):
        lines.append((line.text, line.number, line.gap))
        end = line.end
        if line.text == "3,4":
            break
    file.close()
    assert lines == [("a,b", 1, False), ("1,2", 2, False), ("3,4", 4, True)]
    assert end == path.stat().st_size
