"""Partitions: by hand where they are small, by what their definitions say where they are large."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from edge_sdk.errors import ConfigurationError
from server.training.recipe.partition import (
    RULES,
    Indices,
    Labels,
    label_distribution,
    local_splits,
    own_mix,
    partition,
    rho_tests,
)

COVERING = ("iid", "dirichlet", "dirichlet-client", "quantity", "udd", "udds")
# numbers with which every rule fits 1,000 samples of 10 classes on 10 clients
NUMBERS: dict[str, dict[str, Any]] = {"uds": {"smallest": 30}}


def labels(*counts: int) -> Labels:
    """So many of each class, mixed: a multiplicative walk, so no two classes lie in one piece."""
    y = np.repeat(np.arange(len(counts)), counts)
    return y[np.random.default_rng(7).permutation(len(y))]


def balanced(samples: int, classes: int) -> Labels:
    return labels(*[samples // classes] * classes)


def counts(y: Labels, parts: Sequence[Indices], classes: int) -> NDArray[np.int64]:
    return np.stack([np.bincount(y[part], minlength=classes) for part in parts])


def sizes(parts: Sequence[Indices]) -> list[int]:
    return [len(part) for part in parts]


# every rule


@pytest.mark.parametrize("name", RULES)
def test_the_same_seed_gives_the_same_parts_and_another_seed_others(name: str) -> None:
    y, numbers = balanced(1000, 10), NUMBERS.get(name, {})
    one, again = (partition(name, y, 10, 3, **numbers) for _ in range(2))
    other = partition(name, y, 10, 4, **numbers)
    assert all(np.array_equal(a, b) for a, b in zip(one, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@given(
    st.sampled_from(sorted(RULES)),
    st.lists(st.integers(20, 60), min_size=2, max_size=6),
    st.integers(1, 8),
    st.integers(0, 2**40),
)
def test_no_sample_has_two_owners_and_none_is_lost(
    name: str, per_class: list[int], clients: int, seed: int
) -> None:
    y = labels(*per_class)
    numbers: dict[str, Any] = {
        "shards": {"total": 2 * clients},
        "uds": {"smallest": 1},  # 8 clients take 21, and 2 classes may have 40 samples
        "quantity": {"per_client": len(per_class)},
        "dirichlet": {"least": 1},
        "udds": {"least": 1},
        "dirichlet-client": {"least": 1},
    }.get(name, {})
    parts = partition(name, y, clients, seed, **numbers)
    assert len(parts) == clients
    dealt = np.concatenate(parts)
    assert dealt.dtype == np.int64
    assert len(np.unique(dealt)) == len(dealt)
    assert dealt.min() >= 0
    assert dealt.max() < len(y)
    if name in {*COVERING, "shards"}:
        assert len(dealt) == len(y)
    if name == "dirichlet-equal":
        assert sizes(parts) == [len(y) // clients] * clients


def test_an_unknown_rule_or_number_is_refused_naming_those_there_are() -> None:
    y = balanced(100, 10)
    with pytest.raises(
        ConfigurationError, match=r"'shard': expected one of iid, shards, .*natural"
    ):
        partition("shard", y, 5, 0)
    with pytest.raises(ConfigurationError, match=r"shards: expected per_client, total, got kappa"):
        partition("shards", y, 5, 0, kappa=1)
    with pytest.raises(ConfigurationError, match=r"iid: expected no numbers, got least"):
        partition("iid", y, 5, 0, least=1)
    with pytest.raises(ConfigurationError, match=r"natural: expected no numbers"):
        partition("natural", y, 5, 0, groups=y, least=1)


@pytest.mark.parametrize(
    ("name", "clients", "numbers", "message"),
    [
        ("iid", 101, {}, r"expected at most 100 clients, one a sample, got 101"),
        ("iid", 0, {}, r"clients: expected a whole number of at least 1, got 0"),
        ("shards", 5, {"total": 101}, r"expected at most 100 shards, one a sample, got 101"),
        ("shards", 51, {}, r"got 51 clients with 2 each; set total = 102"),
        ("shards", 5, {"per_client": 1.5}, r"per_client: expected a whole number"),
        ("dirichlet", 11, {}, r"expected at least 110 samples, 10 a client, got 100"),
        ("dirichlet", 10, {}, r"within 10000 draws.*set concentration higher"),
        ("dirichlet", 5, {"concentration": 0}, r"a finite number above 0, got 0"),
        ("dirichlet-client", 5, {"concentration": float("nan")}, r"above 0, got nan"),
        ("dirichlet-equal", 5, {"concentration": float("inf")}, r"above 0, got inf"),
        ("dirichlet", 5, {"least": -1}, r"least: expected a whole number of at least 0"),
        ("quantity", 4, {}, r"multiple of the 10 classes, got 2 \* 4; .* multiple of 5"),
        ("quantity", 60, {"per_client": 2}, r"at most 10 parts a class.* got 12"),
        ("udd", 60, {}, r"at most 10 clients to share a class"),
        ("uds", 10, {}, r"expected at most 100 samples in all, got 13000; set smallest = 3"),
        ("uds", 100, {"smallest": 1}, r"set smallest = 0, or clients lower"),
        ("natural", 3, {}, r"expected data that names the person of each sample"),
    ],
)
def test_what_cannot_be_is_refused_in_words(
    name: str, clients: int, numbers: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        partition(name, balanced(100, 10), clients, 0, **numbers)


def test_labels_and_seeds_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="expected a row of whole labels, got float64"):
        partition("iid", np.zeros(5), 2, 0)  # type: ignore[arg-type]  # what this test is about
    with pytest.raises(ConfigurationError, match="seed: expected a whole number of at least 0"):
        partition("iid", balanced(10, 2), 2, -1)


# one by one


def test_iid_parts_are_equal_and_mixed() -> None:
    y = balanced(6000, 10)
    parts = partition("iid", y, 7, 0)
    assert set(sizes(parts)) == {857, 858}
    # each of 7 x 10 counts is hypergeometric: all of them by chance this far off once in 10^4
    table = counts(y, parts, 10)
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_shards_hold_the_classes_they_are_cut_from() -> None:
    # 12 samples sorted: 0000 1111 2222; six shards of two: 00 00 11 11 22 22
    y = labels(4, 4, 4)
    parts = partition("shards", y, 3, 5, per_client=2, total=6)
    table = counts(y, parts, 3)
    assert sizes(parts) == [4, 4, 4]
    assert (table % 2 == 0).all()  # whole shards
    assert table.sum(0).tolist() == [4, 4, 4]


def test_shard_2_of_a_hundred_leaves_clients_two_classes() -> None:
    y = balanced(60_000, 10)  # as Fashion-MNIST: 100 shards of 600, ten a class
    parts = partition("shards", y, 50, 1)
    assert sizes(parts) == [1200] * 50
    held = (counts(y, parts, 10) > 0).sum(1)
    assert set(held.tolist()) <= {1, 2}
    # both shards of one class: 9 in 99, so 4.5 of 50 expected; none or above 15 once in 10^2..10^4
    assert 1 <= (held == 1).sum() <= 15


def test_shards_that_are_left_over_are_nobodys() -> None:
    parts = partition("shards", balanced(1000, 10), 30, 1, per_client=3)
    assert sizes(parts) == [30] * 30  # 90 of 100 shards


def test_dirichlet_has_the_mean_and_spread_of_its_distribution() -> None:
    # a client's share of a class is Beta(a, a (K - 1)): mean 1/K, variance (K-1) / (K^2 (K a + 1))
    y, clients, a = balanced(20_000, 2), 5, 0.5
    shares = np.concatenate(
        [
            counts(y, partition("dirichlet", y, clients, seed, concentration=a, least=0), 2)
            / 10_000
            for seed in range(300)
        ]
    ).ravel()
    assert shares.mean() == pytest.approx(1 / clients, abs=1e-9)  # all is dealt out
    oracle = stats.beta(a, a * (clients - 1))
    # 600 independent draws of 5: the variance of 3,000 values is known to about 6 %
    assert shares.var() == pytest.approx(oracle.var(), rel=0.2)
    assert stats.kstest(shares[::5], oracle.cdf).pvalue > 1e-3


def test_dirichlet_is_redrawn_until_all_have_ten() -> None:
    y = balanced(2000, 10)
    few = 0
    for seed in range(20):
        loose = partition("dirichlet", y, 20, seed, concentration=0.1, least=0)
        few += min(sizes(loose)) < 10
        assert min(sizes(partition("dirichlet", y, 20, seed, concentration=0.1))) >= 10
    assert few > 0  # the redraw had something to do


def test_higher_concentrations_are_more_even() -> None:
    y = balanced(10_000, 10)
    for name in ("dirichlet", "dirichlet-client", "dirichlet-equal"):
        apart = [
            np.abs(
                label_distribution(y, partition(name, y, 10, 0, concentration=kappa), 10) - 0.1
            ).mean()
            for kappa in (0.1, 1, 1000)
        ]
        assert all(more > less for more, less in pairwise(apart))
        assert apart[-1] < 0.01


def test_udds_is_the_dirichlet_split_of_one_half() -> None:
    y = balanced(1000, 10)
    pairs = zip(
        partition("udds", y, 10, 2),
        partition("dirichlet", y, 10, 2, concentration=0.5),
        strict=True,
    )
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_with_a_tiny_concentration_each_client_wants_one_class() -> None:
    y, least = balanced(1000, 2), {"dirichlet-client": {"least": 0}}
    seen = set()
    for name in ("dirichlet-client", "dirichlet-equal"):
        for seed in range(10):
            numbers: dict[str, Any] = least.get(name, {})
            parts = partition(name, y, 2, seed, concentration=1e-4, **numbers)
            table = counts(y, parts, 2)
            apart = sorted(table.ravel().tolist()) == [0, 0, 500, 500]
            # both want the same: they share it, and the other; by lot, 8 to a standard deviation
            assert apart or np.abs(table - 250).max() < 60
            seen.add(apart)
    assert seen == {True, False}


def test_equal_clients_follow_their_wish_where_there_is_enough() -> None:
    # one client: its wish cannot be granted, it gets all there is
    y = labels(10, 30)
    (part,) = partition("dirichlet-equal", y, 1, 0)
    assert sorted(part) == list(range(40))
    # 41 samples, 4 clients: 10 each, one is left out
    assert sizes(partition("dirichlet-equal", labels(11, 30), 4, 0)) == [10] * 4


def test_quantity_skew_deals_parts_of_one_size() -> None:
    # 10 classes of 60, 20 clients with 2 parts each: 4 parts of 15 a class
    y = balanced(600, 10)
    table = counts(y, partition("quantity", y, 20, 0, per_client=2), 10)
    assert table.sum(1).tolist() == [30] * 20
    assert set(np.unique(table)) <= {0, 15, 30}
    assert ((table > 0).sum(1) <= 2).all()


def test_udd_gives_client_k_k_classes() -> None:
    y = balanced(10_000, 10)
    table = counts(y, partition("udd", y, 10, 0), 10)
    assert (table > 0).sum(1).tolist() == list(range(1, 11))
    for column in table.T:  # who holds a class shares it equally
        held = column[column > 0]
        assert held.max() - held.min() <= 1


def test_udd_scales_to_other_numbers_of_clients() -> None:
    y = balanced(1200, 6)
    held = [(counts(y, partition("udd", y, k, 0), 6) > 0).sum(1).tolist() for k in (3, 12)]
    assert held == [[2, 4, 6], [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]]  # ceil(6 k / K)


def test_uds_has_the_papers_sizes_and_every_class_everywhere() -> None:
    y = balanced(60_000, 10)
    parts = partition("uds", y, 10, 0)
    assert sizes(parts) == [500] * 4 + [1000] * 3 + [2000] * 2 + [4000]
    table = counts(y, parts, 10)
    assert (table == np.array(sizes(parts))[:, None] // 10).all()


def test_uds_keeps_its_shares_for_other_numbers_of_clients() -> None:
    y = labels(300, 100)
    parts = partition("uds", y, 5, 0, smallest=10)
    # places .1 .3 | .5 | .7 .9: the ends of 40, 70, 90 % count for the next group
    assert sizes(parts) == [10, 10, 20, 40, 80]
    np.testing.assert_allclose(label_distribution(y, parts, 2)[:, 0], 0.75, atol=0.05)


def test_natural_clients_are_the_people() -> None:
    groups = np.array([30, 1, 1, 5, 30])
    parts = partition("natural", np.zeros(5, np.int64), 3, 0, groups=groups)
    assert [part.tolist() for part in parts] == [[1, 2], [3], [0, 4]]
    with pytest.raises(ConfigurationError, match=r"expected clients = 3, .* got 2"):
        partition("natural", np.zeros(5, np.int64), 2, 0, groups=groups)


# what follows from parts


def test_label_distribution_counts_by_hand() -> None:
    y = np.array([0, 1, 1, 2, 2, 2])
    parts = [np.array([0, 1, 2, 3]), np.array([4, 5]), np.array([], np.int64)]
    expected = [[0.25, 0.5, 0.25, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
    np.testing.assert_array_equal(label_distribution(y, parts, 4), expected)
    with pytest.raises(ConfigurationError, match="below 2 classes, got 2"):
        label_distribution(y, parts, 2)


def test_rho_tests_mix_in_classes_the_client_has_never_seen() -> None:
    y_train = np.array([0, 0, 1, 2, 2, 1])
    parts = [np.array([0, 1]), np.array([2, 3, 4, 5])]  # classes {0} and {1, 2}
    y_test = np.array([0, 1, 2, 0, 1, 2, 0, 0])
    first, second = rho_tests(y_train, parts, y_test, 0.5, 0)
    assert first.id.tolist() == [0, 3, 6, 7]
    assert len(first.ood) == 2  # 0.5 * 4
    assert set(first.ood) <= {1, 2, 4, 5}
    assert second.id.tolist() == [1, 2, 4, 5]
    assert len(set(second.ood)) == 2
    assert set(second.ood) <= {0, 3, 6, 7}


def test_own_mix_counts_each_class_by_the_client_s_share_of_it() -> None:
    # three quarters of class 0, a quarter of class 1; class 4 has no test samples, class 2 no share
    y_train, y_test = np.array([0, 0, 0, 1, 4, 4]), np.array([0, 0, 1, 1, 1])
    weights = own_mix(y_train, y_test)
    # 5 * 3/4 / 2 for a sample of class 0, 5 * 1/4 / 3 for one of class 1
    np.testing.assert_allclose(weights, [1.875, 1.875, 5 / 12, 5 / 12, 5 / 12], rtol=1e-15)
    right = np.array([True, False, True, True, False])
    # 3/4 * 1/2 + 1/4 * 2/3
    assert (right @ weights) / 5 == pytest.approx(13 / 24)
    assert own_mix(y_train, y_test[:0]).shape == (0,)


def test_own_mix_of_equal_shares_weighs_all_test_samples_alike() -> None:
    y = balanced(200, 10)
    np.testing.assert_allclose(own_mix(balanced(60, 10), y), np.ones(200), rtol=1e-15)


def test_rho_0_tests_on_own_classes_only_and_a_client_keeps_its_draw() -> None:
    y = balanced(1000, 10)
    parts = partition("shards", y, 10, 0, total=20)
    assert all(len(test.ood) == 0 for test in rho_tests(y, parts, y, 0, 0))
    whole = rho_tests(y, parts, y, 0.3, 5)
    alone = rho_tests(y, parts[:3], y, 0.3, 5)
    for a, b in zip(whole, alone, strict=False):
        np.testing.assert_array_equal(a.ood, b.ood)
    assert [len(test.ood) for test in whole] == [round(0.3 * len(test.id)) for test in whole]


def test_more_strangers_than_there_are_is_refused_by_client() -> None:
    y_train = np.array([0, 0, 1, 2])
    y_test = np.array([0, 1, 2, 2])
    parts = [np.array([0, 1]), np.array([2, 3])]  # of the second: ID 3, others 1
    with pytest.raises(ConfigurationError, match=r"client 1: expected 2 .* got 1; set rho at most"):
        rho_tests(y_train, parts, y_test, 0.8, 0)
    for rho in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError, match="rho: expected a finite number of at least 0"):
            rho_tests(y_train, parts, y_test, rho, 0)


def test_local_splits_are_60_20_20_and_drift_comes_from_the_others() -> None:
    y = balanced(1000, 10)
    parts = partition("dirichlet-equal", y, 10, 0, concentration=0.3)
    splits = local_splits(parts, 0)
    tests = [set(split.test) for split in splits]
    for client, (part, split) in enumerate(zip(parts, splits, strict=True)):
        assert (len(split.train), len(split.validation), len(split.test)) == (60, 20, 20)
        together = np.concatenate([split.train, split.validation, split.test])
        assert sorted(together) == sorted(part)
        others = set().union(*(test for k, test in enumerate(tests) if k != client))
        assert len(split.drift) == 20
        assert set(split.drift) <= others


def test_drift_is_drawn_with_replacement() -> None:
    # own tests of 20 against one other client with 1: twenty times the same sample
    splits = local_splits([np.arange(100), np.arange(100, 105)], 0)
    assert splits[0].drift.tolist() == splits[1].test.tolist() * 20


def test_local_splits_that_leave_nothing_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="client 0: expected a sample to train"):
        local_splits([np.arange(2), np.arange(2, 12)], 0)
    with pytest.raises(ConfigurationError, match="expected shares above 0"):
        local_splits([np.arange(10)], 0, validation=0.5, test=0.5)
    with pytest.raises(ConfigurationError, match="expected other clients to drift to, got one"):
        local_splits([np.arange(10)], 0)
