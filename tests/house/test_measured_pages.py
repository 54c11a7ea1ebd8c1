"""The pages of docs/methods show the figures of the committed reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pages.measured import PAGES, with_figures
from benchmarks.paper.report import RESULTS
from edge_sdk.errors import ConfigurationError

MARKED = "# A method\n\n<!-- measured: besplit -->\nold\n<!-- end of measured -->\n\nThe end.\n"


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_has_the_figures_of_the_reports(page: Path) -> None:
    text = page.read_text()
    assert with_figures(text) == text, "run python -m benchmarks.pages"


def test_five_pages_show_figures() -> None:
    assert sum("<!-- measured: " in page.read_text() for page in PAGES.glob("*.md")) == 5


def test_a_report_takes_the_place_of_what_stood_between_the_marks() -> None:
    page = with_figures(MARKED)
    report = (RESULTS / "besplit-cpu.md").read_text()
    (row,) = (line for line in report.splitlines() if line.startswith("| BESplit |"))
    assert "old" not in page
    assert row in page
    assert page.startswith("# A method\n")
    assert page.endswith("<!-- end of measured -->\n\nThe end.\n")


def test_a_table_without_a_report_says_how_to_make_it(tmp_path: Path) -> None:
    (tmp_path / "orderings-cpu.md").write_text("# Orderings\n")
    assert "`python -m benchmarks.paper besplit " in with_figures(MARKED, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- measured: besplit -->\n", "put it back"),
        ("<!-- measured: a -->\n<!-- measured: b -->\n<!-- end of measured -->", "put it back"),
        ("<!-- measured: no-such -->\n<!-- end of measured -->", "no-such: no such table"),
    ],
)
def test_a_mark_that_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        with_figures(text)
