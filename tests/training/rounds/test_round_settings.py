"""Settings of rounds that are refused, and what a seed fixes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_sdk.errors import ConfigurationError
from server.training.methods.splitfed import (
    splitfed_v1,
)
from server.training.methods.supersfl import supersfl
from server.training.rounds.round import RoundSettings
from tests.training.worlds import (
    World,
    assert_same,
    differences,
)


@pytest.mark.parametrize("name", ["participation", "availability", "quorum"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_shares_outside_0_to_1_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=name):
        RoundSettings(**{name: value})  # type: ignore[arg-type]  # a share, by name


def test_a_server_step_without_labels_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs labels"):
        World(replace(splitfed_v1(), labels="private"))


def test_one_seed_gives_one_result_and_another_seed_another() -> None:
    one, same = World(supersfl()).trained(), World(supersfl()).trained()
    assert_same(one, same)
    assert differences(World(supersfl(), seed=1).trained(), one)
