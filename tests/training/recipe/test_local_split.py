"""Clients tested on data of their own and of the others', and a trunk that is served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from edge_sdk.errors import ConfigurationError
from edge_sdk.training.data.load import load_dataset
from server.training.recipe.recipe import Recipe, read_recipe
from server.training.report.evaluate import Evaluator
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation


def recipe_of(
    method: str = "splitgp", rho: float = 1.0, numbers: dict[str, Any] | None = None, **data: Any
) -> Recipe:
    return read_recipe(
        {
            "method": method,
            "method_numbers": numbers or {},
            "data": {
                "name": "digits",
                "clients": 5,
                "partition": "dirichlet-equal",
                "numbers": {"concentration": 0.1},
                "split": "local",
                "held_out": 0,
                **data,
            },
            "train": {
                "backbone": "tiny",
                "rounds": 1,
                "learning_rate": 0.05,
                "batch": 32,
                "depths": [1, 2, 4],
            },
            "evaluate": {"rho": rho},
        }
    )


@pytest.fixture(scope="module")
def world() -> Simulation:
    return build_simulation(recipe_of())


def images(rows: Iterable[Any]) -> Counter[bytes]:
    return Counter(row.tobytes() for row in rows)


def test_both_sets_are_dealt_out_together_and_none_of_it_twice(world: Simulation) -> None:
    digits = load_dataset("digits")
    everything = images(digits.x_train) + images(digits.x_test)
    size = (len(digits.y_train) + len(digits.y_test)) // 5
    dealt: Counter[bytes] = Counter()
    for name, client in world.clients.items():
        own = world.x_test[world.tests[name].id]
        # 60 / 20 / 20 of what each client was given
        assert (client.samples, len(own)) == (size - 2 * round(0.2 * size), round(0.2 * size))
        dealt += images(client.x) + images(own)
    assert not dealt - everything
    # 80 % of all: a fifth is held out for validation
    assert dealt.total() == 5 * (size - round(0.2 * size))


def test_labels_stay_with_their_samples(world: Simulation) -> None:
    digits = load_dataset("digits")
    label = {
        x.tobytes(): y
        for xs, ys in ((digits.x_train, digits.y_train), (digits.x_test, digits.y_test))
        for x, y in zip(xs, ys, strict=True)
    }
    for client in world.clients.values():
        assert [label[x.tobytes()] for x in client.x] == client.y.tolist()
    assert [label[x.tobytes()] for x in world.x_test] == world.y_test.tolist()


def test_own_tests_are_of_the_client_s_classes_and_drift_is_of_the_others(
    world: Simulation,
) -> None:
    places = [set(test.id.tolist()) for test in world.tests.values()]
    assert not set.intersection(*places)
    for name, test in world.tests.items():
        mine = set(test.id.tolist())
        assert len(test.ood) == len(test.id)
        assert not mine & set(test.ood.tolist())
        # Dirichlet 0.1: own tests are nearly all of classes it trains on, drift is not
        known = np.unique(world.clients[name].y)
        own = np.isin(world.y_test[test.id], known).mean()
        drifted = np.isin(world.y_test[test.ood], known).mean()
        assert own > 0.95 > drifted


@pytest.mark.parametrize(("rho", "share"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_rho_is_the_share_of_drift(rho: float, share: float) -> None:
    found = build_simulation(recipe_of(rho=rho))
    for client in Evaluator(found).clients(supervised=True):
        assert client.outside.samples == round(share * client.inside.samples)


def test_the_same_seed_deals_alike_and_another_does_not(world: Simulation) -> None:
    again, other = build_simulation(world.recipe), build_simulation(replace(world.recipe, seed=1))
    assert all(
        np.array_equal(again.tests[name].ood, test.ood) for name, test in world.tests.items()
    )
    assert not np.array_equal(other.x_test, world.x_test)


def test_a_split_there_is_none_of_is_refused() -> None:
    message = "split: expected one of global, local, own-mix, got 'own'"
    with pytest.raises(ConfigurationError, match=message):
        recipe_of(split="own")


def test_depths_are_given_in_turn_and_not_beside_one_depth(world: Simulation) -> None:
    assert [plan.depth for plan in world.plans.values()] == [1, 2, 4, 1, 2]
    train = {"backbone": "tiny", "rounds": 1, "learning_rate": 0.1, "batch": 4}
    data = {"name": "digits", "clients": 2}
    for more, message in (
        ({"depths": [1], "depth": 1}, "without depth"),
        ({"depths": []}, "expected one or more"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            read_recipe({"method": "fedavg", "data": data, "train": train | more})
    recipe = read_recipe({"method": "splitgp", "data": data, "train": train | {"depths": [1, 9]}})
    with pytest.raises(ConfigurationError, match=r"expected one of tiny's cuts, .*; got 9"):
        build_simulation(recipe)


def test_offloaded_samples_are_answered_by_the_client_s_own_last_layer() -> None:
    found = build_simulation(recipe_of("harmony", numbers={"head": "client", "finetune_steps": 0}))
    with torch.no_grad():  # exits that know nothing: entropy ln 10 is above every threshold
        for depth in found.state.net.cuts:
            for parameter in found.state.net.exit_head(depth).parameters():
                parameter.zero_()
    for number, client in enumerate(found.clients.values()):
        bias = torch.nn.functional.one_hot(torch.tensor(number), 10) * 1e6
        client.personal |= {"back.weight": torch.zeros(10, 64), "back.bias": bias}
    evaluator = Evaluator(found)
    assert evaluator.answers(supervised=True) == "gated"
    for number, score in enumerate(evaluator.clients(supervised=True)):
        test = found.tests[score.client]
        assert score.exit_rate == 0
        assert score.inside.correct == (found.y_test[test.id] == number).sum()
        assert score.outside.correct == (found.y_test[test.ood] == number).sum()
    # of the whole network: each client says its own class to everything
    shares = [float((found.y_test == number).mean()) for number in range(5)]
    assert evaluator.accuracy(supervised=True) == pytest.approx(np.mean(shares))
