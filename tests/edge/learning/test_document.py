"""docs/learning.md: its commands work as typed, beside each other."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
import pytest

from edge_sdk.settings import Learn
from edge_sdk.settings_file.settings_file import SettingsFile
from tests.reader import Document, Reader, environment

if TYPE_CHECKING:
    from tests.edge.digits import Digits
    from tests.edge.fleet import Fleet

DOCUMENT = Document("docs/learning.md")


@pytest.mark.deadline
def test_a_running_agent_learns_as_the_document_says(
    digits: Digits, fleet: Fleet, tmp_path: Path
) -> None:
    (tmp_path / "pi").symlink_to(fleet.device("document"))
    np.save(tmp_path / "x.npy", digits.x[0])
    words = DOCUMENT.snippet("run").split()
    assert words[0] == "splitedge"
    command = [sys.executable, "-P", "-m", "edge_sdk.cli", *words[1:]]
    agent = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert agent.stdout is not None
        assert "runs digits/1/d2" in agent.stdout.readline()
        reader = Reader(tmp_path)
        answer = orjson.loads(reader.shell("splitedge agent predict x.npy --state ./pi --json"))[0]
        reader.shell(f"splitedge agent correct {answer['id']} 3 --state ./pi")
        status = orjson.loads(reader.shell(DOCUMENT.snippet("status")))
        learning = status["agent"]["reports"]["learning"]
        assert learning["labels"] == "both"
        for field in ("active", "learnt", "held_out", "corrections", "drops", "why_not"):
            assert field in learning
            assert f"`{field}`" in DOCUMENT.text
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.communicate()


def test_the_table_of_the_document_is_read() -> None:
    table = DOCUMENT.text.split("```toml\n")[1].split("```")[0]
    assert SettingsFile.from_toml(table.encode()).agent.learn == Learn("both")
