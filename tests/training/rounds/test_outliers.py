"""Outliers in a server step: by hand, by attack, and none where no client is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_sdk.errors import FrameError
from edge_sdk.nets import build
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Reply,
    Request,
    StartRound,
    Update,
    Weights,
)
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.core.weighted_mean import Contributions
from server.training.methods.steps import ClientBatch, concatenated, shared
from server.training.methods.supersfl import supersfl
from server.training.recipe.recipe import read_recipe
from server.training.report.rows import row_of
from server.training.rounds.buffered import BufferedLoop
from server.training.rounds.loop import RoundLoop
from server.training.rounds.outliers import ROUNDS_REMEMBERED, forget, outliers
from server.training.rounds.round import RoundResult, RoundSettings
from server.training.rounds.transport import LocalTransport
from server.training.rounds.workers import ThreadedWorkers
from server.training.run.checkpoint import read_checkpoint, save_checkpoint
from server.training.run.run import Simulation
from server.training.simulation.build import build_simulation

CLASSES = 3
SHAPES = {1: (8, 8, 8), 2: (16, 4, 4), 3: (32, 4, 4)}
BAD = {"client-2", "client-7"}
CLIP = 3.0  # features may be twice that many times as large


def state(backbone: str = "tiny") -> ServerState:
    net = build(backbone, classes=CLASSES, seed=0)
    return ServerState(net, Training(0.1, 8, momentum=0.9))


def batch_of(z: Tensor, labels: Tensor | None = None, depth: int = 2) -> ClientBatch:
    return ClientBatch(depth, Features(1, 0, z, labels, None))


def flat(size: float, depth: int = 2) -> ClientBatch:
    """Features that are all `size`, so that is how large they are."""
    return batch_of(torch.full((4, *SHAPES[depth]), size), depth=depth)


def answered(server: ServerState, samples: int = 18) -> tuple[Tensor, Tensor]:
    """Features, and what the server answers to them: every class as often, one after another."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(40 * samples, *server.net.shape_at(2), generator=generator)
    suffix = server.net.suffix(2)
    suffix.eval()
    with torch.no_grad():
        suffix.classifier.bias.sub_(suffix(z).mean(0))  # no class is preferred
        answers = suffix(z).argmax(1)
    suffix.train()
    share = samples // CLASSES
    rows = torch.cat([(answers == c).nonzero().squeeze(1)[:share] for c in range(CLASSES)])
    assert torch.equal(answers[rows].bincount(), torch.full((CLASSES,), share))
    return z[rows], answers[rows]


def find(server: ServerState, fleet: Mapping[str, ClientBatch], number: int = 1) -> dict[str, str]:
    return outliers(server, fleet, RoundView(number), CLIP)


# size


def test_features_are_measured_by_the_median_s() -> None:
    fleet = {"a": flat(1.0), "b": flat(-1.1), "c": flat(0.9), "d": flat(-6.0)}
    assert find(state(), fleet) == {}
    found = find(state(), fleet | {"d": flat(-7.0)})
    assert found == {"d": "features 7 times as large as the median's"}


def test_a_client_alone_at_its_depth_is_measured_by_what_becomes_of_the_others() -> None:
    server = state()
    shallow = {name: batch_of(torch.randn(4, *SHAPES[1]), depth=1) for name in "abc"}
    with torch.no_grad():
        like_theirs = server.net.segment(1, 3)(shallow["a"].features.features)
    for times, stands_out in ((1.0, False), (5.0, False), (9.0, True), (-9.0, True)):
        deep = batch_of(times * like_theirs, depth=3)
        assert ("deep" in find(server, shallow | {"deep": deep})) == stands_out, times


def test_a_second_view_is_measured_where_it_enters() -> None:
    def with_view(size: float) -> ClientBatch:
        view = torch.full((4, *SHAPES[1]), size)
        return ClientBatch(2, replace(flat(1.0).features, view=view, entry=1))

    fleet = {name: with_view(2.0) for name in "abc"}
    assert find(state(), fleet | {"d": with_view(-30.0)}) == {
        "d": "features 15 times as large as the median's"
    }
    assert find(state(), fleet | {"d": with_view(4.0)}) == {}


