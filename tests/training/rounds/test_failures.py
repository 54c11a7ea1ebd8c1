"""Clients that fail: missing, silent, late, below the quorum, diverged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from edge_sdk.errors import LinkError
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
)
from server.training.methods.fedavg import fedavg
from server.training.methods.harmony import harmony
from server.training.methods.method import Method
from server.training.methods.scala import scala
from server.training.methods.splitfed import (
    minibatch,
    multi_exit,
    splitfed_v1,
    splitfed_v2,
    splitgp,
)
from server.training.methods.splitlpf import splitlpf
from server.training.methods.supersfl import supersfl
from server.training.rounds.round import RoundSettings
from server.training.rounds.transport import LocalTransport
from tests.training.worlds import (
    World,
    assert_same,
    meddling,
)


def failing(method: Method, when: Callable[[str, Request], bool], names: str = "abcd") -> World:
    """A world in which a client gives no reply `when` so; it still does what it is told."""

    def drop(name: str, request: Request, reply: Reply) -> Reply | None:
        return None if when(name, request) else reply

    return World(method, names, transport=meddling(drop))


@pytest.mark.parametrize("method", [splitfed_v1, fedavg, multi_exit])
@pytest.mark.parametrize("kind", [StartRound, EndRound])
def test_a_client_without_a_reply_is_missing_and_the_rest_train_as_without_it(
    method: Callable[[], Method], kind: type[Request]
) -> None:
    world = failing(method(), lambda name, request: name == "c" and isinstance(request, kind))
    [result] = world.run(1)
    assert result.missing == ("c",)
    assert result.participants == ("a", "b", "d")
    assert_same(world.state.read(), World(method(), "abd").trained(1))


def test_a_client_missing_from_the_start_leaves_supersfl_as_without_it() -> None:
    world = failing(supersfl(), lambda name, request: name == "b")
    [result] = world.run(1)
    assert (result.missing, result.participants) == (("b",), ("a", "c", "d"))
    assert_same(world.state.read(), World(supersfl(), "acd").trained(1))


def test_a_client_that_raises_is_missing() -> None:
    world = World(fedavg())
    world.clients["c"].y = world.clients["c"].y + 7  # no such labels
    [result] = world.run(1)
    assert result.missing == ("c",)
    assert_same(world.state.read(), World(fedavg(), "abd").trained(1))


def test_a_missed_step_is_trained_alone_and_counted() -> None:
    updates: dict[str, Update] = {}

    def drop(name: str, request: Request, reply: Reply) -> Reply | None:
        if isinstance(reply, Update):
            updates[name] = reply
        return None if name == "c" and isinstance(request, Step) and request.step == 1 else reply

    world = World(supersfl(), transport=meddling(drop))
    [result] = world.run(1)
    assert result.participants == tuple("abcd")
    assert result.missed_steps == {"c": 1}
    assert (updates["c"].steps, updates["c"].supervised) == (4, 3)
    assert (updates["a"].steps, updates["a"].supervised) == (2, 2)


def test_a_client_that_learnt_from_no_batch_has_no_say() -> None:
    # its mean loss over nothing is 0, which Eq. 6 would give all the weight there is
    world = World(supersfl(), "abc")
    inner = world.clients["c"]

    class Deaf:
        """Hears starts and ends, and no step."""

        def handle(self, message: Request) -> Reply:
            if isinstance(message, Step):
                raise LinkError("nothing came")
            return inner.handle(message)

    world.clients["c"] = Deaf()  # type: ignore[assignment]  # a client as the transport sees it
    [result] = world.run(1)
    assert result.missing == ("c",)
    assert result.missed_steps == {"c": 4}
    assert_same(world.state.read(), World(supersfl(), "ab").trained(1))


@pytest.mark.parametrize("method", [supersfl, splitfed_v1, minibatch, fedavg])
def test_below_the_quorum_nothing_changes(method: Callable[[], Method]) -> None:
    world = failing(method(), lambda name, request: name != "a" and isinstance(request, EndRound))
    [result] = world.run(1)
    assert not result.merged
    assert result.missing == ("b", "c", "d")
    assert_same(world.state.read(), world.before)


def test_a_round_below_the_quorum_leaves_no_momentum_either() -> None:
    lost = True

    def drop(name: str, request: Request, reply: Reply) -> Reply | None:
        return None if lost and isinstance(request, EndRound) else reply

    world = World(
        splitfed_v2(),
        momentum=0.9,
        transport=meddling(drop),
    )
    world.loop.run_round(1, 0)
    lost = False
    world.loop.run_round(2, 0)

    clean = World(splitfed_v2(), momentum=0.9)
    clean.loop.run_round(2, 0)
    assert_same(world.state.read(), clean.state.read())


@pytest.mark.parametrize(
    ("quorum", "merged"), [(0.0, True), (0.5, True), (0.75, True), (0.76, False), (1.0, False)]
)
def test_the_quorum_is_a_share_of_those_asked(quorum: float, merged: bool) -> None:
    def drop(name: str, request: Request, reply: Reply) -> Reply | None:
        return None if name == "d" else reply

    world = World(
        fedavg(),
        settings=RoundSettings(quorum=quorum),
        transport=meddling(drop),
    )
    assert world.run(1)[0].merged is merged


def test_a_round_without_anyone_is_no_failure() -> None:
    world = failing(supersfl(), lambda name, request: True)
    [result] = world.run(1)
    assert (result.merged, result.loss, result.missing) == (False, None, tuple("abcd"))
    assert_same(world.state.read(), world.before)


@pytest.mark.parametrize(
    "method",
    [
        supersfl,
        lambda: splitgp(personal_share=0.9),
        lambda: splitlpf(back_rate=3e38, follow_accuracy=False),
        lambda: harmony(head="client"),
        lambda: scala(inversion=0.5, share_batches=False),
    ],
    ids=["supersfl", "splitgp", "splitlpf", "harmony", "scala"],
)
def test_a_client_that_diverged_in_a_round_is_back_in_the_next(
    method: Callable[[], Method],
) -> None:
    def pass_on(name: str, request: Request, reply: Reply) -> Reply:
        # the server sees nothing of it until the round ends; what it returns is large
        if name != "c" or not isinstance(reply, Features):
            return reply
        view = None if reply.view is None else torch.nan_to_num(reply.view)
        return replace(reply, features=torch.nan_to_num(reply.features, nan=6e4), view=view)

    send_labels = method().labels == "sent"
    world = World(
        method(),
        "abc",
        transport=meddling(pass_on),
        depth=2,
        batch=16,
        send_labels=send_labels,
    )
    client = world.clients["c"]
    x = client.x
    client.x = np.full_like(x, np.nan)
    [result] = world.run(1)
    assert "NaN" in result.refused["c"]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in client.personal.values())

    client.x = x
    result = world.loop.run_round(2, 0)
    assert "c" in result.participants


def test_a_late_update_counts_by_its_change_since_its_own_round_and_after_a_resume() -> None:
    settings = RoundSettings(quorum=0.3, staleness_max=2, staleness_power=1.0)
    world = World(fedavg(), "ab", settings=settings)
    before = world.state.read()
    bob = world.clients.pop("b")  # away; each round's transport has who is there
    world.loop.set_clients(world.plans, LocalTransport(world.clients))
    world.loop.run_round(1, 0)
    between = world.state.read()
    bob.handle(StartRound(1, world.plans["b"], before))
    update = bob.handle(EndRound(1))
    assert isinstance(update, Update)

    again = World(fedavg(), "ab", settings=settings)
    again.state.write(between)
    again.loop.load_state_dict(*world.loop.state_dict())
    world.loop.set_clients(world.plans, LocalTransport({}))
    again.loop.set_clients(again.plans, LocalTransport({}))
    late = {"b": update}
    result = world.loop.run_round(2, 0, late)
    assert result.stale == {"b": 1}
    assert result.merged
    # one round late, half of its change counts, on top of what the first round made
    after = world.state.read()
    for name, tensor in update.weights.items():
        wanted = between[name] + (tensor - before[name]) / 2
        torch.testing.assert_close(after[name], wanted)
    again.loop.run_round(2, 0, late)
    assert_same(again.state.read(), after)


@pytest.mark.parametrize("samples", [0, -1])
def test_a_late_update_without_samples_is_refused_where_it_comes_alone(samples: int) -> None:
    settings = RoundSettings(quorum=0.3, staleness_max=2)
    world = World(fedavg(), "ab", settings=settings)
    bob = world.clients.pop("b")
    world.loop.set_clients(world.plans, LocalTransport(world.clients))
    world.loop.run_round(1, 0)
    between = world.state.read()
    bob.handle(StartRound(1, world.plans["b"], world.before))
    update = bob.handle(EndRound(1))
    assert isinstance(update, Update)
    world.loop.set_clients(world.plans, LocalTransport({}))  # nobody else answers
    result = world.loop.run_round(2, 0, {"b": replace(update, samples=samples)})
    assert result.refused == {"b": f"{samples} samples: expected at least 1"}
    assert (result.merged, result.stale, result.loss) == (False, {}, None)
    assert_same(world.state.read(), between)
