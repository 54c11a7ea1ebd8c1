"""Docstrings name their subject, so that a reader knows what is spoken of without the lines around.

Ruff's pydocstyle rules (pyproject.toml) see to it that public names have a docstring. This test
refuses openings that leave the subject out: "Of the next one." says nothing by itself, "Row indices
of the next second batch." does.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("profiles", "edge_sdk", "exporters", "server", "benchmarks")
# A docstring begins with a noun or a verb; these words begin one that has neither.
OPENINGS = frozenset(
    [
        *("as", "beside", "but", "have", "how", "it", "its", "nobody", "of", "so", "such", "that"),
        *("theirs", "them", "these", "they", "this", "those", "to", "what", "whatever", "where"),
        *("which", "who", "whoever", "whom", "whose", "with", "without"),
    ]
)


def first_lines(source: str) -> Iterator[tuple[int, str]]:
    """Line number and first line of each docstring in a module's source."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text.splitlines()[0]


def nameless(source: str) -> list[tuple[int, str]]:
    """The docstrings of a module's source that begin with one of OPENINGS."""
    return [
        (line, text)
        for line, text in first_lines(source)
        if text.split()[0].strip(",.;:").lower() in OPENINGS
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_begin_with_their_subject(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in nameless(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def test_a_docstring_without_a_subject_is_found() -> None:
    source = (
        'def rows():\n    """Of the next one."""\n\ndef views():\n    """Views of a batch."""\n'
    )
    assert nameless(source) == [(1, "Of the next one.")]
