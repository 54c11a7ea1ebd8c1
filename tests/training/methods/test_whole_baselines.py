"""FedDyn, FedLC, FedPer and Ditto in the round loop, beside their papers' lines in plain torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError, FrameError
from edge_sdk.nets import build
from edge_sdk.training.formulas.calibration import calibrated_loss, label_margins
from edge_sdk.training.protocol.client_part import ClientPart
from edge_sdk.training.protocol.messages import Reply, Request, StartRound, Update
from edge_sdk.training.protocol.weights import read_weights
from server.training.core.round_view import RoundView
from server.training.core.weighted_mean import equal
from server.training.methods.compose import combine
from server.training.methods.fedavg import fedavg, fedlc, fedprox
from server.training.methods.feddyn import corrected, feddyn
from server.training.methods.method import Method
from server.training.methods.personal import ditto, fedper
from server.training.recipe.recipe import read_recipe
from server.training.report.evaluate import Evaluator
from server.training.run.checkpoint import latest_checkpoint
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds, simulate
from tests.training.worlds import CLASSES, SIZES, World, assert_same, differences, meddling

RATE, EPOCHS, ROUNDS = 0.05, 2, 3
Labels = Mapping[str, Any]


def world_of(method: Method, names: str = "abc", **more: Any) -> World:
    """Clients whose every batch is all their samples, so that no order counts."""
    return World(method, names, batch=max(SIZES.values()), epochs=EPOCHS, **more)


def network() -> nn.Module:
    return build("tiny", classes=CLASSES, seed=0).segment(0, None)


def data_of(world: World, name: str) -> tuple[Tensor, Tensor]:
    client = world.clients[name]
    return torch.from_numpy(client.x), torch.from_numpy(client.y)


def descend(net: nn.Module, objective: Callable[[], Tensor]) -> None:
    """The epochs of a round by torch's own optimiser."""
    optimiser = torch.optim.SGD(net.parameters(), RATE)
    for _ in range(EPOCHS):
        optimiser.zero_grad()
        objective().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimiser.step()


def assert_close(net: nn.Module, weights: Mapping[str, Tensor], start: str = "") -> None:
    for name, tensor in read_weights(net).items():
        torch.testing.assert_close(weights[start + name], tensor, rtol=1e-4, atol=1e-6)


