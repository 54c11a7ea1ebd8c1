"""Which clients are asked, in which rounds the server answers, and for how many steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from edge_sdk.training.protocol.messages import (
    Reply,
    Request,
    Update,
)
from server.training.methods.fedavg import fedavg
from server.training.methods.method import Method
from server.training.methods.splitfed import (
    splitfed_v1,
    splitfed_v2,
)
from server.training.methods.supersfl import supersfl
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundSettings
from server.training.rounds.transport import LocalTransport
from tests.training.worlds import (
    METHODS,
    World,
    assert_same,
    differences,
    meddling,
)


@pytest.mark.parametrize("method", [splitfed_v1, splitfed_v2, fedavg])
def test_a_round_at_a_decayed_rate_is_that_round_at_a_lower_rate(
    method: Callable[[], Method],
) -> None:
    world, other = World(method(), decay=0.5), World(method())
    world.run(2)
    other.run(1)
    other.state.training = replace(other.state.training, learning_rate=0.025)
    slower = {
        name: replace(plan, training=replace(plan.training, learning_rate=0.025))
        for name, plan in other.plans.items()
    }
    RoundLoop(method(), slower, other.state, LocalTransport(other.clients)).run_round(2, 0)
    for name, tensor in world.state.read().items():
        assert torch.equal(tensor, other.state.read()[name]), name


def test_participants_are_chosen_by_seed_and_round() -> None:
    half = RoundSettings(participation=0.5, quorum=0.0)
    first = [r.participants for r in World(fedavg(), settings=half).run(8)]
    again = [r.participants for r in World(fedavg(), settings=half).run(8)]
    other = [r.participants for r in World(fedavg(), settings=half).run(8, seed=1)]
    assert first == again != other
    assert {len(names) for names in first} == {2}
    assert all(list(names) == sorted(names) for names in first)
    assert set().union(*first) == set("abcd")


def test_at_least_one_client_is_asked() -> None:
    [result] = World(fedavg(), settings=RoundSettings(participation=0.01)).run(1)
    assert len(result.participants) == 1


@pytest.mark.parametrize("availability", [0.0, 0.5, 1.0])
def test_the_server_supervises_that_share_of_rounds(availability: float) -> None:
    rounds = 30
    world = World(supersfl(), "ab", settings=RoundSettings(availability=availability))
    results = world.run(rounds)
    supervised = sum("down gradients" in r.bytes_by_kind for r in results)
    # 30 throws of a fair coin: outside of 6..24 once in 2,000 seeds, and the seed is fixed
    low, high = {0.0: (0, 0), 0.5: (6, 24), 1.0: (rounds, rounds)}[availability]
    assert low <= supervised <= high
    assert all(r.merged for r in results)


def test_supersfl_learns_without_its_server_and_plain_splitfed_cannot() -> None:
    never = RoundSettings(availability=0.0)
    alone = World(supersfl(), settings=never, learning_rate=0.3)
    losses = [r.loss for r in alone.run(20)]
    assert losses[-1] is not None
    assert losses[0] is not None
    assert losses[-1] < 0.8 * losses[0]

    plain = World(splitfed_v1(), settings=never)
    [result] = plain.run(1)
    assert not result.merged
    assert result.loss is None
    assert_same(plain.state.read(), plain.before)


def test_clients_with_fewer_batches_end_with_their_last_feedback() -> None:
    updates: dict[str, Update] = {}

    def keep(name: str, _request: Request, reply: Reply) -> Reply:
        if isinstance(reply, Update):
            updates[name] = reply
        return reply

    world = World(supersfl(), transport=meddling(keep))
    world.run(1)
    # batches of 4: 9 samples are 4 + 5, 4 are 4, 14 are 4 + 4 + 4 + 2, 6 are 4 + 2
    assert {n: u.steps for n, u in updates.items()} == {"a": 2, "b": 1, "c": 4, "d": 2}
    assert {n: u.supervised for n, u in updates.items()} == {"a": 2, "b": 1, "c": 4, "d": 2}


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("batch", [1, 4])
def test_one_client_with_one_sample_trains(method: Callable[[], Method], batch: int) -> None:
    world = World(method(), "a", batch=batch)
    client = world.clients["a"]
    client.x, client.y = client.x[:1], client.y[:1]
    [result] = world.run(1)
    assert result.participants == ("a",)
    assert differences(world.state.read(), world.before)
