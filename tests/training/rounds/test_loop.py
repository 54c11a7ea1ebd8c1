"""Whole rounds: baselines that meet, clients that fail, nonsense that is refused, bytes counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from edge_sdk.errors import ConfigurationError, LinkError
from edge_sdk.manifest import Codec
from edge_sdk.nets import build
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Ready,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
    Weights,
    from_bytes,
    to_bytes,
)
from edge_sdk.training.protocol.training import Training
from server.training.core.server_state import ServerState
from server.training.methods.fedavg import fedavg, fedprox
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
from server.training.rounds.loop import RoundLoop
from server.training.rounds.reply_checks import update_fault
from server.training.rounds.round import RoundResult, RoundSettings
from server.training.rounds.transport import LocalTransport, Transport
from tests.training.plans import flat_plan

CLASSES = 3
SIZES = {"a": 9, "b": 4, "c": 14, "d": 6}
DEPTHS = {"a": 1, "b": 3, "c": 2, "d": 4}
Change = Callable[[str, Request, Reply], Reply | None]


class BytesTransport:
    """Every message as the bytes it would travel as, both ways."""

    def __init__(self, clients: Mapping[str, TrainingClient]) -> None:
        self._inner = LocalTransport(clients)

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        arrived = {name: from_bytes(to_bytes(request)) for name, request in requests.items()}
        replies = self._inner.exchange(arrived, deadline_s)  # type: ignore[arg-type]  # requests
        return {name: from_bytes(to_bytes(r)) for name, r in replies.items()}  # type: ignore[misc]  # replies


class Meddler:
    """Changes replies on their way, or drops them."""

    def __init__(self, inner: Transport, change: Change) -> None:
        self._inner = inner
        self._change = change
        self.asked: list[tuple[str, str]] = []

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        self.asked += [(name, type(request).__name__) for name, request in requests.items()]
        replies = self._inner.exchange(requests, deadline_s)
        changed = {n: self._change(n, requests[n], reply) for n, reply in replies.items()}
        return {name: reply for name, reply in changed.items() if reply is not None}


class World:
    """A small fleet on the tiny network."""

    def __init__(
        self,
        method: Method,
        names: str = "abcd",
        *,
        settings: RoundSettings | None = None,
        transport: Callable[[Mapping[str, TrainingClient]], Transport] = LocalTransport,
        depth: int | None = None,
        momentum: float = 0.0,
        decay: float = 1.0,
        **numbers: Any,
    ) -> None:
        self.clients = {name: _client(name) for name in names}
        self.state = ServerState(
            build("tiny", classes=CLASSES, seed=0),
            Training(0.05, 8, momentum=momentum),
            decay=decay,
        )
        self.plans = {
            name: flat_plan(
                **{
                    "backbone": "tiny",
                    "input_shape": (1, 8, 8),
                    "classes": CLASSES,
                    "mean": (0.0,),
                    "std": (1.0,),
                    "depth": depth or DEPTHS[name],
                    "learning_rate": 0.05,
                    "batch": 4,
                    "momentum": momentum,
                    "part": method.client,
                    **numbers,
                }
            )
            for name in names
        }
        self.loop = RoundLoop(method, self.plans, self.state, transport(self.clients), settings)
        self.before = self.state.read()

    def run(self, rounds: int = 2, seed: int = 0) -> list[RoundResult]:
        return [self.loop.run_round(number, seed) for number in range(1, rounds + 1)]

    def trained(self, rounds: int = 2) -> Weights:
        self.run(rounds)
        return self.state.read()


def _client(name: str) -> TrainingClient:
    generator = np.random.default_rng(ord(name))
    x = generator.standard_normal((SIZES[name], 1, 8, 8)).astype(np.float32)
    return TrainingClient(name, x, generator.integers(0, CLASSES, SIZES[name]))


def differences(one: Weights, other: Weights) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


def assert_same(one: Weights, other: Weights) -> None:
    assert differences(one, other) == []


METHODS: dict[str, Callable[[], Method]] = {
    "supersfl": supersfl,
    "splitfed-v1": splitfed_v1,
    "splitfed-v2": splitfed_v2,
    "minibatch-sfl": minibatch,
    "fedavg": fedavg,
    "multi-exit": multi_exit,
    "splitgp": splitgp,
}


# strength zero


def test_fedprox_without_a_pull_is_fedavg() -> None:
    assert_same(World(fedprox(0.0)).trained(), World(fedavg()).trained())
    assert differences(World(fedprox(0.5)).trained(), World(fedavg()).trained())


def test_splitgp_without_a_personal_share_is_multi_exit() -> None:
    assert_same(World(splitgp(0.0)).trained(), World(multi_exit()).trained())
    assert differences(World(splitgp(0.2)).trained(), World(multi_exit()).trained())


def test_multi_exit_without_an_exit_share_is_splitfed_but_for_the_exits() -> None:
    ours, plain = World(multi_exit(0.0)).trained(), World(splitfed_v1()).trained()
    assert {name.partition(".")[0] for name in differences(ours, plain)} == {
        "exit1",
        "exit2",
        "exit3",
        "exit4",
    }


def test_supersfl_without_a_vote_of_the_servers_and_one_client_takes_its_stages_as_they_are() -> (
    None
):
    kept: dict[str, Update] = {}

    def keep(name: str, _request: Request, reply: Reply) -> Reply:
        if isinstance(reply, Update):
            kept[name] = reply
        return reply

    world = World(
        supersfl(server_weight=0.0),
        "a",
        transport=lambda clients: Meddler(LocalTransport(clients), keep),
    )
    after = world.trained(1)
    held = {k: v for k, v in kept["a"].weights.items() if not k.startswith("exit")}
    assert_same({name: after[name] for name in held}, held)


def test_exit_heads_of_supersfl_stay_on_their_clients() -> None:
    world = World(supersfl())
    assert not [name for name in differences(world.trained(), world.before) if "exit" in name]
    heads = {next(iter(c.personal)).partition(".")[0] for c in world.clients.values()}
    assert heads == {"exit1", "exit2", "exit3", "exit4"}


def test_a_stage_nobody_holds_keeps_the_servers_training() -> None:
    stepped: list[Weights] = []
    world = World(supersfl(), "ab")

    def look(_name: str, request: Request, reply: Reply) -> Reply:
        if isinstance(request, EndRound):
            stepped.append(world.state.read())
        return reply

    world.loop = RoundLoop(
        supersfl(), world.plans, world.state, Meddler(LocalTransport(world.clients), look)
    )
    after = world.trained(1)
    names = [name for name in after if name.startswith(("stage4.", "stage5.", "head."))]
    assert_same({n: after[n] for n in names}, {n: stepped[-1][n] for n in names})
    assert differences({n: after[n] for n in names}, {n: world.before[n] for n in names})


# the same with bytes in between


@pytest.mark.parametrize("codec", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_bytes_in_between_change_no_bit(method: Callable[[], Method], codec: Codec) -> None:
    local = World(method(), codec=codec, momentum=0.9)
    remote = World(method(), codec=codec, momentum=0.9, transport=BytesTransport)
    ours, theirs = local.run(3), remote.run(3)

    assert_same(local.state.read(), remote.state.read())
    for name in local.clients:
        assert_same(local.clients[name].personal, remote.clients[name].personal)
    assert [replace(r, seconds=0) for r in ours] == [replace(r, seconds=0) for r in theirs]
    assert differences(local.state.read(), local.before)


# cohorts and order


@pytest.mark.parametrize("method", [splitfed_v1, fedavg, multi_exit])
def test_cohorts_change_no_bit_where_clients_do_not_meet(method: Callable[[], Method]) -> None:
    whole = World(method()).trained()
    for size in (1, 2, 3):
        assert_same(World(method(), settings=RoundSettings(cohort=size)).trained(), whole)


def test_taking_turns_by_batch_or_by_client_matters_to_one_model_for_all() -> None:
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
        transport=lambda clients: Meddler(LocalTransport(clients), keep),
    )
    world.run(1)
    for weights in sent.values():
        assert_same(weights, {name: world.before[name] for name in weights})


# choice of clients and rounds


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

    world = World(supersfl(), transport=lambda clients: Meddler(LocalTransport(clients), keep))
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


# clients that fail


def failing(method: Method, when: Callable[[str, Request], bool], names: str = "abcd") -> World:
    """A world in which a client gives no reply `when` so; it still does what it is told."""

    def drop(name: str, request: Request, reply: Reply) -> Reply | None:
        return None if when(name, request) else reply

    return World(method, names, transport=lambda clients: Meddler(LocalTransport(clients), drop))


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

    world = World(supersfl(), transport=lambda clients: Meddler(LocalTransport(clients), drop))
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


def test_below_the_quorum_the_servers_momentum_goes_back_too() -> None:
    lost = True

    def drop(name: str, request: Request, reply: Reply) -> Reply | None:
        return None if lost and isinstance(request, EndRound) else reply

    world = World(
        splitfed_v2(),
        momentum=0.9,
        transport=lambda clients: Meddler(LocalTransport(clients), drop),
    )
    world.loop.run_round(1, 0)
    assert world.state.momentum() == {}
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
        transport=lambda clients: Meddler(LocalTransport(clients), drop),
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
def test_a_client_whose_round_diverged_is_back_in_the_next(method: Callable[[], Method]) -> None:
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
        transport=lambda clients: Meddler(LocalTransport(clients), pass_on),
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


# nonsense


def altered(change: Callable[[Update], Update]) -> Change:
    def meddle(name: str, request: Request, reply: Reply) -> Reply:
        return change(reply) if name == "c" and isinstance(reply, Update) else reply

    return meddle


def with_weights(change: Callable[[Weights], Weights]) -> Change:
    return altered(lambda update: replace(update, weights=change(dict(update.weights))))


def _set(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return with_weights(lambda weights: weights | {name: change(weights[name])})


def _poke(value: float) -> Callable[[Tensor], Tensor]:
    def poke(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return poke


NAME = "stage2.0.bias"
BAD_UPDATES: dict[str, tuple[Change, str]] = {
    "a missing name": (with_weights(lambda w: {k: w[k] for k in w if k != NAME}), "missing"),
    "an unknown name": (with_weights(lambda w: w | {"stage9.x": torch.zeros(1)}), "unknown"),
    "a shape": (_set(NAME, lambda t: t[:1]), "expected shape"),
    "a broadcast shape": (_set(NAME, lambda t: t[None]), "expected shape"),
    "a type": (_set(NAME, lambda t: t.double()), "float64"),
    "whole numbers": (_set(NAME, lambda t: t.long()), "int64"),
    "one NaN": (_set(NAME, _poke(float("nan"))), "NaN"),
    "one infinity": (_set(NAME, _poke(float("-inf"))), "infinity"),
    "a long way": (_set(NAME, _poke(1e4)), "norm 1e+04"),
    "an overflow": (_set(NAME, _poke(3e38)), "norm 3e+38"),
    "other samples": (altered(lambda u: replace(u, samples=10**9)), "samples"),
    "no samples": (altered(lambda u: replace(u, samples=0)), "samples"),
    "a loss of NaN": (altered(lambda u: replace(u, loss=float("nan"))), "loss"),
    "an infinite loss": (altered(lambda u: replace(u, loss=float("inf"))), "loss"),
    "a negative loss": (altered(lambda u: replace(u, loss=-1e-8)), "loss"),
}


@pytest.mark.parametrize("method", [splitfed_v1, fedavg])
@pytest.mark.parametrize(("change", "said"), BAD_UPDATES.values(), ids=BAD_UPDATES)
def test_an_update_that_is_not_sound_is_refused_by_name_and_the_round_goes_on_without(
    method: Callable[[], Method], change: Change, said: str
) -> None:
    world = World(
        method(),
        settings=RoundSettings(norm_bound=100.0),
        transport=lambda clients: Meddler(LocalTransport(clients), change),
    )
    [result] = world.run(1)
    assert list(result.refused) == ["c"]
    assert said in result.refused["c"]
    assert result.missing == ()
    assert_same(world.state.read(), World(method(), "abd").trained(1))


def test_a_variance_below_zero_is_refused_and_a_mean_is_not() -> None:
    sent = {"stage1.bn.running_mean": torch.zeros(2), "stage1.bn.running_var": torch.ones(2)}

    def fault(mean: float, variance: float) -> str | None:
        values = dict(zip(sent, (mean, variance), strict=True))
        weights = {name: torch.tensor([0.5, value]) for name, value in values.items()}
        return update_fault(Update(1, weights, 4, 1.0, 1, 1), sent, 4, None)

    assert fault(-5.0, 0.0) is None
    why = fault(0.0, -5.0)
    assert why is not None
    assert "stage1.bn.running_var: expected variances from 0 up" in why


@pytest.mark.parametrize(("bound", "refused"), [(0.6, []), (0.4, ["c"])])
def test_the_norm_of_a_change_is_over_all_tensors_and_measured_from_what_was_sent(
    bound: float, refused: list[str]
) -> None:
    # supersfl's server moves the deeper clients' stages while they train: no part of their change
    sent: Weights = {}

    def move(name: str, request: Request, reply: Reply) -> Reply:
        if name == "c" and isinstance(request, StartRound):
            sent.update(request.weights)
        if name == "c" and isinstance(reply, Update):
            moved = {key: sent.get(key, tensor) for key, tensor in reply.weights.items()}
            for key, by in (("stage1.0.bias", 0.3), ("stage2.0.bias", 0.4)):  # together 0.5
                moved[key] = moved[key].clone()
                moved[key][0] += by
            return replace(reply, weights=moved)
        return reply

    world = World(
        supersfl(),
        settings=RoundSettings(norm_bound=bound),
        transport=lambda clients: Meddler(LocalTransport(clients), move),
    )
    assert [name for name in world.run(1)[0].refused if name == "c"] == refused


def in_features(change: Callable[[Features], Features], step: int = 0) -> Change:
    def meddle(name: str, request: Request, reply: Reply) -> Reply:
        bad = name == "c" and isinstance(reply, Features) and reply.step == step
        return change(reply) if bad and isinstance(reply, Features) else reply

    return meddle


def _labels(change: Callable[[Tensor], Tensor | None]) -> Change:
    def alter(features: Features) -> Features:
        assert features.labels is not None
        return replace(features, labels=change(features.labels))

    return in_features(alter)


def _bytes(features: Features, shape: tuple[int, ...], scale: float = 1.0) -> Features:
    """Of the int8 codec, in another shape, with ranges for each of its rows."""
    values = torch.zeros(shape, dtype=torch.uint8)
    ranges = torch.tensor([[scale, 0.0]]).repeat(shape[0] if shape else 1, 1)
    return replace(features, features=values, ranges=ranges)


BAD_FEATURES: dict[str, tuple[Change, str]] = {
    "a shape": (in_features(lambda f: replace(f, features=f.features[:, :1])), "expected shape"),
    "too many": (
        in_features(lambda f: replace(f, features=f.features.repeat(9, 1, 1, 1))),
        "expected shape",
    ),
    "none": (in_features(lambda f: replace(f, features=f.features[:0])), "expected shape"),
    "a number": (in_features(lambda f: replace(f, features=torch.zeros(()))), "expected shape"),
    "NaN": (in_features(lambda f: replace(f, features=f.features * float("nan"))), "NaN"),
    "infinity": (in_features(lambda f: replace(f, features=f.features + float("inf"))), "larger"),
    "huge": (in_features(lambda f: replace(f, features=f.features + 1e9)), "larger"),
    "a type": (in_features(lambda f: replace(f, features=f.features.double())), "float64"),
    "bytes without ranges": (
        in_features(lambda f: replace(f, features=f.features.to(torch.uint8))),
        "zero point",
    ),
    "bytes with bad ranges": (
        in_features(
            lambda f: replace(
                f, features=f.features.to(torch.uint8), ranges=torch.full((4, 2), float("nan"))
            )
        ),
        "zero point",
    ),
    # a codec's, which is decoded row by row: its shape is looked at before
    "a byte": (in_features(lambda f: _bytes(f, ())), "expected shape"),
    "no bytes": (in_features(lambda f: _bytes(f, (0, *f.features.shape[1:]))), "expected shape"),
    "many rows of bytes with bad ranges": (
        in_features(lambda f: _bytes(f, (500, 1), scale=float("nan"))),
        "expected shape",
    ),
    "a scale of zero": (in_features(lambda f: _bytes(f, f.features.shape, scale=0)), "scale above"),
    "ranges beside floats": (
        in_features(lambda f: replace(f, ranges=torch.ones(len(f.features), 2))),
        "no ranges",
    ),
    "a view of one byte": (
        in_features(lambda f: replace(f, view=torch.zeros((), dtype=torch.uint8), entry=1)),
        "view",
    ),
    "no labels": (_labels(lambda y: None), "labels"),
    "unknown labels": (_labels(lambda y: y + 7), "labels"),
    "negative labels": (_labels(lambda y: y - 7), "labels"),
    "few labels": (_labels(lambda y: y[:1]), "labels"),
    "labels of a type": (_labels(lambda y: y.float()), "labels"),
}


@pytest.mark.parametrize("method", [supersfl, minibatch])
@pytest.mark.parametrize(("change", "said"), BAD_FEATURES.values(), ids=BAD_FEATURES)
def test_features_that_are_not_sound_put_their_client_out_of_the_round(
    method: Callable[[], Method], change: Change, said: str
) -> None:
    meddlers: list[Meddler] = []

    def transport(clients: Mapping[str, TrainingClient]) -> Transport:
        meddlers.append(Meddler(LocalTransport(clients), change))
        return meddlers[0]

    world = World(method(), transport=transport)
    [result] = world.run(1)
    assert list(result.refused) == ["c"]
    assert said in result.refused["c"]
    # asked twice: its weights, and the batch that gave it away; nothing of it was used
    assert [kind for name, kind in meddlers[0].asked if name == "c"] == ["StartRound", "Step"]
    assert_same(world.state.read(), World(method(), "abd").trained(1))


@pytest.mark.parametrize(("samples", "steps"), [(0, 1), (-1, 1), (14, 10**9), (14, -1), (14, 5)])
def test_a_start_that_does_not_add_up_is_refused(samples: int, steps: int) -> None:
    def meddle(name: str, request: Request, reply: Reply) -> Reply:
        if name == "c" and isinstance(reply, Ready):
            return replace(reply, samples=samples, steps=steps)
        return reply

    world = World(supersfl(), transport=lambda clients: Meddler(LocalTransport(clients), meddle))
    [result] = world.run(1)
    assert list(result.refused) == ["c"]
    assert_same(world.state.read(), World(supersfl(), "abd").trained(1))


class Endless(Meddler):
    """A client that says it has no end of batches; how it goes on is told by `change`."""

    def __init__(
        self, clients: Mapping[str, TrainingClient], change: Change, steps: int = 2**56
    ) -> None:
        super().__init__(LocalTransport(clients), self._boast)
        self._then = change
        self._steps = steps

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        assert len(self.asked) < 50_000, "the round does not end"
        return super().exchange(requests, deadline_s)

    def _boast(self, name: str, request: Request, reply: Reply) -> Reply | None:
        if name == "c" and isinstance(reply, Ready):
            return replace(reply, samples=2**60, steps=self._steps, label_counts=())
        return self._then(name, request, reply)


def test_a_round_ends_though_a_client_with_endless_batches_falls_silent() -> None:
    def silent(name: str, request: Request, reply: Reply) -> Reply | None:
        return None if name == "c" and isinstance(request, Step) else reply

    world = World(supersfl(), transport=lambda clients: Endless(clients, silent))
    [result] = world.run(1)
    assert result.participants == ("a", "b", "d")
    # two steps with others, and three of it alone
    assert result.missed_steps == {"c": 5}


def test_a_round_ends_though_a_client_with_endless_batches_is_out_of_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def nonsense(name: str, _request: Request, reply: Reply) -> Reply:
        if name != "c" or not isinstance(reply, Features):
            return reply
        return replace(reply, features=reply.features * float("nan"))

    world = World(supersfl(), transport=lambda clients: Endless(clients, nonsense, 10_000))
    [result] = world.run(1)
    assert "NaN" in result.refused["c"]
    assert result.participants == ("a", "b", "d")
    assert "no more steps from 2: no client answers" in caplog.text


def test_a_round_ends_though_a_client_answers_without_end() -> None:
    class Repeating(Endless):
        """Answers every step with the features of the first."""

        kept: Features | None = None

        def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
            replies = super().exchange(requests, deadline_s)
            asked, got = requests.get("c"), replies.get("c")
            if isinstance(got, Features):
                self.kept = got
            if isinstance(asked, Step) and self.kept is not None:
                replies["c"] = replace(self.kept, step=asked.step)
            return replies

    world = World(
        supersfl(),
        settings=RoundSettings(steps_deadline_s=0.3),
        transport=lambda clients: Repeating(clients, lambda _name, _request, reply: reply),
    )
    [result] = world.run(1)
    assert result.participants == ("a", "b", "d")
    assert not result.missed_steps


@pytest.mark.parametrize("kind", [Ready, Features, Update])
def test_a_reply_of_another_round_or_kind_is_none(kind: type[Reply]) -> None:
    def meddle(name: str, request: Request, reply: Reply) -> Reply:
        if name != "c" or not isinstance(reply, kind):
            return reply
        return replace(reply, round=reply.round + 1)

    world = World(splitfed_v1(), transport=lambda clients: Meddler(LocalTransport(clients), meddle))
    [result] = world.run(1)
    assert result.missing == ("c",)
    assert_same(world.state.read(), World(splitfed_v1(), "abd").trained(1))


# bytes


@pytest.mark.parametrize(
    ("codec", "size", "extra"), [("fp32", 4, 0), ("fp16", 2, 0), ("int8", 1, 8)]
)
def test_bytes_are_counted_by_kind_by_hand(codec: Codec, size: int, extra: int) -> None:
    # a: 9 samples at depth 1, 8 channels of 8x8; its prefix has 80 weights (8 * 3*3 + 8)
    # b: 4 samples at depth 3, 32 channels of 4x4; its prefix has 5,888 (docs/methods.md)
    [result] = World(splitfed_v2(), "ab", codec=codec).run(1)
    elements = 9 * 8 * 8 * 8 + 4 * 32 * 4 * 4
    assert result.bytes_by_kind == {
        "down weights": 4 * (80 + 5888),
        "up features": size * elements + extra * 13,
        "up labels": 8 * 13,
        "down gradients": 4 * elements,
        "up weights": 4 * (80 + 5888),
    }
    assert result.bytes_down == 4 * (80 + 5888) + 4 * elements
    assert result.bytes_up == size * elements + extra * 13 + 8 * 13 + 4 * (80 + 5888)


def test_fedavg_sends_weights_and_nothing_else() -> None:
    [result] = World(fedavg(), "ab").run(1)
    parameters = sum(t.numel() for n, t in World(fedavg(), "a").before.items() if "exit" not in n)
    assert result.bytes_by_kind == {
        "down weights": 2 * 4 * parameters,
        "up weights": 2 * 4 * parameters,
    }


# settings


@pytest.mark.parametrize("name", ["participation", "availability", "quorum"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_shares_outside_0_to_1_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=name):
        RoundSettings(**{name: value})  # type: ignore[arg-type]  # a share, by name


def test_a_server_step_without_labels_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs labels"):
        World(replace(splitfed_v1(), labels="private"))


def test_one_seed_gives_one_result_and_another_seed_another() -> None:
    one, same = World(supersfl()).trained(), World(supersfl()).trained()
    assert_same(one, same)
    assert differences(World(supersfl(), seed=1).trained(), one)
