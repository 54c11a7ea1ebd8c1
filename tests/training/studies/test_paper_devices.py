"""A device is compared with the CPU by the weights after three rounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from benchmarks.compare import train
from benchmarks.paper import devices
from benchmarks.paper.devices import check_agreement, farthest_weights
from benchmarks.paper.recipes import job_of
from benchmarks.paper.tables.catalog import TABLES
from edge_sdk.errors import ConfigurationError


def test_a_device_that_trains_as_the_cpu_passes_row_by_row() -> None:
    lines: list[str] = []
    check_agreement(["scala"], "cpu", lines.append)
    assert lines == [
        f"scala: {row.name}: weights differ by 0.0e+00 at most" for row in TABLES["scala"].rows
    ]


def test_one_that_does_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = job_of("scala", TABLES["scala"], TABLES["scala"].rows[0], "smoke").recipe
    faster = replace(recipe.train.training, learning_rate=0.06)
    other = replace(recipe, train=replace(recipe.train, training=faster))
    one, two = (train(each)[0] for each in (recipe, other))
    apart = max(
        float((a - b).abs().max())
        for (name, a), (same, b) in product(one.state.read().items(), two.state.read().items())
        if name == same
    )
    assert farthest_weights(one, two) == pytest.approx(apart, rel=1e-6)
    assert apart > devices.LIMIT
    monkeypatch.setattr(devices, "farthest_weights", lambda *_: apart)
    with pytest.raises(ConfigurationError, match="scala: SCALA: expected weights within"):
        check_agreement(["scala"], "cpu")


def test_a_device_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(ConfigurationError, match="expected cpu or cuda, got 'toaster'"):
        check_agreement(["scala"], "toaster")
