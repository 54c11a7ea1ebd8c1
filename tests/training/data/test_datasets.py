"""Data sets: what is on disk is what comes out; files that are not sound are refused by name."""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from sklearn.datasets import load_digits

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data.load import FASHION_CLASSES, Dataset, load_dataset, read_idx

PARTS = ("train", "t10k")
NAMES = tuple(
    f"{part}-{what}.gz" for part in PARTS for what in ("images-idx3-ubyte", "labels-idx1-ubyte")
)
# of the 60,000 published training images, as pixel / 255
PUBLISHED_MEAN, PUBLISHED_STD = 0.28604, 0.35302


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits")


@pytest.fixture(scope="module")
def fashion(fashion_mnist_folder: Path) -> Dataset:
    return load_dataset("fashion-mnist", fashion_mnist_folder)


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    """Four sound files of three training images and one test image."""
    for part, count in zip(PARTS, (3, 1), strict=True):
        write(tmp_path / f"{part}-images-idx3-ubyte.gz", idx(count, 28, 28))
        write(tmp_path / f"{part}-labels-idx1-ubyte.gz", idx(count))
    return tmp_path


def idx(*shape: int, content: bytes | None = None) -> bytes:
    """An IDX file of bytes: zeros, or `content` whatever its length."""
    sizes = b"".join(size.to_bytes(4, "big") for size in shape)
    body = bytes(int(np.prod(shape))) if content is None else content
    return bytes((0, 0, 8, len(shape))) + sizes + body


def write(path: Path, raw: bytes) -> Path:
    """Write `raw`, gzipped where the name says so."""
    path.write_bytes(gzip.compress(raw, 1) if path.suffix == ".gz" else raw)
    return path


# digits


def test_digits_are_all_of_scikit_learns(digits: Dataset) -> None:
    bunch = load_digits()
    assert digits.x_train.shape == (1438, 1, 8, 8)
    assert digits.x_test.shape == (359, 1, 8, 8)  # 1,797 // 5
    assert digits.classes == 10
    x, y = np.empty((1797, 8, 8)), np.empty(1797)
    is_test = np.tile([False, False, False, False, True], 360)[:1797]
    x[is_test], x[~is_test] = digits.x_test[:, 0], digits.x_train[:, 0]
    y[is_test], y[~is_test] = digits.y_test, digits.y_train
    np.testing.assert_array_equal(x, bunch.images)
    np.testing.assert_array_equal(y, bunch.target)


def test_digits_have_every_class_in_both_parts(digits: Dataset) -> None:
    counts = np.bincount(digits.y_train) + np.bincount(digits.y_test)
    np.testing.assert_array_equal(counts, np.bincount(load_digits().target))
    assert np.bincount(digits.y_test).min() >= 20


def test_digits_are_normalised_by_the_training_part(digits: Dataset) -> None:
    assert digits.x_train.dtype == np.float32
    assert digits.y_train.dtype == digits.y_test.dtype == np.int64
    np.testing.assert_allclose(digits.mean, [np.mean(digits.x_train.astype(np.float64))])
    np.testing.assert_allclose(digits.std, [np.std(digits.x_train.astype(np.float64))])


def test_the_head_keeps_the_first_samples_and_the_moments(digits: Dataset) -> None:
    head = digits.head(5, 2)
    np.testing.assert_array_equal(head.x_train, digits.x_train[:5])
    np.testing.assert_array_equal(head.y_test, digits.y_test[:2])
    assert (len(head.y_train), len(head.x_test)) == (5, 2)
    assert (head.name, head.mean, head.std) == ("digits", digits.mean, digits.std)


def test_the_head_of_samples_that_are_sorted_by_class_has_every_class(digits: Dataset) -> None:
    order = np.argsort(digits.y_train, kind="stable")  # as a folder of pictures is read
    x, y = digits.x_train[order], digits.y_train[order]
    head = replace(digits, x_train=x, y_train=y).limited(50, None)
    counts = np.bincount(head.y_train, minlength=10)
    assert counts.sum() == 50
    assert counts.min() >= 4
    np.testing.assert_array_equal(head.x_train[[0, -1]], x[[0, -1]])


def test_an_unknown_data_set_is_refused_naming_those_there_are() -> None:
    with pytest.raises(ConfigurationError, match=r"'mnist': expected digits, fashion-mnist"):
        load_dataset("mnist")


# Fashion-MNIST


