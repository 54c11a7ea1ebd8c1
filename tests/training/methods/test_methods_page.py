"""docs/methods has each number of each method, with the default that the code has."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest

from server.training.recipe.recipe import METHODS

PAGES = Path(__file__).parents[3] / "docs" / "methods"
NOT_SET = "not set"
NUMBERED = [name for name, made in METHODS.items() if inspect.signature(made).parameters]


def pages() -> str:
    """All pages, one after the other."""
    return "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))


def tables(text: str) -> dict[str, dict[str, tuple[str, str]]]:
    """Default and origin of each number, by the method that heads the table."""
    found: dict[str, dict[str, tuple[str, str]]] = {}
    rows: dict[str, tuple[str, str]] | None = None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("|"):
            rows = None
        elif [cell.strip() for cell in cells[1:3]] == ["default", "whose"]:
            name = cells[0].strip("`")
            assert name not in found
            rows = found[name] = {}
        elif rows is not None and not set(line) <= set("|- "):
            number = cells[0].strip("`")
            assert number not in rows
            rows[number] = (cells[1], cells[2])
            assert cells[3], f"{name}: {number} has no meaning"
    return found


def read_default(text: str) -> Any:
    """A default of the page; None for a number that a recipe leaves out."""
    if text == NOT_SET:
        return None
    value = tomllib.loads(f"value = {text.strip('`')}")["value"]
    return tuple(value) if isinstance(value, list) else value


def test_each_method_with_numbers_has_a_table_and_no_other_has() -> None:
    assert sorted(tables(pages())) == sorted(NUMBERED)


@pytest.mark.parametrize("name", NUMBERED)
def test_the_table_has_every_number_with_its_default(name: str) -> None:
    page = tables(pages())[name]
    code = {
        number: parameter.default
        for number, parameter in inspect.signature(METHODS[name]).parameters.items()
    }
    assert {number: read_default(default) for number, (default, _) in page.items()} == code
    assert {whose for _, whose in page.values()} <= {"paper", "ours"}


def test_a_default_is_read_as_a_recipe_reads_it() -> None:
    text = "| `m` | default | whose | meaning |\n| --- | --- | --- | --- |\n"
    text += '| `a` | `1e-6` | ours | a number |\n| `b` | `"x"` | paper | a word |\n'
    text += "| `c` | not set | ours | nothing |\n\n| `other` | table |\n| `d` | 1 |\n"
    (found,) = tables(text).values()
    assert {name: read_default(default) for name, (default, _) in found.items()} == {
        "a": 1e-6,
        "b": "x",
        "c": None,
    }
