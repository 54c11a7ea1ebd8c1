"""Data in every form: what a file holds comes out, what is not sound is refused by name."""

from __future__ import annotations

import io
import lzma
import pickle
import re
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data import cifar
from edge_sdk.training.data.cifar import CIFAR10_CLASSES, CIFAR100_CLASSES, read_cifar
from edge_sdk.training.data.dataset import labelled_dataset, moments
from edge_sdk.training.data.har import ACTIVITIES, CHANNELS
from edge_sdk.training.data.load import load_dataset, open_data
from edge_sdk.training.data.samples import Part, checked_samples

Write = Callable[..., Path]


def record(labels: tuple[int, ...], red: int, green: int, blue: int) -> bytes:
    """One CIFAR record: its label bytes, then 1,024 bytes of each colour."""
    return bytes(labels) + bytes([red]) * 1024 + bytes([green]) * 1024 + bytes([blue]) * 1024


@pytest.fixture
def cifar10_folder(tmp_path: Path) -> Path:
    """Five batches of two images and a test batch of one, plain, as they are unpacked."""
    for number in range(1, 6):
        raw = record((number,), number, 10, 20) + record((0,), 0, 10, 30)
        (tmp_path / f"data_batch_{number}.bin").write_bytes(raw)
    (tmp_path / "test_batch.bin").write_bytes(record((9,), 1, 2, 3))
    return tmp_path


@pytest.fixture
def har_folder(tmp_path: Path) -> Path:
    """The published text layout: three training windows of subjects 1, 1, 30, one test window."""
    root = tmp_path / "UCI HAR Dataset"
    for side, activities, subjects in (("train", (5, 1, 6), (1, 1, 30)), ("test", (2,), (2,))):
        (root / side / "Inertial Signals").mkdir(parents=True)
        for number, channel in enumerate(CHANNELS):
            lines = [
                " ".join(f"{number + row + 0.5: .7e}" for _ in range(128))
                for row in range(len(activities))
            ]
            path = root / side / "Inertial Signals" / f"{channel}_{side}.txt"
            path.write_text("\n".join(lines) + "\n")
        (root / side / f"y_{side}.txt").write_text("".join(f"{a}\n" for a in activities))
        (root / side / f"subject_{side}.txt").write_text("".join(f"{s}\n" for s in subjects))
    return tmp_path


def arrays(**others: Any) -> dict[str, Any]:
    """Three training samples of two values and one for test."""
    return {
        "x_train": np.array([[1, 10], [2, 10], [3, 40]], np.float32),
        "y_train": np.array([0, 1, 1]),
        "x_test": np.array([[5, 6]], np.float32),
        "y_test": np.array([1]),
    } | others


@pytest.fixture
def npz(tmp_path: Path) -> Write:
    def write(**others: Any) -> Path:
        content = {key: value for key, value in arrays(**others).items() if value is not None}
        np.savez(tmp_path / "mine.npz", **content)
        return tmp_path

    return write


