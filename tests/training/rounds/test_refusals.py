"""Replies that are not sound: refused by name, and the round goes on without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.messages import (
    Features,
    Ready,
    Reply,
    Request,
    StartRound,
    Step,
    Update,
    Weights,
)
from server.training.core.weighted_mean import Contribution
from server.training.methods.fedavg import fedavg
from server.training.methods.method import Method
from server.training.methods.splitfed import (
    minibatch,
    splitfed_v1,
)
from server.training.methods.supersfl import supersfl
from server.training.rounds.reply_checks import Refusal, update_fault
from server.training.rounds.round import RoundSettings, mean_loss
from server.training.rounds.transport import LocalTransport, Transport
from tests.training.worlds import (
    Change,
    Meddler,
    World,
    assert_same,
    meddling,
)


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
DIVERGED = {"one NaN", "one infinity", "a loss of NaN", "an infinite loss"}
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
    "a loss that no float32 is": (altered(lambda u: replace(u, loss=1e307)), "loss"),
    "a codec's error that no float32 is": (altered(lambda u: replace(u, error=1e308)), "error"),
    "a negative error of a codec": (altered(lambda u: replace(u, error=-1e-8)), "error"),
    "a codec's error of NaN": (altered(lambda u: replace(u, error=float("nan"))), "error"),
    "a cosine above 1": (altered(lambda u: replace(u, cosine=1.01)), "cosine"),
    "a cosine below -1": (altered(lambda u: replace(u, cosine=-1e308)), "cosine"),
    "a cosine of NaN": (altered(lambda u: replace(u, cosine=float("nan"))), "cosine"),
}


@pytest.mark.parametrize("method", [splitfed_v1, fedavg])
@pytest.mark.parametrize("bad", BAD_UPDATES)
def test_an_update_that_is_not_sound_is_refused_by_name_and_the_round_goes_on_without(
    method: Callable[[], Method], bad: str
) -> None:
    """FAULTS row 10."""
    change, reason = BAD_UPDATES[bad]
    world = World(
        method(),
        settings=RoundSettings(norm_bound=100.0),
        transport=meddling(change),
    )
    [result] = world.run(1)
    assert list(result.refused) == ["c"]
    assert reason in result.refused["c"]
    # told by kind, so that no program has to read the reason
    assert result.faults == {"c": "not-finite" if bad in DIVERGED else "unsound"}
    assert result.missing == ()
    assert_same(world.state.read(), World(method(), "abd").trained(1))


def test_a_variance_below_zero_is_refused_and_a_mean_is_not() -> None:
    sent = {"stage1.bn.running_mean": torch.zeros(2), "stage1.bn.running_var": torch.ones(2)}

    def fault(mean: float, variance: float) -> Refusal | None:
        values = dict(zip(sent, (mean, variance), strict=True))
        weights = {name: torch.tensor([0.5, value]) for name, value in values.items()}
        return update_fault(Update(1, weights, 4, 1.0, 1, 1), sent, 4, None)

    assert fault(-5.0, 0.0) is None
    why = fault(0.0, -5.0)
    assert why is not None
    assert "stage1.bn.running_var: expected variances from 0 up" in why.why


def test_a_huge_loss_times_its_samples_leaves_the_mean_finite() -> None:
    def with_loss(loss: float) -> Contribution:
        return Contribution(1, Update(1, {}, 100, loss, 1, 1))

    assert mean_loss({"a": with_loss(1e307), "b": with_loss(0.0)}) == 5e306


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
        transport=meddling(move),
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
    """Features of the int8 codec in another shape, with ranges for each of its rows."""
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
    "infinity": (in_features(lambda f: replace(f, features=f.features + float("inf"))), "finite"),
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
    "ranges with floats": (
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
@pytest.mark.parametrize(("change", "reason"), BAD_FEATURES.values(), ids=BAD_FEATURES)
def test_features_that_are_not_sound_put_their_client_out_of_the_round(
    method: Callable[[], Method], change: Change, reason: str
) -> None:
    """FAULTS row 10."""
    meddlers: list[Meddler] = []

    def transport(clients: Mapping[str, TrainingClient]) -> Transport:
        meddlers.append(Meddler(LocalTransport(clients), change))
        return meddlers[0]

    world = World(method(), transport=transport)
    [result] = world.run(1)
    assert list(result.refused) == ["c"]
    assert reason in result.refused["c"]
    # asked twice: its weights, and the batch that gave it away; nothing of it was used
    assert [kind for name, kind in meddlers[0].asked if name == "c"] == ["StartRound", "Step"]
    assert_same(world.state.read(), World(method(), "abd").trained(1))


@pytest.mark.parametrize(("samples", "steps"), [(0, 1), (-1, 1), (14, 10**9), (14, -1), (14, 5)])
def test_a_start_that_does_not_add_up_is_refused(samples: int, steps: int) -> None:
    def meddle(name: str, request: Request, reply: Reply) -> Reply:
        if name == "c" and isinstance(reply, Ready):
            return replace(reply, samples=samples, steps=steps)
        return reply

    world = World(supersfl(), transport=meddling(meddle))
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

    world = World(splitfed_v1(), transport=meddling(meddle))
    [result] = world.run(1)
    assert result.missing == ("c",)
    assert_same(world.state.read(), World(splitfed_v1(), "abd").trained(1))