def test_fashion_mnist_is_whole_and_balanced(fashion: Dataset, shared_data: Path | None) -> None:
    train, test = (1500, 500) if shared_data is None else (60_000, 10_000)
    assert fashion.x_train.shape == (train, 1, 28, 28)
    assert fashion.x_test.shape == (test, 1, 28, 28)
    assert fashion.x_train.dtype == fashion.x_test.dtype == np.uint8
    assert fashion.y_train.dtype == fashion.y_test.dtype == np.int64
    assert fashion.class_names == FASHION_CLASSES
    assert np.bincount(fashion.y_train).tolist() == [train // 10] * 10
    assert np.bincount(fashion.y_test).tolist() == [test // 10] * 10


def test_fashion_mnist_has_the_published_mean_and_deviation(
    fashion: Dataset, shared_data: Path | None
) -> None:
    # published to five digits; a mean of 1,500 balanced images is off by about 0.15 / sqrt(1500)
    tolerance = 0.016 if shared_data is None else 0.000005
    assert fashion.mean[0] / 255 == pytest.approx(PUBLISHED_MEAN, abs=tolerance)
    assert fashion.std[0] / 255 == pytest.approx(PUBLISHED_STD, abs=tolerance)


def test_loading_holds_no_second_copy_as_floats(fashion_mnist_fixture: Path) -> None:
    pixels = 2000 * 28 * 28
    tracemalloc.start()
    try:
        load_dataset("fashion-mnist", fashion_mnist_fixture)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # the images, and one block of 1,000 as float64 twice (difference and square)
    assert peak < 2 * pixels + 2 * 8 * 1000 * 28 * 28 + 1_000_000


def test_moments_are_right_across_blocks(tmp_path: Path) -> None:
    # 2,500 images, two and a half blocks: half of the pixels 0, half 200
    half = np.repeat(np.array([0, 200], np.uint8), 28 * 14)
    images = np.tile(half, 2500).tobytes()
    write(tmp_path / "train-images-idx3-ubyte", idx(2500, 28, 28, content=images))
    write(tmp_path / "train-labels-idx1-ubyte", idx(2500))
    write(tmp_path / "t10k-images-idx3-ubyte", idx(1, 28, 28))
    write(tmp_path / "t10k-labels-idx1-ubyte", idx(1))
    data = load_dataset("fashion-mnist", tmp_path)
    assert (data.mean, data.std) == ((100.0,), (100.0,))


def test_constant_images_count_as_deviating_by_one(small_folder: Path) -> None:
    data = load_dataset("fashion-mnist", small_folder)
    assert (data.mean, data.std) == ((0.0,), (1.0,))


def test_fashion_mnist_without_a_folder_says_what_to_give() -> None:
    with pytest.raises(ConfigurationError, match="--data fashion-mnist=DIR"):
        load_dataset("fashion-mnist")


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_is_named_with_the_remedy(small_folder: Path, name: str) -> None:
    (small_folder / name).unlink()
    with pytest.raises(ConfigurationError, match=f"{name}, found none; put the four"):
        load_dataset("fashion-mnist", small_folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(str(tmp_path / "nowhere"))):
        load_dataset("fashion-mnist", tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("train-labels-idx1-ubyte.gz", idx(3, content=b"\0\x0a\0"), "expected labels 0..9, got 10"),
        ("t10k-labels-idx1-ubyte.gz", idx(1, content=b"\xff"), "expected labels 0..9, got 255"),
        ("train-labels-idx1-ubyte.gz", idx(4), r"shapes \(3, 28, 28\) and \(4,\)"),
        ("train-labels-idx1-ubyte.gz", idx(3, 1), r"shapes \(3, 28, 28\) and \(3, 1\)"),
        ("train-images-idx3-ubyte.gz", idx(3, 32, 32), r"shapes \(3, 32, 32\)"),
        ("train-images-idx3-ubyte.gz", idx(3), r"shapes \(3,\)"),
        ("train-images-idx3-ubyte.gz", idx(), r"shapes \(\)"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    small_folder: Path, name: str, raw: bytes, message: str
) -> None:
    write(small_folder / name, raw)
    with pytest.raises(InputError, match=message) as caught:
        load_dataset("fashion-mnist", small_folder)
    assert str(small_folder) in str(caught.value)


def test_no_images_at_all_are_refused(small_folder: Path) -> None:
    write(small_folder / "train-images-idx3-ubyte.gz", idx(0, 28, 28))
    write(small_folder / "train-labels-idx1-ubyte.gz", idx(0))
    with pytest.raises(InputError, match="at least one"):
        load_dataset("fashion-mnist", small_folder)


# IDX


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "expected an IDX file of bytes, got nothing"),
        (b"\0\0\x08", "expected an IDX file of bytes, got 000008"),
        (b"\x01" + idx(3)[1:], "expected an IDX file of bytes, got 01000801"),
        (b"\0\0\x0d\x01" + idx(3)[4:], "expected an IDX file of bytes, got 00000d01"),  # float32
        (b"\x93NUMPY", "expected an IDX file of bytes, got 934e554d"),
        (idx(3)[:6], "expected"),
        (idx(3)[:-1], r"expected 11 bytes for shape \(3,\), got 10"),
        (idx(3) + b"\0", r"expected 11 bytes for shape \(3,\), got 12"),
        (idx(2**32 - 1, 2**32 - 1, content=b""), "got 12"),
        (idx(*[1] * 255), "numpy has no array of that shape"),
        (idx(0, *[2**32 - 1] * 3, content=b""), "numpy has no array of that shape"),
    ],
)
def test_what_is_no_idx_file_is_refused_by_name(tmp_path: Path, raw: bytes, message: str) -> None:
    for name in ("data-idx", "data-idx.gz"):
        path = write(tmp_path / name, raw)
        with pytest.raises(InputError, match=message) as caught:
            read_idx(path)
        assert str(path) in str(caught.value)


