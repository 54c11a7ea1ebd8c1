"""Simulations: clients, plans and the server's network follow the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import build
from edge_sdk.training.data.load import load_dataset
from edge_sdk.training.protocol.training import Training
from server.training.recipe.recipe import TrainSettings, load_recipe, read_recipe
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation, client_names, draw_depths

RECIPES = Path(__file__).parents[3] / "examples" / "recipes"


def recipe_of(
    method: str = "supersfl",
    data: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    **rest: Any,
) -> dict[str, Any]:
    return {
        "method": method,
        "data": {"name": "digits", "clients": 10, "partition": "dirichlet"} | (data or {}),
        "train": {"backbone": "tiny", "rounds": 1, "learning_rate": 0.1, "batch": 16}
        | (train or {}),
        **rest,
    }


def simulation_of(*args: Any, **kwargs: Any) -> Simulation:
    return build_simulation(read_recipe(recipe_of(*args, **kwargs)))


def settings(memory_gb: tuple[float, float], backbone: str = "tiny") -> TrainSettings:
    return TrainSettings(
        backbone, 1, Training(0.1, batch=1), memory_gb=memory_gb, latency_ms=(20, 200)
    )


def test_every_training_sample_is_at_exactly_one_client_and_none_is_held_out() -> None:
    simulation, dataset = simulation_of(), load_dataset("digits", held_out=0.1)
    held = np.concatenate([client.x for client in simulation.clients.values()])
    labels = np.concatenate([client.y for client in simulation.clients.values()])
    assert held.shape == dataset.x_train.shape

    def in_one_order(x: Any, y: Any) -> Any:
        rows = np.concatenate([x.reshape(len(x), -1), y[:, None]], axis=1)
        return rows[np.lexsort(rows.T)]

    expected = in_one_order(dataset.x_train, dataset.y_train)
    assert np.array_equal(in_one_order(held, labels), expected)


def test_clients_are_views_of_one_array() -> None:
    simulation = simulation_of(data={"clients": 100, "partition": "iid"})
    bases = {id(client.x.base) for client in simulation.clients.values()}
    assert len(bases) == 1
    assert all(not client.x.flags.owndata for client in simulation.clients.values())


def test_one_recipe_gives_one_world_and_another_seed_another() -> None:
    first, again, other = simulation_of(seed=3), simulation_of(seed=3), simulation_of(seed=4)
    for name, client in first.clients.items():
        assert np.array_equal(client.x, again.clients[name].x)
        assert first.plans[name] == again.plans[name]
    weights, same, different = (simulation.state.read() for simulation in (first, again, other))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert not torch.equal(weights["stage1.0.weight"], different["stage1.0.weight"])
    sizes = [client.samples for client in first.clients.values()]
    assert sizes != [client.samples for client in other.clients.values()]


def test_names_sort_as_they_are_counted() -> None:
    names = client_names(101)
    assert names[0] == "client-000"
    assert names == sorted(names)
    assert client_names(1) == ["client-0"]


def test_a_fleet_without_memory_is_cut_by_latency_alone() -> None:
    # floor(0.5 * 0.1) = 0, so the slowest has max(1, 0) and the fastest min(4, L - 1) = 4 of 5
    depths = draw_depths(settings((0.1, 0.1)), build("tiny"), 50, seed=0)
    assert min(depths) == 1
    assert max(depths) == 4
    assert set(depths) == {1, 2, 3, 4}


def test_a_fleet_with_memory_to_spare_keeps_one_stage_at_the_server() -> None:
    # floor(0.5 * 16) = 8 and more: min(.., L - 1)
    assert draw_depths(settings((16, 16)), build("tiny"), 5, seed=0) == [4] * 5


def test_depths_are_taken_down_to_a_cut() -> None:
    net = build("cnn8")
    depths = draw_depths(settings((2, 16), "cnn8"), net, 30, seed=0)
    assert set(depths) <= set(net.cuts)


@pytest.mark.parametrize(("method", "depth"), [("fedavg", 5), ("fedprox", 5), ("splitfed-v1", 2)])
def test_whole_networks_are_all_stages_deep(method: str, depth: int) -> None:
    simulation = simulation_of(method, train={"depth": 2})
    assert {plan.depth for plan in simulation.plans.values()} == {depth}


def test_a_method_reaches_its_clients_as_a_plan() -> None:
    simulation = simulation_of("splitgp", method_numbers={"personal_share": 0.9}, seed=7)
    for plan in simulation.plans.values():
        assert (plan.part.personal_share, plan.part.exit_head, plan.part.fusion) == (
            0.9,
            True,
            "fixed",
        )
        assert (plan.seed, plan.training.batch, plan.send_labels) == (7, 16, True)


def test_natural_clients_are_those_the_samples_came_from(tmp_path: Path) -> None:
    x, y = np.zeros((6, 1, 8, 8), np.float32), np.array([0, 1, 0, 1, 0, 1])
    np.savez(
        tmp_path / "worn.npz",
        x_train=x, y_train=y, x_test=x, y_test=y,
        group_train=np.array([5, 2, 2, 5, 5, 5]), group_test=np.zeros(6, int),
    )  # fmt: skip
    data: dict[str, Any] = {
        "name": "worn.npz",
        "folder": str(tmp_path),
        "partition": "natural",
        "clients": 2,
    }
    data |= {"held_out": 0}
    assert [c.samples for c in simulation_of(data=data).clients.values()] == [2, 4]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train": {"depth": 6}}, "train: depth: expected one of tiny's cuts"),
        ({"train": {"backbone": "giant"}}, "giant"),
        ({"train": {"norm": "batch"}}, "norm"),
        ({"train": {"rounds": 0}}, "train: rounds: expected a whole number of at least 1, got 0"),
        ({"train": {"rounds": "five"}}, "train: rounds: expected a whole number"),
        ({"train": {"learning_rate": "fast"}}, "train: "),
        ({"train": {"momentum": "much"}}, "momentum: expected a number"),
        ({"train": {"memory_gb": [4]}}, "memory_gb: expected a list of 2, each a number"),
        ({"data": {"clients": 2000}}, "clients"),
        ({"data": {"name": "letters"}}, "letters"),
        ({"data": {"partition": "random"}}, "partition 'random'"),
        ({"data": {"numbers": {"spread": 2}}}, "spread"),
        ({"evaluate": {"every": 0}}, "evaluate: every: expected a whole number"),
        ({"evaluate": {"rho": -1}}, "evaluate: rho"),
        ({"round": {"cohort": 0}}, "round: cohort"),
        ({"seed": -1}, "seed: expected a whole number of at least 0"),
        ({"method_numbers": {"warmth": 1}}, "method_numbers: supersfl takes"),
        ({"colour": "blue"}, "recipe: unknown colour"),
    ],
)
def test_a_recipe_that_cannot_work_is_refused_by_name(
    changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        simulation_of(**changed)
    assert message in str(caught.value)


def test_a_recipe_that_misses_something_says_what() -> None:
    incomplete = recipe_of()
    del incomplete["train"]["backbone"], incomplete["train"]["batch"]
    with pytest.raises(ConfigurationError, match="train: expected also backbone, batch"):
        read_recipe(incomplete)


def test_a_gpu_that_is_not_there_is_not_pretended() -> None:
    if torch.cuda.is_available():
        simulation = build_simulation(read_recipe(recipe_of()), "cuda")
        assert next(simulation.state.net.parameters()).is_cuda
        return
    with pytest.raises(ConfigurationError, match="--device cuda: expected a GPU"):
        build_simulation(read_recipe(recipe_of()), "cuda")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*-digits.toml")), ids=lambda path: path.stem)
def test_recipes_of_the_digits_build_a_world_of_ten_clients(path: Path) -> None:
    simulation = build_simulation(load_recipe(path))
    assert len(simulation.clients) == 10
    made_of_parts = {"default-digits", "combined-digits"}
    assert path.stem in {f"{simulation.recipe.method}-digits", *made_of_parts}


@pytest.mark.parametrize(
    "path", sorted(RECIPES.glob("*-fashion-mnist.toml")), ids=lambda path: path.stem
)
def test_recipes_of_fashion_mnist_are_sound(path: Path) -> None:
    recipe = load_recipe(path)
    assert (recipe.data.clients, recipe.train.backbone) == (20, "cnn6")
    assert path.stem in {f"{recipe.method}-fashion-mnist", "default-fashion-mnist"}
