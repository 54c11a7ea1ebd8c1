"""The pages of docs/methods show the figures of the committed reports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.pages.measured import PAGES, marks_of, pictures, with_figures
from benchmarks.pages.plots import CURVES
from benchmarks.pages.plots import drawn as picture
from benchmarks.paper.curves import curves_of
from benchmarks.paper.report import RESULTS
from edge_sdk.errors import ConfigurationError
from tests.house.pictures import same_picture

ROOT = Path(__file__).parents[2]
SECTION = re.compile(r"^## The algorithms?, beside our files\n(.*?)^## ", re.MULTILINE | re.DOTALL)
# `server/training/methods/steps.py`: `shared`, `joint_step`
OUR_LINES = re.compile(r"`([\w/]+\.py)`: (`\w+`(?:, `\w+`)*)")
NAME = re.compile(r"`(\w+)`")
MARKED = "# A method\n\n<!-- measured: besplit -->\nold\n<!-- end of measured -->\n\nThe end.\n"


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_page_has_the_figures_of_the_reports(page: Path) -> None:
    text = page.read_text()
    assert with_figures(text) == text, "run python -m benchmarks.pages"


def test_the_pictures_are_of_the_reports() -> None:
    drawn = pictures()
    there = {path.stem: path.read_bytes() for path in CURVES.glob("*.svg")}
    assert drawn.keys() == there.keys()
    old = [name for name in drawn if not same_picture(drawn[name], there[name])]
    assert old == [], "run make paper-plots"


def test_a_picture_with_another_curve_is_not_the_same() -> None:
    one, other = np.array([[20.0, 40.0]]), np.array([[20.0, 40.1]])
    pictures = [picture({"a": curve}) for curve in (one, one + 1e-12, other)]
    assert same_picture(pictures[0], pictures[1])
    assert not same_picture(pictures[0], pictures[2])
    assert not same_picture(pictures[0], picture({"b": one}))


def test_a_curve_has_the_rounds_that_were_measured_with_every_seed() -> None:
    runs = [
        {"row": "a", "curve": [None, 20.0, None, 40.0]},
        {"row": "a", "curve": [None, 30.0, None, 60.0]},
        {"row": "at the end", "curve": [None, None, None, 50.0]},
        {"row": "one stopped", "curve": [10.0, 20.0]},
        {"row": "one stopped", "curve": [10.0, 20.0, 30.0]},
        {"row": "none"},
    ]
    curves = curves_of({"runs": runs})
    assert list(curves) == ["a"]
    assert np.isnan(curves["a"][:, 0]).all()
    assert curves["a"][:, [1, 3]].tolist() == [[20.0, 40.0], [30.0, 60.0]]
    drawn = picture(curves)
    assert drawn == picture(curves)
    assert b"accuracy on the test part" in drawn


METHOD_PAGES = sorted(
    page for page in PAGES.glob("*.md") if page.stem not in {"index", "common", "costs"}
)


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_every_method_s_page_has_figures_a_curve_and_what_is_not_shown(page: Path) -> None:
    text = page.read_text()
    assert marks_of(text)
    shown = re.findall(r"\(\.\./pictures/curves/([a-z0-9-]+)\.svg\)", text)
    assert shown
    assert all((CURVES / f"{name}.svg").is_file() for name in shown)
    assert len(text.partition("\n## Not shown\n")[2].split()) > 20


@pytest.mark.parametrize("page", METHOD_PAGES, ids=lambda page: page.stem)
def test_the_algorithm_on_a_method_s_page_names_our_lines(page: Path) -> None:
    section = SECTION.search(page.read_text())
    assert section
    lines = [line for line in section[1].splitlines() if line.startswith("| ")][2:]
    assert len(lines) >= 3
    for line in lines:
        *_, here, _ = line.split(" |")
        for path, names in OUR_LINES.findall(here):
            defined = names_in(ROOT / path)
            lacking = [name for name in NAME.findall(names) if name not in defined]
            assert not lacking, f"{path} defines no {', '.join(lacking)}"
        assert OUR_LINES.search(here), line


def names_in(path: Path) -> set[str]:
    """Names of all functions and classes in a file."""
    tree = ast.parse(path.read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def test_a_page_shows_some_rows_of_another_s_table_with_their_curve() -> None:
    text = "<!-- measured: besplit: FedDyn; FedAvg -->\n<!-- end of measured -->\n"
    page = with_figures(text)
    report = (RESULTS / "besplit-cpu.md").read_text().splitlines()
    rows = [line for line in page.splitlines() if line.startswith("| Fed")]
    assert rows == [
        line for name in ("FedDyn", "FedAvg") for line in report if f"| {name} |" in line
    ]
    assert "(../pictures/curves/besplit-cpu-feddyn.svg)" in page
    assert "| SplitFed |" not in page


def test_a_report_takes_the_place_of_what_stood_between_the_marks() -> None:
    page = with_figures(MARKED)
    report = (RESULTS / "besplit-cpu.md").read_text()
    (row,) = (line for line in report.splitlines() if line.startswith("| BESplit |"))
    assert "old" not in page
    assert row in page
    assert page.startswith("# A method\n")
    assert page.endswith("<!-- end of measured -->\n\nThe end.\n")


def test_a_report_that_is_no_paper_s_table_is_shown_as_a_whole() -> None:
    page = with_figures("<!-- report: training-digits -->\nold\n<!-- end of measured -->\n")
    report = (RESULTS.parent / "training-digits.md").read_text()
    title, _, rest = report.partition("\n\n")
    assert f"\n##{title}\n\n{rest}\n<!-- end" in page
    assert "old" not in page


def test_a_table_without_a_report_says_how_to_make_it(tmp_path: Path) -> None:
    (tmp_path / "orderings-cpu.md").write_text("# Orderings\n")
    assert "`python -m benchmarks.paper besplit " in with_figures(MARKED, tmp_path)


def test_claims_of_both_scales_are_shown_without_rows_that_were_not_trained(tmp_path: Path) -> None:
    head = "| table | above | below | |\n| --- | --- | --- | --- |\n"
    (tmp_path / "full").mkdir()
    (tmp_path / "orderings-cpu.md").write_text(f"{head}| besplit | a | b | open |\n")
    (tmp_path / "full" / "orderings.md").write_text(
        f"{head}| besplit | c | d | shown |\n| besplit | c | e | not run |\n"
        "| harmony | f | g | open |\n"
    )
    page = with_figures(MARKED, tmp_path)
    assert f"Scale `full`:\n\n{head}| besplit | c | d | shown |\n\n" in page
    assert f"Scale `cpu`:\n\n{head}| besplit | a | b | open |\n\n" in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- measured: besplit -->\n", "put it back"),
        ("<!-- measured: a -->\n<!-- measured: b -->\n<!-- end of measured -->", "put it back"),
        ("<!-- measured: besplit: Nobody -->\n<!-- end of measured -->", r"got \['Nobody'\]"),
        ("<!-- report: no-such -->\n<!-- end of measured -->", "no-such: no such report"),
        ("<!-- measured: no-such -->\n<!-- end of measured -->", "no-such: no such table"),
    ],
)
def test_a_mark_that_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        with_figures(text)