def test_a_second_view_at_the_cut_hides_no_features() -> None:
    def with_view(size: float, view: float) -> ClientBatch:
        other = torch.full((4, *SHAPES[2]), view)
        return ClientBatch(2, replace(flat(size).features, view=other, entry=2))

    fleet = {name: with_view(1.0, 1.0) for name in "abc"}
    for bad in (with_view(1000.0, 1.0), with_view(1.0, 1000.0)):
        assert find(state(), fleet | {"d": bad}) == {
            "d": "features 1e+03 times as large as the median's"
        }


def test_half_of_those_known_are_no_outliers() -> None:
    few = {name: flat(1.0) for name in "abcd"} | {name: flat(9.0) for name in "xyz"}
    assert find(state(), few).keys() == set("xyz")
    del few["d"]
    assert find(state(), few) == {}
    assert find(state(), {"a": flat(1.0), "x": flat(9.0)}) == {}
    server = state()
    for name, each in few.items():  # nor where they come one at a time
        found = find(server, {name: each})
        assert (name in found) == (name in "xy")  # two of five; three of six
    assert find(server, {"x": flat(9.0)}) == {}


def test_a_client_that_left_or_was_absent_for_long_is_no_measure() -> None:
    server, names = state(), [f"client-{i}" for i in range(10)]
    z, answers = answered(server)
    find(server, {name: batch_of(z, answers) for name in names})
    everything = dict(server.seen)
    forget(server, names, 1)
    assert server.seen == everything
    forget(server, names[:4], 1)
    assert {key.partition("/")[2] for key in server.seen} == set(names[:4])
    find(server, {names[0]: batch_of(z, answers)}, 2)
    forget(server, names, 2)
    kept = {f"{kind}/{names[0]}" for kind in ("round", "sizes", "sent", "labels")}
    assert server.seen.keys() == kept


def test_clients_that_come_one_at_a_time_are_measured_by_those_before() -> None:
    server = state()
    assert find(server, {"a": flat(1.0)}) == {}
    assert find(server, {"b": flat(1.5)}) == {}
    assert find(server, {"c": flat(10.0)}) != {}
    assert find(server, {"a": flat(2.0)}) == {}  # in the same round it may have grown


def test_dead_features_are_no_measure() -> None:
    fleet = {name: flat(0.0) for name in "abc"}
    assert find(state(), fleet | {"d": flat(1.0)}) == {}


# labels


def test_labels_that_contradict_the_others_are_found() -> None:
    server = state()
    z, answers = answered(server)
    fleet = {name: batch_of(z, answers) for name in "abc"}
    for number in (1, 2):
        found = find(server, fleet | {"d": batch_of(z, (answers + 1) % CLASSES)}, number)
    assert found == {
        "d": "the server's answers are 0% of its labels, and 100% of the others' of these classes"
    }


def test_half_of_the_others_agreement_is_enough_by_hand() -> None:
    server = state()
    z, answers = answered(server, 24)  # eight of each class
    fleet = {name: batch_of(z, answers) for name in "abcd"}
    changed = torch.arange(24) % 8 < 4
    half = torch.where(changed, (answers + 1) % CLASSES, answers)
    # each class: four of its own and four of the class before; the others' are met in full
    assert find(server, fleet | {"e": batch_of(z, half)}) == {}
    most = torch.where(torch.arange(24) % 8 < 5, (answers + 1) % CLASSES, answers)
    # 3 of 8; the record of 24 before fades to 24 * (1 - 24/64) = 15: (7.5 + 9) / (15 + 24)
    found = find(server, fleet | {"e": batch_of(z, most)}, 2)
    assert list(found) == ["e"]
    assert "42% of its labels" in found["e"]


