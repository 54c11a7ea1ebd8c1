"""The source `folder:DIR`: whole files, once, in the order in which they came."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from PIL import Image

from edge_sdk.answers.prediction import Prediction
from edge_sdk.manifest import TensorSpec
from edge_sdk.pipeline.answer import row_of
from edge_sdk.pipeline.sources import folder as folder_module
from edge_sdk.pipeline.sources.folder import FolderSource, Start
from edge_sdk.pipeline.sources.memory import SeenFiles, memory_file
from tests.edge.pipeline.reading import reading
from tests.waiting import wait_until

SPEC = TensorSpec("uint8", (1, 2, 2))
ANSWER = Prediction(0, "cat", np.array([1.0, 0.0], np.float32), 0.0, 1.0, "device", 1.0)


def picture(value: int) -> bytes:
    held = io.BytesIO()
    Image.fromarray(np.full((2, 2), value, np.uint8)).save(held, "png")
    return held.getvalue()


def source(folder: Path, memory: Path | None = None, start: Start = "last") -> FolderSource:
    return FolderSource(folder, SeenFiles(memory), start)


def put(path: Path, value: int, at_s: int) -> None:
    path.write_bytes(picture(value))
    os.utime(path, (at_s, at_s))


def test_files_are_read_in_the_order_of_their_last_change(tmp_path: Path) -> None:
    put(tmp_path / "b.png", 1, 100)
    put(tmp_path / "a.png", 2, 200)
    np.save(tmp_path / "c.npy", np.full((2, 2, 2), 9, np.uint8))
    with reading(source(tmp_path), SPEC) as got:
        got.wait(4)
        put(tmp_path / "d.png", 3, 50)  # it comes last all the same
        items = got.wait(5)
    assert got.names == ["b.png", "a.png", "c.npy[0]", "c.npy[1]", "d.png"]
    values = [int(np.asarray(item.sample).mean()) for item in items]
    assert values == [1, 2, 9, 9, 3]


def test_other_files_and_dot_files_are_left_out(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "notes.txt").write_text("no picture")
    (tmp_path / ".half.png").write_bytes(picture(1)[:20])
    (tmp_path / "inner").mkdir()
    put(tmp_path / "a.PNG", 2, 200)
    with reading(source(tmp_path), SPEC) as got:
        got.wait(1)
    assert got.names == ["a.PNG"]
    assert got.feed.counts.refused == 0
    assert caplog.text.count("files with the ending .txt are left out") == 1


@pytest.mark.deadline
def test_folders_inside_are_named_where_there_is_nothing_else(tmp_path: Path, caplog: Any) -> None:
    for name in ("dog", "cat"):
        (tmp_path / name).mkdir()
        put(tmp_path / name / "a.png", 1, 100)
    with reading(source(tmp_path), SPEC) as got:
        wait_until(lambda: "folders inside are not read" in caplog.text, "it was not said")
        put(tmp_path / "b.png", 2, 200)
        got.wait(1)
    assert got.names == ["b.png"]
    assert caplog.text.count("(2, such as cat)") == 1
    assert f"name it: folder:{tmp_path / 'cat'}" in caplog.text


def test_a_file_that_is_being_written_waits_until_its_writer_is_done(tmp_path: Path) -> None:
    whole = picture(7)
    with reading(source(tmp_path), SPEC) as got:
        with (tmp_path / "slow.png").open("wb") as file:
            file.write(whole[:30])
            file.flush()
            put(tmp_path / "other.png", 1, 100)
            got.wait(1)  # by now the folder was looked through with the half file in it
            assert got.names == ["other.png"]
            file.write(whole[30:])
        items = got.wait(2)
    assert got.names == ["other.png", "slow.png"]
    assert int(np.asarray(items[1].sample).mean()) == 7
    assert got.feed.counts.refused == 0


def test_without_leases_a_file_waits_until_it_no_longer_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "_is_written", lambda _path: None)  # as on NFS
    monkeypatch.setattr(folder_module, "SETTLE_S", 0.6)
    whole = picture(7)
    with (
        reading(source(tmp_path), SPEC) as got,
        (tmp_path / "slow.png").open("wb") as file,
    ):
        for part in (whole[:30], whole[30:40], whole[40:]):
            file.write(part)
            file.flush()
            put(tmp_path / f"{len(part)}.npy", 1, 100)  # no array: refused once it is settled
        got.wait(1)
    assert got.names == ["slow.png"]


def test_a_corrupt_file_is_named_counted_and_not_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = tmp_path / "memory"
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "torn.png").write_bytes(picture(1)[:40])
    (pictures / "text.npy").write_text("no array")
    np.save(pictures / "shape.npy", np.zeros((3, 3), np.uint8))
    (pictures / "zip.npy").write_bytes(b"PK\x03\x04" + bytes(60))
    os.utime(pictures / "torn.png", (100, 100))
    for run in range(2):
        with reading(source(pictures, memory), SPEC) as got:
            put(pictures / f"good{run}.png", 1, 2_000_000_000)  # after those
            got.wait(1)
            put(pictures / f"more{run}.png", 1, 2_000_000_000)
            got.wait(2)
            got.answer_all()
        assert got.feed.counts.refused == (4 if run == 0 else 0)
    for name in ("torn.png", "text.npy", "shape.npy", "zip.npy"):
        assert caplog.text.count(f"{pictures / name}: ") == 1
    with reading(source(pictures, memory), SPEC) as got:
        put(pictures / "torn.png", 5, 300)  # mended: it is another file now
        got.wait(1)
    assert got.names == ["torn.png"]


@pytest.mark.deadline
def test_answered_files_are_not_read_again_after_a_restart_unless_told(tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    for number in range(3):
        put(pictures / f"{number}.png", number, 100 + number)
    with reading(source(pictures, memory), SPEC) as first:
        first.wait(3)
        for item in first.items[:2]:  # the third was read and not answered
            first.source.answered(item.mark)
    with reading(source(pictures, memory), SPEC) as second:
        second.wait(1)
    assert second.names == ["2.png"]
    with reading(source(pictures, memory, "start"), SPEC) as third:
        third.wait(3)
    assert third.names == ["0.png", "1.png", "2.png"]
    with reading(source(pictures, None, "end"), SPEC) as fourth:
        wait_until(lambda: fourth.source._given, "the folder was not looked through")
        put(pictures / "new.png", 1, 50)
        fourth.wait(1)
    assert fourth.names == ["new.png"]


def test_a_torn_memory_costs_one_file_no_more(tmp_path: Path) -> None:
    memory = tmp_path / "memory.json"
    seen = SeenFiles(memory)
    seen.add("a.png", (1, 2))
    seen.add("b.png", (3, 4))
    memory.write_bytes(memory.read_bytes()[:-5])
    again = SeenFiles(memory)
    assert again.has("a.png", (1, 2))
    assert not again.has("b.png", (3, 4))


def test_the_memory_forgets_files_that_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_sdk.pipeline.sources.memory.GONE_MAX", 10)
    memory = tmp_path / "memory.json"
    seen = SeenFiles(memory)
    for number in range(30):
        seen.add(f"{number}.png", (number, number))
    seen.keep_only({"3.png", "29.png"})
    assert len(seen) == 2
    assert len(memory.read_bytes().splitlines()) == 2
    assert SeenFiles(memory).has("29.png", (29, 29))


@pytest.mark.deadline
def test_a_folder_that_goes_and_comes_back_is_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pictures, gone = tmp_path / "pictures", tmp_path / "gone"
    with reading(source(pictures), SPEC, str(pictures)) as got:
        wait_until(lambda: got.feed.why_away, "it was not missed")
        pictures.mkdir()
        put(pictures / "0.png", 1, 100)
        got.wait(1)
        pictures.rename(gone)
        wait_until(lambda: got.feed.counts.lost == 2, "it was not missed again")
        put(gone / "1.png", 2, 200)
        gone.rename(pictures)
        got.wait(2)
    assert got.names == ["0.png", "1.png"]
    assert caplog.text.count("is away: No such file or directory; waiting for it") == 2
    assert caplog.text.count("is back after") == 2


def test_a_name_that_is_no_text_is_answered_and_remembered(tmp_path: Path) -> None:
    memory, pictures = tmp_path / "memory.json", tmp_path / "pictures"
    pictures.mkdir()
    put(Path(os.fsdecode(os.fsencode(pictures) + b"/caf\xe9.png")), 1, 100)  # Latin-1
    with reading(source(pictures, memory), SPEC) as got:
        got.wait(1)
        got.answer_all()
    written = row_of(got.items[0].name, 0.0, ANSWER, None)
    assert orjson.loads(orjson.dumps(written))["input"].endswith("caf\\udce9.png")
    assert len(SeenFiles(memory)) == 1
    assert memory_file(tmp_path, "folder", Path("caf\udce9")) is not None
    with reading(source(pictures, memory), SPEC) as again:
        put(pictures / "new.png", 1, 200)
        again.wait(1)
    assert again.names == ["new.png"]


def test_the_memory_of_a_file_that_changes_all_the_time_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_sdk.pipeline.sources.memory.GONE_MAX", 10)
    memory = tmp_path / "memory.json"
    seen = SeenFiles(memory)
    for second in range(100):
        seen.add("newest.png", (4, second))
    assert len(memory.read_bytes().splitlines()) <= 13
    assert SeenFiles(memory).has("newest.png", (4, 99))
