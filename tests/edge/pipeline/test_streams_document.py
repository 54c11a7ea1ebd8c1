"""What docs/streams.md says to type, typed."""

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

from edge_sdk import EdgeAgent
from edge_sdk.pipeline.sinks.kinds import SINKS
from edge_sdk.pipeline.sources.kinds import SOURCES
from edge_sdk.settings_file.settings_file import SettingsFile
from tests.reader import Document, Reader, environment
from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

pytestmark = pytest.mark.deadline

STREAMS = Document("docs/streams.md")


@pytest.fixture(scope="module")
def place(fleet: Fleet, digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """A folder with an enrolled device, a picture of a digit, and the two files of the document."""
    folder = tmp_path_factory.mktemp("streams")
    shutil.copytree(fleet.device("streams"), folder / "pi", symlinks=True)
    (folder / "pictures").mkdir()
    Image.fromarray(digits.x[0, 0].astype(np.uint8)).save(folder / "pictures" / "7.png")
    (folder / "sensor.py").write_text(STREAMS.snippet("sensor"))
    (folder / "alarm.py").write_text(STREAMS.snippet("alarm"))
    return Reader(folder)


@pytest.fixture(scope="module")
def label(digits: Digits) -> int:
    """The agent's own label of the picture, or the server's; they are the same here."""
    folder = digits.models / "digits" / "1" / "bundles" / "d2"
    with EdgeAgent.from_bundle(folder) as agent:
        return agent.predict(digits.x[0]).label


def test_a_picture_in_the_folder_is_answered_in_the_file(place: Reader, label: int) -> None:
    process = subprocess.Popen(
        ["bash", "-euc", f"exec {STREAMS.snippet('folder')}"],
        cwd=place.folder,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    answers = place.folder / "answers.jsonl"
    try:
        wait_until(lambda: answers.exists() and answers.read_text(), "no answer", 30)
    finally:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    row: dict[str, Any] = json.loads(answers.read_text())
    assert Path(row["input"]).name == "7.png"
    assert row["label"] == label
    shown = STREAMS.text.partition("```json\n")[2].partition("```")[0]
    assert list(row) == list(json.loads(shown))


def test_a_line_in_gives_a_line_out(place: Reader, label: int) -> None:
    assert json.loads(place.shell(STREAMS.snippet("lines")))["label"] == label


def test_functions_are_source_and_sink(place: Reader) -> None:
    place.shell(STREAMS.snippet("function"))
    rung = (place.folder / "alarm.txt").read_text().splitlines()
    assert [line.rpartition(" ")[0] for line in rung] == [f"reading {n}" for n in range(3)]


def test_the_document_has_every_kind_and_option() -> None:
    sources, _, sinks = STREAMS.text.partition("## Sinks")
    documented = [(sources, kind.example, kind.keys) for kind in SOURCES.values()]
    documented += [(sinks, kind.example, kind.keys) for kind in SINKS.values()]
    for text, example, keys in documented:
        starts = tuple(f"| `{example.partition(':')[0]}{end}" for end in (":", "`"))
        (line,) = [row for row in text.splitlines() if row.startswith(starts)]
        assert [key for key in keys if f"`{key}`" not in line] == [], example


def test_the_settings_in_the_document_are_read() -> None:
    toml = STREAMS.text.partition("```toml\n")[2].partition("```")[0]
    assert SettingsFile.from_toml(toml.encode()).stream.every == 0.5
