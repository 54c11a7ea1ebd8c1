"""The notebook for researchers runs from its first cell to its last."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
NOTEBOOK = ROOT / "examples" / "notebooks" / "compare_methods.ipynb"


@pytest.mark.deadline
def test_the_notebook_compares_three_methods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    monkeypatch.setenv("ROUNDS", "2")
    monkeypatch.setenv("SEEDS", "1")
    monkeypatch.setenv("RECIPES", str(ROOT / "examples" / "recipes"))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute(cwd=str(tmp_path))
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output["text"] for output in outputs if output["output_type"] == "stream")
    assert [line.split()[0] for line in printed.splitlines()] == [
        "supersfl",
        "splitfed-v2",
        "fedavg",
    ]
    assert printed.count(" % after 2 rounds") == 3
    assert any("image/png" in output.get("data", {}) for output in outputs)


def test_the_notebook_is_committed_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