def plain_objective(net: nn.Module, data: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
    return lambda: nn.functional.cross_entropy(net(data[0]), data[1])


def dynamic_objective(
    net: nn.Module,
    data: tuple[Tensor, Tensor],
    term: Sequence[Tensor],
    start: Sequence[Tensor],
    alpha: float,
) -> Callable[[], Tensor]:
    """Cross-entropy - <term, w> + alpha/2 * |w - start|^2."""

    def objective() -> Tensor:
        loss = nn.functional.cross_entropy(net(data[0]), data[1])
        for p, g, before in zip(net.parameters(), term, start, strict=True):
            loss = loss - (g * p).sum() + alpha / 2 * ((p - before) ** 2).sum()
        return loss

    return objective


# FedProx


def test_fedprox_is_its_algorithm_in_plain_torch() -> None:
    mu, names = 0.5, "ab"
    world = world_of(fedprox(mu), names)
    world.run(ROUNDS)

    average = network()
    total = sum(SIZES[name] for name in names)
    for _ in range(ROUNDS):
        start = [p.detach().clone() for p in average.parameters()]
        none = [torch.zeros_like(p) for p in start]
        mean = [torch.zeros_like(p) for p in start]
        for name in names:
            net = deepcopy(average)
            # cross-entropy + mu/2 * |w - w_start|^2
            descend(net, dynamic_objective(net, data_of(world, name), none, start, mu))
            for place, p in enumerate(net.parameters()):
                mean[place] += p.detach() * (SIZES[name] / total)
        for parameter, tensor in zip(average.parameters(), mean, strict=True):
            parameter.data.copy_(tensor)
    assert_close(average, world.state.read())


# FedDyn


def test_feddyn_without_a_term_is_fedavg_with_equal_weights() -> None:
    plain = replace(fedavg(), weigh=equal)
    assert_same(World(feddyn(0.0)).trained(), World(plain).trained())
    assert differences(World(feddyn(0.1)).trained(), World(plain).trained())


def test_feddyn_is_its_algorithm_in_plain_torch() -> None:
    alpha, names = 0.5, "abc"
    world = world_of(feddyn(alpha), names)
    world.run(ROUNDS)

    average = network()
    term = {name: [torch.zeros_like(p) for p in average.parameters()] for name in names}
    h = [torch.zeros_like(p) for p in average.parameters()]
    for _ in range(ROUNDS):
        start = [p.detach().clone() for p in average.parameters()]
        ended = []
        for name in names:
            net = deepcopy(average)
            objective = dynamic_objective(net, data_of(world, name), term[name], start, alpha)
            descend(net, objective)
            ended.append([p.detach() for p in net.parameters()])
            moves = [p - before for p, before in zip(ended[-1], start, strict=True)]
            term[name] = [g - alpha * move for g, move in zip(term[name], moves, strict=True)]
        for place, parameter in enumerate(average.parameters()):
            moved = torch.stack([each[place] - start[place] for each in ended])
            h[place] = h[place] - alpha * moved.sum(0) / len(names)
            mean = torch.stack([each[place] for each in ended]).mean(0)
            parameter.data.copy_(mean - h[place] / alpha)
    assert_close(average, world.state.read())
    for name in names:
        kept = world.clients[name].personal
        for (key, _), g in zip(average.named_parameters(), term[name], strict=True):
            torch.testing.assert_close(kept[f"dynamic.{key}"], g, rtol=1e-4, atol=1e-6)


def test_feddyn_s_correction_by_hand() -> None:
    # alpha 0.5; one of two clients takes part and moves the weight from 1 to 2:
    # h = 0 - 0.5 * 1/2 * (2 - 1) = -0.25;    theta = 2 + 0.25 / 0.5 = 2.5
    view = RoundView(1, plans={"a": None, "b": None}, sent={"w": torch.tensor([1.0])})  # type: ignore[dict-item]  # plans are counted
    after = corrected({"w": torch.tensor([2.0])}, 1, view, alpha=0.5)
    assert after["w"].item() == 2.5
    # both take part and their mean is 2: h = -0.25 - 0.5 * (2 - 2.5) = 0;    theta = 2
    then = replace(view, sent=after)
    assert corrected({"w": torch.tensor([2.0])}, 2, then, alpha=0.5)["w"].item() == 2.0


def after_rounds(force: float, alpha: float) -> float:
    """Distance from the minimum of w^2 / 2 after 60 rounds from 1; FedAvg for alpha 0.

    The client's lines are plain numbers: w - force * (w - g), one step a round.
    """
    memory: dict[str, Any] = {}
    w, g = torch.tensor([1.0], dtype=torch.float64), 0.0
    for number in range(1, 61):
        view = RoundView(number, plans={"a": None}, sent={"w": w}, memory=memory)  # type: ignore[dict-item]  # plans are counted
        ended = w - force * (w - g)
        g -= alpha * float(ended - w)
        w = corrected({"w": ended}, 1, view, alpha=alpha)["w"] if alpha else ended
    return abs(float(w))


def test_feddyn_bears_two_thirds_of_the_movement_that_fedavg_bears() -> None:
    # (w, sum of movements) goes by [[1 - 2 K, 1 - 2 Ka], [-K, 1 - Ka]]: its eigenvalues lie in the
    # unit circle while K (3 + 2 a) < 4; FedAvg's 1 - K does while K < 2
    alpha = 0.01
    for force in (0.5, 1.0, 1.3, 1.36, 1.9):
        matrix = [[1 - 2 * force, 1 - 2 * force * alpha], [-force, 1 - force * alpha]]
        inside = bool((torch.linalg.eigvals(torch.tensor(matrix)).abs() < 1).all())
        assert inside == (force * (3 + 2 * alpha) < 4)
        assert (after_rounds(force, alpha) < 0.05) == inside
        assert after_rounds(force, 0.0) < 0.05


def test_clients_that_diverged_keep_their_terms_and_take_part_again() -> None:
    world = World(feddyn(0.5), "ab")
    world.run(1)
    trained = deepcopy(world.state.net.state_dict())
    before = {name: dict(client.personal) for name, client in world.clients.items()}
    huge = {n: 1e25 * t if n.startswith("stages.") else t for n, t in trained.items()}
    world.state.net.load_state_dict(huge)
    assert not world.loop.run_round(2, 0).merged
    for name, client in world.clients.items():
        assert_same(dict(client.personal), before[name])
    world.state.net.load_state_dict(trained)
    assert world.loop.run_round(3, 0).merged


def test_feddyn_sends_no_more_than_fedavg() -> None:
    sent: list[Update] = []

    def keep(_name: str, _request: Request, reply: Reply) -> Reply:
        if isinstance(reply, Update):
            sent.append(reply)
        return reply

    world = World(feddyn(), "ab", transport=meddling(keep))
    world.run(1)
    assert [set(update.weights) for update in sent] == [set(network_names())] * 2


def network_names() -> list[str]:
    return list(read_weights(network()))


def test_a_linear_term_of_another_network_is_refused() -> None:
    world = World(feddyn(), "a")
    world.clients["a"].personal = {"dynamic.head.weight": torch.zeros(3)}
    plan = world.plans["a"]
    weights = world.state.weights(plan.depth, whole=True, exit_head=False)
    with pytest.raises(FrameError, match="unknown"):
        world.clients["a"].handle(StartRound(1, plan, weights))


# FedLC


def test_margins_and_loss_by_hand() -> None:
    # 16^(-1/4) = 1/2 and 1^(-1/4) = 1; a class without samples counts 1e-8: 10^(8/4) = 100
    margins = label_margins(torch.tensor([16, 1, 0]), 1.0)
    torch.testing.assert_close(margins, torch.tensor([0.5, 1.0, 100.0]))
    # s = 0, y = 0: -ln(e^-0.5 / (e^-0.5 + e^-1)) = ln(1 + e^-0.5)
    loss = calibrated_loss(torch.zeros(1, 3), torch.tensor([0]), margins)
    assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.5)))


