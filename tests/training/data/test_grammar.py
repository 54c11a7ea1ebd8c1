"""The words of DATA that name published sets, tables and options; and what is said about them."""

from __future__ import annotations

import filecmp
import logging
import runpy
from pathlib import Path

import numpy as np
import pytest

from edge_sdk.errors import ConfigurationError, InputError, SplitedgeError
from edge_sdk.training.data.load import described, labelled_dataset, open_data, with_resize
from edge_sdk.training.data.split import split_samples

FIXTURES = Path(__file__).parents[2] / "fixtures"
EMNIST, CIFAR100 = FIXTURES / "emnist", FIXTURES / "cifar-100"


# published sets, on files in their published format


def test_emnist_letters_stand_upright_and_have_their_names() -> None:
    samples = open_data(f"emnist={EMNIST}")
    assert samples.name == "emnist-letters"
    assert samples.class_names == tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    assert samples.test is not None
    assert samples.train.y is not None
    assert samples.test.y is not None
    assert "".join(samples.class_names[y] for y in samples.train.y) == "LTILTIL"
    assert "".join(samples.class_names[y] for y in samples.test.y) == "TIL"
    letter = samples.train.x[0, 0]  # an L: ink below and on the left, none above on the right
    assert (letter.shape, letter.dtype) == ((28, 28), np.uint8)
    assert letter[22].any()
    assert letter[:, 7].any()
    assert not letter[:20, 10:].any()


def test_emnist_may_lie_in_its_own_folder_and_asks_which_split(tmp_path: Path) -> None:
    (tmp_path / "gzip").mkdir()
    for path in EMNIST.iterdir():
        for split in ("letters", "balanced"):
            raw = path.read_bytes()
            (tmp_path / "gzip" / path.name.replace("letters", split)).write_bytes(raw)
    with pytest.raises(ConfigurationError, match=r"got balanced, letters; choose one: .*\?split"):
        open_data(f"emnist={tmp_path}")
    assert open_data(f"emnist={tmp_path}?split=letters").name == "emnist-letters"
    with pytest.raises(ConfigurationError, match=r"split: expected one of byclass, .* got words"):
        open_data(f"emnist={tmp_path}?split=words")
    (tmp_path / "gzip" / "emnist-letters-mapping.txt").write_text("1 65\n")
    with pytest.raises(InputError, match="expected labels of the mapping, got 9"):
        open_data(f"emnist={tmp_path}?split=letters")
    (tmp_path / "gzip" / "emnist-letters-mapping.txt").write_text("one A\n")
    with pytest.raises(InputError, match="expected a label and an ASCII code on each line"):
        open_data(f"emnist={tmp_path}?split=letters")


def test_emnist_that_is_not_there_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected the file emnist-balanced-train-images"):
        open_data(f"emnist={tmp_path}")


def test_cifar100_is_read_with_its_fine_labels() -> None:
    data = labelled_dataset(open_data(f"cifar-100={CIFAR100}"), held_out=0)
    assert data.x_train.shape == (4, 3, 32, 32)
    assert data.x_train[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert data.y_train.tolist() == [0, 99, 1, 0]
    assert [data.class_names[y] for y in (0, 99)] == ["apple", "worm"]
    assert data.y_test.tolist() == [2]


def test_script_makes_the_committed_files_again(tmp_path: Path) -> None:
    script = runpy.run_path(str(FIXTURES / "make_small_sets.py"))
    for folder, make in ((EMNIST, "make_emnist"), (CIFAR100, "make_cifar100")):
        script[make](tmp_path)
        names = [path.name for path in folder.iterdir()]
        assert filecmp.cmpfiles(folder, tmp_path, names, shallow=False)[0] == names


# tables


def table(path: Path, rows: list[str], header: str = "time,ax,ay,what") -> str:
    path.write_text("\n".join(([header] if header else []) + rows) + "\n")
    return f"csv:{path}"


def test_windows_of_a_table_have_channels_labels_and_names(tmp_path: Path) -> None:
    rows = [f"{i},{i},{-i},{'walk' if i < 6 else 'rest'}" for i in range(11)]
    word = table(tmp_path / "motion.csv", rows)
    samples = open_data(f"{word}?columns=ay,ax&window=4&step=2&label=what")
    assert (samples.name, samples.class_names) == ("motion", ("rest", "walk"))
    # walk is rows 0..5: windows at 0 and 2; rest is rows 6..10: a window at 6
    assert samples.train.x.tolist() == [
        [[0, -1, -2, -3], [0, 1, 2, 3]],
        [[-2, -3, -4, -5], [2, 3, 4, 5]],
        [[-6, -7, -8, -9], [6, 7, 8, 9]],
    ]
    assert samples.train.x.dtype == np.float32
    assert samples.train.y is not None
    assert samples.train.y.tolist() == [1, 1, 0]


def test_table_without_labels_takes_all_columns_and_half_a_window_as_step(tmp_path: Path) -> None:
    word = table(tmp_path / "bare.csv", [f"{i};{2 * i}" for i in range(6)], header="")
    samples = open_data(f"{word}?window=4")
    assert samples.train.y is None
    assert samples.train.x.tolist() == [
        [[0, 1, 2, 3], [0, 2, 4, 6]],
        [[2, 3, 4, 5], [4, 6, 8, 10]],
    ]


def test_holes_are_named_by_line_and_column_and_their_windows_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f"{i},{i},{i},a" for i in range(12)]
    rows[5] = "5,5,,a"  # line 7 with the header
    rows[9] = "9,9,9,"
    word = table(tmp_path / "holes.csv", rows)
    with caplog.at_level(logging.WARNING):
        samples = open_data(f"{word}?columns=ax,ay&window=4&step=2&label=what")
    assert samples.train.x[:, 0].tolist() == [[0, 1, 2, 3]]
    # rows 2..4 began two windows, rows 6..8 began two
    assert samples.skipped == 4
    assert "line 7: skipped, column ay: expected a finite number, got nothing" in caplog.text
    assert "line 11: skipped, column what: expected a text, got nothing" in caplog.text
    assert described(samples, {"train": 1}).endswith(": 1 train; 4 skipped (windows with holes)")


