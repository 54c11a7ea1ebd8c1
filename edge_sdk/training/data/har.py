"""UCI-HAR: signals of a phone worn at the waist by 30 people, who are natural clients."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from edge_sdk.errors import InputError
from edge_sdk.training.data.arrays import read_npz, samples_of
from edge_sdk.training.data.files import find
from edge_sdk.training.data.samples import Array, Part, Samples, checked_samples

ACTIVITIES: Final = (
    "WALKING", "WALKING_UPSTAIRS", "WALKING_DOWNSTAIRS", "SITTING", "STANDING", "LAYING",
)  # fmt: skip
CHANNELS: Final = tuple(
    f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
WINDOW: Final = 128  # samples at 50 Hz
_REMEDY: Final = "put uci_har.npz in it, or the published folder 'UCI HAR Dataset', unpacked"


def uci_har(folder: Path) -> Samples:
    """7,352 + 2,947 windows of 9 x 128, float32, in 6 activities; groups are the 30 subjects.

    Read from `uci_har.npz`, or from the published text files (`train/Inertial Signals/...`, about
    3 s). The published split is by subject. Neighbouring windows of one recording overlap by half:
    never split them at random between training and test.
    """
    if (folder / "uci_har.npz").is_file():
        path = folder / "uci_har.npz"
        samples = samples_of("uci-har", path, read_npz(path), group="subject")
    else:
        inner = folder / "UCI HAR Dataset"
        root = inner if inner.is_dir() else folder
        if not (root / "train").is_dir():
            find(folder, ["uci_har.npz"], _REMEDY)
        train, test = (_text_part(root, side) for side in ("train", "test"))
        samples = checked_samples("uci-har", train, test, source=root, class_names=ACTIVITIES)
    shape = (len(CHANNELS), WINDOW)
    if samples.train.x.shape[1:] != shape or samples.train.groups is None:
        raise InputError(
            f"{folder}: expected windows of shape {shape} and the subject of each,"
            f" got shape {samples.train.x.shape[1:]}; {_REMEDY}"
        )
    return samples


def _text_part(root: Path, side: str) -> Part:
    signals = [_numbers(root, f"{side}/Inertial Signals/{c}_{side}.txt", WINDOW) for c in CHANNELS]
    activity = _numbers(root, f"{side}/y_{side}.txt", 1)
    subject = _numbers(root, f"{side}/subject_{side}.txt", 1)
    if len({len(rows) for rows in (*signals, activity, subject)}) != 1:
        raise InputError(f"{root}: expected files of one length in {side}; {_REMEDY}")
    return Part(
        np.stack(signals, axis=1),
        activity[:, 0].astype(np.int64) - 1,  # published as 1..6
        subject[:, 0].astype(np.int64),
    )


def _numbers(root: Path, name: str, columns: int) -> Array:
    path = find(root, [name], _REMEDY)
    try:
        rows = np.loadtxt(path, np.float32, ndmin=2)
    except (OSError, ValueError) as err:
        raise InputError(f"{path}: expected lines of numbers ({err})") from err
    if rows.shape[1] != columns:
        raise InputError(f"{path}: expected {columns} numbers a line, got {rows.shape[1]}")
    return rows