def test_fedlc_without_calibration_is_fedavg() -> None:
    assert_same(World(fedlc(0.0)).trained(), World(fedavg()).trained())
    assert differences(World(fedlc(1.0)).trained(), World(fedavg()).trained())


def test_fedlc_trains_by_torch_s_loss_of_calibrated_logits() -> None:
    labels = [0, 0, 0, 1, 1, 1, 1, 1, 0]
    world = world_of(fedlc(0.5), "a", labels={"a": labels})
    world.run(1)
    margins = 0.5 * torch.tensor([4.0, 5.0, 1e-8]) ** -0.25
    net, (x, y) = network(), data_of(world, "a")
    descend(net, lambda: nn.CrossEntropyLoss()(net(x) - margins, y))
    assert_close(net, world.state.read())


# FedPer


def head_names() -> set[str]:
    return {name for name in network_names() if name.startswith("head.")}


def test_a_client_alone_trains_by_fedper_as_by_fedavg() -> None:
    world, plain = World(fedper(), "a"), World(fedavg(), "a")
    world.run(ROUNDS)
    plain.run(ROUNDS)
    got, expected = world.state.read(), plain.state.read()
    assert_same(
        {k: v for k, v in got.items() if k not in head_names()},
        {k: v for k, v in expected.items() if k not in head_names()},
    )
    own = {
        f"head.{last()}.{k}": world.clients["a"].personal[f"back.{k}"] for k in ("weight", "bias")
    }
    assert_same(own, {name: expected[name] for name in own})


def last() -> str:
    return next(iter(head_names())).split(".")[1]


def test_no_last_layer_travels_with_fedper() -> None:
    messages: list[Update | StartRound] = []

    def watch(_name: str, request: Request, reply: Reply) -> Reply:
        messages.extend(each for each in (request, reply) if isinstance(each, Update | StartRound))
        return reply

    world = World(fedper(), "abc", transport=meddling(watch))
    after = world.trained()
    assert len(messages) == 2 * 2 * 3
    for message in messages:
        assert not head_names() & message.weights.keys()
    assert not head_names() & set(differences(after, world.before))


