"""Rounds in cohorts: where clients do not meet no bit differs, and all start alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edge_sdk.training.protocol.messages import (
    Reply,
    Request,
    StartRound,
    Weights,
)
from server.training.methods.fedavg import fedavg
from server.training.methods.method import Method
from server.training.methods.splitfed import (
    multi_exit,
    splitfed_v1,
)
from server.training.methods.supersfl import supersfl
from server.training.recipe.recipe import METHODS
from server.training.rounds.clients import can_train_apart
from server.training.rounds.round import RoundSettings
from tests.training.worlds import (
    World,
    assert_same,
    differences,
    meddling,
)


@pytest.mark.parametrize("method", [splitfed_v1, fedavg, multi_exit])
def test_cohorts_change_no_bit_where_clients_do_not_meet(method: Callable[[], Method]) -> None:
    whole = World(method()).trained()
    for size in (1, 2, 3):
        assert_same(World(method(), settings=RoundSettings(cohort=size)).trained(), whole)


def test_which_methods_train_clients_apart() -> None:
    """As docs/training-speed.md says for workers."""
    apart = {name for name, method in METHODS.items() if can_train_apart(method(), RoundSettings())}
    assert apart == {
        *("splitfed-v1", "multi-exit", "splitgp", "harmony", "splitlpf"),
        *("fedavg", "fedprox", "feddyn", "fedlc", "fedper", "ditto", "pfsl"),
    }
    assert not can_train_apart(splitfed_v1(), RoundSettings(robust="trimmed"))


def test_taking_turns_by_batch_or_by_client_matters_to_a_shared_suffix() -> None:
    # so a recipe of SuperSFL or SplitFedV2 names its cohort, and results keep to it
    turns = World(supersfl()).trained()
    assert differences(World(supersfl(), settings=RoundSettings(cohort=1)).trained(), turns)
    assert_same(World(supersfl(), settings=RoundSettings(cohort=4)).trained(), turns)


def test_every_cohort_starts_from_the_weights_of_the_rounds_start() -> None:
    sent: dict[str, Weights] = {}

    def keep(name: str, request: Request, reply: Reply) -> Reply:
        if isinstance(request, StartRound):
            sent[name] = dict(request.weights)
        return reply

    world = World(
        supersfl(),
        settings=RoundSettings(cohort=1),
        transport=meddling(keep),
    )
    world.run(1)
    for weights in sent.values():
        assert_same(weights, {name: world.before[name] for name in weights})
