"""The command that a user types after a training."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from exporters.run.record import RunRecord


def export_command(record: RunRecord, folder: Path, out: Path) -> str:
    """The command that exports a run.

    It trains exits on the run's own data where the run has none. `DATA` stands where only the user
    can name samples that no client trained on.

    Args:
        folder: of the run. out: folder of models.
    """
    words = ["splitedge", "export", "--run", str(folder)]
    if not record.exits:
        words += ["--train-exits", record.data.source]
    if not record.data.chooses:
        words += ["--data", "DATA"]
    return shlex.join([*words, "--out", str(out), "--name", model_name(folder.name)])


def model_name(text: str) -> str:
    """The text as a model's name: a-z, 0-9 and '-'."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63] or "model"
