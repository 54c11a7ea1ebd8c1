"""The report on drift: what it claims, and that a small run of its command says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from benchmarks.drift.__main__ import Sizes, blocks_of, measured
from benchmarks.reports import RESULTS
from edge_sdk.training.data.load import load_dataset

REPORT = RESULTS / "drift"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    return dict(orjson.loads(REPORT.with_suffix(".json").read_bytes()))


def test_the_page_is_that_of_the_figures(committed: dict[str, Any]) -> None:
    assert "\n\n".join(blocks_of(committed)) + "\n" == REPORT.with_suffix(".md").read_text()


def test_false_alarms_stay_below_the_level_that_scipy_keeps(committed: dict[str, Any]) -> None:
    """The oracle errs as often as its level says, so the windows are what they should be."""
    assert len(committed["levels"]) == 10
    for one in committed["levels"]:
        # of ten intervals of 95 % one may miss its level; by a fifth of the level and no more
        slack = 0.2 * one["alpha"]
        assert one["scipy"]["low"] - slack <= one["alpha"] <= one["scipy"]["high"] + slack, one
        assert one["ours"]["low"] <= one["alpha"], one
    for day in committed["days"]:
        assert day["certain"]["low"] <= day["stated"]


def test_plain_pictures_raise_no_alert_and_far_ones_do(committed: dict[str, Any]) -> None:
    found = {(one["change"], one["answers"]): one for one in committed["detections"]}
    for (change, answers), one in found.items():
        share = one["ours"]["hits"] / one["ours"]["of"]
        if change == "none":
            assert one["ours"]["hits"] == 0
        if one["distance"] >= 0.2 and answers >= 1_000:
            assert share > 0.9, one


def test_a_small_run_finds_the_same(fashion_mnist_fixture: Path) -> None:
    """Real pictures, 2,000 of them, which are in the repository."""
    torch.set_num_threads(1)
    data = load_dataset("fashion-mnist", fashion_mnist_fixture)
    sizes = Sizes(
        trained=900, epochs=3, held_out=300, windows=60, days=0, answers=(400,), levels_at=(200,)
    )
    report = measured(data, sizes)
    found = {one["change"]: one["ours"]["hits"] for one in report["detections"]}
    assert found["none"] == 0
    assert max(found.values()) == 60, found
    for one in report["levels"]:
        # with 60 windows, a right test passes these with a probability above 99.99 %
        assert one["ours"]["hits"] <= 60 * one["alpha"] + 4 * (60 * one["alpha"]) ** 0.5 + 1
