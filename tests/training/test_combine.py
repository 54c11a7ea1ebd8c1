"""Parts of methods: what they become together, and what is refused with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edge_sdk.errors import ConfigurationError
from server.training.recipe import METHODS, Recipe, read_recipe
from server.training.simulate import run_rounds
from server.training.world import build_world


def recipe_of(method: str, **more: Any) -> Recipe:
    return read_recipe(
        {
            "method": method,
            "data": {"name": "digits", "clients": 3, "train_max": 120, "test_max": 50},
            "train": {
                "backbone": "tiny",
                "rounds": 2,
                "learning_rate": 0.05,
                "batch": 20,
                "iterations": 6,
            },
            **more,
        }
    )


def test_a_part_is_taken_whole_and_the_rest_stays() -> None:
    method = recipe_of("supersfl", parts={"server": "minibatch-sfl"}).build_method()
    supersfl, minibatch = METHODS["supersfl"](), METHODS["minibatch-sfl"]()
    assert method.server_step is minibatch.server_step
    assert (method.client, method.weigh) == (supersfl.client, supersfl.weigh)
    assert method.server_weight == supersfl.server_weight == 0.01
    assert method.name == "supersfl + minibatch-sfl server"


def test_a_part_may_have_numbers() -> None:
    parts = {"weigh": {"method": "supersfl", "numbers": {"server_weight": 0.3}}}
    assert recipe_of("splitfed-v2", parts=parts).build_method().server_weight == 0.3


def test_a_method_with_all_its_parts_from_itself_is_itself() -> None:
    parts = dict.fromkeys(("client", "server", "weigh"), "splitfed-v1")
    combined = recipe_of("supersfl", parts=parts)
    worlds = [build_world(combined), build_world(recipe_of("splitfed-v1", train=TRAIN))]
    for world in worlds:
        list(run_rounds(world, []))
    one, other = (world.state.read() for world in worlds)
    assert all(torch.equal(one[name], other[name]) for name in one)


TRAIN = {"backbone": "tiny", "rounds": 2, "learning_rate": 0.05, "batch": 20, "iterations": 6}


def test_a_combination_trains() -> None:
    world = build_world(recipe_of("supersfl", parts={"server": "minibatch-sfl"}))
    rows: list[dict[str, Any]] = []
    list(run_rounds(world, rows))
    assert rows[-1]["supervised"]
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize(
    ("base", "parts", "said"),
    [
        ("fedavg", {"server": "splitfed-v1"}, "train the whole network.*split method"),
        ("splitfed-v1", {"server": "fedavg"}, "no step for them"),
        ("supersfl", {"server": "harmony"}, "harmony's client part with it"),
        ("harmony", {"server": "scala"}, "needs labels.*labels = 'derivable'"),
        ("besplit", {"server": "scala"}, "learn from the server's logits"),
        ("supersfl", {"weigh": "besplit"}, "records that its own server step keeps"),
        ("splitfed-v1", {"gate": "supersfl"}, "expected some of client, server, weigh"),
        ("splitfed-v1", {"server": "nobody"}, "expected one of"),
        ("splitfed-v1", {"server": 3}, "a method's name, or method and numbers"),
        ("splitfed-v1", {"server": {"numbers": {}}}, "a method's name, or method and numbers"),
        ("splitfed-v1", {"weigh": {"method": "supersfl", "numbers": {"a": 1}}}, "takes fusion"),
        ("splitfed-v1", ["server"], "expected a table"),
    ],
)
def test_what_does_not_go_together_is_refused(base: str, parts: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        recipe_of(base, parts=parts)


@pytest.mark.parametrize("part", ["client", "server", "weigh"])
@pytest.mark.parametrize("base", METHODS)
def test_every_pair_of_parts_is_built_or_refused_with_a_sentence(base: str, part: str) -> None:
    for other in METHODS:
        try:
            method = recipe_of(base, parts={part: other}).build_method()
        except ConfigurationError as err:
            said = str(err)
            matched = said.startswith("parts: ") and ": expected" in said
        else:
            matched = other in method.name
        assert matched, (base, part, other)
