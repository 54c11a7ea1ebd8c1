"""docs/own-network.md: its network is the example's, and its commands work as typed."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson

from tests.reader import ROOT, Document, Reader

DOCUMENT = Document("docs/own-network.md")


def test_the_network_of_the_document_is_the_example() -> None:
    example = (ROOT / "examples" / "own_network" / "my_network.py").read_text()
    assert example.endswith(DOCUMENT.snippet("network"))


def test_the_commands_train_and_export_it(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    Reader(tmp_path).shell(DOCUMENT.snippet("simulate"))
    model = orjson.loads(
        (tmp_path / "server" / "models" / "mine" / "1" / "model.json").read_bytes()
    )
    assert model["backbone"] == "my_network:network"
    assert model["stages"] == 3
    assert model["cuts"]
    report = orjson.loads((tmp_path / "run" / "report.json").read_bytes())
    assert report["final"]["accuracy"] > 0.8  # every class is known
