"""docs/planning.md and the figures of `splitedge server plan` are of the reports."""

from __future__ import annotations

import numpy as np
import orjson
import pytest

from benchmarks.planning.collect import collected
from benchmarks.planning.page import PAGE, with_plans
from benchmarks.reports import RESULTS
from edge_sdk.errors import ConfigurationError
from server.planning.figures import FILE
from tests.house.pictures import numbers


def test_the_shipped_figures_are_those_of_the_reports() -> None:
    shipped, now = orjson.loads(FILE.read_bytes()), collected(RESULTS)
    assert shipped["figures"].keys() == now["figures"].keys(), "run benchmarks.planning figures"
    # four digits are shipped
    assert np.allclose(numbers(shipped), numbers(now), rtol=1e-3), "run benchmarks.planning figures"


def test_the_page_has_the_plans_of_the_figures() -> None:
    text = PAGE.read_text()
    assert with_plans(text) == text, "run python -m benchmarks.planning page"


def test_the_page_plans_ten_ten_thousand_and_a_million() -> None:
    text = PAGE.read_text()
    assert all(f"<!-- planned: {size} -->" in text for size in (10, 10_000, 1_000_000))
    assert "**10,000 devices: " in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- planned: 10 -->\n", "put it back"),
        ("<!-- planned: 10 -->\n<!-- planned: 20 -->\n<!-- end of planned -->", "put it back"),
        ("<!-- planned: ten -->\n<!-- end of planned -->", "a number of devices or one of"),
    ],
)
def test_a_mark_that_is_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        with_plans(text)
