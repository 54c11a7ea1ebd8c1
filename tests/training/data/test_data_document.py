"""What docs/data.md says to type, typed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_sdk.training.data.load import load_dataset
from tests.reader import Document, Reader

DOCUMENT = Document("docs/data.md")
RECIPE = """
method = "fedavg"
[data]
name = "digits"
clients = 2
[train]
backbone = "tiny"
rounds = 1
batch = 16
learning_rate = 0.05
"""


@pytest.fixture
def reader(tmp_path: Path) -> Reader:
    """A reader with 60 pictures of several sizes, a table, a module and a recipe."""
    digits = load_dataset("digits")
    for row in range(60):
        folder = tmp_path / "pictures" / str(digits.y_train[row])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.round(digits.x_train[row, 0] * (255 / 16)).astype(np.uint8)
        Image.fromarray(pixels).resize((16 + row % 3, 20)).save(folder / f"{row}.png")
    (tmp_path / "pictures" / "0" / "broken.png").write_text("no picture")
    rows = [f"{i},{i % 7},{i % 5},{'walk' if i // 50 % 2 else 'rest'}" for i in range(400)]
    rows[17] = "17,,2,rest"
    (tmp_path / "motion.csv").write_text("\n".join(["time,ax,ay,activity", *rows]) + "\n")
    (tmp_path / "my_data.py").write_text(DOCUMENT.snippet("function"))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return Reader(tmp_path)


def test_words_read_what_the_document_says(reader: Reader) -> None:
    first, *lines = reader.shell(DOCUMENT.snippet("look")).splitlines()
    assert first in DOCUMENT.text
    assert lines[0].startswith("pictures: 60 samples of 1 x 28 x 28 uint8 in 10 classes: ")
    assert lines[0].endswith("; 1 skipped (damaged files)")
    assert " samples of 2 x 16 float32 in 2 classes: " in lines[1]
    assert lines[1].endswith("skipped (windows with holes)")
    found = json.loads("\n".join(lines[2:]))
    assert found["shape"] == [3, 64]
    assert found["samples"] == {"train": 144, "held_out": 16, "test": 40}
    assert found["class_names"] == []
    assert found["labelled"]


def test_own_pictures_train_in_place_of_the_recipes_data(reader: Reader) -> None:
    said = " ".join(reader.shell(f"({DOCUMENT.snippet('train').strip()}) 2>&1").split())
    assert "pictures: 60 samples of 1 x 8 x 8 uint8 in 10 classes" in said
    assert "accuracy on the test part" in said
    report = json.loads((reader.folder / "run" / "report.json").read_text())
    assert report["recipe"]["data"]["name"] == "pictures?resize=8x8"
    assert report["final"]["figures_of"] == "test"
    assert report["final"]["threshold_chosen_on"] is None
