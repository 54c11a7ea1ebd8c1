"""The folder of kept inputs: bounded, exact, whole after a kill, and nobody else's files lost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pytest
from PIL import Image

from edge_sdk.errors import ConfigurationError, StateInUseError
from edge_sdk.kept.folder import KeptFolder, clear
from edge_sdk.kept.form import class_folders
from edge_sdk.kept.index import INDEX, KeptInput, LabelFrom, read_index
from edge_sdk.manifest import BundleManifest, TensorSpec
from tests.edge.full_disk import full_disk, read_only

if TYPE_CHECKING:
    from tests.edge.digits import Digits

MANY = 1000
LARGE = 1_000_000


@pytest.fixture(scope="module")
def manifest(digits: Digits) -> BundleManifest:
    """Of a model of pictures: float32 (1, 8, 8)."""
    return BundleManifest.load(digits.models / "digits" / "1" / "bundles" / "d2")


def entry(number: int, label: int | None = None, label_from: LabelFrom = "") -> KeptInput:
    return KeptInput(
        id=f"{number:032x}",
        file="",
        size_bytes=0,
        label=label,
        class_name="",
        label_from=label_from,
        at=float(number),
        bundle="digits/1/d2",
        source="server",
        device_label=0,
        uncertainty=0.5,
        threshold=0.1,
    )


def picture(value: int) -> Any:
    return np.full((1, 8, 8), value, np.float32)


def floats(values: Iterable[float]) -> Any:
    return np.array(list(values), np.float32).reshape(1, 2, -1)


def ids(folder: Path) -> list[int]:
    return [int(each.id, 16) for each in read_index(folder)]


def files(folder: Path) -> list[str]:
    ours = [*folder.glob("labelled/*/*"), *folder.glob("unlabelled/*")]
    return sorted(str(path.relative_to(folder)) for path in ours)


def opened(folder: Path, inputs_max: int = MANY, bytes_max: int = LARGE) -> KeptFolder:
    return KeptFolder(folder, inputs_max, bytes_max)


def test_files_lie_by_class_and_hold_the_input_exactly(
    tmp_path: Path, manifest: BundleManifest, digits: Digits
) -> None:
    kept = opened(tmp_path)
    for number in range(5):
        assert kept.put(digits.x[number], manifest, entry(number, number, "server"))
    kept.close()
    found = read_index(tmp_path)
    assert [each.label for each in found] == [0, 1, 2, 3, 4]
    for number, each in enumerate(found):
        assert each.file == f"labelled/{manifest.class_names[number]}/{each.id}.png"
        pixels = np.asarray(Image.open(tmp_path / each.file))
        np.testing.assert_array_equal(pixels, digits.x[number, 0])
        assert each.size_bytes == (tmp_path / each.file).stat().st_size
    classes = (tmp_path / "labelled" / "classes.txt").read_text().splitlines()
    assert classes == list(manifest.class_names)


@pytest.mark.parametrize(
    ("spec", "x"),
    [
        (TensorSpec("float32", (2, 4)), floats(range(8)).reshape(2, 4)),
        (TensorSpec("float32", (1, 2, 2)), floats([0.5, 1, 2, 3])),
        (TensorSpec("float32", (1, 2, 2)), floats([0, 1, 1, 0])),  # perhaps a 0..1 scale
        (TensorSpec("float32", (1, 2, 2)), floats([-1, 1, 9, 0])),
        (TensorSpec("float32", (1, 2, 2)), floats([256, 1, 9, 0])),
    ],
)
def test_inputs_that_are_no_pictures_of_bytes_are_arrays(
    spec: TensorSpec, x: Any, manifest: BundleManifest, tmp_path: Path
) -> None:
    with_spec = replace(manifest, input=spec)
    kept = opened(tmp_path)
    assert kept.put(x, with_spec, entry(1, 3, "server"))
    kept.close()
    (each,) = read_index(tmp_path)
    read = np.load(tmp_path / each.file)
    assert read.dtype == x.dtype
    np.testing.assert_array_equal(read, x)


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5, 3), (4, 5, 1), (1, 4, 5)])
def test_pictures_of_both_layouts(
    shape: tuple[int, ...], manifest: BundleManifest, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    kept = opened(tmp_path)
    kept.put(x, replace(manifest, input=TensorSpec("uint8", shape)), entry(1, 3, "server"))
    kept.close()
    pixels = np.asarray(Image.open(tmp_path / read_index(tmp_path)[0].file))
    planes = x if shape[0] not in (1, 3) else x.transpose(1, 2, 0)
    np.testing.assert_array_equal(pixels, planes[..., 0] if planes.shape[2] == 1 else planes)


def test_a_value_that_no_picture_holds_is_refused_in_a_folder_of_pictures(
    manifest: BundleManifest, tmp_path: Path
) -> None:
    kept = opened(tmp_path)
    assert kept.put(picture(9), manifest, entry(1, 3, "server"))
    assert not kept.put(picture(9) + 0.5, manifest, entry(2, 3, "server"))
    kept.close()
    assert ids(tmp_path) == [1]


def test_a_correction_moves_the_file(manifest: BundleManifest, tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.put(picture(9), manifest, entry(1))
    assert files(tmp_path) == [f"unlabelled/{1:032x}.png"]
    kept.put(picture(9), manifest, entry(1, 3, "server"))
    kept.put(picture(9), manifest, entry(1, 7, "correction"))
    kept.close()
    assert files(tmp_path) == [f"labelled/7/{1:032x}.png"]
    (each,) = read_index(tmp_path)
    assert (each.label, each.label_from, each.class_name) == (7, "correction", "7")


@pytest.mark.parametrize(
    ("earlier", "later", "wins", "relabelled"),
    [
        ((3, "server"), (7, "server"), (7, "server"), 1),
        ((3, "server"), (3, "server"), (3, "server"), 0),
        ((3, "server"), (7, "correction"), (7, "correction"), 1),
        ((3, "correction"), (7, "correction"), (7, "correction"), 1),
        ((3, "correction"), (7, "server"), (3, "correction"), 0),
        ((3, "server"), (None, ""), (3, "server"), 0),
        ((None, ""), (7, "server"), (7, "server"), 0),
    ],
)
@pytest.mark.parametrize("ending", ["png", "npy"])
@pytest.mark.parametrize("opened_again", [False, True])
def test_a_picture_that_comes_again_is_kept_once_with_the_later_label(
    earlier: tuple[int | None, LabelFrom],
    later: tuple[int | None, LabelFrom],
    wins: tuple[int | None, LabelFrom],
    relabelled: int,
    ending: str,
    opened_again: bool,
    manifest: BundleManifest,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    x = picture(9) if ending == "png" else picture(9) + 0.5
    other = x.copy()
    other[0, 0, 0] += 1  # as an array, a file of the same size
    kept = opened(tmp_path)
    kept.put(x, manifest, entry(1, *earlier))
    kept.put(other, manifest, entry(2, 5, "server"))
    if opened_again:
        kept.close()
        kept = opened(tmp_path)
    with caplog.at_level("INFO", logger="edge_sdk.kept.folder"):
        assert kept.put(x, manifest, entry(3, *later))
    assert kept.relabelled == relabelled
    assert (f"is '{later[0]}' now ({later[1]}), it was '3'" in caplog.text) == bool(relabelled)
    assert len(kept) == 2
    on_disk = sum((tmp_path / name).stat().st_size for name in files(tmp_path))
    assert kept.size_bytes == on_disk
    kept.close()
    assert len(files(tmp_path)) == 2
    found = {each.label: each for each in read_index(tmp_path)}
    assert set(found) == {wins[0], 5}
    assert found[wins[0]].label_from == wins[1]
    assert found[wins[0]].file in files(tmp_path)
    assert found[wins[0]].file.endswith(ending)


def test_every_copy_of_a_picture_that_an_older_release_kept_gives_way(
    manifest: BundleManifest, tmp_path: Path
) -> None:
    kept = opened(tmp_path)
    kept.put(picture(9), manifest, entry(1, 3, "server"))
    kept.close()
    (first,) = read_index(tmp_path)
    copy = replace(first, id=f"{2:032x}", label=4, class_name="4", file=f"labelled/4/{2:032x}.png")
    (tmp_path / "labelled" / "4").mkdir()
    (tmp_path / copy.file).write_bytes((tmp_path / first.file).read_bytes())
    with (tmp_path / INDEX).open("ab") as index:
        index.write(orjson.dumps(asdict(copy)) + b"\n")
    kept = opened(tmp_path)
    assert len(kept) == 2
    kept.put(picture(9), manifest, entry(3, 7, "server"))
    kept.close()
    assert files(tmp_path) == [f"labelled/7/{3:032x}.png"]
    assert ids(tmp_path) == [3]


def test_beyond_the_number_the_oldest_goes_and_corrected_ones_last(
    manifest: BundleManifest, tmp_path: Path
) -> None:
    kept = opened(tmp_path, inputs_max=3)
    kept.put(picture(1), manifest, entry(1, 1, "correction"))
    for number in range(2, 6):
        kept.put(picture(number), manifest, entry(number, 0, "server"))
    assert ids(tmp_path) == [1, 4, 5]
    for number in range(6, 9):
        kept.put(picture(number), manifest, entry(number, 0, "correction"))
    kept.close()
    assert ids(tmp_path) == [6, 7, 8]  # all are corrected: the oldest goes
    assert len(files(tmp_path)) == 3


def test_beyond_the_size_the_oldest_goes(manifest: BundleManifest, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kept = opened(tmp_path, bytes_max=1000)
    for number in range(40):
        x = rng.integers(0, 256, (1, 8, 8)).astype(np.float32)
        kept.put(x, manifest, entry(number, 0, "server"))
        assert kept.size_bytes <= 1000
    kept.close()
    assert ids(tmp_path)[-1] == 39
    on_disk = sum((tmp_path / name).stat().st_size for name in files(tmp_path))
    assert on_disk == kept.size_bytes > 500
    small = opened(tmp_path / "small", bytes_max=10)
    assert not small.put(picture(3), manifest, entry(1, 0, "server"))
    assert len(small) == 0
    small.close()


def test_the_index_stays_bounded(manifest: BundleManifest, tmp_path: Path) -> None:
    kept = opened(tmp_path, inputs_max=2)
    for number in range(300):
        kept.put(picture(number % 200 + 2), manifest, entry(number, 0, "server"))
    kept.close()
    assert len((tmp_path / "index.jsonl").read_bytes().splitlines()) <= 2 * 2 + 100 + 2
    assert ids(tmp_path) == [298, 299]


def test_after_a_kill_files_and_index_agree_again(manifest: BundleManifest, tmp_path: Path) -> None:
    kept = opened(tmp_path)
    for number in range(4):
        kept.put(picture(number + 2), manifest, entry(number, 0, "server"))
    kept.close()
    folder = tmp_path / "labelled" / "0"
    stray = folder / f"{99:032x}.png"  # written, and not yet in the index
    stray.write_bytes(b"x")
    own = folder / "mine.png"
    own.write_bytes(b"x")
    (folder / f"{1:032x}.png").unlink()  # deleted by a person
    index = tmp_path / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-9])  # the last line is torn
    again = opened(tmp_path)
    again.close()
    assert ids(tmp_path) == [0, 2]
    assert files(tmp_path) == [f"labelled/0/{n:032x}.png" for n in (0, 2)] + ["labelled/0/mine.png"]


def test_another_model_s_inputs_do_not_fit(manifest: BundleManifest, tmp_path: Path) -> None:
    kept = opened(tmp_path)
    kept.put(picture(2), manifest, entry(1, 0, "server"))
    kept.close()
    again = opened(tmp_path)
    assert again.fits(manifest)
    assert not again.fits(replace(manifest, class_names=("a", "b")))
    assert not again.fits(replace(manifest, input=TensorSpec("float32", (1, 9, 9))))
    again.close()


def test_clearing_leaves_other_files(manifest: BundleManifest, tmp_path: Path) -> None:
    kept = opened(tmp_path)
    for number in range(3):
        kept.put(picture(number + 2), manifest, entry(number, number, "server"))
    (tmp_path / "labelled" / "1" / "mine.png").write_bytes(b"x")
    with pytest.raises(StateInUseError, match="already runs as keep here"):
        clear(tmp_path)
    kept.close()
    assert clear(tmp_path) == 3
    assert files(tmp_path) == ["labelled/1/mine.png"]
    assert not (tmp_path / "labelled" / "0").exists()
    with pytest.raises(ConfigurationError, match="expected a folder of kept inputs, found none"):
        clear(tmp_path)


def test_a_folder_that_cannot_be_ours_is_refused(tmp_path: Path) -> None:
    for text in ("no json", '{"format": 2}', '{"format": 1}', "[]"):
        (tmp_path / "kept.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"kept\.json: "):
            opened(tmp_path)


@pytest.mark.parametrize(
    ("names", "folders"),
    [
        (("cat", "dog"), ("cat", "dog")),
        (("T-shirt/top", "a\\b", "../x"), ("T-shirt_top", "a_b", "_x")),
        (("", "  ", "..."), ("class 0", "class 1", "class 2")),
        (("Cat", "cat", "CAT"), ("Cat", "cat 1", "CAT 2")),
        (("Ameise", "Bär", "x" * 300), ("Ameise", "Bär", "x" * 100)),
    ],
)
def test_folders_of_classes(names: tuple[str, ...], folders: tuple[str, ...]) -> None:
    assert class_folders(names) == folders


def test_a_line_that_a_full_disk_tore_costs_no_other_one(
    tmp_path: Path, manifest: BundleManifest
) -> None:
    place = tmp_path / "kept"
    folder = opened(place)
    for number in range(3):
        assert folder.put(picture(number + 2), manifest, entry(number))
    with full_disk((place / INDEX).stat().st_size + 40), pytest.raises(OSError, match="too large"):
        folder.put(picture(5), manifest, entry(3))
    for number in (4, 5):
        assert folder.put(picture(number + 2), manifest, entry(number))
    folder.close()
    assert ids(place) == [0, 1, 2, 3, 4, 5]
    assert len(files(place)) == 6


def test_a_folder_opens_on_a_full_disk_and_its_index_is_right_with_the_next_input(
    tmp_path: Path, manifest: BundleManifest, caplog: pytest.LogCaptureFixture
) -> None:
    """FAULTS row 6."""
    place = tmp_path / "kept"
    folder = opened(place)
    for number in range(3):
        assert folder.put(picture(number + 2), manifest, entry(number))
    folder.close()
    (place / files(place)[0]).unlink()  # by a person
    with full_disk(100):
        again = opened(place)
    assert "the index was not written: " in caplog.text
    assert again.put(picture(9), manifest, entry(3))
    again.close()
    assert ids(place) == [1, 2, 3]
    assert len((place / INDEX).read_bytes().splitlines()) == 3


def test_a_folder_opens_on_a_read_only_disk(tmp_path: Path, manifest: BundleManifest) -> None:
    """FAULTS row 6."""
    place = tmp_path / "kept"
    folder = opened(place)
    assert folder.put(picture(2), manifest, entry(0))
    folder.close()
    (place / "unlabelled" / f"{7:032x}.png").touch()  # an agent was killed in between
    with read_only(place):
        again = opened(place)
        assert len(again) == 1
        again.close()


def test_a_folder_that_cannot_be_opened_is_not_locked(
    tmp_path: Path, manifest: BundleManifest
) -> None:
    place = tmp_path / "kept"
    folder = opened(place)
    assert folder.put(picture(2), manifest, entry(0))
    folder.close()
    index = place / INDEX
    index.rename(place / "other")
    index.mkdir()
    with pytest.raises(IsADirectoryError):
        opened(place)
    index.rmdir()
    opened(place).close()