def test_a_damaged_gzip_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "data.gz"
    whole = gzip.compress(idx(500, content=bytes(range(250)) * 2))
    inverted = bytes(255 - byte for byte in whole[10:])
    cases = (whole[:-9], whole[:12], whole[:10] + inverted, whole[:-8] + bytes(8), idx(500))
    for raw in cases:  # cut twice, no deflate stream, wrong checksum, not gzipped at all
        path.write_bytes(raw)
        with pytest.raises(InputError, match=re.escape(f"{path}: cannot be read")):
            read_idx(path)


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.gz: cannot be read"):
        read_idx(tmp_path / "none.gz")
    with pytest.raises(InputError, match="cannot be read"):
        read_idx(tmp_path)


@given(array_shapes(min_dims=1, max_dims=5, min_side=0, max_side=5), st.data())
def test_any_idx_file_reads_back(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, ...], data: st.DataObject
) -> None:
    count = int(np.prod(shape))
    content = bytes(i * 37 % 256 for i in range(count))
    suffix = data.draw(st.sampled_from(("", ".gz")))
    path = write(tmp_path_factory.getbasetemp() / f"any{suffix}", idx(*shape, content=content))
    array = read_idx(path)
    assert array.shape == shape
    assert array.dtype == np.uint8
    assert array.tobytes() == content


@given(st.binary(max_size=60), st.booleans(), st.integers(0, 255), st.sampled_from(("", ".gz")))
def test_random_bytes_give_input_errors_only(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes, magic: bool, rank: int, suffix: str
) -> None:
    path = tmp_path_factory.getbasetemp() / f"random{suffix}"
    write(path, bytes((0, 0, 8, rank % 6 if rank < 200 else rank)) + raw if magic else raw)
    try:
        array = read_idx(path)
    except InputError as err:
        assert str(path) in str(err)  # noqa: PT017 - few of these are sound files
    else:
        assert array.size <= len(raw)


@given(st.integers(0, 2**32), st.binary(min_size=1, max_size=4))
def test_a_damaged_file_gives_input_errors_only(
    tmp_path_factory: pytest.TempPathFactory, place: int, damage: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gz"
    whole = gzip.compress(idx(6, 7, content=bytes(range(42))), mtime=0)
    at = place % len(whole)
    path.write_bytes(whole[:at] + damage + whole[at + len(damage) :])
    try:
        array = read_idx(path)
    except InputError:
        return
    assert array.shape == (6, 7)  # the damage met the time stamp, or changed nothing


# the committed images


def test_the_committed_images_are_those_their_readme_lists(fashion_mnist_fixture: Path) -> None:
    readme = (fashion_mnist_fixture / "README.md").read_text()
    listed = dict(re.findall(r"\| `([^`]+\.gz)` \| [\d,]+ \| `([0-9a-f]{64})` \|", readme))
    assert set(listed) == set(NAMES)
    for name, digest in listed.items():
        assert hashlib.sha256((fashion_mnist_fixture / name).read_bytes()).hexdigest() == digest


def test_the_script_makes_the_committed_images_again(
    tmp_path: Path, fashion_mnist_folder: Path, fashion_mnist_fixture: Path
) -> None:
    # from the full files where they are, else from its own output, which gives itself again
    script = fashion_mnist_fixture.parent / "make_fashion_mnist.py"
    command = [sys.executable, str(script), "--source", str(fashion_mnist_folder)]
    subprocess.run([*command, "--target", str(tmp_path)], check=True, timeout=120)
    for name in NAMES:
        # the pixels, not the file: another deflate packs them differently
        made, committed = read_idx(tmp_path / name), read_idx(fashion_mnist_fixture / name)
        np.testing.assert_array_equal(made, committed)


def test_the_files_may_be_unpacked(tmp_path: Path, small_folder: Path) -> None:
    (tmp_path / "plain").mkdir()
    for name in NAMES:
        with (
            gzip.open(small_folder / name) as packed,
            (tmp_path / "plain" / name[:-3]).open("wb") as to,
        ):
            shutil.copyfileobj(packed, to)
    assert load_dataset("fashion-mnist", tmp_path / "plain").x_train.shape == (3, 1, 28, 28)
