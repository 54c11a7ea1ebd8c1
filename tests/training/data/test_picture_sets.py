"""CINIC-10, Tiny ImageNet, Imagenette, ISIC 2019 and HAM10000 in their published formats."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data.dataset import labelled_dataset
from edge_sdk.training.data.load import open_data
from edge_sdk.training.data.skin import HAM_CLASSES, HAM_MALIGNANT, ISIC_CLASSES, ISIC_MALIGNANT
from server.training.recipe.recipe import DataSettings

FIXTURES = Path(__file__).parents[2] / "fixtures"
BYTES_MAX = 50_000


def red(x: np.ndarray) -> list[int]:
    """Middle red value of each picture."""
    return [int(value) for value in x[:, 0, x.shape[2] // 2, x.shape[3] // 2]]


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a fixture that a test may damage."""

    def copy(name: str) -> Path:
        shutil.copytree(FIXTURES / name, tmp_path / name)
        return tmp_path / name

    return copy


@pytest.mark.parametrize("name", ["cinic-10", "tiny-imagenet", "imagenette", "isic", "ham10000"])
def test_a_fixture_is_small(name: str) -> None:
    files = [path for path in (FIXTURES / name).rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) < BYTES_MAX


def test_cinic10_is_read_from_train_and_test_alone() -> None:
    samples = open_data(f"cinic-10={FIXTURES / 'cinic-10'}")
    assert samples.test is not None
    assert samples.train.x.shape == samples.test.x.shape == (10, 3, 32, 32)
    assert samples.class_names[2:4] == ("bird", "cat")
    assert samples.train.y is not None
    assert red(samples.train.x) == samples.train.y.tolist() == list(range(10))


def test_labels_of_tiny_imagenet_are_in_the_order_of_its_list() -> None:
    samples = open_data(f"tiny-imagenet={FIXTURES / 'tiny-imagenet'}")
    assert samples.class_names == ("n02124075", "n04067472", "n01443537")
    for part in (samples.train, samples.test):
        assert part is not None
        assert part.y is not None
        assert part.x.shape == (3, 3, 64, 64)
        assert part.y.tolist() == [0, 1, 2]
        assert red(part.x) == pytest.approx([0, 80, 160], abs=2)  # a JPEG is not exact


def test_imagenette_s_pictures_of_many_sizes_become_one() -> None:
    folder = FIXTURES / "imagenette"
    samples = open_data(f"imagenette={folder}")
    assert samples.train.x.shape == (10, 3, 64, 64)
    assert samples.class_names[0] == "tench"
    assert samples.test is not None
    assert red(samples.test.x) == pytest.approx([20 * label for label in range(10)], abs=2)
    assert open_data(f"imagenette={folder}?resize=8x16").train.x.shape == (10, 3, 8, 16)


def test_isic_has_labels_of_its_table_and_keeps_a_lesion_together() -> None:
    samples = open_data(f"isic={FIXTURES / 'isic'}?resize=8x8")
    assert samples.class_names == ISIC_CLASSES
    assert samples.train.y is not None
    assert samples.train.groups is not None
    assert samples.train.y.tolist() == [*range(8), 0, 0]
    assert red(samples.train.x) == pytest.approx([*range(0, 160, 20), 0, 0], abs=2)
    first, *others, again, once_more = samples.train.groups.tolist()
    assert first == again == once_more
    assert len({first, *others}) == 8


def test_ham10000_is_read_from_both_folders_and_no_lesion_is_in_two_parts() -> None:
    samples = open_data(f"ham10000={FIXTURES / 'ham10000'}")
    assert samples.train.x.shape == (14, 3, 64, 64)
    assert samples.train.y is not None
    assert samples.train.y.tolist() == [label for label in range(7) for _ in range(2)]
    data = labelled_dataset(samples)
    parts = [set(part.tolist()) for part in (data.group_train, data.group_test) if part is not None]
    assert len(parts) == 2
    assert not parts[0] & parts[1]


