"""The sources `-`, `module:function` and `camera:`, and the words of all sources."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from PIL import Image

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.manifest import TensorSpec
from edge_sdk.pipeline.sources.camera import CameraSource, is_live, opencv_capture
from edge_sdk.pipeline.sources.function import FunctionSource
from edge_sdk.pipeline.sources.json_lines import JsonLinesSource
from edge_sdk.pipeline.sources.kinds import SOURCES, Surroundings, open_source
from tests.edge.pipeline.reading import reading
from tests.waiting import wait_until

SPEC = TensorSpec("float32", (1, 2, 2))
VIDEO_SPEC = TensorSpec("uint8", (3, 8, 8))


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Descriptors for reading and writing; the writing end is closed by the test."""
    near, far = os.pipe()
    yield near, far
    os.close(near)


def test_json_lines_until_the_end_of_the_input(pipe: tuple[int, int], tmp_path: Path) -> None:
    Image.fromarray(np.full((4, 4), 7, np.uint8)).save(tmp_path / "a.png")
    near, far = pipe
    with reading(JsonLinesSource(near), SPEC) as got:
        os.write(far, b'[[1, 2], [3, 4]]\n{"x": [[[0, 0], [0, 0]]], "name"')
        got.wait(1)
        os.write(far, b': "dark"}\n\n')
        os.write(far, f'{{"file": "{tmp_path}/a.png"}}\n[[[1,1],[1,1]],[[2,2],[2,2]]]'.encode())
        os.close(far)
        got.wait_ended()
    assert got.names == ["line 1", "dark", "a.png", "line 5[0]", "line 5[1]"]
    assert np.asarray(got.items[0].sample).tolist() == [[[1, 2], [3, 4]]]
    assert got.feed.counts.refused == 0