def test_parts_of_a_table_share_no_row(tmp_path: Path) -> None:
    rows = [f"{i},{'ab'[i // 300 % 2]},{i // 600}" for i in range(1800)]
    word = table(tmp_path / "long.csv", rows, header="v,what,who")
    parts = split_samples(open_data(f"{word}?columns=v&window=8&step=2&label=what"))
    own = [set(part.x.ravel().tolist()) for part in (parts.train, parts.held_out, parts.test)]
    assert not own[0] & own[1]
    assert not own[0] & own[2]
    assert not own[1] & own[2]
    for part in (parts.train, parts.held_out, parts.test):
        assert part.y is not None
        assert set(part.y.tolist()) == {0, 1}
    by_person = split_samples(open_data(f"{word}?columns=v&window=8&step=2&label=what&group=who"))
    people = [
        set(part.groups.tolist())
        for part in (by_person.train, by_person.held_out, by_person.test)
        if part.groups is not None
    ]
    assert sorted(map(sorted, people)) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "window: expected a whole number of at least 1, got none"),
        ("?window=2&columns=az", "column az: expected one of time, ax, ay, what"),
        ("?window=2&label=what&width=3", "expected options columns, window, step, label, group"),
        ("?window=50&label=what", "expected 50 rows in a row with one label and without a hole"),
    ],
)
def test_table_that_gives_nothing_says_what_to_change(
    tmp_path: Path, options: str, message: str
) -> None:
    word = table(tmp_path / "motion.csv", [f"{i},1,2,a" for i in range(9)])
    with pytest.raises(SplitedgeError, match=message):
        open_data(word + options)


def test_file_that_is_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected a CSV file there, with the sensors in"):
        open_data(f"csv:{tmp_path / 'none.csv'}?window=2")
    (tmp_path / "raw.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="expected a CSV file of text"):
        open_data(f"csv:{tmp_path / 'raw.csv'}?window=2")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(InputError, match="got an empty file"):
        open_data(f"csv:{tmp_path / 'empty.csv'}?window=2")


# options and lines


def test_arrays_in_class_folders_are_samples(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for place, name in enumerate(("fall", "walk")):
        (tmp_path / name).mkdir()
        for number in range(2):
            np.save(tmp_path / name / f"{number}.npy", np.full((3, 5), 10 * place + number, "f4"))
    np.save(tmp_path / "walk" / "other.npy", np.zeros((3, 6), "f4"))
    samples = open_data(str(tmp_path))
    assert samples.train.x[:, 0, 0].tolist() == [0, 1, 10, 11]
    assert samples.class_names == ("fall", "walk")
    assert samples.skipped == 1
    assert "other.npy: skipped, cannot be decoded (expected float32 of shape (3, 5)" in caplog.text
    (tmp_path / "walk" / "a.png").write_text("")
    with pytest.raises(ConfigurationError, match="expected pictures or arrays, got both"):
        open_data(str(tmp_path))


def test_size_of_pictures_belongs_to_a_folder(tmp_path: Path) -> None:
    assert with_resize("digits", None) == "digits"
    assert with_resize(str(tmp_path), "4x6") == f"{tmp_path}?resize=4x6"
    with pytest.raises(ConfigurationError, match="--resize: expected a folder of pictures"):
        with_resize("digits", "4x6")
    for size in ("4x", "0x3", "axb", "1x2x3", "99999"):
        with pytest.raises(ConfigurationError, match="resize: expected"):
            with_resize(str(tmp_path), size)


def test_name_goes_before_a_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    assert len(open_data("digits").train) == 1438
    with pytest.raises(ConfigurationError, match="got none"):
        open_data("./digits")


def test_folder_with_idx_files_is_fashion_mnist(fashion_mnist_fixture: Path) -> None:
    assert open_data(str(fashion_mnist_fixture)).name == "fashion-mnist"
    with pytest.raises(ConfigurationError, match="holds IDX files, which --resize does not"):
        open_data(f"{fashion_mnist_fixture}?resize=8x8")
    with pytest.raises(ConfigurationError, match=r"--resize: expected HEIGHTxWIDTH .* got nothing"):
        open_data(f"{fashion_mnist_fixture}?")


def test_line_says_samples_shape_classes_and_parts() -> None:
    samples = open_data("digits")
    assert described(samples, split_samples(samples).sizes) == (
        "digits: 1,797 samples of 1 x 8 x 8 float32 in 10 classes:"
        " 1,294 train, 144 held-out, 359 test"
    )