def test_what_is_malignant_is_named_by_its_label() -> None:
    assert [ISIC_CLASSES[label] for label in ISIC_MALIGNANT] == ["MEL", "BCC", "AK", "SCC"]
    assert [HAM_CLASSES[label] for label in HAM_MALIGNANT] == ["akiec", "bcc", "mel"]
    page = (FIXTURES.parents[1] / "docs" / "data.md").read_text()
    for labels in (ISIC_MALIGNANT, HAM_MALIGNANT):
        assert f"`{list(labels)}`" in page


def test_a_recipe_of_published_pictures_takes_their_folder() -> None:
    given = DataSettings("imagenette", 2).taken_from(str(FIXTURES / "imagenette"))
    assert given.word == f"imagenette={FIXTURES / 'imagenette'}"


def test_a_damaged_picture_is_left_out_with_its_label_and_lesion(
    copied: Callable[[str], Path],
) -> None:
    folder = copied("ham10000")
    (folder / "HAM10000_images_part_1" / "ISIC_0024308.jpg").write_bytes(b"no picture")
    samples = open_data(f"ham10000={folder}")
    assert (len(samples.train), samples.skipped) == (13, 1)
    assert samples.train.y is not None
    assert samples.train.groups is not None
    assert (
        samples.train.y.tolist()
        == samples.train.groups.tolist()
        == [
            *(0, 0, 1),
            *(label for label in range(2, 7) for _ in range(2)),
        ]
    )


@pytest.mark.parametrize(
    ("name", "gone", "said"),
    [
        ("cinic-10", "train", "expected the folder train, found none; put the published folders"),
        ("cinic-10", "test/cat", "expected the folder cat, found none"),
        ("cinic-10", "test/cat/cifar10-test-3.png", "expected pictures there, found none; put"),
        ("tiny-imagenet", "wnids.txt", "expected the file wnids.txt, found none; put the content"),
        ("tiny-imagenet", "val/val_annotations.txt", "expected the file val_annotations.txt"),
        ("imagenette", "imagenette2-160/val", "expected the folder val, found none"),
        ("isic", "ISIC_2019_Training_GroundTruth.csv", "expected the file ISIC_2019_Training_Gr"),
        ("isic", "ISIC_2019_Training_Input/ISIC_0000003.jpg", "expected a picture ISIC_0000003"),
        ("ham10000", "HAM10000_metadata.csv", "expected the file HAM10000_metadata.csv, found"),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(
    name: str, gone: str, said: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    path = folder / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ConfigurationError, match=said):
        open_data(f"{name}={folder}")


@pytest.mark.parametrize(
    ("name", "file", "text", "said"),
    [
        ("tiny-imagenet", "val/val_annotations.txt", "val_0.JPEG\tn0\n", "line 1: expected a pic"),
        ("tiny-imagenet", "wnids.txt", "n1\nn1\n", "expected different classes, one a line"),
        ("isic", "ISIC_2019_Training_GroundTruth.csv", "image,MEL\na,1.0\n", "got no column NV"),
        (
            "isic",
            "ISIC_2019_Training_GroundTruth.csv",
            "image,MEL,NV,BCC,AK,BKL,DF,VASC,SCC\na,1.0,1.0,0,0,0,0,0,0\n",
            "a: expected 1.0 in one of MEL, .*, got it in 2",
        ),
        ("ham10000", "HAM10000_metadata.csv", "lesion_id,image_id,dx\n", "got no row"),
        ("ham10000", "HAM10000_metadata.csv", "lesion_id,image_id,dx\nh,i\n", "got fewer"),
        ("ham10000", "HAM10000_metadata.csv", "lesion_id,image_id,dx\nh,i,wart\n", "got wart"),
    ],
)
def test_what_is_not_sound_is_named(
    name: str, file: str, text: str, said: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(name)
    (folder / file).write_text(text)
    with pytest.raises(InputError, match=said):
        open_data(f"{name}={folder}")