def test_labels_are_not_compared_while_the_others_are_not_met() -> None:
    server = state()
    z, answers = answered(server)
    wrong = {name: batch_of(z, (answers + 1) % CLASSES) for name in "abc"}
    assert find(server, wrong | {"d": batch_of(z, (answers + 2) % CLASSES)}) == {}


def test_a_class_that_fewer_than_three_have_is_no_evidence() -> None:
    server = state()
    z, answers = answered(server, 48)
    first, second = answers == 0, answers == 1
    fleet = {name: batch_of(z[first], answers[first]) for name in "abc"}
    # what d has alone is not known to the server yet
    own = batch_of(z[second], torch.full((16,), 2))
    assert find(server, fleet | {"d": own}) == {}
    assert find(server, fleet | {"d": own, "e": own}) == {}


def test_a_handful_of_samples_is_no_evidence() -> None:
    server = state()
    z, answers = answered(server)
    fleet = {name: batch_of(z, answers) for name in "abc"}
    few = batch_of(z[4:9], (answers[4:9] + 1) % CLASSES)
    assert [find(server, fleet | {"d": few}, number) != {} for number in (1, 2, 3, 4)] == [
        # 5, then 5 + 5 * (1 - 5/64) = 9.6, 13.9 and 17.8: 16 say something
        False,
        False,
        False,
        True,
    ]


def test_labels_are_compared_at_the_first_features_of_a_round() -> None:
    server = state()
    z, answers = answered(server, 48)
    fleet = {name: batch_of(z, answers) for name in "abcd"}
    flipped = fleet | {"d": batch_of(z, (answers + 1) % CLASSES)}
    assert find(server, fleet) == {}
    assert find(server, flipped) == {}  # of the same round
    assert list(find(server, flipped, 2)) == ["d"]
    assert list(find(server, fleet, 2)) == ["d"]  # to the round's end


# what is changed by it