def test_fedper_is_its_algorithm_in_plain_torch() -> None:
    names = "abc"
    world = world_of(fedper(), names)
    world.run(ROUNDS)

    base = network()
    nets = {name: deepcopy(base) for name in names}
    total = sum(SIZES[name] for name in names)
    for _ in range(ROUNDS):
        for name, net in nets.items():
            shared = {k: v for k, v in base.state_dict().items() if not k.startswith("head.")}
            net.load_state_dict(shared, strict=False)
            descend(net, plain_objective(net, data_of(world, name)))
        for key, tensor in base.state_dict().items():
            each = [nets[name].state_dict()[key] * (SIZES[name] / total) for name in names]
            tensor.copy_(torch.stack(each).sum(0))
    got = world.state.read()
    for key, tensor in read_weights(base).items():
        if key not in head_names():
            torch.testing.assert_close(got[key], tensor, rtol=1e-4, atol=1e-6)
    for name, net in nets.items():
        for kind in ("weight", "bias"):
            own = world.clients[name].personal[f"back.{kind}"]
            expected = net.state_dict()[f"head.{last()}.{kind}"]
            torch.testing.assert_close(own, expected, rtol=1e-4, atol=1e-6)


# Ditto


@pytest.mark.parametrize("strength", [0.0, 0.5])
def test_ditto_s_average_is_fedavg_s(strength: float) -> None:
    assert_same(World(ditto(strength)).trained(), World(fedavg()).trained())


def test_without_a_pull_the_network_of_a_client_alone_is_the_average() -> None:
    world = World(ditto(0.0), "a")
    world.run(ROUNDS)
    own = {name: world.clients["a"].personal[f"own.{name}"] for name in network_names()}
    trained = world.state.read()
    assert_same(own, {name: trained[name] for name in own})


def test_ditto_is_its_algorithm_in_plain_torch() -> None:
    strength, names = 0.5, "ab"
    world = world_of(ditto(strength), names)
    world.run(ROUNDS)

    average = network()
    own = {name: deepcopy(average) for name in names}
    total = sum(SIZES[name] for name in names)
    for _ in range(ROUNDS):
        start = [p.detach().clone() for p in average.parameters()]
        mean = [torch.zeros_like(p) for p in start]
        for name in names:
            x, y = data_of(world, name)
            net, v = deepcopy(average), own[name]
            plain = [torch.zeros_like(w) for w in start]
            personal = dynamic_objective(v, (x, y), plain, start, strength)
            descend(net, plain_objective(net, (x, y)))
            descend(v, personal)
            for place, p in enumerate(net.parameters()):
                mean[place] += p.detach() * (SIZES[name] / total)
        for parameter, tensor in zip(average.parameters(), mean, strict=True):
            parameter.data.copy_(tensor)
    assert_close(average, world.state.read())
    for name in names:
        assert_close(own[name], world.clients[name].personal, "own.")


# A run as a whole


def recipe_of(method: str, rounds: int = 2, **changes: Any) -> Any:
    return read_recipe(
        {
            "method": method,
            "data": {
                "name": "digits",
                "clients": 3,
                "train_max": 150,
                "test_max": 60,
                "partition": "dirichlet",
                "numbers": {"concentration": 0.5},
            },
            "train": {
                "backbone": "tiny",
                "rounds": rounds,
                "learning_rate": 0.1,
                "batch": 16,
                **changes,
            },
        }
    )


