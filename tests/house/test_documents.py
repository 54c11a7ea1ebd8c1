"""The documents name files, folders and links that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("profiles", "edge_sdk", "exporters", "server", "benchmarks", "tests", "docs", "examples")
# `edge_sdk/agent.py`, `tests/nets`; not `server/models`, which a server makes in its own folder
NAMED = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)`")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[\w-]*)?\)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_is_there(document: Path) -> None:
    text = document.read_text()
    named = [name for name in NAMED.findall(text) if "NAME" not in name and "NNNN" not in name]
    links = [(document.parent / link).resolve() for link in LINK.findall(text)]
    missing = [name for name in named if not (ROOT / name).exists()]
    missing += [str(link.relative_to(ROOT)) for link in links if not link.exists()]
    assert not missing


def test_the_documents_name_something() -> None:
    assert sum(len(NAMED.findall(document.read_text())) for document in DOCUMENTS) > 50
