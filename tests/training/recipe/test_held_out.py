"""Held-out samples of each client: of its own classes, in its own shares, at nobody else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_sdk.training.data.load import load_dataset
from server.training.recipe.held_out import held_out_parts
from server.training.recipe.partition import partition
from server.training.recipe.recipe import read_recipe
from server.training.simulation.build import build_simulation


def test_shares_by_hand() -> None:
    # of class 0: a quarter and three quarters of 8; of class 1: half of 4, the other half at nobody
    y_train = np.array([0] * 8 + [1] * 4)
    parts = [np.array([0, 1, 8, 9]), np.arange(2, 8)]
    y_held_out = np.array([0, 0, 0, 0, 1, 1])
    first, second = held_out_parts(y_train, parts, y_held_out, 0)
    assert np.bincount(y_held_out[first], minlength=2).tolist() == [1, 1]
    assert np.bincount(y_held_out[second], minlength=2).tolist() == [3, 0]


@given(
    labels=st.lists(st.integers(0, 4), min_size=20, max_size=200),
    held_out=st.lists(st.integers(0, 6), max_size=60),
    clients=st.integers(1, 8),
    seed=st.integers(0, 3),
)
def test_no_sample_is_dealt_twice_and_none_is_of_a_strange_class(
    labels: list[int], held_out: list[int], clients: int, seed: int
) -> None:
    y_train, y_held_out = np.array(labels), np.array(held_out, np.int64)
    parts = np.array_split(np.random.default_rng(seed).permutation(len(labels)), clients)
    dealt = held_out_parts(y_train, parts, y_held_out, seed)
    rows = np.concatenate(dealt)
    assert len(np.unique(rows)) == len(rows)
    for part, own in zip(parts, dealt, strict=True):
        assert set(y_held_out[own]) <= set(y_train[part])
        for label in set(y_train[part]):
            share = (y_train[part] == label).sum() / (y_train == label).sum()
            exact = share * (y_held_out == label).sum()
            assert abs((y_held_out[own] == label).sum() - exact) <= 1


@pytest.mark.parametrize(
    ("rule", "numbers"),
    [
        ("iid", {}),
        ("shards", {"per_client": 2, "total": 20}),
        ("dirichlet", {"concentration": 0.5}),
        ("uds", {"smallest": 40}),
    ],
)
def test_held_out_samples_are_a_tenth_of_the_clients_own(rule: str, numbers: Any) -> None:
    data = {"name": "digits", "clients": 10, "partition": rule, "numbers": numbers}
    train = {"backbone": "tiny", "rounds": 1, "learning_rate": 0.1, "batch": 16, "depth": 2}
    simulation = build_simulation(
        read_recipe({"method": "multi-exit", "data": data | {"held_out": 0.1}, "train": train})
    )
    digits = load_dataset("digits", held_out=0.1)
    parts = partition(rule, digits.y_train, 10, 0, **numbers)
    for part, (name, client) in zip(parts, simulation.clients.items(), strict=True):
        assert client.samples == len(part)  # what is held out costs the client no sample
        own = simulation.held_out[name]
        # a tenth of all is a ninth of what is trained on; each class is rounded
        assert abs(len(own) - client.samples / 9) <= 10 / 2
        assert set(simulation.y_held_out[own]) <= set(client.y)
    assert sum(map(len, simulation.held_out.values())) <= digits.sizes["held_out"]


def test_with_a_local_split_they_are_the_clients_validation_samples() -> None:
    data = {"name": "digits", "clients": 5, "split": "local", "held_out": 0}
    train = {"backbone": "tiny", "rounds": 1, "learning_rate": 0.1, "batch": 16, "depth": 2}
    simulation = build_simulation(
        read_recipe({"method": "multi-exit", "data": data, "train": train})
    )
    size = 1797 // 5
    trained = {x.tobytes() for client in simulation.clients.values() for x in client.x}
    tested = {x.tobytes() for x in simulation.x_test}
    for own in simulation.held_out.values():
        images = {x.tobytes() for x in simulation.x_held_out[own]}
        assert abs(len(own) - 0.2 * size) < 1
        assert not images & trained
        assert not images & tested


def test_a_run_that_holds_nothing_out_has_none() -> None:
    assert [
        len(own)
        for own in held_out_parts(np.zeros(4, np.int64), [np.arange(4)], np.zeros(0, np.int64), 0)
    ] == [0]