@pytest.mark.parametrize("backbone", ["tiny", "har_cnn"])
def test_looking_changes_nothing(backbone: str) -> None:
    server = state(backbone)
    z, answers = answered(server)
    before, drawn = server.read(), torch.get_rng_state()
    find(server, {"a": batch_of(z, answers), "b": batch_of(-20 * z, answers)})
    assert all(torch.equal(tensor, before[name]) for name, tensor in server.read().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(module.training for module in server.trunk.modules())


def velocities(server: ServerState) -> list[Tensor]:
    optimiser = server.suffix(1).optimiser
    assert optimiser is not None
    return [tensor.clone() for tensor in optimiser.velocities.values()]


@pytest.mark.parametrize("step", [shared, concatenated])
def test_a_frozen_suffix_answers_and_stays_as_it_is(step: Callable[..., Any]) -> None:
    server, awake = state("har_cnn"), state("har_cnn")  # with BatchNorm
    z, answers = answered(server)
    answered(awake)
    for each in (server, awake):
        step(each, {"a": batch_of(z, answers)}, RoundView(1))
    before, momentum = server.read(), velocities(server)
    with server.frozen():
        feedback = step(server, {"b": batch_of(-3 * z, answers)}, RoundView(1))
    expected = step(awake, {"b": batch_of(-3 * z, answers)}, RoundView(1))
    assert torch.equal(feedback["b"].gradient, expected["b"].gradient)
    assert all(torch.equal(tensor, before[name]) for name, tensor in server.read().items())
    assert momentum
    assert all(map(torch.equal, velocities(server), momentum))
    step(server, {"a": batch_of(z, answers)}, RoundView(1))
    assert not all(torch.equal(tensor, before[name]) for name, tensor in server.read().items())


# whole rounds


class Attackers:
    """Clients in this process; the bad ones' features are turned over on their way."""

    def __init__(self, clients: Mapping[str, TrainingClient], bad: set[str], factor: float) -> None:
        self._inner = LocalTransport(clients)
        self._bad = bad
        self._factor = factor

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        replies = self._inner.exchange(requests, deadline_s)
        return {name: self._change(name, reply) for name, reply in replies.items()}

    def _change(self, name: str, reply: Reply) -> Reply:
        if name not in self._bad or not isinstance(reply, Features):
            return reply
        return replace(reply, features=reply.features * self._factor)


def world(
    method: str = "supersfl", rounds: int = 1, samples: int = 300, **round_numbers: Any
) -> Simulation:
    recipe = {
        "method": method,
        "data": {"name": "digits", "clients": 10, "partition": "iid", "train_max": samples},
        "train": {
            "backbone": "tiny",
            "rounds": rounds,
            "learning_rate": 0.1,
            "momentum": 0.8,
            "batch": 16,
            "memory_gb": [1, 6],
            **({"iterations": 2} if method == "mergesfl" else {}),
        },
        "round": {"robust": "trimmed", **round_numbers},
    }
    return build_simulation(read_recipe(recipe))


def run(
    here: Simulation, bad: set[str] | None = None, factor: float = -10.0, first: int = 1
) -> list[RoundResult]:
    """Rounds under attack; the bad clients' labels are turned over too."""
    for name in bad or ():
        here.clients[name].y = 9 - here.clients[name].y
    transport = Attackers(here.clients, bad or set(), factor)
    loop = RoundLoop(here.method, here.plans, here.state, transport, here.recipe.round)
    return [loop.run_round(n, 0) for n in range(first, here.recipe.train.rounds + 1)]


def test_without_outliers_these_are_the_plain_rounds_to_the_last_bit() -> None:
    nothing: dict[str, Any] = {"trim": 0.0, "clip_factor": 1e9, "weight_cap": 1e9}
    for method in ("supersfl", "minibatch-sfl", "splitfed-v1"):
        watched = world(method, samples=200, **nothing)
        plain = world(method, samples=200, robust="none")
        found = run(watched)
        run(plain)
        ours, theirs = watched.state.read(), plain.state.read()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert all(not result.suspects for result in found)
        assert watched.state.seen
        assert not plain.state.seen


class Fleet:
    """Ten clients of SuperSFL with images of four kinds, which are soon learnt."""

    def __init__(self, bad: set[str], factor: float) -> None:
        method = supersfl()
        self.clients = {f"client-{i}": TrainingClient(f"client-{i}", *blobs(i)) for i in range(10)}
        for name in bad:
            self.clients[name].y = 3 - self.clients[name].y
        plan = Plan(
            backbone="tiny",
            input_shape=(1, 8, 8),
            classes=4,
            mean=(0.0,),
            std=(1.0,),
            depth=1,
            training=Training(0.05, 8, momentum=0.8),
            part=method.client,
        )
        plans = {name: replace(plan, depth=1 + i % 3) for i, name in enumerate(self.clients)}
        self.state = ServerState(build("tiny", classes=4, seed=0), Training(0.05, 8, momentum=0.8))
        transport = Attackers(self.clients, bad, factor)
        settings = RoundSettings(robust="trimmed")
        self.loop = RoundLoop(method, plans, self.state, transport, settings)

    def run(self, rounds: int) -> list[RoundResult]:
        return [self.loop.run_round(number, 0) for number in range(1, rounds + 1)]

    @property
    def accuracy(self) -> float:
        x, y = blobs(99, 200)
        whole = self.state.whole(2).eval()
        with torch.no_grad():
            right = whole(torch.from_numpy(x)).argmax(1).numpy() == y
        return float(right.mean())


def blobs(seed: int, count: int = 40) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Images that are noise but for one quarter, which says their kind."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 4, count)
    x = generator.normal(size=(count, 1, 8, 8)).astype(np.float32)
    for image, label in zip(x, y, strict=True):
        top, left = 4 * (label // 2), 4 * (label % 2)
        image[0, top : top + 4, left : left + 4] += 1.5
    return x, y


def test_two_of_ten_that_turn_features_and_labels_over_are_found_and_cost_little() -> None:
    """FAULTS row 23."""
    attacked = Fleet(BAD, -10.0)
    found = attacked.run(10)
    assert attacked.accuracy > 0.95  # 24 % where the server's half learns from whatever comes
    for result in found:
        assert result.suspects.keys() >= BAD
        assert all("times as large" in result.suspects[name] for name in BAD)
        assert all(result.weights.get(name, 0) == 0 for name in BAD)  # or it was refused


def test_flipped_labels_alone_are_found_once_the_others_are_known() -> None:
    attacked = Fleet(BAD, 1.0)
    last = attacked.run(8)[-1]
    assert attacked.accuracy > 0.95
    assert {name for name, why in last.suspects.items() if "of its labels" in why} == BAD
    assert all(last.weights[name] == 0 for name in BAD)


def test_clients_that_stay_may_outgrow_those_absent_for_long() -> None:
    here = world("fedavg")
    loop = RoundLoop(here.method, here.plans, here.state, Silent(), here.recipe.round)
    find(here.state, {name: flat(1.0) for name in here.plans})
    stay = list(here.plans)[:4]  # the others are away; they have not left
    grown = {name: flat(8.0) for name in stay}
    for number, expected in ((1 + ROUNDS_REMEMBERED, set(stay)), (2 + ROUNDS_REMEMBERED, set())):
        loop.run_round(number, 0)
        assert find(here.state, grown, number).keys() == expected


class Silent:
    """Devices that are all away."""

    def exchange(self, _requests: Mapping[str, Request], _deadline_s: float) -> dict[str, Reply]:
        return {}


@pytest.mark.parametrize("method", ["supersfl", "splitlpf", "besplit"])
def test_nothing_is_learnt_from_an_outlier_by_weights_or_memory(method: str) -> None:
    here = world(method, samples=200)
    heard: set[str] = set()
    recorded: set[str] = set()

    def weigh(contributions: Contributions, now: RoundView) -> dict[str, float]:
        heard.update(contributions)
        recorded.update(n.removeprefix("new/") for n in now.memory if n.startswith("new/"))
        return here.method.weigh(contributions, now)

    transport = Attackers(here.clients, BAD, -1000.0)
    spied = replace(here.method, weigh=weigh)
    loop = RoundLoop(spied, here.plans, here.state, transport, here.recipe.round)
    result = loop.run_round(1, 0)
    others = here.plans.keys() - BAD
    assert result.suspects.keys() >= BAD
    assert heard == others - result.suspects.keys()
    if method == "besplit":
        assert not recorded & BAD
        assert {n for n in here.state.memory if n.startswith("record/")} == {
            f"record/{name}" for name in heard
        }
    assert sum(result.weights.get(name, 0.0) for name in BAD) == 0.0


@pytest.mark.parametrize("method", ["supersfl", "besplit", "mergesfl"])
def test_a_round_of_outliers_alone_leaves_the_servers_weights(method: str) -> None:
    here = world(method, participation=0.1)
    bad: set[str] = set()
    heard: list[int] = []

    def count(average: Weights, participants: int, _now: RoundView) -> Weights:
        heard.append(participants)
        return average

    transport = Attackers(here.clients, bad, -1000.0)
    counting = replace(here.method, correct=count)
    loop = RoundLoop(counting, here.plans, here.state, transport, here.recipe.round)
    for number in range(1, 6):
        assert not loop.run_round(number, 0).suspects
    bad.update(here.plans)
    before = here.state.read()
    result = loop.run_round(6, 0)
    assert result.merged
    assert result.suspects
    assert result.weights == dict.fromkeys(result.suspects, 0.0)
    assert heard == [1] * 5  # there is no average to correct
    assert all(torch.equal(tensor, before[name]) for name, tensor in here.state.read().items())


class HandsInLate(Attackers):
    """The bad clients' updates, and one other's, are kept back at the round's end."""

    late: Mapping[str, Update] = {}

    def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
        replies = super().exchange(requests, deadline_s)
        if self.late:
            return {}
        held = {*BAD, "client-0"}
        self.late = {n: r for n, r in replies.items() if n in held and isinstance(r, Update)}
        return {name: reply for name, reply in replies.items() if name not in self.late}


def test_a_late_update_of_a_round_in_which_it_stood_out_weighs_nothing() -> None:
    here = world(samples=200, staleness_max=2, quorum=0.1)
    transport = HandsInLate(here.clients, BAD, -10.0)
    loop = RoundLoop(here.method, here.plans, here.state, transport, here.recipe.round)
    assert loop.run_round(1, 0).suspects.keys() >= BAD
    fields, sent = loop.state_dict()

    resumed = RoundLoop(here.method, here.plans, here.state, transport, here.recipe.round)
    resumed.load_state_dict(orjson.loads(orjson.dumps(fields)), sent)
    result = resumed.run_round(2, 0, transport.late)
    assert result.stale == dict.fromkeys(["client-0", *sorted(BAD)], 1)
    assert result.weights["client-0"] > 0
    for name in BAD:
        assert result.weights[name] == 0
        assert result.suspects[name] == "stood out in round 1, of which its update is"
    resumed.run_round(4, 0)
    assert resumed.state_dict()[0] == {}
    with pytest.raises(FrameError, match="outlying"):
        resumed.load_state_dict({"outlying": [3]}, {})


def test_so_it_is_in_buffered_rounds_of_real_devices() -> None:
    here = world("fedavg", samples=200, buffer=1, staleness_max=3)
    how, name = here.recipe.round, "client-0"
    plans = {name: here.plans[name]}
    client = here.clients[name]

    class Begins:
        def exchange(self, requests: Mapping[str, Request], _s: float) -> dict[str, Reply]:
            return {n: client.handle(r) for n, r in requests.items() if isinstance(r, StartRound)}

    for outlying in ([], [[name, 1]]):
        loop = BufferedLoop(
            here.method, plans, here.state, Begins(), how, workers=ThreadedWorkers(), clients=1
        )
        loop.run_round(1, 0)
        update = client.handle(EndRound(1))
        assert isinstance(update, Update)
        fields, sent = loop.state_dict()
        loop.load_state_dict({**fields, "outlying": outlying}, sent)
        assert loop.state_dict()[0].get("outlying", []) == [tuple(each) for each in outlying]
        before = here.state.read()
        result = loop.run_round(2, 0, {name: update})
        after = here.state.read()
        assert result.weights == {name: 0.0 if outlying else 1.0}
        assert all(torch.equal(t, before[k]) for k, t in after.items()) == bool(outlying)


@pytest.mark.parametrize("method", ["harmony", "splitlpf", "besplit", "minibatch-sfl"])
def test_every_method_goes_on_with_the_others(method: str) -> None:
    here = world(method, samples=200, participation=0.6)
    bad = set(list(here.plans)[:3])
    (result,) = run(here, bad)
    assert bad & result.samples.keys() == result.suspects.keys() & bad
    assert not result.missing
    assert not result.refused
    assert "down gradients" in result.bytes_by_kind


def test_a_run_that_goes_on_from_a_checkpoint_ends_in_the_same_weights(tmp_path: Path) -> None:
    whole, half = world(rounds=4, samples=200), world(rounds=2, samples=200)
    run(whole, BAD, factor=1.0)
    rows = [row_of(result, None, "") for result in run(half, BAD, factor=1.0)]
    path = save_checkpoint(tmp_path, half, rows)
    rest = world(rounds=4, samples=200)
    read_checkpoint(path).restore(rest)
    run(rest, BAD, factor=1.0, first=3)
    assert all(torch.equal(t, whole.state.read()[name]) for name, t in rest.state.read().items())
    assert rest.state.seen.keys() == whole.state.seen.keys()
    assert all(torch.equal(t, whole.state.seen[name]) for name, t in rest.state.seen.items())
