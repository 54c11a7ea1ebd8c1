"""The page docs/faults-tests.md, which names the tests of each row, made from their docstrings."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from benchmarks.reports import ROOT
from edge_sdk.durable import write_atomic
from edge_sdk.errors import ConfigurationError

PAGE: Final = ROOT / "docs" / "faults-tests.md"
TESTS: Final = ROOT / "tests"
BEGIN: Final = "<!-- tests of each row -->"
END: Final = "<!-- end of the tests -->"
# "FAULTS row 3", "FAULTS rows 3 and 4", "FAULTS rows 1, 3 and 4"
_WORDS: Final = re.compile(r"FAULTS\s+rows?\s+(\d+(?:(?:,\s*|\s+and\s+)\d+)*)")


def rows_named(docstring: str) -> set[int]:
    """Rows that a docstring names, as in `FAULTS row 3` or `FAULTS rows 3, 4 and 20`."""
    return {
        int(number) for words in _WORDS.findall(docstring) for number in re.findall(r"\d+", words)
    }


def by_row(folder: Path = TESTS) -> dict[int, list[str]]:
    """Tests whose docstring names a row, by row: `tests/FILE.py::FUNCTION`."""
    found: defaultdict[int, list[str]] = defaultdict(list)
    for path in sorted(folder.rglob("test_*.py")):
        for name, docstring in _tests_in(path.read_text()):
            for row in rows_named(docstring):
                found[row].append(f"{path.relative_to(folder.parent)}::{name}")
    return dict(sorted(found.items()))


def on_page(text: str) -> dict[int, list[str]]:
    """Tests of each row as the page has them."""
    found: dict[int, list[str]] = {}
    for line in _parted(text)[1].splitlines():
        if begun := re.fullmatch(r"Row (\d+):", line):
            found[int(begun[1])] = []
        elif named := re.fullmatch(r"- `(\S+)`", line):
            found[max(found)].append(named[1])
    return found


def with_tests(text: str, tests: Mapping[int, list[str]]) -> str:
    """The page with these tests in the place of those that it had."""
    lines = [f"Row {row}:\n\n" + "\n".join(f"- `{test}`" for test in tests[row]) for row in tests]
    before, _, after = _parted(text)
    return "\n\n".join([before, *lines, after])


def rewrite() -> None:
    """Write the tests of each row into the page.

    Raises: ConfigurationError, StorageError.
    """
    write_atomic(PAGE, with_tests(PAGE.read_text(), by_row()).encode())


def _parted(text: str) -> tuple[str, str, str]:
    """The page up to its first mark, between the two, and from the second one on."""
    before, begun, rest = text.partition(BEGIN)
    part, ended, after = rest.partition(END)
    if not begun or not ended:
        raise ConfigurationError(
            f"docs/faults-tests.md: expected the lines {BEGIN!r} and {END!r};"
            " put them back where the tests of each row shall stand"
        )
    return before + begun, part, ended + after


def _tests_in(source: str) -> Iterator[tuple[str, str]]:
    """Name and docstring of each test function that has one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.name, docstring
