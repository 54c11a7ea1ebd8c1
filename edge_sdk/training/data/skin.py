"""Pictures of skin lesions, published as tables and folders: ISIC 2019 and HAM10000.

Several pictures may show one lesion. They are one group, so that no lesion is in two parts.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.training.data.files import find
from edge_sdk.training.data.pictures import Size, decoded_parts
from edge_sdk.training.data.samples import Samples, checked_samples

ISIC_CLASSES: Final = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
HAM_CLASSES: Final = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
# Labels that must not be taken for benign (BMR): melanoma, basal and squamous cell carcinoma, and
# actinic keratosis, which may become one. A recipe names them as `malignant`.
ISIC_MALIGNANT: Final = (0, 2, 3, 7)
HAM_MALIGNANT: Final = (0, 1, 4)
SIZE: Final = (64, 64)  # ours: 25,000 pictures as published are beyond 4 GB
_SUFFIXES: Final = (".jpg", ".jpeg", ".png")

Row = Mapping[str, str]


def isic(folder: Path, size: Size | None = None) -> Samples:
    """25,331 RGB pictures in 8 classes, uint8: the training part of ISIC 2019, which has labels.

    `ISIC_2019_Training_GroundTruth.csv`, the folder `ISIC_2019_Training_Input` and, if it is there,
    `ISIC_2019_Training_Metadata.csv` with the lesion of each picture.

    Args:
        size: height and width that every picture is brought to; SIZE where None.
    Raises: ConfigurationError saying what to put where; InputError naming a row that is not sound.
    """
    stem = "ISIC_2019_Training"
    remedy = f"put the published {stem}_GroundTruth.csv and the folder {stem}_Input in it"
    truth = find(folder, (f"{stem}_GroundTruth.csv",), remedy)
    rows = _rows(truth, ("image", *ISIC_CLASSES))
    labels = {row["image"]: _one_hot(truth, row) for row in rows}
    lesions: dict[str, str] = {}
    metadata = folder / f"{stem}_Metadata.csv"
    if metadata.is_file():
        found = _rows(metadata, ("image", "lesion_id"))
        lesions = {row["image"]: row["lesion_id"] for row in found if row["lesion_id"]}
    places = (f"{stem}_Input", f"{stem}_Input/{stem}_Input", ".")
    return _samples("isic", folder, labels, lesions, ISIC_CLASSES, places, size, remedy)


def ham10000(folder: Path, size: Size | None = None) -> Samples:
    """10,015 RGB pictures in 7 classes, uint8.

    `HAM10000_metadata.csv` (or without the suffix) and the folders `HAM10000_images_part_1` and
    `HAM10000_images_part_2`, or one folder `HAM10000_images`.

    Args:
        size: height and width that every picture is brought to; SIZE where None.
    Raises: ConfigurationError saying what to put where; InputError naming a row that is not sound.
    """
    remedy = (
        "put the published HAM10000_metadata.csv and the folders HAM10000_images_part_1 and"
        " HAM10000_images_part_2 in it"
    )
    table = find(folder, ("HAM10000_metadata.csv", "HAM10000_metadata"), remedy)
    labels, lesions = {}, {}
    for row in _rows(table, ("lesion_id", "image_id", "dx")):
        if row["dx"] not in HAM_CLASSES:
            raise InputError(
                f"{table}: {row['image_id']}: expected dx to be one of {', '.join(HAM_CLASSES)},"
                f" got {row['dx'] or 'nothing'}"
            )
        labels[row["image_id"]] = HAM_CLASSES.index(row["dx"])
        lesions[row["image_id"]] = row["lesion_id"]
    places = ("HAM10000_images_part_1", "HAM10000_images_part_2", "HAM10000_images", ".")
    return _samples("ham10000", folder, labels, lesions, HAM_CLASSES, places, size, remedy)


def _samples(  # noqa: PLR0917 - a data set in its parts
    name: str,
    folder: Path,
    labels: Mapping[str, int],
    lesions: Mapping[str, str],
    names: Sequence[str],
    places: Sequence[str],
    size: Size | None,
    remedy: str,
) -> Samples:
    """The pictures of a table.

    Args:
        labels, lesions: by the name of a picture; one without a lesion is a group of its own.
        places: folders within `folder` that may hold the pictures.
    """
    entries = [(_picture(folder, places, image, remedy), labels[image]) for image in labels]
    numbers = {
        key: number
        for number, key in enumerate(dict.fromkeys(lesions.get(image, image) for image in labels))
    }
    groups = {
        path: numbers[lesions.get(image, image)]
        for (path, _), image in zip(entries, labels, strict=True)
    }
    (part,) = decoded_parts(
        folder, [entries], size=size or SIZE, groups=groups if lesions else None
    )
    samples = checked_samples(name, part, None, source=folder, class_names=names)
    return replace(samples, skipped=len(entries) - len(part), what="damaged files")


def _picture(folder: Path, places: Sequence[str], image: str, remedy: str) -> Path:
    for place in places:
        for suffix in _SUFFIXES:
            path = folder / place / f"{image}{suffix}"
            if path.is_file():
                return path
    raise ConfigurationError(
        f"{folder}: expected a picture {image}.jpg in {places[0]}, found none; {remedy}"
    )


def _rows(path: Path, columns: Sequence[str]) -> list[Row]:
    """The rows of a table that has these columns, at least one row."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in columns if name not in (reader.fieldnames or ())]
            rows: list[Row] = [] if missing else list(reader)
    except (OSError, UnicodeDecodeError, csv.Error) as err:
        raise InputError(f"{path}: expected a table with commas ({err})") from err
    if missing or not rows:
        wrong = f"no column {missing[0]}" if missing else "no row"
        raise InputError(f"{path}: expected the columns {', '.join(columns)} and rows, got {wrong}")
    short = next((row for row in rows if any(row[name] is None for name in columns)), None)
    if short is not None:
        raise InputError(f"{path}: {short[columns[0]]}: expected {len(columns)} columns, got fewer")
    return rows


def _one_hot(path: Path, row: Row) -> int:
    """The label of a row with 1.0 in the column of its class."""
    marked = [label for label, name in enumerate(ISIC_CLASSES) if row[name] in {"1", "1.0"}]
    if len(marked) != 1:
        raise InputError(
            f"{path}: {row['image']}: expected 1.0 in one of {', '.join(ISIC_CLASSES)}, got it in"
            f" {len(marked)}"
        )
    return marked[0]