def image(path: Path, colour: int | tuple[int, int, int], size: tuple[int, int] = (5, 4)) -> None:
    """Write an image all of one colour; grey where that is a number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


@pytest.fixture
def images_folder(tmp_path: Path) -> Path:
    """Two cats and a dog to train on, a dog to test on; 5 wide, 4 high, in colour."""
    image(tmp_path / "train/cat/b.png", (1, 2, 3))
    image(tmp_path / "train/cat/a.png", (4, 5, 6))
    image(tmp_path / "train/dog/a.bmp", (7, 8, 9))
    image(tmp_path / "test/dog/a.png", (10, 11, 12))
    (tmp_path / "train/.DS_Store").mkdir()
    (tmp_path / "train/cat/.hidden").write_text("")
    return tmp_path


# CIFAR


def test_cifar10_is_read_batch_after_batch(cifar10_folder: Path) -> None:
    data = load_dataset("cifar-10", cifar10_folder)
    assert data.x_train.shape == (10, 3, 32, 32)
    assert data.x_train.dtype == np.uint8
    assert data.y_train.tolist() == [1, 0, 2, 0, 3, 0, 4, 0, 5, 0]
    assert data.y_test.tolist() == [9]
    assert data.class_names == CIFAR10_CLASSES
    assert data.x_train[2, :, 31, 0].tolist() == [2, 10, 20]
    # red 1..5 and five 0; green 10; blue 20 and 30 in turn
    np.testing.assert_allclose(data.mean, [1.5, 10, 25])
    # red squared: 55 / 10 - 1.5 ** 2
    np.testing.assert_allclose(data.std, [3.25**0.5, 1, 5])


def test_cifar10_may_be_packed_and_lie_in_its_own_folder(cifar10_folder: Path) -> None:
    inner = cifar10_folder / "cifar-10-batches-bin"
    inner.mkdir()
    plain = load_dataset("cifar-10", cifar10_folder)
    for path in list(cifar10_folder.glob("*.bin")):
        (inner / f"cifar10_{path.name}.xz").write_bytes(lzma.compress(path.read_bytes()))
        path.unlink()
    packed = load_dataset("cifar-10", cifar10_folder)
    np.testing.assert_array_equal(packed.x_train, plain.x_train)
    np.testing.assert_array_equal(packed.y_train, plain.y_train)


def test_cifar100_takes_the_fine_label(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(record((4, 0), 1, 2, 3) + record((19, 99), 4, 5, 6))
    (tmp_path / "cifar100_test.bin.xz").write_bytes(lzma.compress(record((1, 51), 7, 8, 9)))
    data = load_dataset("cifar-100", tmp_path)
    assert data.y_train.tolist() == [0, 99]
    assert data.y_test.tolist() == [51]
    assert (data.class_names[0], data.class_names[51], data.class_names[99]) == (
        "apple",
        "mushroom",
        "worm",
    )
    assert data.x_train[1, :, 0, 0].tolist() == [4, 5, 6]


def test_cifar100_has_a_hundred_names_in_alphabetical_order() -> None:
    assert len(set(CIFAR100_CLASSES)) == 100
    assert list(CIFAR100_CLASSES) == sorted(CIFAR100_CLASSES)


@pytest.mark.parametrize("name", ["data_batch_1.bin", "data_batch_4.bin", "test_batch.bin"])
def test_a_missing_batch_is_named_with_the_place_to_put_it(cifar10_folder: Path, name: str) -> None:
    (cifar10_folder / name).unlink()
    with pytest.raises(ConfigurationError, match=f"{name}, found none; put the files") as caught:
        load_dataset("cifar-10", cifar10_folder)
    assert str(cifar10_folder) in str(caught.value)


@pytest.mark.parametrize("name", ["cifar-10", "cifar-100", "uci-har"])
def test_data_in_files_needs_a_folder(name: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"{name}: expected a folder with .*--data {name}=DIR"
    ):
        load_dataset(name)


def test_records_that_are_not_whole_are_refused(cifar10_folder: Path) -> None:
    path = cifar10_folder / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match=r"data_batch_3\.bin: .*records of 3073 bytes, got 6145"):
        load_dataset("cifar-10", cifar10_folder)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="got 0 bytes"):
        load_dataset("cifar-10", cifar10_folder)


def test_a_label_out_of_range_is_refused(cifar10_folder: Path) -> None:
    (cifar10_folder / "data_batch_5.bin").write_bytes(record((10,), 1, 2, 3))
    with pytest.raises(InputError, match=r"y_train: expected labels 0\.\.9, got 0\.\.10"):
        load_dataset("cifar-10", cifar10_folder)


def test_what_unpacks_without_end_is_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cifar, "RECORDS_MAX", 1000)  # 3 MB
    path = tmp_path / "bomb.bin.xz"
    path.write_bytes(lzma.compress(bytes(64 << 20), preset=0))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="expected 1 to 1000 records"):
            read_cifar(path, 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12_000_000  # the 3 MB, what bytearray keeps while it grows, one piece


def test_a_damaged_xz_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "batch.bin.xz"
    whole = lzma.compress(record((1,), 2, 3, 4))
    for raw in (whole[:-9], whole[:20] + b"\xff" * 8 + whole[28:], b"no xz at all"):
        path.write_bytes(raw)
        with pytest.raises(InputError, match=re.escape(f"{path}: cannot be read")):
            read_cifar(path, 1)


def test_a_batch_has_the_labels_it_was_published_with(
    tmp_path: Path, shared_data: Path | None
) -> None:
    path = (shared_data or tmp_path) / "cifar10_data_batch_1.bin.xz"
    # as counted in the README of the data
    counts = [1005, 974, 1032, 1016, 999, 937, 1030, 1001, 1025, 981]
    if not path.is_file():
        counts = list(range(1, 11))
        raw = b"".join(record((k,), k, k, k) * count for k, count in enumerate(counts))
        path = tmp_path / path.name
        path.write_bytes(lzma.compress(raw))
    images, labels = read_cifar(path, 1)
    assert images.shape == (sum(counts), 3, 32, 32)
    assert np.bincount(labels).tolist() == counts


# UCI-HAR


def test_har_text_files_become_windows_and_subjects(har_folder: Path) -> None:
    data = load_dataset("uci-har", har_folder)
    assert data.x_train.shape == (3, 9, 128)
    assert data.x_train.dtype == np.float32
    assert data.x_train[1, 4].tolist() == [5.5] * 128  # channel 4, row 1
    assert data.y_train.tolist() == [4, 0, 5]  # published from 1
    assert data.class_names == ACTIVITIES
    assert data.group_train is not None
    assert data.group_test is not None
    assert (data.group_train.tolist(), data.group_test.tolist()) == ([1, 1, 30], [2])


def test_har_text_files_may_be_given_by_their_own_folder(har_folder: Path) -> None:
    assert load_dataset("uci-har", har_folder / "UCI HAR Dataset").y_test.tolist() == [1]


def test_a_missing_har_file_is_named(har_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"uci_har\.npz, found none; put uci_har\.npz"):
        load_dataset("uci-har", har_folder / "UCI HAR Dataset" / "train")
    (har_folder / "UCI HAR Dataset/train/Inertial Signals/body_gyro_y_train.txt").unlink()
    with pytest.raises(ConfigurationError, match=r"body_gyro_y_train.txt, found none; put uci_har"):
        load_dataset("uci-har", har_folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("y_train.txt", "1\n2\n", "files of one length in train"),
        ("y_train.txt", "1 2\n3 4\n5 6\n", "expected 1 numbers a line, got 2"),
        ("subject_train.txt", "one\n", "expected lines of numbers"),
        ("y_train.txt", "0\n1\n2\n", r"expected labels 0\.\.5, got -1\.\.1"),
    ],
)
def test_har_files_that_do_not_fit_are_refused(
    har_folder: Path, name: str, text: str, message: str
) -> None:
    (har_folder / "UCI HAR Dataset" / "train" / name).write_text(text)
    with pytest.raises(InputError, match=message):
        load_dataset("uci-har", har_folder)


def test_har_from_npz_has_the_subjects_it_names(tmp_path: Path, shared_data: Path | None) -> None:
    if shared_data is not None and (shared_data / "uci_har.npz").is_file():
        data = load_dataset("uci-har", shared_data)
        assert (len(data.y_train), len(data.y_test)) == (7352, 2947)
        # per activity, as the README counts them
        assert np.bincount(data.y_train).tolist() == [1226, 1073, 986, 1286, 1374, 1407]
        assert data.group_train is not None
        assert np.unique(data.group_train).size == 21
    else:
        windows = np.arange(3 * 9 * 128, dtype=np.float32).reshape(3, 9, 128)
        np.savez(
            tmp_path / "uci_har.npz",
            x_train=windows[:2], y_train=np.array([0, 5], np.uint8),
            x_test=windows[2:], y_test=np.array([3], np.uint8),
            subject_train=np.array([1, 30], np.uint8), subject_test=np.array([2], np.uint8),
            class_names=np.array(ACTIVITIES),
        )  # fmt: skip
        data = load_dataset("uci-har", tmp_path)
        assert data.group_train is not None
        assert data.group_train.tolist() == [1, 30]
    assert data.class_names == ACTIVITIES
    assert data.x_train.shape[1:] == (9, 128)


def test_har_without_subjects_is_refused(npz: Write) -> None:
    windows = np.zeros((3, 9, 128), np.float32)
    folder = npz(x_train=windows, x_test=windows[:1])
    (folder / "mine.npz").rename(folder / "uci_har.npz")
    with pytest.raises(InputError, match="and the subject of each"):
        load_dataset("uci-har", folder)


# .npz


def test_an_npz_is_read_as_it_was_saved(npz: Write) -> None:
    data = load_dataset("mine.npz", npz(class_names=np.array(["yes", "no", "unseen"])))
    assert data.name == "mine"
    assert data.x_train.tolist() == [[1, 10], [2, 10], [3, 40]]
    assert data.y_train.tolist() == [0, 1, 1]
    assert data.y_train.dtype == np.int64
    assert data.class_names == ("yes", "no", "unseen")
    np.testing.assert_allclose(data.mean, [2, 20])
    np.testing.assert_allclose(data.std, [np.sqrt(2 / 3), np.sqrt(200)])
    assert data.group_train is None


def test_an_npz_may_say_whose_samples_they_are(npz: Write) -> None:
    data = load_dataset("mine.npz", npz(group_train=np.array([7, 7, 8]), group_test=np.array([9])))
    _, y, groups = data.merged()
    assert groups is not None
    assert groups.tolist() == [7, 7, 8, 9]
    assert y.tolist() == [0, 1, 1, 1]
    assert data.class_names == ("0", "1")
    head = data.head(2, 1)
    assert head.group_train is not None
    assert head.group_train.tolist() == [7, 8]  # sorted by class: the first and the last


def test_an_npz_needs_x_train_alone(npz: Write) -> None:
    path = (
        npz(y_train=None, x_test=None, y_test=None, class_names=np.array(["a", "b"])) / "mine.npz"
    )
    samples = open_data(str(path))
    assert (samples.train.y, samples.test, samples.class_names) == (None, None, ("a", "b"))
    with pytest.raises(InputError, match=r"mine\.npz: expected labels .*, there are none"):
        labelled_dataset(samples)
    samples = open_data(str(npz(y_test=None) / "mine.npz"))
    with pytest.raises(InputError, match="to train with, the test part has none"):
        labelled_dataset(samples)


def test_an_incomplete_npz_is_told_with_the_arrays_that_it_has(npz: Write) -> None:
    path = npz(x_train=None, x_test=None, y_test=None) / "mine.npz"
    with pytest.raises(InputError, match=r"expected the array x_train, .* got y_train$"):
        open_data(str(path))
    with pytest.raises(InputError, match="expected the array x_test next to y_test, got none"):
        open_data(str(npz(x_test=None) / "mine.npz"))


def test_a_missing_npz_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"other\.npz: expected a file .* x_train"):
        load_dataset("other.npz", tmp_path)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"x_train": None}, "expected the array x_train, .* got y_train, x_test, y_test"),
        ({"y_train": np.array([0, 1])}, r"y_train: expected whole numbers of shape \(3,\)"),
        ({"y_train": np.array([0.0, 1.0, 1.0])}, "y_train: expected whole numbers"),
        ({"y_train": np.array([0, -1, 1])}, r"expected labels 0\.\.1, got -1\.\.1"),
        ({"y_test": np.array([2])}, r"y_test: expected labels 0\.\.1, got 2\.\.2"),
        ({"x_train": np.zeros(3)}, r"shape \(samples, channels, \.\.\.\), got shape \(3,\)"),
        ({"x_train": np.zeros((0, 2))}, "at least one sample"),
        ({"x_train": np.array([["a", "b"]] * 3)}, "expected numbers"),
        ({"x_train": np.array([[1, np.nan]] * 3)}, "expected finite"),
        ({"x_train": np.array([[1, 1e39]] * 3)}, "expected finite float32"),
        ({"x_test": np.zeros((1, 3))}, "samples of one shape in both parts"),
        ({"group_train": np.array([1])}, "group_train: expected whole numbers"),
        ({"class_names": np.array([1, 2])}, "class_names: expected a row of text"),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(
    npz: Write, others: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message) as caught:
        load_dataset("mine.npz", npz(**others))
    assert "mine.npz" in str(caught.value)


class Bait:
    """Unpickling one would put a mark."""

    marks: list[str] = []  # noqa: RUF012 - it is meant to be shared

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        """What unpickling would call."""
        return Bait.marks.append, ("unpickled",)


def test_nothing_in_an_npz_is_unpickled(npz: Write) -> None:
    folder = npz(x_train=np.array([[Bait()] * 2] * 3, object))
    with pytest.raises(InputError, match=r"x_train\.npy: .* got Python objects"):
        load_dataset("mine.npz", folder)
    (folder / "mine.npz").write_bytes(pickle.dumps(Bait()))
    with pytest.raises(InputError, match=r"cannot be read as .npz"):
        load_dataset("mine.npz", folder)
    assert Bait.marks == []


def test_a_size_that_the_file_does_not_have_takes_no_memory(npz: Write) -> None:
    folder = npz()
    header = io.BytesIO()
    claim = {"descr": "<f4", "fortran_order": False, "shape": (1 << 40, 2)}
    np.lib.format.write_array_header_1_0(header, claim)
    with zipfile.ZipFile(folder / "mine.npz", "w") as archive:
        archive.writestr("x_train.npy", header.getvalue())
    with pytest.raises(InputError, match=r"x_train\.npy: expected 8796093022\d+ bytes for shape"):
        load_dataset("mine.npz", folder)


@given(st.integers(0, 2**32), st.binary(min_size=1, max_size=6))
def test_a_damaged_npz_gives_input_errors_only(
    tmp_path_factory: pytest.TempPathFactory, place: int, damage: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    np.savez_compressed(path, **arrays())
    whole = path.read_bytes()
    at = place % len(whole)
    path.write_bytes(whole[:at] + damage + whole[at + len(damage) :])
    try:
        data = load_dataset("damaged.npz", path.parent)
    except InputError as err:
        assert str(path) in str(err)  # noqa: PT017 - some damage meets nothing that is read
    else:
        # damage may hide the test part: then a training sample becomes one
        assert len(data.x_train) + len(data.x_test) in (3, 4)
        assert all(row in arrays()["x_train"].tolist() for row in data.x_train.tolist())


# images


def test_folders_of_images_are_classes_in_order_of_name(images_folder: Path) -> None:
    data = load_dataset("images", images_folder)
    assert data.class_names == ("cat", "dog")
    assert data.x_train.shape == (3, 3, 4, 5)  # channels, height, width
    assert data.x_train.dtype == np.uint8
    assert data.x_train[:, :, 0, 0].tolist() == [[4, 5, 6], [1, 2, 3], [7, 8, 9]]
    assert (data.y_train.tolist(), data.y_test.tolist()) == ([0, 0, 1], [1])


def test_grey_images_have_one_channel(tmp_path: Path) -> None:
    for side in ("train", "test"):
        image(tmp_path / side / "only" / "a.png", 17)
    data = load_dataset("images", tmp_path)
    assert data.x_train.shape == (1, 1, 4, 5)
    assert (data.mean, data.std) == ((17.0,), (1.0,))


def test_images_of_several_sizes_ask_for_one(images_folder: Path) -> None:
    image(images_folder / "train/dog/z.png", (1, 1, 1), size=(6, 4))
    with pytest.raises(
        ConfigurationError, match=r"got 4x5 \(a\.png\) and 4x6 \(z\.png\); --resize 4x5 brings"
    ):
        load_dataset("images", images_folder)
    samples = open_data(f"{images_folder}?resize=8x10")
    assert samples.train.x.shape == (4, 3, 8, 10)


def test_one_coloured_image_makes_all_of_them_coloured(images_folder: Path) -> None:
    image(images_folder / "train/dog/z.png", 3)
    data = load_dataset("images", images_folder)
    assert data.x_train[-1, :, 0, 0].tolist() == [3, 3, 3]


def test_images_that_a_byte_cannot_hold_are_skipped(
    images_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Image.new("I;16", (5, 4)).save(images_folder / "train/dog/z.png")
    samples = open_data(str(images_folder))
    assert (len(samples.train), samples.skipped) == (3, 1)
    assert "z.png: skipped, cannot be decoded (expected 8-bit grey or colour" in caplog.text


def test_more_pixels_than_fit_are_refused_before_any_is_decoded(tmp_path: Path) -> None:
    # sixty headers that promise 9,000 x 9,000 pixels each, and no pixels behind them
    image(tmp_path / "small.png", 0)
    raw = bytearray((tmp_path / "small.png").read_bytes())
    (tmp_path / "small.png").unlink()
    raw[16:24] = (9_000).to_bytes(4, "big") + (9_000).to_bytes(4, "big")
    raw[29:33] = zlib.crc32(bytes(raw[12:29])).to_bytes(4, "big")
    for number in range(60):
        path = tmp_path / ("train" if number else "test") / "only" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)
    with pytest.raises(InputError, match="at most 4294967296 bytes together, got 4860000000"):
        load_dataset("images", tmp_path)


def test_what_is_missing_among_images_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"expected pictures \(\.bmp, .* got none"):
        load_dataset("images", tmp_path)
    image(tmp_path / "train/cat/a.png", 1)
    with pytest.raises(ConfigurationError, match="test: expected a folder there, next to train"):
        load_dataset("images", tmp_path)
    image(tmp_path / "test/dog/a.png", 1)
    with pytest.raises(InputError, match=r"expected the classes cat of .* got also dog"):
        load_dataset("images", tmp_path)
    with pytest.raises(ConfigurationError, match="images: expected a folder of pictures"):
        load_dataset("images")


# a user's function

SOURCE = """
import numpy as np

