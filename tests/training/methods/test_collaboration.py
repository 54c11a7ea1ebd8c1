"""Biased clients, their pairs and what moves: by scipy, by brute force, and by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from server.training.methods.formulas.collaboration import (
    biased_clients,
    complementarity,
    counts_to_move,
    jensen_shannon,
    matched_pairs,
    pairs_present,
)


def share(*values: float) -> Tensor:
    p = torch.tensor(values, dtype=torch.float64)
    return p / p.sum()


def some_shares(clients: int, classes: int, seed: int) -> dict[str, Tensor]:
    draws = np.random.default_rng(seed).dirichlet([0.3] * classes, clients)
    return {f"c{number}": torch.from_numpy(p) for number, p in enumerate(draws)}


def mean_of(shares: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(shares.values())).mean(0)


def test_divergence_is_the_square_of_scipy_s_distance() -> None:
    pairs = [
        (share(1, 2, 3), share(3, 2, 1)),
        (share(1, 0, 0), share(0, 1, 1)),  # apart: ln 2
        (share(1, 0, 5), share(1, 0, 5)),
        (share(1, 0, 1e-12), share(1, 1, 1)),
    ]
    for p, q in pairs:
        expected = jensenshannon(p.numpy(), q.numpy()) ** 2
        assert float(jensen_shannon(p, q)) == pytest.approx(expected, abs=1e-15)


def test_divergence_takes_many_at_once() -> None:
    shares = some_shares(6, 4, 0)
    overall = mean_of(shares)
    together = jensen_shannon(torch.stack(list(shares.values())), overall)
    apart = [float(jensen_shannon(p, overall)) for p in shares.values()]
    np.testing.assert_allclose(together.numpy(), apart, rtol=1e-14)


def test_biased_are_those_above_the_largest_gap() -> None:
    shares = {
        "a": share(1, 0, 0),
        "b": share(4, 3, 3),
        "c": share(1, 1, 1),
        "d": share(0, 0, 1),
        "e": share(3, 3, 4),
    }
    overall = share(1, 1, 1)
    # a and d diverge from 1/3 by the same, by far the most
    assert biased_clients(shares, overall) == ["a", "d"]


@pytest.mark.parametrize("seed", range(5))
def test_biased_by_the_definition(seed: int) -> None:
    shares = some_shares(9, 5, seed)
    overall = mean_of(shares)
    distances = {c: jensenshannon(p.numpy(), overall.numpy()) ** 2 for c, p in shares.items()}
    ordered = sorted(distances.values())
    widest = max(range(8), key=lambda i: ordered[i + 1] - ordered[i])
    expected = [c for c, d in distances.items() if d > ordered[widest] + 1e-15]
    assert biased_clients(shares, overall) == expected


def test_no_client_is_biased_among_few_or_equals() -> None:
    assert biased_clients({}, share(1, 1)) == []
    assert biased_clients({"a": share(1, 0)}, share(1, 0)) == []
    assert biased_clients({"a": share(1, 0), "b": share(0, 1)}, share(1, 1)) == []
    alike = {name: share(1, 2, 3) for name in "abcd"}
    assert biased_clients(alike, share(1, 2, 3)) == []


def test_complementarity_by_hand() -> None:
    overall = share(1, 1)
    # (1/2, -1/2) and (-1/2, 1/2) cancel: 1 + 1 - 0; with itself nothing does
    assert complementarity(share(1, 0), share(0, 1), overall) == pytest.approx(2)
    assert complementarity(share(1, 0), share(1, 0), overall) == pytest.approx(0)
    # (1/2, -1/2) and (-1/4, 1/4): 1 + 1/2 - |(1/4, -1/4)| = 1
    assert complementarity(share(1, 0), share(1, 3), overall) == pytest.approx(1)


def test_clients_biased_the_same_way_are_not_matched() -> None:
    shares = {name: share(8 + place, 1, 1) for place, name in enumerate("abcd")}
    assert matched_pairs(shares, share(1, 1, 1)) == []


@pytest.mark.parametrize("seed", range(6))
def test_matching_takes_the_heaviest_edge_that_is_left(seed: int) -> None:
    shares = some_shares(6, 4, seed)
    overall = mean_of(shares)
    edges = {
        pair: complementarity(shares[pair[0]], shares[pair[1]], overall)
        for pair in itertools.combinations(shares, 2)
    }
    expected = []
    while edges and max(edges.values()) > 1e-12:
        best = max(edges, key=lambda pair: edges[pair])
        expected.append(best)
        edges = {pair: w for pair, w in edges.items() if not set(pair) & set(best)}
    assert matched_pairs(shares, overall) == expected


@pytest.mark.parametrize("seed", range(6))
def test_greedy_matching_is_at_least_half_of_the_best(seed: int) -> None:
    shares = some_shares(6, 4, seed)
    overall = mean_of(shares)

    def weight(pairs: object) -> float:
        assert isinstance(pairs, list)
        return sum(complementarity(shares[i], shares[j], overall) for i, j in pairs)

    best = max(  # every way to pair six
        weight([(order[0], order[1]), (order[2], order[3]), (order[4], order[5])])
        for order in itertools.permutations(shares)
    )
    assert weight(matched_pairs(shares, overall)) >= best / 2


def test_what_moves_by_hand() -> None:
    own, partner, overall = share(6, 3, 1), share(1, 3, 6), share(4, 3, 3)
    counts = torch.tensor([20, 8, 4])
    # class 0 alone is over-represented. w_i > w_j: (.6 - .4) / .6 of 20 is 6.67
    assert counts_to_move(counts, own, partner, overall, 0.1).tolist() == [7, 0, 0]
    # w_j > w_i: (.4 - .1) / .6 of 20 is 10; equal: the smaller
    assert counts_to_move(counts, own, partner, overall, -0.1).tolist() == [10, 0, 0]
    assert counts_to_move(counts, own, partner, overall, 0.0).tolist() == [7, 0, 0]
    # and the partner's class 2: (.6 - .3) / .6 down, (.3 - .1) / .6 up
    back = counts_to_move(torch.tensor([2, 8, 15]), partner, own, overall, -0.1)
    assert back.tolist() == [0, 0, 5]


def test_moving_minimises_the_bias_it_is_derived_from() -> None:
    # F(rho) = w_i |P_i - rho P_i - P_g| + w_j |P_j + rho P_i - P_g|    Eq. 29-30
    own, partner, overall = share(7, 3), share(1, 9), share(5, 5)
    counts = torch.tensor([1000, 0])
    for w_i, w_j in ((0.7, 0.3), (0.3, 0.7), (0.5, 0.5)):
        grid = np.linspace(0, 1, 1001)
        p_i, p_j, p_g = 0.7, 0.1, 0.5
        bias = w_i * abs(p_i - grid * p_i - p_g) + w_j * abs(p_j + grid * p_i - p_g)
        moved = int(counts_to_move(counts, own, partner, overall, w_i - w_j)[0])
        assert bias[moved] == pytest.approx(bias.min(), abs=1e-3)


def test_never_more_moves_than_there_is_and_never_less_than_nothing() -> None:
    # up: (.9 - 0) / .1 is far above 1; down: (.1 - .9) / .1 below 0
    own, partner, overall = share(1, 9), share(0, 1), share(9, 1)
    counts = torch.tensor([3, 5])
    assert counts_to_move(counts, own, partner, overall, -1).tolist() == [3, 0]
    assert counts_to_move(counts, own, partner, overall, 1).tolist() == [0, 0]


def test_only_the_present_are_matched() -> None:
    shares = {
        "a": share(1, 0, 0),
        "b": share(1, 1, 1),
        "c": share(0, 0, 1),
        "d": share(3, 3, 4),
        "e": share(0, 1, 0),
    }
    overall = share(1, 1, 1)
    assert pairs_present(shares, overall, ["a", "b", "c", "d"]) == [("a", "c")]
    assert pairs_present(shares, overall, ["b", "c", "d", "e"]) == [("c", "e")]
    assert pairs_present(shares, overall, ["a", "b", "d"]) == []
