"""A folder is a room that a reader can take in: a dozen modules, sixteen at most."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("profiles", "edge_sdk", "exporters", "server", "benchmarks")
MODULES_MAX = 16


def test_no_folder_holds_more_modules_than_a_reader_takes_in() -> None:
    modules = Counter(
        str(path.parent.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    )
    assert modules, "no module was found: this test looked in the wrong place"
    crowded = {folder: count for folder, count in modules.items() if count > MODULES_MAX}
    assert not crowded


def test_only_packages_with_public_names_run_code_when_imported() -> None:
    """An `__init__.py` is empty, or re-exports the names that users import from there."""
    public = {"edge_sdk", "edge_sdk/nets", "edge_sdk/training/client", "profiles"}
    found = {
        str(path.parent.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
        if path.read_text().strip()
    }
    assert found <= public
