"""docs/faults.md has every row, and docs/faults-tests.md the tests that say so, and just those."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import orjson
import pytest

from benchmarks.faults.figures import FIGURES
from benchmarks.faults.page import PAGE, by_row, on_page, rows_named, with_tests
from benchmarks.faults.report import MET
from benchmarks.reports import RESULTS

FAULTS = PAGE.with_name("faults.md")
ROWS = range(1, 35)
REWRITE = "run `python -m benchmarks.faults page`, which writes docs/faults-tests.md"


@functools.cache
def of_the_repository() -> dict[int, list[str]]:
    """Its tests by row, read once: there are hundreds of files."""
    return by_row()


def test_the_table_has_every_row_once() -> None:
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", FAULTS.read_text(), re.MULTILINE)]
    assert rows == list(ROWS)


def test_the_page_says_which_figures_are_missed() -> None:
    figures = orjson.loads((RESULTS / "faults.json").read_bytes())["figures"].values()
    missed = sorted({row for one in figures if one["result"] == "missed" for row in one["rows"]})
    met = sum(one["result"] == MET for one in figures)
    text = " ".join(FAULTS.read_text().split())
    said = re.search(
        r"Of its (\d+) figures (\d+) are met. Missed are those of rows ([^.]+)\.", text
    )
    assert said is not None
    assert [int(number) for number in said.group(1, 2)] == [len(figures), met]
    assert [int(number) for number in re.findall(r"\d+", said[3])] == missed


def test_every_row_has_a_test_whose_docstring_says_so() -> None:
    assert list(of_the_repository()) == list(ROWS)


def test_the_page_names_the_tests_of_each_row() -> None:
    found, written = of_the_repository(), on_page(PAGE.read_text())
    gone = {row: sorted(set(written[row]) - set(found.get(row, []))) for row in written}
    left_out = {row: sorted(set(found[row]) - set(written.get(row, []))) for row in found}
    assert not any(left_out.values()), f"{left_out}: not on the page; {REWRITE}"
    assert not any(gone.values()), f"{gone}: no such tests of that row; {REWRITE}"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_names_tests_of_its_rows(name: str) -> None:
    figure, found = FIGURES[name], of_the_repository()
    own = {test for row in figure.rows for test in found.get(row, [])}
    assert set(figure.tests) <= own


@pytest.mark.parametrize(
    ("docstring", "rows"),
    [
        ("FAULTS row 3: kill -9 of the broker.", {3}),
        ("FAULTS rows 3 and 4.", {3, 4}),
        ("FAULTS rows 3, 4 and 20: kills.", {3, 4, 20}),
        ("FAULTS row 3.\n\nAnd FAULTS row 4.", {3, 4}),
        ("The faults of row 3.", set()),
    ],
)
def test_rows_are_read_from_a_docstring(docstring: str, rows: set[int]) -> None:
    assert rows_named(docstring) == rows


def test_tests_are_written_and_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text(
        'def test_one() -> None:\n    """FAULTS rows 2 and 3."""\n'
        "def test_two() -> None:\n    pass\n"
        'def other() -> None:\n    """FAULTS row 4."""\n'
    )
    found = by_row(folder)
    assert found == {2: ["tests/test_a.py::test_one"], 3: ["tests/test_a.py::test_one"]}
    page = with_tests(PAGE.read_text(), found)
    assert on_page(page) == found
    assert with_tests(page, on_page(PAGE.read_text())) == PAGE.read_text()