def load():
    x = np.arange(12, dtype=np.uint8).reshape(6, 2)
    return x[:4], np.array([0, 1, 2, 0]), x[4:], np.array([2, 2])

def three():
    return 1, 2, 3

def broken():
    raise RuntimeError("mine")
"""


def test_a_users_function_gives_the_data(tmp_path: Path) -> None:
    (tmp_path / "my_data_a.py").write_text(SOURCE)
    before = list(sys.path)
    data = load_dataset("my_data_a:load", tmp_path)
    assert sys.path == before
    assert data.x_train.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert data.y_test.tolist() == [2, 2]
    assert data.class_names == ("0", "1", "2")


def test_an_installed_module_is_not_hidden_by_a_users_file(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text(SOURCE)
    with pytest.raises(ConfigurationError, match=r"expected a function load in .*colorsys.py"):
        load_dataset("colorsys:load", tmp_path)


def test_a_users_function_that_is_not_there_or_fails_says_so(tmp_path: Path) -> None:
    (tmp_path / "my_data_b.py").write_text(SOURCE)
    (tmp_path / "my_data_c.py").write_text("import no_such_package_anywhere")
    with pytest.raises(ConfigurationError, match=r"put my_data_z\.py in"):
        load_dataset("my_data_z:load", tmp_path)
    with pytest.raises(InputError, match=r"expected x_train, y_train, .* got tuple of 3"):
        load_dataset("my_data_b:three", tmp_path)
    with pytest.raises(RuntimeError, match="mine"):
        load_dataset("my_data_b:broken", tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere"):
        load_dataset("my_data_c:load", tmp_path)


# all of them


def test_an_unknown_name_is_refused_naming_what_there_is() -> None:
    with pytest.raises(
        ConfigurationError,
        match="'mnist': expected digits, fashion-mnist=DIR, cifar-10=DIR, cifar-100=DIR, ",
    ):
        load_dataset("mnist")


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 50), st.booleans())
def test_moments_in_blocks_are_those_of_numpy(n: int, channels: int, side: int, byte: bool) -> None:
    rng = np.random.default_rng((n, channels, side))
    x = rng.integers(0, 256, (n, channels, side, side), dtype=np.uint8)
    values = x if byte else (x / 7).astype(np.float32)
    mean, std = moments(values)
    whole = values.astype(np.float64)
    np.testing.assert_allclose(mean, whole.mean((0, 2, 3)), rtol=1e-12)
    expected = whole.std((0, 2, 3))
    np.testing.assert_allclose(std, np.where(expected > 0, expected, 1), rtol=1e-9)


def test_moments_of_large_samples_need_little_memory() -> None:
    x = np.zeros((40, 3, 500, 500), np.uint8)  # 30 MB, 240 MB as float64
    tracemalloc.start()
    try:
        moments(x)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 30_000_000


def test_other_numbers_become_float32() -> None:
    x = np.array([[[-5, 300]]], np.int32)
    train = checked_samples("mine", Part(x), None, source="mine").train
    assert train.x.dtype == np.float32
    assert train.x.tolist() == [[[-5, 300]]]
