"""Namespaces of kept weights: each key belongs to one of them."""

from __future__ import annotations

from edge_sdk.bundles.namespaces import AUXILIARY, BACK, INVERSION, exit_head

KEPT = {
    "exit2.weight": 1,
    "exit21.weight": 2,
    "auxiliary.head.weight": 3,
    "back.weight": 4,
    "backbone.weight": 5,
}


def test_a_namespace_selects_its_own_tensors_by_their_own_names() -> None:
    assert AUXILIARY.select(KEPT) == {"head.weight": 3}
    assert INVERSION.select(KEPT) == {}


def test_a_namespace_ends_at_the_first_dot() -> None:
    assert exit_head(2).select(KEPT) == {"weight": 1}
    assert BACK.select(KEPT) == {"weight": 4}
    assert not BACK.holds("backbone.weight")


def test_what_a_namespace_prefixes_it_selects_again() -> None:
    tensors = {"0.weight": 1, "0.bias": 2}
    kept = exit_head(3).prefixed(tensors)
    assert kept == {"exit3.0.weight": 1, "exit3.0.bias": 2}
    assert exit_head(3).select(kept) == tensors
    assert all(exit_head(3).holds(key) for key in kept)
