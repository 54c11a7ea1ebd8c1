"""The user's own samples for a run: in the form of its network, with its classes in its order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from exporters.errors import ExportError
from exporters.run.record import DataRecord, NetworkRecord, RunRecord
from exporters.run.samples import run_samples, training_samples


def record(*class_names: str) -> RunRecord:
    """Of a run on pictures, 1 x 4 x 4, that held nothing out."""
    network = NetworkRecord("tiny", (1, 4, 4), len(class_names), (0.0,), (1.0,))
    data = DataRecord("elsewhere")
    return RunRecord("fedavg", 1, network, class_names, data, "simulation", ())


def pictures(folder: Path, *classes: str) -> str:
    for name in classes:
        (folder / name).mkdir()
        for number in range(6):
            Image.fromarray(np.full((8, 8), number, np.uint8)).save(folder / name / f"{number}.png")
    return str(folder)


def test_pictures_of_any_size_are_brought_to_that_of_the_network(tmp_path: Path) -> None:
    word = pictures(tmp_path, "ant", "cat")
    assert run_samples(record("ant", "cat"), word).x_test.shape[1:] == (1, 4, 4)


def test_labels_of_other_classes_are_refused(tmp_path: Path) -> None:
    """Folders of two of three classes: their labels 0 and 1 would be taken for ant and bee."""
    word, run = pictures(tmp_path, "bee", "cat"), record("ant", "bee", "cat")
    with pytest.raises(ExportError, match=r"of the run in its order, ant, bee, cat, got bee, cat"):
        run_samples(run, word)
    with pytest.raises(ExportError, match=r"classes.txt"):
        training_samples(run, word)
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    assert set(run_samples(run, word).y_test) <= {1, 2}
    assert run_samples(record("0", "1", "2"), word).classes == 3  # a run that named none
