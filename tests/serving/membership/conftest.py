"""One model for the servers of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.bench.models import export_random


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model bench-tiny/1, of depth 1 and random weights."""
    folder = tmp_path_factory.mktemp("models")
    export_random("tiny", (1, 8, 8), (1,), folder)
    return folder
