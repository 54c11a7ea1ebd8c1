"""The first page of the documents shows the figures of the committed reports."""

from __future__ import annotations

import re

import pytest

from benchmarks.pages.front import PAGE, with_figures


def test_the_first_page_has_the_figures_of_the_reports() -> None:
    text = PAGE.read_text()
    assert with_figures(text) == text, "run python -m benchmarks.pages"
    rows = re.findall(r"^\| .+ \| \[[a-z-]+\]\(\.\./benchmarks/results/", text, re.MULTILINE)
    assert len(rows) >= 6


def test_a_page_without_a_place_for_them_is_told() -> None:
    with pytest.raises(ValueError, match="<!-- figures -->"):
        with_figures("# A page\n")