@pytest.mark.parametrize("method", ["feddyn", "ditto"])
def test_a_stopped_run_ends_as_one_that_was_not(method: str, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    simulate(recipe_of(method, 2), whole)
    simulate(recipe_of(method, 1), parts)
    simulate(recipe_of(method, 2), parts, resume=True)
    one, other = latest_checkpoint(whole), latest_checkpoint(parts)
    assert one is not None
    assert other is not None
    assert_same(dict(other.tensors), dict(one.tensors))
    marks = {"feddyn": "client-0/dynamic.", "ditto": "client-0/own."}
    assert any(marks[method] in name for name in one.tensors)


@pytest.mark.parametrize(
    ("method", "path"), [("fedper", "backs"), ("ditto", "own"), ("feddyn", "full")]
)
def test_clients_are_tested_with_what_is_their_own(method: str, path: str) -> None:
    run = build_simulation(recipe_of(method, 1))
    for _ in run_rounds(run, []):
        pass
    evaluator = Evaluator(run)
    assert evaluator.answers(supervised=False) == path
    for name, client in run.clients.items():
        net = deepcopy(run.state.net.segment(0, None))
        own = {k.removeprefix("own."): t for k, t in client.personal.items() if "own." in k}
        mark = net.classifier_prefix
        own |= {
            mark + k.removeprefix("back."): t for k, t in client.personal.items() if "back." in k
        }
        net.load_state_dict(net.state_dict() | own)
        net.eval()
        test = evaluator.tests[name]
        with torch.no_grad():
            labels = net(torch.from_numpy(run.x_test[test.id])).argmax(1).numpy()
        score = next(s for s in evaluator.clients(supervised=False) if s.client == name)
        assert score.inside.correct == (labels == run.y_test[test.id]).sum()


@pytest.mark.parametrize(
    "given",
    [
        {"dynamic": 0.5},
        {"calibration": 0.5},
        {"own_network": 0.5},
        {"own_network": 0.0},  # a network without a pull is one all the same
        {"own_head": True},
    ],
)
def test_what_a_whole_network_asks_is_refused_of_a_part(given: dict[str, Any]) -> None:
    (part,) = given
    with pytest.raises(ConfigurationError, match=f"{part}: expected none where the client trains"):
        ClientPart(**given)


def test_synthetic_updates_of_a_network_without_its_last_layer_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="stays on its clients: expected another codec"):
        recipe_of("fedper", update_codec="synthetic")


def feddyn_of(alpha: float) -> dict[str, Any]:
    return {"method": "feddyn", "numbers": {"alpha": alpha}}


@pytest.mark.parametrize(
    ("parts", "terms"),
    [
        ({"client": "feddyn"}, "clients by 0.01, the average by 0"),
        ({"weigh": "feddyn"}, "clients by 0, the average by 0.01"),
        (
            {"client": feddyn_of(0.1), "weigh": feddyn_of(0.01)},
            "clients by 0.1, the average by 0.01",
        ),
    ],
)
def test_half_of_feddyn_is_refused(parts: dict[str, Any], terms: str) -> None:
    given = recipe_of("fedavg").to_dict() | {"parts": parts}
    with pytest.raises(ConfigurationError, match="the weigh part of one method") as refused:
        read_recipe(given)
    assert f"({terms})" in str(refused.value)


def test_both_halves_of_feddyn_make_it() -> None:
    parts = {"client": feddyn_of(0.1), "weigh": feddyn_of(0.1)}
    given = recipe_of("fedavg").to_dict() | {"parts": parts}
    assert_same(World(read_recipe(given).built_method).trained(), World(feddyn(0.1)).trained())


def test_an_own_correction_of_the_average_takes_parts_of_others() -> None:
    def halved(average: Mapping[str, Tensor], _participants: int, _now: RoundView) -> Any:
        return {name: tensor / 2 for name, tensor in average.items()}

    own = replace(fedavg(), name="own", correct=halved)
    assert combine(own, {"client": fedlc()}).correct is halved
    assert combine(fedlc(), {"weigh": own}).correct is halved


@pytest.mark.parametrize(
    "late", [{"buffer": 2}, {"buffer": 2, "staleness_max": 0}, {"staleness_max": 3}]
)
def test_updates_that_count_late_are_refused_with_feddyn(late: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match=r"feddyn's clients commit their term.*no buffer"):
        build_simulation(read_recipe(recipe_of("feddyn").to_dict() | {"round": late}))
    build_simulation(read_recipe(recipe_of("fedlc").to_dict() | {"round": late}))
