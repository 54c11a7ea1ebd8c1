"""What docs/kept-inputs.md says to type, typed in its order."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from edge_sdk.kept.index import read_index
from edge_sdk.settings_file.keep_table import KeepTable
from edge_sdk.settings_file.settings_file import SettingsFile
from tests.reader import Document, Reader, environment
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

pytestmark = pytest.mark.deadline

KEPT = Document("docs/kept-inputs.md")
PICTURES = 60


def rows_of(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def test_hard_inputs_become_a_data_set(fleet: Fleet, digits: Digits, tmp_path: Path) -> None:
    shutil.copytree(fleet.device("keeping"), tmp_path / "pi", symlinks=True)
    (tmp_path / "pictures").mkdir()
    for number in range(PICTURES):
        picture = Image.fromarray(digits.x[number, 0].astype(np.uint8))
        picture.save(tmp_path / "pictures" / f"{number}.png")
    place = Reader(tmp_path)
    process = subprocess.Popen(
        ["bash", "-euc", f"exec {KEPT.snippet('run')}"],
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        answers = tmp_path / "answers.jsonl"
        wait_until(lambda: len(rows_of(answers)) == PICTURES, lambda: rows_of(answers), 60)
        rows = rows_of(answers)
        corrected = next(row for row in rows if row["source"] == "device")
        place.shell(KEPT.snippet("correct").replace("ID", corrected["id"]))
        again = subprocess.run(
            ["splitedge", "agent", "correct", corrected["id"], "3", "--state", "pi"],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        assert "each can be corrected once" in " ".join(again.stderr.split())
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err

    kept = read_index(tmp_path / "kept")
    offloaded = {row["id"] for row in rows if row["source"] == "server"}
    assert offloaded
    assert {each.id for each in kept} == offloaded | {corrected["id"]}
    shown = place.shell(KEPT.snippet("list"))
    assert f"{len(kept)} inputs" in shown
    assert "kept/labelled" in shown
    labelled = list((tmp_path / "kept" / "labelled").rglob("*.png"))
    assert len(labelled) == len(kept)
    assert f"{len(kept)} inputs deleted" in place.shell(KEPT.snippet("clear"))
    assert not (tmp_path / "kept" / "labelled").exists()
    assert place.shell(KEPT.snippet("list")) == "kept: no inputs are kept\n"


def test_the_settings_in_the_document_are_read() -> None:
    toml = KEPT.text.partition("```toml\n")[2].partition("```")[0]
    table = SettingsFile.from_toml(toml.encode()).keep
    assert table == KeepTable(Path("kept"), 1000, 100, 1.0)
