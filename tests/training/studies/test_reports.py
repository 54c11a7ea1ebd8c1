"""Reports of benchmarks and the processes that make them, which import a checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from benchmarks.reports import ROOT, child_environment, made_by, provenance, write
from benchmarks.same_weights import _simulate


def test_a_child_process_imports_benchmarks_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "users_own.py").touch()
    command = [
        sys.executable,
        "-P",
        "-c",
        "import benchmarks.reports as r, users_own; print(r.ROOT)",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(ROOT)


def test_a_report_is_json_and_markdown(tmp_path: Path) -> None:
    about = {"command": "python -m benchmarks.none"} | provenance()
    write(tmp_path / "new" / "none", about, ["# None", made_by(about)])
    assert orjson.loads((tmp_path / "new" / "none.json").read_bytes()) == about
    title, _, ran = (tmp_path / "new" / "none.md").read_text().partition("\n\n")
    assert title == "# None"
    assert ran.startswith("`python -m benchmarks.none`; splitedge ")
    assert str(about["when"]) in ran


def test_a_checkout_is_run_by_its_own_entry_point(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project.entry-points."splitedge.commands"]\nsimulate = "once.simulate_cli:app"\n'
    )
    assert _simulate(tmp_path) == "from once.simulate_cli import app; app()"
    assert _simulate(ROOT).startswith("from server.training.commands import ")
