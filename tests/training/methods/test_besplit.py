"""BESplit's server: its step, the samples that move, the gradients that come back, its memory."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import build
from edge_sdk.training.formulas.distillation import kd_global
from edge_sdk.training.formulas.evidence import evidential_losses
from edge_sdk.training.protocol.messages import Features, Feedback, Update
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights
from server.training.core.round_view import RoundView
from server.training.core.server_state import ServerState
from server.training.core.weighted_mean import Contribution
from server.training.methods.besplit import besplit
from server.training.methods.fedavg import fedavg
from server.training.methods.formulas.client_records import evidential_weights, record_of, updated
from server.training.methods.steps import ClientBatch

RATE, CLASSES = 0.1, 3
# P_g is (1/3, 1/3, 1/3); a and b lie one-sided by as much, the others close to it
LABELS = {
    "a": [0, 0, 0, 0, 0, 0],
    "b": [1, 1, 1, 2, 2, 2],
    "c": [0, 0, 1, 1, 2, 2],
    "d": [0, 0, 1, 1, 2, 2],
    "e": [0, 0, 1, 1, 2, 2],
}


def batch_of(labels: list[int], seed: int = 0, shape: tuple[int, ...] = (16, 4, 4)) -> ClientBatch:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(len(labels), *shape, generator=generator)
    return ClientBatch(2, Features(1, 0, z, torch.tensor(labels), None))


def state(backbone: str = "tiny", momentum: float = 0.0, clip: float | None = None) -> ServerState:
    shape = {"tiny": (1, 8, 8), "resnet18": (1, 16, 16)}[backbone]
    net = build(backbone, classes=CLASSES, input_shape=shape, seed=0)
    return ServerState(net, Training(RATE, 8, momentum=momentum), clip=clip)


def plan(seed: int = 7) -> Plan:
    return Plan("tiny", (1, 8, 8), CLASSES, (0.0,), (1.0,), 2, Training(RATE, 6), seed=seed)


def view(memory: dict[str, Tensor] | None = None, number: int = 5, step: int = 0) -> RoundView:
    plans = dict.fromkeys([*LABELS, "x", "y"], plan())
    return RoundView(number, step, plans, memory={} if memory is None else memory)


def remembered(counts: Mapping[str, list[float]], seen: int = 4) -> dict[str, Tensor]:
    """A memory in which every client has that many samples of each class and some evidence."""
    memory = {}
    for client, count in counts.items():
        m = torch.tensor(count, dtype=torch.float64)[:, None]
        evidence = torch.full((CLASSES, CLASSES), 1.0, dtype=torch.float64) * m
        memory[f"record/{client}"] = torch.cat([evidence, m, m * 0.5, m * 0.5], dim=1)
        memory[f"round/{client}"] = torch.tensor(seen)
    return memory


def skewed(seen: int = 4) -> dict[str, Tensor]:
    counts = {c: [float(labels.count(n)) for n in range(CLASSES)] for c, labels in LABELS.items()}
    return remembered(counts, seen)


def arrivals_of(*clients: str) -> dict[str, ClientBatch]:
    return {c: batch_of(LABELS[c], seed=ord(c)) for c in clients}


def taught(
    server: ServerState, client_batches: Mapping[str, ClientBatch], now: RoundView, **numbers: Any
) -> dict[str, Feedback]:
    step = besplit(**numbers).server_step
    assert step is not None
    answers = step(server, client_batches, now)
    assert isinstance(answers, dict)
    return answers


def contribution(samples: int = 10, number: int = 5) -> Contribution:
    return Contribution(2, Update(number, {}, samples, 1.0, 1, 1))


def test_without_records_each_batch_steps_its_own_copy_on_the_evidential_loss() -> None:
    server, pair = state(), arrivals_of("a", "c")
    twin = deepcopy(server.net)
    got = taught(server, pair, view(number=5))
    for client, one in pair.items():
        z = one.features.features.clone().requires_grad_()
        suffix = deepcopy(twin).suffix(2)
        logits = suffix(z)
        loss = evidential_losses(logits, one.labels, 0.005).mean()  # round 5 of T = 10
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        assert z.grad is not None
        torch.testing.assert_close(got[client].gradient, z.grad, rtol=1e-6, atol=1e-8)
        assert got[client].loss == pytest.approx(float(loss.detach()), rel=1e-6)
        for after, before in zip(
            server.copies[client].module.parameters(), suffix.parameters(), strict=True
        ):
            assert before.grad is not None
            expected = before.detach() - RATE * before.grad
            torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-7)
    assert list(got) == ["a", "c"]


def test_over_represented_samples_of_a_pair_change_sides() -> None:
    """a holds class 0 alone and b the other two; P_g is (.4, .3, .3); no weight is known.

    From a: min(1 - .4, .4 - 0) / 1 of 6 is 2.4: two. From b, of each of classes 1 and 2:
    min(.5 - .3, .3 - 0) / .5 of 3 is 1.2: one.
    """
    moved = labels_moved(view(skewed()))
    assert moved == {"a": [0, 0], "b": [1, 2], "c": []}


def test_the_client_ahead_decides_how_much() -> None:
    # a comes down to P_g: .6 of 6 is 3.6; b's classes come up to it in a: .3 / .5 of 3 is 1.8
    ahead = {"weight/a": torch.tensor(0.3), "weight/b": torch.tensor(0.1)}
    assert labels_moved(view(skewed() | ahead)) == {"a": [0] * 4, "b": [1, 1, 2, 2], "c": []}
    # the other way round: a's class comes up in b, .4 of 6; b's come down, .2 / .5 of 3
    behind = {"weight/a": torch.tensor(0.1), "weight/b": torch.tensor(0.3)}
    assert labels_moved(view(skewed() | behind)) == {"a": [0, 0], "b": [1, 2], "c": []}


@pytest.mark.parametrize(
    "memory",
    [
        {},
        remembered({c: [2.0, 2.0, 2.0] for c in LABELS}),  # all alike
        remembered({c: [6.0, 1.0, 0.0] for c in LABELS}),  # all biased the same way
        remembered({"a": [6.0, 0.0, 0.0]}),  # one client only
        {k: t for k, t in skewed().items() if not k.endswith("/b")},  # the partner is not known
    ],
)
def test_without_a_partner_nothing_moves(memory: dict[str, Tensor]) -> None:
    assert labels_moved(view(memory)) == {"a": [], "b": [], "c": []}


def test_no_client_waits_for_a_partner_that_is_absent() -> None:
    server, some = state(), arrivals_of("a", "c")
    got = taught(server, some, view(skewed()))
    apart = taught(state(), some, view(skewed()), ablation="no_bcc")
    for client in some:
        assert torch.equal(got[client].gradient, apart[client].gradient)


def test_partners_have_the_same_cut() -> None:
    everyone = arrivals_of("a", "c")
    everyone["b"] = ClientBatch(3, batch_of(LABELS["b"], shape=(32, 4, 4)).features)
    got = taught(state(), everyone, view(skewed()))
    apart = taught(state(), everyone, view(skewed()), ablation="no_bcc")
    for client in everyone:
        assert torch.equal(got[client].gradient, apart[client].gradient)


def labels_moved(now: RoundView) -> dict[str, list[int]]:
    """Labels of the samples that went through another's copy than their own client's.

    No layer of tiny mixes samples, so once copies differ the direction of a sample's gradient names
    the copy that it came from.
    """
    server, everyone = state(), arrivals_of("a", "b", "c")
    taught(server, everyone, view())
    before = {client: deepcopy(server.copies[client].module) for client in everyone}
    got = taught(server, everyone, now)
    moved: dict[str, list[int]] = {}
    for client, one in everyone.items():
        found = directions(got[client].gradient)
        own = directions(gradient_through(before[client], one, now.round))
        away = (found * own).sum(1) < 1 - 1e-5
        partner = {"a": "b", "b": "a"}.get(client, client)
        theirs = directions(gradient_through(before[partner], one, now.round))
        torch.testing.assert_close(found[away], theirs[away], rtol=1e-3, atol=1e-5)
        moved[client] = sorted(one.labels[away].tolist())
    return moved


def gradient_through(suffix: nn.Module, one: ClientBatch, number: int) -> Tensor:
    z = one.features.features.clone().requires_grad_()
    losses = evidential_losses(suffix(z), one.labels, 0.01 * min(1, number / 10))
    return torch.autograd.grad(losses.sum(), z)[0]


def directions(gradient: Tensor) -> Tensor:
    return nn.functional.normalize(gradient.flatten(1))


def test_what_moves_is_drawn_by_seed_round_and_step() -> None:
    def gradients(number: int, step: int) -> Tensor:
        server, everyone = state(), arrivals_of("a", "b", "c")
        taught(server, everyone, view())
        return taught(server, everyone, view(skewed(), number, step))["a"].gradient

    assert torch.equal(gradients(12, 3), gradients(12, 3))  # 12: the loss is no longer annealed
    assert not torch.equal(gradients(12, 3), gradients(13, 3))
    assert not torch.equal(gradients(12, 3), gradients(12, 4))


def test_a_client_without_a_finite_loss_leaves_the_others_alone() -> None:
    server, everyone = state("resnet18"), {}
    for client in "abc":
        shape = server.shape_at(2)
        everyone[client] = batch_of(LABELS[client], ord(client), shape)
    everyone["a"].features.features[:] = 3e38  # finite, as every admitted feature is
    memory = skewed()
    got = taught(server, everyone, view(memory))
    assert list(got) == ["b", "c"]
    assert not any(name.startswith("new/a") for name in memory)
    fresh = read_weights(server.net.suffix(2))
    for client, same in (("a", True), ("b", False)):
        copy = read_weights(server.copies[client].module)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in copy.values())
        assert all(torch.equal(copy[name], fresh[name]) for name in fresh) is same
    # b learnt as it would have without a
    alone = taught(state("resnet18"), {"b": everyone["b"]}, view())
    torch.testing.assert_close(got["b"].gradient, alone["b"].gradient)


def test_a_batch_of_one_that_batchnorm_cannot_take_gets_no_feedback() -> None:
    server = state("resnet18")
    shape = server.shape_at(8)  # one value a channel
    pair = {
        "a": ClientBatch(8, batch_of([0], 0, shape).features),
        "b": batch_of([0, 1], 1, shape),
    }
    pair["b"] = ClientBatch(8, pair["b"].features)
    assert list(taught(server, pair, view())) == ["b"]
    assert list(taught(state(), {"a": batch_of([0])}, view())) == ["a"]


def test_evidence_is_recorded_for_the_client_a_sample_is_of() -> None:
    memory = skewed()
    now = view(memory)
    server, everyone = state(), arrivals_of("a", "b", "c")
    alone, expected = everyone["c"], torch.zeros(CLASSES, CLASSES + 3, dtype=torch.float64)
    for step in range(2):
        now.step = step
        copy = deepcopy(server.copy_for("c", 2).module)  # c has no partner
        expected += record_of(copy(alone.features.features), alone.labels)
        taught(server, everyone, now)
    torch.testing.assert_close(memory["new/c"], expected)
    for client, one in everyone.items():
        counts = torch.bincount(one.labels, minlength=CLASSES)
        assert torch.equal(memory[f"new/{client}"][:, CLASSES], 2.0 * counts)


def test_records_fade_and_weights_come_from_them() -> None:
    rule = besplit(beta=0.5).weigh
    memory = remembered({"a": [6.0, 0, 0], "b": [0, 3.0, 3.0]}, seen=2)
    new = {c: record_of(torch.eye(3) * (4 if c == "a" else 1), torch.arange(3)) for c in "ab"}
    memory |= {f"new/{client}": tensor for client, tensor in new.items()}
    old = {c: memory[f"record/{c}"] for c in "ab"}
    weights = rule({"a": contribution(), "b": contribution(90)}, view(memory, number=5))
    # last seen in round 2, so b_dec = 0.5^3
    expected = {c: updated(old[c], new[c], 3, 0.5) for c in "ab"}
    torch.testing.assert_close(expected["a"], 0.125 * old["a"] + 0.875 * new["a"])
    for client in "ab":
        torch.testing.assert_close(memory[f"record/{client}"], expected[client])
        assert int(memory[f"round/{client}"]) == 5
        assert float(memory[f"weight/{client}"]) == pytest.approx(weights[client])
    assert weights == pytest.approx(evidential_weights(expected))
    assert not any(name.startswith("new/") for name in memory)


def test_a_client_whose_update_does_not_count_is_not_remembered_for_this_round() -> None:
    rule = besplit().weigh
    record = record_of(torch.eye(3), torch.arange(3))
    memory = {"new/a": record, "new/b": record, "weight/b": torch.tensor(0.5)}
    assert rule({"a": contribution()}, view(memory)) == {"a": 1}
    assert sorted(memory) == ["record/a", "round/a", "weight/a"]


def test_records_are_closed_where_the_weights_are_another_method_s() -> None:
    memory: dict[str, Tensor] = {}
    server, pair = state(), arrivals_of("a", "c")
    taught(server, pair, view(memory, number=5))
    seen = memory["new/a"]
    taught(server, pair, view(memory, number=7), beta=0.5)
    assert torch.equal(memory["record/a"], seen)
    assert int(memory["round/a"]) == 5
    again = memory["new/a"]
    taught(server, pair, view(memory, number=8), beta=0.5)
    torch.testing.assert_close(memory["record/a"], 0.25 * seen + 0.75 * again)


def test_a_pair_that_cannot_learn_together_is_tried_apart_once() -> None:
    server, alone = state("resnet18"), state("resnet18")
    shape = server.shape_at(2)
    everyone = {c: batch_of(LABELS[c], ord(c), shape) for c in "ab"}
    everyone["b"].features.features[:] = 3e38
    assert list(taught(server, everyone, view(skewed()))) == ["a"]
    taught(alone, {"a": everyone["a"]}, view())
    expected = read_weights(alone.copies["a"].module)
    for name, tensor in read_weights(server.copies["a"].module).items():
        torch.testing.assert_close(tensor, expected[name])


def test_clients_not_seen_for_ttl_rounds_are_forgotten() -> None:
    memory = remembered({"x": [1.0, 1, 1]}, seen=2) | remembered({"y": [1.0, 1, 1]}, seen=3)
    memory["new/a"] = record_of(torch.eye(3), torch.arange(3))
    besplit(ttl=3).weigh({"a": contribution()}, view(memory, number=5))
    kept = {name for name in memory if name.startswith("record/")}
    assert kept == {"record/a", "record/y"}
    assert "round/x" not in memory


def test_without_any_record_weights_are_by_samples() -> None:
    # rounds in which the server did not supervise, say
    two = {"a": contribution(10), "b": contribution(30)}
    assert besplit().weigh(two, view()) == {"a": 0.25, "b": 0.75}


def test_a_client_without_a_record_counts_as_the_mean_of_the_others() -> None:
    memory = {f"new/{c}": record_of(torch.eye(3), torch.arange(3)) for c in "ab"}
    three = {client: contribution() for client in ("a", "b", "x")}
    weights = besplit().weigh(three, view(memory))
    assert weights == pytest.approx({"a": 1 / 3, "b": 1 / 3, "x": 1 / 3})


def test_ablations_leave_out_what_they_name() -> None:
    def weights(**numbers: Any) -> dict[str, float]:
        logits = {"a": torch.eye(3) * 6, "b": torch.eye(3) + 1}
        memory = {f"new/{c}": record_of(logits[c], torch.arange(3)) for c in "ab"}
        return besplit(**numbers).weigh(
            {"a": contribution(10), "b": contribution(30)}, view(memory)
        )

    records = {
        "a": record_of(torch.eye(3) * 6, torch.arange(3)),
        "b": record_of(torch.eye(3) + 1, torch.arange(3)),
    }
    assert weights(ablation="no_ea") == {"a": 0.5, "b": 0.5}
    assert weights(ablation="no_ea", no_ea="samples") == {"a": 0.25, "b": 0.75}
    full = evidential_weights(records)
    for ablation in ("none", "no_bcc", "no_dtd"):
        assert weights(ablation=ablation) == pytest.approx(full)
    for word in ("evidence", "aleatoric", "epistemic"):
        left = [f for f in ("evidence", "aleatoric", "epistemic") if f != word]
        expected = evidential_weights(records, factors=left)  # type: ignore[arg-type]  # words
        assert weights(ablation=f"no_{word}") == pytest.approx(expected)
        assert expected != pytest.approx(full)


def test_equal_weights_are_fedavg_s_of_equal_sizes() -> None:
    three = {client: contribution(samples) for client, samples in (("a", 3), ("b", 3), ("c", 3))}
    uneven = {client: contribution(samples) for client, samples in (("a", 3), ("b", 9), ("c", 1))}
    fedavg_weights = fedavg().weigh(three, view())
    for given in (three, uneven):
        assert besplit(ablation="no_ea").weigh(given, view()) == pytest.approx(fedavg_weights)


def test_weights_can_be_evened_out_and_capped() -> None:
    # one client is sure and right, two are not
    logits = {"a": torch.eye(3) * 6, "b": torch.eye(3), "c": torch.eye(3)}
    records = {c: record_of(logits[c], torch.arange(3)) for c in "abc"}

    def weights(**numbers: Any) -> dict[str, float]:
        memory = {f"new/{client}": record for client, record in records.items()}
        return besplit(**numbers).weigh(dict.fromkeys("abc", contribution()), view(memory))

    full = evidential_weights(records)
    assert weights() == pytest.approx(full)
    ratio = full["a"] / full["b"]
    assert ratio > 4
    root = weights(weight_power=0.5)
    assert root["a"] / root["b"] == pytest.approx(ratio**0.5)
    assert weights(weight_power=0.0) == pytest.approx(dict.fromkeys("abc", 1 / 3))
    # twice the median of the three is 2 : 1 : 1
    assert weights(weight_cap=2.0) == pytest.approx({"a": 0.5, "b": 0.25, "c": 0.25})
    with pytest.raises(ConfigurationError, match=r"weight_cap: expected .* of at least 1"):
        besplit(weight_cap=0.5)


def test_the_teacher_is_the_server_s_half_as_the_round_began() -> None:
    """KD_G's gradient of W_A's last layer, by hand: tau / B * (p_a - p_g)^T h, with h its input."""
    server, one = state("resnet18", momentum=0.9), {"a": batch_of([0, 1, 2, 0], 3, (64, 4, 4))}
    now = view(number=12)
    began = server.net.suffix(2)
    z = one["a"].features.features
    shape = server.shape_at(2)
    assert z.shape[1:] == shape
    with torch.no_grad():
        teacher = deepcopy(began).eval()(z)
    statistics = {name: tensor.clone() for name, tensor in began.named_buffers()}
    taught(server, one, now)
    outputs = taught(server, one, now)["a"].outputs  # after a step of the client's own copy
    assert outputs is not None
    assert torch.equal(outputs, teacher)
    with torch.no_grad():
        copy = server.copies["a"].module.eval()(z)
    assert not torch.allclose(copy, teacher, atol=1e-3)
    assert began.training
    for name, tensor in began.named_buffers():
        assert torch.equal(tensor, statistics[name]), name

    tau, hidden = 5.0, torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    last = nn.Linear(6, CLASSES, bias=False)
    logits = last(hidden)
    (got,) = torch.autograd.grad(kd_global(logits, outputs, tau), [last.weight])
    apart = torch.softmax(logits / tau, 1) - torch.softmax(teacher / tau, 1)
    torch.testing.assert_close(got, tau / 4 * apart.T @ hidden, rtol=1e-4, atol=1e-6)


def test_a_teacher_that_is_not_finite_does_not_travel() -> None:
    server = state()
    server.net.head.load_state_dict({n: t * 1e3 for n, t in server.net.head.state_dict().items()})
    assert server.rest_logits(2, torch.full((3, 16, 4, 4), 3e38)) is None


def test_without_distillation_no_outputs_travel() -> None:
    assert besplit(ablation="no_dtd").client.distil is None
    got = taught(state(), arrivals_of("a"), view(), ablation="no_dtd")
    assert got["a"].outputs is None
    assert besplit(tau=2.0).client.distil is not None


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"ablation": "no_luck"}, "ablation: expected one of none, no_ea"),
        ({"missing": "zero"}, "missing: expected one of full, mean, sum, got 'zero'"),
        ({"beta": 1.5}, "beta: expected a finite number from 0 to 1, got 1.5"),
        ({"ttl": 0}, "ttl: expected a whole number of at least 1, got 0"),
        ({"anneal_rounds": 0}, "anneal_rounds"),
        ({"tau": -1.0}, "tau"),
    ],
)
def test_numbers_that_cannot_be_are_refused_in_words(
    numbers: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigurationError, match=expected):
        besplit(**numbers)
