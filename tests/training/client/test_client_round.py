"""One client's round: what it learns with the server, without it, and from wrong messages."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import FrameError
from edge_sdk.nets import Supernet
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.client_part import ClientPart
from edge_sdk.training.protocol.messages import (
    EndRound,
    Features,
    Feedback,
    Ready,
    StartRound,
    Step,
    Update,
    Weights,
)
from edge_sdk.training.protocol.plan import Plan, network_of
from edge_sdk.training.protocol.weights import load_weights, read_weights
from tests.training.plans import flat_plan

RATE = 0.1
DEPTH, L = 2, 5


PART = {field.name for field in fields(ClientPart)}


def plan(**numbers: Any) -> Plan:
    part: dict[str, Any] = {"exit_head": True, "fusion": "tpgf", "clip": 0.5}
    part |= {name: value for name, value in numbers.items() if name in PART}
    return flat_plan(
        part=ClientPart(**part),
        **{
            "backbone": "tiny",
            "input_shape": (1, 8, 8),
            "classes": 3,
            "mean": (0.0,),
            "std": (1.0,),
            "depth": DEPTH,
            "learning_rate": RATE,
            "batch": 4,
            **{name: value for name, value in numbers.items() if name not in PART},
        },
    )


def data(samples: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    generator = np.random.default_rng(5)
    x = 2 * generator.standard_normal((samples, 1, 8, 8)).astype(np.float32)
    return x, generator.integers(0, 3, samples)


def start(p: Plan, number: int = 1, more: Weights | None = None) -> StartRound:
    part = network_of(p).segment(0, None) if p.part.whole else network_of(p).prefix(p.depth)
    return StartRound(number, p, read_weights(part) | (more or {}))


def step(client: TrainingClient, number: int, feedback: Feedback | None = None) -> Features:
    reply = client.handle(Step(1, number, feedback))
    assert isinstance(reply, Features)
    return reply


def end(client: TrainingClient, feedback: Feedback | None = None) -> Update:
    reply = client.handle(EndRound(1, feedback))
    assert isinstance(reply, Update)
    return reply


class Oracle:
    """SuperSFL's Alg. 2 and 3 with ordinary autograd: full graphs, torch's own clip."""

    def __init__(self, p: Plan) -> None:
        self.net: Supernet = network_of(p)
        self.f = deepcopy(self.net.prefix(DEPTH))
        self.h = deepcopy(self.net.exit_head(DEPTH))

    def gradients(self, x: Tensor, y: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
        """Lc, the clipped g_c through the head as it is, and z; then the head has stepped."""
        z = self.f(x)
        loss = nn.functional.cross_entropy(self.h(z), y)
        for part in (self.f, self.h):
            part.zero_grad()
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]  # torch
        nn.utils.clip_grad_norm_(self.f.parameters(), 0.5)
        g_c = [p.grad.clone() for p in self.f.parameters() if p.grad is not None]
        torch.optim.SGD(self.h.parameters(), RATE).step()
        return loss.detach(), g_c, z

    def apply(self, gradients: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, gradient in zip(self.f.parameters(), gradients, strict=True):
                parameter.sub_(RATE * gradient)


def assert_close(update: Update, oracle: Oracle) -> None:
    got = [t for name, t in update.weights.items() if not name.startswith("exit")]
    # the clip adds 1e-8 to the norm where torch adds 1e-6; sums over a batch in another order
    for mine, theirs in zip(got, oracle.f.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)
    head = [t for name, t in update.weights.items() if name.startswith("exit2.")]
    for mine, theirs in zip(head, oracle.h.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


def batch_of(client: TrainingClient, features: Features) -> tuple[Tensor, Tensor]:
    """One batch holds all samples here, in the order of the labels sent."""
    assert features.labels is not None
    order = np.random.default_rng([0, 1, crc32(b"a")]).permutation(len(client.y))
    assert torch.equal(torch.from_numpy(client.y[order]), features.labels)
    return torch.from_numpy(client.x[order]), features.labels


def test_a_supervised_batch_is_equations_3_and_4() -> None:
    client = TrainingClient("a", *data(4))
    assert client.handle(start(plan())) == Ready(1, 4, 1, tuple(np.bincount(client.y).tolist()))
    features = step(client, 0)
    feedback = Feedback(torch.randn(features.features.shape, generator=_seeded()), 0.7)
    update = end(client, feedback)

    oracle = Oracle(plan())
    loss, g_c, z = oracle.gradients(*batch_of(client, features))
    g_s = torch.autograd.grad(z, list(oracle.f.parameters()), feedback.gradient)
    w_c = DEPTH / L * (1 / (loss + 1e-8)) / (1 / (loss + 1e-8) + 1 / (0.7 + 1e-8))
    oracle.apply([w_c * c + (1 - w_c) * s for c, s in zip(g_c, g_s, strict=True)])

    assert torch.equal(features.features, z.detach())
    assert features.loss == pytest.approx(float(loss), rel=1e-6)
    assert_close(update, oracle)
    assert update.loss == pytest.approx(float(w_c * loss + (1 - w_c) * 0.7), rel=1e-6)
    assert (update.samples, update.steps, update.supervised) == (4, 1, 1)


def test_without_feedback_the_batch_is_phase_1_at_weight_1() -> None:
    client = TrainingClient("a", *data(4))
    client.handle(start(plan()))
    features = step(client, 0)
    update = end(client)

    oracle = Oracle(plan())
    loss, g_c, _ = oracle.gradients(*batch_of(client, features))
    oracle.apply(g_c)

    assert_close(update, oracle)
    assert update.loss == pytest.approx(float(loss), rel=1e-6)
    assert (update.steps, update.supervised) == (1, 0)


def test_the_clip_limits_the_clients_step() -> None:
    # the gradient of the fallback is well above 0.5 here, so the step is 0.5 * rate long
    client = TrainingClient("a", *data(4))
    begin = start(plan())
    client.handle(begin)
    step(client, 0)
    update = end(client)
    change = [update.weights[name] - before for name, before in begin.weights.items()]
    norm = torch.linalg.vector_norm(torch.cat([c.flatten() for c in change]))
    assert float(norm) == pytest.approx(0.5 * RATE, rel=1e-4)


@pytest.mark.parametrize("limit", [1e-3, 0.05])
def test_without_an_exit_head_the_clip_limits_all_that_the_prefix_steps_by(limit: float) -> None:
    def moved(clip: float | None) -> Tensor:
        p = plan(exit_head=False, fusion="server", clip=clip)
        update = run(p, client=TrainingClient("a", *data(4)))
        begin = start(p).weights
        return torch.cat([(update.weights[name] - begin[name]).flatten() for name in begin])

    full, limited = moved(None), moved(limit)
    assert float(full.norm()) > 2 * limit * RATE  # the limit is reached
    torch.testing.assert_close(limited, full / full.norm() * limit * RATE, rtol=1e-3, atol=1e-6)
    assert torch.equal(moved(1e9), full)


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(9)


def run(p: Plan, *, answered: bool = True, client: TrainingClient | None = None) -> Update:
    client = client or TrainingClient("a", *data(10))
    ready = client.handle(start(p))
    assert isinstance(ready, Ready)
    generator, feedback = _seeded(), None
    for number in range(ready.steps):
        features = step(client, number, feedback)
        if answered:
            gradient = torch.randn(features.features.shape, generator=generator)
            feedback = Feedback(gradient, 1.0)
    return end(client, feedback)


def assert_equal(a: Weights, b: Weights) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def prefix_of(update: Update) -> Weights:
    return {name: t for name, t in update.weights.items() if not name.startswith("exit")}


def test_an_exit_share_of_0_trains_the_prefix_as_plain_splitfed() -> None:
    neutral = run(plan(exit_head=False, fusion="server", clip=None))
    for clip in (None, 0.5):
        zero = run(plan(fusion="fixed", exit_share=0.0, clip=clip))
        assert_equal(prefix_of(zero), prefix_of(neutral))


def test_an_exit_share_of_1_trains_the_prefix_as_if_the_server_were_silent() -> None:
    full = run(plan(fusion="fixed", exit_share=1.0))
    alone = run(plan(), answered=False)
    assert_equal(full.weights, alone.weights)


def test_an_exit_head_steps_by_its_share_and_in_full_without_the_server() -> None:
    def moved(p: Plan, *, answered: bool = True) -> Weights:
        head = {
            f"exit2.{name}": tensor
            for name, tensor in read_weights(network_of(p).exit_head(2)).items()
        }
        after = run(p, answered=answered, client=TrainingClient("a", *data(4))).weights
        return {name: after[name] - tensor for name, tensor in head.items()}

    full = moved(plan(fusion="equal", epochs=1))
    half = moved(plan(fusion="fixed", exit_share=0.5, epochs=1))
    for name, tensor in full.items():
        torch.testing.assert_close(half[name], tensor / 2, rtol=1e-4, atol=1e-7)
    alone = moved(plan(fusion="fixed", exit_share=0.5, epochs=1), answered=False)
    assert_equal(alone, full)


def test_no_limit_and_an_infinite_one_are_the_same() -> None:
    assert_equal(run(plan(clip=None)).weights, run(plan(clip=float("inf"))).weights)


def test_one_backward_pass_gives_what_two_give() -> None:
    # without a clip the two gradients are joined at the cut; a limit never reached takes the other
    # path. Differs by the order of float32 operations only, on steps of about the weights' size.
    one, two = run(plan(clip=None)), run(plan(clip=1e9))
    for name, tensor in one.weights.items():
        torch.testing.assert_close(tensor, two.weights[name], rtol=1e-4, atol=1e-5)


def test_without_exit_head_and_feedback_the_prefix_learns_nothing() -> None:
    p = plan(exit_head=False, fusion="server", clip=None)
    update = run(p, answered=False)
    assert_equal(update.weights, start(p).weights)
    assert update.steps == 0


def test_fedprox_pulls_towards_the_rounds_start_by_hand() -> None:
    p = plan(exit_head=False, fusion="server", clip=None, prox_mu=0.5, epochs=2, whole=True)
    plain = plan(exit_head=False, fusion="server", clip=None, epochs=2, whole=True)
    client = TrainingClient("a", *data(4))
    client.handle(start(p))
    got = end(client).weights

    # by hand: w1 = w0 - r*g(w0); w2 = w1 - r*(g(w1) + mu*(w1 - w0))
    client = TrainingClient("a", *data(4))
    w0 = start(plain).weights
    one = plan(exit_head=False, fusion="server", clip=None, epochs=1, whole=True)
    client.handle(start(one))
    w1 = end(client).weights
    client.handle(start(plain))
    w2 = end(client).weights
    for name, tensor in got.items():
        want = w2[name] - RATE * 0.5 * (w1[name] - w0[name])
        torch.testing.assert_close(tensor, want, rtol=1e-5, atol=1e-6)


def test_an_exit_head_that_is_not_sent_is_kept_between_rounds() -> None:
    client = TrainingClient("a", *data(10))
    first = run(plan(), client=client)
    kept = {name: t for name, t in first.weights.items() if name.startswith("exit2.")}
    assert_equal(client.personal, kept)

    # a round in which nothing is trained shows what it starts from
    client.handle(start(plan()))
    again = end(client)
    assert_equal({k: v for k, v in again.weights.items() if k.startswith("exit")}, kept)


def test_an_exit_head_that_the_server_sends_replaces_the_kept_one() -> None:
    client = TrainingClient("a", *data(10))
    run(plan(), client=client)
    sent = {f"exit2.{k}": v + 1 for k, v in read_weights(network_of(plan()).exit_head(2)).items()}
    client.handle(start(plan(), 1, sent))
    assert_equal({k: v for k, v in end(client).weights.items() if k in sent}, sent)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_a_personal_client_starts_from_a_mixture_of_its_weights_and_the_average(
    share: float,
) -> None:
    p = plan(personal_share=share)
    client = TrainingClient("a", *data(10))
    own = run(p, client=client).weights
    sent = start(p)
    client.handle(sent)
    begun = end(client).weights
    for name, average in sent.weights.items():
        want = share * own[name] + (1 - share) * average
        torch.testing.assert_close(begun[name], want, rtol=1e-6, atol=1e-7)


def test_the_order_of_samples_is_keyed_by_seed_round_and_name() -> None:
    def labels(name: str, number: int, seed: int) -> list[int]:
        client = TrainingClient(name, *data(40))
        client.handle(start(plan(batch=40, seed=seed), number))
        reply = client.handle(Step(number, 0))
        assert isinstance(reply, Features)
        assert reply.labels is not None
        return reply.labels.tolist()

    same = labels("a", 1, 0)
    assert labels("a", 1, 0) == same
    assert all(labels(*key) != same for key in (("b", 1, 0), ("a", 2, 0), ("a", 1, 1)))


@pytest.mark.parametrize(
    ("samples", "batch", "sizes"),
    [
        (1, 4, [1]),
        (4, 4, [4]),
        (5, 4, [5]),  # the last one would be alone: BatchNorm cannot train on one sample
        (6, 4, [4, 2]),
        (9, 4, [4, 5]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_every_sample_is_seen_once_an_epoch(samples: int, batch: int, sizes: list[int]) -> None:
    client = TrainingClient("a", *data(samples))
    ready = client.handle(start(plan(batch=batch, epochs=2)))
    assert isinstance(ready, Ready)
    seen = [step(client, number) for number in range(ready.steps)]
    assert [len(features.features) for features in seen] == sizes * 2
    labels = torch.cat([f.labels for f in seen if f.labels is not None])
    assert torch.equal(labels.bincount(), 2 * torch.from_numpy(client.y).bincount())
    assert end(client).steps == len(seen)


def test_labels_are_sent_only_where_the_plan_says_so() -> None:
    client = TrainingClient("a", *data(4))
    ready = client.handle(start(plan(send_labels=False)))
    assert isinstance(ready, Ready)
    assert ready.label_counts == ()
    assert step(client, 0).labels is None


@pytest.mark.parametrize("message", [Step(1, 0), EndRound(1), Step(2, 0)])
def test_a_message_before_the_first_round_is_refused(message: Step | EndRound) -> None:
    client = TrainingClient("a", *data(4))
    with pytest.raises(FrameError, match="no round"):
        client.handle(message)


def test_after_its_end_a_round_takes_no_more_messages() -> None:
    client = TrainingClient("a", *data(4))
    client.handle(start(plan()))
    end(client)
    with pytest.raises(FrameError, match="no round 1"):
        end(client)


def test_a_new_start_drops_the_round_before() -> None:
    client = TrainingClient("a", *data(10))
    clean = run(plan(), client=TrainingClient("a", *data(10)))
    client.handle(start(plan()))
    step(client, 0)
    assert_equal(run(plan(), client=client).weights, clean.weights)


@pytest.mark.parametrize("number", [1, 99])
def test_a_step_beyond_the_last_is_refused(number: int) -> None:
    client = TrainingClient("a", *data(4))
    client.handle(start(plan()))
    with pytest.raises(FrameError, match="no step"):
        step(client, number)


def test_no_step_is_opened_twice_and_none_before_it() -> None:
    # 400 of the same batch would average the noise on it away
    client, untroubled = TrainingClient("a", *data(12)), TrainingClient("a", *data(12))
    for each in (client, untroubled):
        each.handle(start(plan()))
        step(each, 1)
    feedback = Feedback(torch.randn(4, 16, 4, 4, generator=_seeded()), 1.0)
    for number in (0, 1, -1):
        with pytest.raises(FrameError, match=f"no step {number}: expected 2 to 2"):
            step(client, number, feedback)
    # what was refused left no trace
    for each in (client, untroubled):
        step(each, 2, feedback)
    assert_equal(end(client).weights, end(untroubled).weights)


@pytest.mark.parametrize("size", [5, 400, 0, -1])
def test_no_batch_is_larger_than_the_plans(size: int) -> None:
    client = TrainingClient("a", *data(12))
    client.handle(start(plan(iterations=2)))
    with pytest.raises(FrameError, match=f"a batch of {size}: expected 1 to 4"):
        client.handle(Step(1, 0, batch=size))
    reply = client.handle(Step(1, 0, batch=3))
    assert isinstance(reply, Features)
    assert len(reply.features) == 3


@pytest.mark.parametrize(
    "gradient",
    [torch.zeros(4, 16, 4), torch.zeros(3, 16, 4, 4), torch.full((4, 16, 4, 4), float("nan"))],
)
def test_feedback_that_does_not_fit_is_refused(gradient: Tensor) -> None:
    client = TrainingClient("a", *data(4))
    client.handle(start(plan()))
    assert step(client, 0).features.shape == (4, 16, 4, 4)
    with pytest.raises(FrameError, match=r"finite gradient of shape \(4, 16, 4, 4\)"):
        end(client, Feedback(gradient, 1.0))


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    sound = start(plan()).weights
    name = "stage1.0.weight"
    wrong = {
        "missing": {k: v for k, v in sound.items() if k != name},
        "unknown": sound | {"stage9.weight": torch.zeros(1)},
        "shape": sound | {name: torch.zeros(2)},
        "float64": sound | {name: sound[name].double()},
        "NaN": sound | {name: sound[name] * float("nan")},
    }
    for expected, weights in wrong.items():
        with pytest.raises(FrameError, match=expected):
            TrainingClient("a", *data(4)).handle(StartRound(1, plan(), weights))


def test_data_that_do_not_fit_the_plan_are_named() -> None:
    x, y = data(4)
    cases = [
        ((x[:, :, :4], y), r"inputs \(1, 8, 8\)"),
        ((x, y + 3), "labels 0 to 2"),
        ((x, y - 3), "labels 0 to 2"),
        ((x[:0], y[:0]), "0 inputs and 0 labels"),
        ((x, y[:2]), "4 inputs and 2 labels"),
    ]
    for (inputs, labels), expected in cases:
        with pytest.raises(FrameError, match=expected):
            TrainingClient("a", inputs, labels).handle(start(plan()))


def test_one_sample_under_batch_norm_is_refused_with_the_next_step() -> None:
    def begin(norm: str) -> TrainingClient:
        p = plan(
            backbone="resnet18",
            input_shape=(1, 28, 28),
            depth=8,  # the last stages have maps of 1x1
            norm=norm,
            classes=3,
        )
        client = TrainingClient("a", np.zeros((1, 1, 28, 28), np.float32), np.zeros(1, np.int64))
        client.handle(start(p))
        return client

    with pytest.raises(FrameError, match='norm = "group"'):
        step(begin("batch"), 0)
    assert step(begin("group"), 0).features.shape == (1, 512, 1, 1)


def test_loading_names_what_does_not_fit_before_it_changes_anything() -> None:
    net = network_of(plan()).prefix(2)
    before = read_weights(net)
    with pytest.raises(FrameError):
        load_weights(net, {**before, "stage2.0.bias": torch.zeros(3)})
    assert_equal(read_weights(net), before)
