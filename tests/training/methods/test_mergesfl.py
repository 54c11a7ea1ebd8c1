"""MergeSFL: batches and weights by the workers' speeds, one step over merged features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.protocol.messages import Features, Reply, Request, Update
from server.training.core.round_view import RoundView
from server.training.core.weighted_mean import equal
from server.training.methods.mergesfl import by_speed, mergesfl
from server.training.methods.splitfed import minibatch
from server.training.recipe.recipe import read_recipe
from server.training.rounds.round import RoundSettings
from tests.training.worlds import World, assert_same, differences, meddling


def batches(present: str, speeds: tuple[float, ...], batch: int = 32) -> dict[str, int]:
    """d_k of those present, in a fleet of four."""
    fleet: Any = dict.fromkeys("abcd")  # plans, which are counted alone
    return by_speed(dict.fromkeys(present, 1), batch, RoundView(1, plans=fleet), speeds=speeds)


def test_batches_by_hand() -> None:
    # a and d are the fastest; b needs twice the time and c four times
    assert batches("abcd", (1.0, 0.5, 0.25, 1.0)) == {"a": 32, "b": 16, "c": 8, "d": 32}
    # a and d are away: the batches of b and c are the same
    assert batches("bc", (1.0, 0.5, 0.25, 1.0)) == {"b": 16, "c": 8}
    # in turn over the clients; floor(32 * 0.3) = 9
    assert batches("abcd", (10.0, 3.0)) == {"a": 32, "b": 9, "c": 32, "d": 9}
    # a worker that is a hundred times slower brings one sample all the same
    assert batches("ab", (1.0, 0.01), 16) == {"a": 16, "b": 1}
    # 0.7 / 0.1 * 1 is slightly less than 7 in floats
    assert batches("ab", (0.1, 0.7), 7) == {"a": 1, "b": 7}


def test_equal_speeds_are_minibatch_sfl_with_equal_weights() -> None:
    plain = World(replace(minibatch(), weigh=equal), iterations=3).trained()
    assert_same(World(mergesfl(), iterations=3).trained(), plain)
    assert differences(World(mergesfl((1.0, 0.5)), iterations=3).trained(), plain)


def test_workers_send_their_batches_and_are_weighed_by_them() -> None:
    rows: dict[str, set[int]] = {}

    def watch(name: str, _request: Request, reply: Reply) -> Reply:
        if isinstance(reply, Features):
            rows.setdefault(name, set()).add(len(reply.features))
        return reply

    world = World(mergesfl((1.0, 0.5)), iterations=2, batch=8, transport=meddling(watch))
    (result,) = world.run(1)
    assert rows == {"a": {8}, "b": {4}, "c": {8}, "d": {4}}
    assert result.weights == {"a": 8 / 24, "b": 4 / 24, "c": 8 / 24, "d": 4 / 24}


def test_weights_are_by_the_batches_that_cohorts_and_those_left_trained() -> None:
    rows: dict[str, set[int]] = {}

    def lose_a(name: str, _request: Request, reply: Reply) -> Reply | None:
        if isinstance(reply, Features):
            rows.setdefault(name, set()).add(len(reply.features))
        return None if name == "a" and isinstance(reply, Update) else reply

    world = World(
        mergesfl((1.0, 0.5, 0.25)),
        "abc",
        iterations=2,
        batch=8,
        settings=RoundSettings(cohort=1),
        transport=meddling(lose_a),
    )
    (result,) = world.run(1)
    assert rows == {"a": {8}, "b": {4}, "c": {2}}
    assert result.weights == {"b": 4 / 6, "c": 2 / 6}


@pytest.mark.parametrize("speeds", [(), (1.0, 0.0), (-1.0,)])
def test_a_speed_that_is_none_is_refused(speeds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigurationError, match="speeds: expected one or more numbers above 0"):
        mergesfl(speeds)


def test_a_recipe_gives_speeds_and_counts_rounds_in_batches() -> None:
    given: dict[str, Any] = {
        "method": "mergesfl",
        "method_numbers": {"speeds": [1, 0.5]},
        "data": {"name": "digits", "clients": 4},
        "train": {"backbone": "tiny", "rounds": 1, "learning_rate": 0.1, "batch": 8},
    }
    with pytest.raises(ConfigurationError, match="expected iterations"):
        read_recipe(given)
    given["train"]["iterations"] = 2
    assert read_recipe(given).built_method.name == "mergesfl"
