from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from edge_sdk.errors import ConfigurationError, InputError, SplitedgeError
from edge_sdk.training.data.pictures import PictureForm, read_pictures
from edge_sdk.training.data.samples import Part, Samples, read_samples, split_samples

Array = NDArray[Any]
FORM = PictureForm(3, 4, 6)


def picture(path: Path, shade: int, size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path)


def numbered(count: int, *, labels: bool = False) -> Samples:
    x = np.arange(count, dtype=np.float32)[:, None]
    return Samples("numbers", Part(x, np.arange(count) % 3 if labels else None), None)


def test_flat_folder_is_unlabelled_and_pictures_of_any_size_are_resized(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 10)
    picture(tmp_path / "b.jpg", 200, size=(31, 17))
    samples = read_samples(str(tmp_path), form=FORM)
    assert samples.train.x.shape == (2, 3, 4, 6)
    assert samples.train.x.dtype == np.uint8
    assert samples.train.y is None
    assert samples.test is None
    assert abs(int(samples.train.x[1].mean()) - 200) <= 2


def test_folder_for_each_class_gives_labels_by_name(tmp_path: Path) -> None:
    for name, shade in (("cat", 50), ("ant", 10), ("bee", 30)):
        picture(tmp_path / name / "1.png", shade)
    samples = read_samples(str(tmp_path), form=PictureForm(1, 4, 6))
    assert samples.class_names == ("ant", "bee", "cat")
    assert samples.train.y is not None
    assert samples.train.y.tolist() == [0, 1, 2]
    assert samples.train.x[:, 0, 0, 0].tolist() == [10, 30, 50]


def test_folder_with_a_test_part_of_its_own(tmp_path: Path) -> None:
    for side, shade in (("train", 10), ("test", 20)):
        picture(tmp_path / side / "ant" / "1.png", shade)
    samples = read_samples(str(tmp_path), form=FORM)
    assert samples.test is not None
    assert samples.test.x.max() == 20
    assert samples.train.x.max() == 10


def test_damaged_pictures_are_named_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picture(tmp_path / "good.png", 10)
    whole = (tmp_path / "good.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no picture")
    with caplog.at_level(logging.WARNING):
        samples = read_samples(str(tmp_path), form=FORM)
    assert {path.name for path in samples.skipped} == {"cut.png", "text.png"}
    assert len(samples.train) == 1
    assert "text.png: skipped, cannot be decoded" in caplog.text


def test_folder_in_which_nothing_can_be_decoded(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(InputError, match="none of 1 pictures"):
        read_samples(str(tmp_path), form=FORM)


def test_at_most_so_many_pictures_are_read_evenly_spread(tmp_path: Path) -> None:
    for shade in range(10):
        picture(tmp_path / f"{shade}.png", 20 * shade)
    pictures, _, _ = read_pictures(tmp_path, FORM, most=4)
    assert pictures.x[:, 0, 0, 0].tolist() == [0, 60, 120, 180]


def test_npz_needs_x_train_alone(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    np.savez(path, x_train=np.zeros((9, 2)), class_names=np.array(["a", "b"]))
    samples = read_samples(str(path))
    assert (samples.train.y, samples.test, samples.class_names) == (None, None, ("a", "b"))
    np.savez(path, x_train=np.zeros((9, 2)), x_test=np.zeros((3, 2)), y_test=np.array([0, 1, 1]))
    samples = read_samples(str(path))
    assert samples.test is not None
    assert samples.test.y is not None


def test_function_may_leave_labels_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare_samples.py").write_text(
        "import numpy as np\ndef load():\n    return np.ones((7, 2)), None, np.ones((2, 2)), None\n"
    )
    monkeypatch.chdir(tmp_path)
    samples = read_samples("bare_samples:load")
    assert len(samples.train) == 7
    assert samples.test is not None
    assert len(samples.test) == 2


def test_published_sets_name_their_folder(fashion_mnist_fixture: Path) -> None:
    samples = read_samples(f"fashion-mnist={fashion_mnist_fixture}")
    assert samples.train.x.shape[1:] == (1, 28, 28)
    assert len(samples.class_names) == 10


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("moons", "expected digits, fashion-mnist=DIR"),
        ("fashion-mnist", "fashion-mnist=DIR"),
        ("nowhere.npz", "nowhere.npz: expected a file there"),
        ("fashion-mnist=nowhere", "nowhere"),
        ("no_such_module:load", "no_such_module.py"),
    ],
)
def test_words_that_name_nothing(word: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_samples(word, form=FORM)


def test_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigurationError, match="got none; an IDX data set is named"):
        read_samples(str(tmp_path), form=FORM)
    with pytest.raises(ConfigurationError, match="this model takes none"):
        read_samples(str(tmp_path))


def test_folder_of_both_layouts(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 1)
    picture(tmp_path / "ant" / "b.png", 2)
    with pytest.raises(ConfigurationError, match="got both, such as a"):
        read_samples(str(tmp_path), form=FORM)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"y_train": np.zeros(3, int)}, "x_train, got none"),
        ({"x_train": np.zeros((3, 2)), "y_train": np.zeros(2, int)}, r"shape \(3,\)"),
        ({"x_train": np.full((3, 2), np.nan)}, "finite values"),
        ({"x_train": np.zeros((3, 2)), "x_test": np.zeros((3, 4))}, "of one shape"),
        ({"x_train": np.array([["a", "b"]])}, "expected numbers"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path: Path, arrays: dict[str, Array], message: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy's stub takes bool for all keywords
    with pytest.raises(SplitedgeError, match=message):
        read_samples(str(path))


def test_parts_share_no_sample_and_lose_none() -> None:
    parts = split_samples(numbered(1000), seed=0)
    sizes = [len(part) for part in (parts.train, parts.held_out, parts.test)]
    assert sizes == [640, 160, 200]
    every = np.concatenate([part.x for part in (parts.train, parts.held_out, parts.test)])
    assert sorted(every[:, 0].tolist()) == list(range(1000))


def test_split_is_the_seeds() -> None:
    first, again, other = (split_samples(numbered(50), seed=seed).test.x for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_own_test_part_is_left_whole_and_held_out_comes_from_the_rest() -> None:
    own = Part(-np.ones((7, 1)), None)
    samples = Samples("numbers", numbered(100).train, own)
    parts = split_samples(samples, seed=0, most=50)
    assert parts.test is own
    assert (len(parts.train), len(parts.held_out)) == (40, 10)


def test_labels_stay_with_their_samples() -> None:
    parts = split_samples(numbered(60, labels=True), seed=0)
    for part in (parts.train, parts.held_out, parts.test):
        assert part.y is not None
        np.testing.assert_array_equal(part.x[:, 0] % 3, part.y)


def test_too_few_samples() -> None:
    with pytest.raises(InputError, match="at least 6 samples, got 5"):
        split_samples(numbered(5), seed=0)