def test_wrong_lines_are_named_and_the_next_ones_are_read(
    pipe: tuple[int, int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    near, far = pipe
    wrong = [
        b"no json",
        b"3",
        b'{"y": [1]}',
        b"[[1, 2], [3]]",
        b'["a", "b"]',
        b'{"x": [[1, 2], [3, 4]], "name": 5}',
        b"[[1, 2, 3]]",
        b'{"file": "%s/none.png"}' % str(tmp_path).encode(),
    ]
    with reading(JsonLinesSource(near), SPEC) as got:
        os.write(far, b"\n".join(wrong) + b"\n[[1, 2], [3, 4]]\n")
        os.close(far)
        got.wait_ended()
    assert got.names == ["line 9"]
    assert got.feed.counts.refused == len(wrong)
    for number in range(1, 6):  # more are not named one by one
        assert f"skipped: line {number}: " in caplog.text
    assert caplog.text.count("skipped: ") == 5


def test_a_file_that_is_not_there_is_named(
    pipe: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    near, far = pipe
    with reading(JsonLinesSource(near), SPEC) as got:
        os.write(far, b'{"file": "/none.png"}\n')
        os.close(far)
        got.wait_ended()
    assert "skipped: /none.png: not a readable image (No such file or directory)" in caplog.text


def test_a_line_above_the_limit_is_counted(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_sdk.pipeline.sources.json_lines.LINE_BYTES_MAX", 100)
    near, far = pipe
    with reading(JsonLinesSource(near), SPEC) as got:
        os.write(far, b"[" + b"1," * 100 + b"1]\n[[1, 2], [3, 4]]\n")
        os.close(far)
        got.wait_ended()
    assert len(got.items) == 1
    assert got.feed.counts.refused == 1


def test_a_function_yields_arrays_with_and_without_names() -> None:
    def frames() -> Iterator[Any]:
        yield np.zeros((2, 2))
        yield "named", [[[1, 2], [3, 4]]]
        yield np.zeros(7)
        yield np.full((2, 1, 2, 2), 5.0)
        yield [[1], [2, 3]]

    with reading(FunctionSource(frames, "own:frames"), SPEC) as got:
        got.wait_ended()
    assert got.names == ["own:frames 1", "named", "own:frames 4[0]", "own:frames 4[1]"]
    assert np.asarray(got.items[1].sample).tolist() == [[[1, 2], [3, 4]]]
    assert got.feed.counts.refused == 2


def test_a_function_that_fails_or_gives_no_iterator_ends_the_reading() -> None:
    def fails() -> Iterator[Any]:
        yield np.zeros((2, 2))
        raise ZeroDivisionError

    with reading(FunctionSource(fails, "own:fails"), SPEC) as got:
        got.wait_ended()
    assert len(got.items) == 1
    assert isinstance(got.fault, ZeroDivisionError)
    with reading(FunctionSource(lambda: 3, "own:three"), SPEC) as got:
        got.wait_ended()
    assert "own:three: expected an iterator of arrays" in str(got.fault)


def write_video(path: Path, levels: list[int]) -> None:
    """A video of frames 32 x 24, each of one level of red and no other colour."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (32, 24))
    assert writer.isOpened()
    for level in levels:
        frame = np.zeros((24, 32, 3), np.uint8)
        frame[..., 2] = level  # OpenCV's order is blue, green, red
        writer.write(frame)
    writer.release()


def camera(path: Path, *, live: bool) -> CameraSource:
    return CameraSource(partial(opencv_capture, str(path)), path.name, live=live)


def test_a_video_file_is_read_frame_by_frame_in_the_model_s_form(tmp_path: Path) -> None:
    levels = [0, 100, 200, 250]
    write_video(tmp_path / "a.avi", levels)
    with reading(camera(tmp_path / "a.avi", live=False), VIDEO_SPEC) as got:
        got.wait_ended()
    assert got.names == [f"a.avi frame {n}" for n in (1, 2, 3, 4)]
    assert not got.source.newest
    for item, level in zip(got.items, levels, strict=True):
        sample = item.take()
        assert sample.dtype == np.uint8
        assert sample.shape == (3, 8, 8)
        # JPEG keeps an even colour within a few levels
        np.testing.assert_allclose(sample.mean(axis=(1, 2)), [level, 0, 0], atol=6)


def test_frames_are_grey_where_the_model_is(tmp_path: Path) -> None:
    write_video(tmp_path / "a.avi", [255])
    with reading(camera(tmp_path / "a.avi", live=False), TensorSpec("float32", (1, 4, 4))) as got:
        got.wait_ended()
    # luma of red by ITU-R 601: 0.299 * 255 = 76
    np.testing.assert_allclose(got.items[0].take(), 76, atol=6)


@pytest.mark.parametrize("model", [VIDEO_SPEC, SPEC])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((4, 6), np.uint16), ((4, 6, 3), np.uint16), ((4, 6, 4), np.uint8)]
)
def test_a_frame_that_is_no_8_bit_picture_is_refused(
    shape: tuple[int, ...], dtype: type[np.generic], model: TensorSpec, tmp_path: Path
) -> None:
    cv2.imwrite(str(tmp_path / "frame_1.png"), np.full(shape, 200, dtype))

    def as_it_is() -> cv2.VideoCapture:  # as a driver gives frames that OpenCV does not convert
        return cv2.VideoCapture(str(tmp_path / "frame_%d.png"), cv2.CAP_IMAGES)

    with reading(CameraSource(as_it_is, "camera 0", live=False), model) as got:
        got.wait_ended()
    expected = f"camera 0 frame 1: expected uint8 pixels .*, got {np.dtype(dtype)} of shape"
    with pytest.raises(InputError, match=expected):
        got.items[0].take()


def test_a_bundle_without_pictures_says_so(tmp_path: Path) -> None:
    write_video(tmp_path / "a.avi", [255])
    with reading(camera(tmp_path / "a.avi", live=False), TensorSpec("float32", (9, 128))) as got:
        got.wait_ended()
    with pytest.raises(InputError, match="takes arrays of shape"):
        got.items[0].take()


@pytest.mark.deadline
def test_a_camera_that_stops_is_opened_again_until_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "camera.avi"
    with reading(camera(path, live=True), VIDEO_SPEC, "camera 0") as got:
        wait_until(lambda: got.feed.counts.lost == 1, "not missed")
        write_video(tmp_path / "b.avi", [100, 200])
        (tmp_path / "b.avi").rename(path)
        got.wait(3)  # its end is the loss of the camera; then it is there again
        path.unlink()
        wait_until(lambda: got.feed.why_away == "it cannot be opened", "not missed")
        assert got.feed.counts.lost >= 2
    assert got.source.newest
    assert "camera 0 is away: it cannot be opened; waiting for it" in caplog.text
    assert "camera 0 is back after" in caplog.text


class Frames(BaseHTTPRequestHandler):
    """A network camera: one JPEG after the other, as long as the client listens."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        held = io.BytesIO()
        Image.new("RGB", (32, 24), (200, 0, 0)).save(held, "jpeg")
        head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {held.tell()}\r\n\r\n"
        with contextlib.suppress(OSError):  # the client left
            for _ in range(200):
                self.wfile.write(head.encode() + held.getvalue() + b"\r\n")

    def log_message(self, *_: Any) -> None:
        """Nothing is printed."""


def test_frames_of_a_network_camera(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Frames)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        word = f"camera:http://127.0.0.1:{server.server_port}/stream.mjpg?fps=5"
        with reading(open_source(word, Surroundings(tmp_path)).source, VIDEO_SPEC) as got:
            got.wait(3)
        np.testing.assert_allclose(got.items[2].take()[0], 200, atol=6)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("place", "live"),
    [("0", True), ("/dev/video2", True), ("rtsp://pi:554/a?b=c", True), ("a.avi", False)],
)
def test_cameras_and_files_are_told_apart(place: str, live: bool) -> None:
    assert is_live(place) is live


def test_words_of_sources(tmp_path: Path) -> None:
    (tmp_path / "own_source.py").write_text("def frames():\n    yield [1]\n")
    around = Surroundings(tmp_path)
    for word, name in (
        ("folder:in?from=end", str(tmp_path / "in")),
        ("csv:a.csv?window=4&step=2&columns=a,b&separator=;", str(tmp_path / "a.csv")),
        ("serial:/dev/ttyUSB0?baud=9600", "/dev/ttyUSB0"),
        ("camera:http://pi/s?quality=3", "camera http://pi/s?quality=3"),
        ("camera:a.avi", f"camera {tmp_path}/a.avi"),
        ("-", "standard input"),
        ("own_source:frames", "own_source:frames"),
    ):
        assert open_source(word, around).name == name


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("pictures", "expected one of folder:DIR, camera:0, csv:FILE"),
        ("folder:", "expected more behind the colon, as in folder:DIR"),
        ("folder:in?form=end", "expected options from, got form"),
        ("folder:in?from=now", "from: expected one of last, start, end, got now"),
        ("csv:a.csv?window=0", "window: expected a whole number of at least 1, got 0"),
        ("csv:a.csv?separator=tab", "separator: expected one character, got tab"),
        ("serial:/dev/x?baud=fast", "baud: expected a whole number of at least 1, got fast"),
        ("-:x", "expected - alone"),
        ("none_of_ours:frames", "expected a module none_of_ours; put none_of_ours.py in"),
    ],
)
def test_a_wrong_source_is_named(word: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as refused:
        open_source(word, Surroundings(tmp_path))
    assert message in str(refused.value)


@pytest.mark.parametrize(("kind", "module"), [("camera", "cv2"), ("serial", "serial")])
def test_an_extra_that_is_not_installed_is_named(
    kind: str, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ConfigurationError, match=rf"pip install 'splitedge\[{kind}\]'"):
        open_source(SOURCES[kind].example, Surroundings(tmp_path))


def test_a_function_that_yields_may_import_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "own_numbers.py").write_text("FIRST = [1.0, 2.0, 3.0, 4.0]\n")
    (tmp_path / "own_frames.py").write_text(
        "def frames():\n    import own_numbers\n    yield own_numbers.FIRST\n    yield [5] * 4\n"
    )
    opened = open_source("own_frames:frames", Surroundings(tmp_path))
    with reading(opened.source, TensorSpec("float32", (4,))) as got:
        items = got.wait(2)
    assert [np.asarray(item.sample).tolist() for item in items] == [[1, 2, 3, 4], [5] * 4]


def test_the_password_of_a_camera_stays_out_of_its_answers(tmp_path: Path) -> None:
    opened = open_source("camera:rtsp://me:hunter2@127.0.0.1:1/door", Surroundings(tmp_path))
    assert opened.name == "camera rtsp://127.0.0.1:1/door"
    assert isinstance(opened.source, CameraSource)
    assert opened.source._name == "rtsp://127.0.0.1:1/door"
