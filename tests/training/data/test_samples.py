from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data.load import open_data
from edge_sdk.training.data.pictures import PictureForm, read_pictures
from tests.damage import damaged_arrays

FORM = PictureForm(3, 4, 6)


def picture(path: Path, shade: int, size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (shade, shade, shade)).save(path)


def test_flat_folder_is_unlabelled_and_pictures_of_any_size_are_resized(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 10)
    picture(tmp_path / "b.jpg", 200, size=(31, 17))
    samples = open_data(str(tmp_path), form=FORM)
    assert samples.train.x.shape == (2, 3, 4, 6)
    assert samples.train.x.dtype == np.uint8
    assert samples.train.y is None
    assert samples.test is None
    assert abs(int(samples.train.x[1].mean()) - 200) <= 2


def test_folder_for_each_class_gives_labels_by_name(tmp_path: Path) -> None:
    for name, shade in (("cat", 50), ("ant", 10), ("bee", 30)):
        picture(tmp_path / name / "1.png", shade)
    samples = open_data(str(tmp_path), form=PictureForm(1, 4, 6))
    assert samples.class_names == ("ant", "bee", "cat")
    assert samples.train.y is not None
    assert samples.train.y.tolist() == [0, 1, 2]
    assert samples.train.x[:, 0, 0, 0].tolist() == [10, 30, 50]


def test_a_list_of_the_classes_sets_the_order_of_the_labels(tmp_path: Path) -> None:
    for name, shade in (("cat", 50), ("ant", 10)):
        picture(tmp_path / name / "1.png", shade)
    (tmp_path / "classes.txt").write_text("dog\ncat\nant\n")  # none of dogs yet
    samples = open_data(str(tmp_path), form=PictureForm(1, 4, 6))
    assert samples.class_names == ("dog", "cat", "ant")
    assert samples.train.y is not None
    assert samples.train.y.tolist() == [1, 2]
    assert samples.train.x[:, 0, 0, 0].tolist() == [50, 10]
    (tmp_path / "classes.txt").write_text("cat\n")
    with pytest.raises(InputError, match="one line for each folder of a class, got none for ant"):
        open_data(str(tmp_path))
    (tmp_path / "classes.txt").write_text("cat\ncat\nant\n")
    with pytest.raises(InputError, match="got a class twice"):
        open_data(str(tmp_path))
    (tmp_path / "classes.txt").write_bytes(b"\xef\xbb\xbfcat\r\nant\r\n")  # of another editor
    assert open_data(str(tmp_path)).class_names == ("cat", "ant")
    (tmp_path / "classes.txt").write_bytes(b"cat\n\xff\n")
    with pytest.raises(InputError, match=r"classes.txt: expected text in UTF-8"):
        open_data(str(tmp_path))


def test_folder_with_a_test_part_of_its_own(tmp_path: Path) -> None:
    for side, shade in (("train", 10), ("test", 20)):
        picture(tmp_path / side / "ant" / "1.png", shade)
    samples = open_data(str(tmp_path), form=FORM)
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
        samples = open_data(str(tmp_path), form=FORM)
    assert samples.skipped == 2
    assert "cut.png: skipped, cannot be decoded" in caplog.text
    assert len(samples.train) == 1
    assert "text.png: skipped, cannot be decoded" in caplog.text


def test_whichever_bit_of_an_array_is_damaged_the_others_of_its_folder_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.save(tmp_path / "0.npy", np.ones((2, 3), np.float32))
    for number, damaged in enumerate(damaged_arrays(np.zeros((2, 3), np.float32))):
        (tmp_path / f"worn{number}.npy").write_bytes(damaged)
    samples = read_pictures(tmp_path)
    assert samples.train.x[0].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert samples.skipped > 800
    assert caplog.text.count("skipped, cannot be decoded (") == samples.skipped


@pytest.mark.parametrize("content", ["renamed", "torn"])
def test_a_first_array_that_is_none_gives_the_others_no_shape(content: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "renamed.npz", np.ones(3))
    raw = (tmp_path / "renamed.npz").read_bytes()
    (tmp_path / "a.npy").write_bytes(raw if content == "renamed" else raw[:-1])
    with pytest.raises(InputError, match="none of 1 arrays can be read"):
        read_pictures(tmp_path)
    np.save(tmp_path / "b.npy", np.ones((2, 3), np.float32))
    assert read_pictures(tmp_path).train.x.shape == (1, 2, 3)


def test_folder_in_which_nothing_can_be_decoded(tmp_path: Path) -> None:
    (tmp_path / "text.png").write_text("no picture")
    with pytest.raises(InputError, match="none of 1 pictures"):
        open_data(str(tmp_path), form=FORM)


def test_at_most_so_many_pictures_are_read_evenly_spread(tmp_path: Path) -> None:
    for shade in range(10):
        picture(tmp_path / f"{shade}.png", 20 * shade)
    pictures = read_pictures(tmp_path, FORM, most=4)
    assert pictures.train.x[:, 0, 0, 0].tolist() == [0, 60, 120, 180]


def test_function_may_leave_labels_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bare_samples.py").write_text(
        "import numpy as np\ndef load():\n    return np.ones((7, 2)), None, np.ones((2, 2)), None\n"
    )
    monkeypatch.chdir(tmp_path)
    samples = open_data("bare_samples:load")
    assert len(samples.train) == 7
    assert samples.test is not None
    assert len(samples.test) == 2


def test_published_sets_name_their_folder(fashion_mnist_fixture: Path) -> None:
    samples = open_data(f"fashion-mnist={fashion_mnist_fixture}")
    assert samples.train.x.shape[1:] == (1, 28, 28)
    assert len(samples.class_names) == 10


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("moons", "expected digits, fashion-mnist=DIR"),
        ("fashion-mnist", "with the four IDX files; name it: --data fashion-mnist=DIR"),
        ("nowhere.npz", "nowhere.npz: expected a file there"),
        ("fashion-mnist=nowhere", "nowhere: expected a folder there with the four IDX files"),
        ("no_such_module:load", "no_such_module.py"),
    ],
)
def test_words_that_name_nothing(word: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        open_data(word, form=FORM)


def test_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigurationError, match="or a folder of them for each class, got none"):
        open_data(str(tmp_path), form=FORM)


def test_folder_of_both_layouts(tmp_path: Path) -> None:
    picture(tmp_path / "a.png", 1)
    picture(tmp_path / "ant" / "b.png", 2)
    with pytest.raises(ConfigurationError, match="got both, such as a"):
        open_data(str(tmp_path), form=FORM)
