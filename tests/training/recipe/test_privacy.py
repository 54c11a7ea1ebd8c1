"""Noise on what leaves a client: its size, its streams, and what it is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from scipy.stats import norm

from edge_sdk.errors import ConfigurationError, InputError
from edge_sdk.nets import build
from edge_sdk.training.client import TrainingClient
from edge_sdk.training.protocol.client_part import ClientPart, MetaAdaptation, Noise
from edge_sdk.training.protocol.messages import (
    Evaluate,
    Features,
    OutputGradient,
    Reply,
    Request,
    Scores,
    StartRound,
    Step,
    Update,
)
from edge_sdk.training.protocol.noise import NoiseKey, clip_samples, noised_features, noised_update
from edge_sdk.training.protocol.plan import Plan
from edge_sdk.training.protocol.training import Training
from edge_sdk.training.protocol.weights import read_weights
from server.training.core.server_state import ServerState
from server.training.methods.fedavg import fedavg
from server.training.methods.method import Method
from server.training.methods.splitfed import splitfed_v1
from server.training.methods.splitlpf import splitlpf
from server.training.recipe.privacy import NOISED, Mechanism, PrivacySettings, epsilon, with_noise
from server.training.recipe.recipe import METHODS, read_recipe
from server.training.report.report import report_of
from server.training.rounds.loop import RoundLoop
from server.training.rounds.round import RoundResult, RoundSettings
from server.training.rounds.transport import LocalTransport
from server.training.simulation.build import build_simulation
from server.training.simulation.run import run_rounds
from tests.training.plans import flat_plan
from tests.training.worlds import BytesTransport

KEY = NoiseKey(7, "a", 1, 0)
DEPTH = 2
BOTH = Noise(5.0, 0.5, 1.0, 0.1)


def plan_for(part: ClientPart, **numbers: Any) -> Plan:
    fields: dict[str, Any] = {
        "backbone": "tiny",
        "input_shape": (1, 8, 8),
        "classes": 3,
        "mean": (0.0,),
        "std": (1.0,),
        "depth": 5 if part.whole else DEPTH,
        "learning_rate": 0.05,
        "batch": 4,
        "part": part,
    }
    return flat_plan(**fields | numbers)


def client_of(name: str = "a", secret: int = 7) -> TrainingClient:
    generator = np.random.default_rng(ord(name))
    x = generator.standard_normal((9, 1, 8, 8), np.float32)
    return TrainingClient(name, x, generator.integers(0, 3, 9), secret=secret)


def rounds(
    method: Method, transport: type[LocalTransport] = LocalTransport, **numbers: Any
) -> tuple[dict[str, torch.Tensor], list[RoundResult]]:
    """Two rounds of two clients: the server's weights and the results."""
    clients = {name: client_of(name) for name in "ab"}
    state = ServerState(build("tiny", classes=3, seed=0), Training(0.05, 8))
    plan = plan_for(method.client, send_labels=method.labels == "sent", **numbers)
    loop = RoundLoop(method, dict.fromkeys("ab", plan), state, transport(clients), RoundSettings())
    results = [loop.run_round(number, 0) for number in (1, 2)]
    return state.read(), results


def test_samples_are_clipped_one_by_one() -> None:
    z = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    assert clip_samples(z, 1.0).tolist() == [
        pytest.approx([0.6, 0.8]),
        pytest.approx([0.3, 0.4]),
        [0.0, 0.0],
    ]


def test_gradient_goes_back_through_the_clip() -> None:
    # d/dz of u . z/|z| at z = (3, 4), u = (1, 0): (u - (u.z)z/|z|^2)/|z| = (.64, -.48)/5
    z = torch.tensor([[3.0, 4.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(clip_samples(z, 1.0), z, torch.tensor([[1.0, 0.0]]))
    torch.testing.assert_close(gradient, torch.tensor([[0.128, -0.096]]))


def test_noise_on_features_is_as_wide_as_said() -> None:
    z = torch.zeros(200, 500)
    added = noised_features(z, Noise(feature_clip=4.0, feature_sigma=0.25), KEY, 0)
    # 100,000 draws of N(0, 1): the deviation is known to 0.2 %, the mean to 0.003
    assert float(added.std()) == pytest.approx(1.0, rel=0.01)
    assert float(added.mean()) == pytest.approx(0.0, abs=0.02)


def test_update_is_clipped_whole_and_noised_as_said() -> None:
    sent = {"a": torch.ones(50_000), "b": torch.ones(50_000)}
    after = {"a": torch.ones(50_000), "b": 1 + torch.ones(50_000)}
    clipped = noised_update(after, sent, Noise(update_clip=2.0), KEY)
    change = torch.cat([clipped[name] - sent[name] for name in sent])
    assert float(change.double().norm()) == pytest.approx(2.0, rel=1e-3)
    assert torch.equal(clipped["a"], sent["a"])
    noised = noised_update(after, sent, Noise(update_clip=2.0, update_sigma=0.5), KEY)
    added = torch.cat([noised[name] - clipped[name] for name in sent])
    assert float(added.std()) == pytest.approx(1.0, rel=0.01)


def test_change_within_the_limit_is_left_alone() -> None:
    sent = {"a": torch.zeros(3)}
    after = {"a": torch.tensor([0.1, 0.2, 0.2])}
    assert torch.equal(noised_update(after, sent, Noise(update_clip=9.0), KEY)["a"], after["a"])


def test_diverged_update_is_not_noised_but_refused() -> None:
    with pytest.raises(InputError, match="learning_rate"):
        noised_update({"a": torch.tensor([math.nan])}, {"a": torch.zeros(1)}, BOTH, KEY)


@pytest.mark.parametrize("method", [fedavg, splitfed_v1, splitlpf])
def test_limits_that_nothing_reaches_and_no_noise_are_the_baseline(method: Any) -> None:
    loose = Noise(update_clip=1e9) if method is fedavg else Noise(1e9, 0.0, 1e9, 0.0)
    plain, _ = rounds(method())
    noised_weights, _ = rounds(with_noise(method(), loose))
    for name, tensor in plain.items():
        torch.testing.assert_close(noised_weights[name], tensor, rtol=0, atol=1e-6)


def test_bytes_change_no_bit_of_a_noised_round() -> None:
    method = with_noise(splitlpf(), BOTH)
    here, _ = rounds(method)
    there, _ = rounds(method, BytesTransport)
    assert all(torch.equal(there[name], tensor) for name, tensor in here.items())


def test_losses_stay_on_clients_with_noise() -> None:
    seen: list[Reply] = []

    class Recording(LocalTransport):
        def exchange(self, requests: Mapping[str, Request], deadline_s: float) -> dict[str, Reply]:
            replies = super().exchange(requests, deadline_s)
            seen.extend(replies.values())
            return replies

    _, results = rounds(with_noise(splitlpf(), BOTH), Recording)
    kinds = {type(reply) for reply in seen}
    assert {Features, OutputGradient, Update} <= kinds
    losses = [r.loss for r in seen if isinstance(r, Features | OutputGradient | Update)]
    assert set(losses) == {None, 0.0}
    assert [result.loss for result in results] == [None, None]


def features_of(client: TrainingClient, noise: Noise | None) -> torch.Tensor:
    part = ClientPart(noise=noise)
    start = read_weights(build("tiny", classes=3, seed=0).prefix(DEPTH))
    client.handle(StartRound(1, plan_for(part), start))
    reply = client.handle(Step(1, 0))
    assert isinstance(reply, Features)
    return reply.features


def test_noise_is_the_client_s_own_and_new_for_a_round_begun_again() -> None:
    client, same, other = client_of(), client_of(), client_of(secret=8)
    first = features_of(client, BOTH)
    assert torch.equal(features_of(same, BOTH), first)
    assert not torch.equal(features_of(other, BOTH), first)
    # the difference of two noisy versions of the same features shall not be free of noise
    again = features_of(client, BOTH)
    clean = features_of(client_of(), Noise(feature_clip=5.0))
    assert float((again - clean).std()) == pytest.approx(2.5, rel=0.1)
    assert float((again - first).std()) == pytest.approx(2.5 * math.sqrt(2), rel=0.1)


def test_a_device_that_is_given_no_secret_has_one_of_its_own() -> None:
    one, other = (TrainingClient("a", *(client_of().x, client_of().y)) for _ in range(2))
    assert not torch.equal(features_of(one, BOTH), features_of(other, BOTH))


def test_a_device_under_noise_is_not_asked_how_many_answers_are_right() -> None:
    noisy, plain = (plan_for(ClientPart(noise=noise)) for noise in (BOTH, None))
    net = build("tiny", classes=3, seed=0)
    weights = read_weights(net.segment(0, None))
    with pytest.raises(ConfigurationError, match="not scored"):
        client_of().handle(Evaluate(1, noisy, weights))
    # nor by leaving the noise out once it has trained with it
    client = client_of()
    client.handle(StartRound(1, noisy, read_weights(net.prefix(DEPTH))))
    with pytest.raises(ConfigurationError, match="not scored"):
        client.handle(Evaluate(1, plain, weights))
    assert client_of().handle(Evaluate(1, plain, weights)) == Scores(1, 0, 0, None)


def exact(found: list[Mechanism], delta: float) -> float:
    """Balle and Wang 2018, Theorem 8, for one Gaussian mechanism of the joint mu."""
    mu = math.sqrt(sum(m.releases / m.multiplier**2 for m in found))
    return float(
        brentq(
            lambda e: norm.cdf(mu / 2 - e / mu) - math.exp(e) * norm.cdf(-mu / 2 - e / mu) - delta,
            0,
            500,
        )
    )


@pytest.mark.parametrize(
    "found",
    [
        [Mechanism("updates", 1.0, 1)],
        [Mechanism("updates", 10.0, 100)],
        [Mechanism("updates", 0.5, 3)],
        [Mechanism("updates", 5.0, 10), Mechanism("features", 60.0, 1000)],
    ],
)
def test_epsilon_is_a_bound_near_the_exact_one(found: list[Mechanism]) -> None:
    assert exact(found, 1e-5) <= epsilon(found, 1e-5) <= 1.15 * exact(found, 1e-5)


def test_epsilon_of_no_noise_is_infinite_and_of_no_release_nothing() -> None:
    assert epsilon([Mechanism("updates", 0.0, 1)], 1e-5) == math.inf
    assert epsilon([Mechanism("updates", 1.0, 0)], 1e-5) == 0


def recipe(method: str, privacy: dict[str, Any], **train: Any) -> dict[str, Any]:
    return {
        "method": method,
        "data": {"name": "digits", "clients": 3, "train_max": 60, "test_max": 30},
        "train": {"backbone": "tiny", "rounds": 2, "learning_rate": 0.1, "batch": 16, "depth": 2}
        | train,
        "privacy": privacy,
    }


def privacy_in(data: dict[str, Any]) -> Any:
    world = build_simulation(read_recipe(data))
    rows: list[Any] = []
    for _ in run_rounds(world, rows):
        pass
    return report_of(world, rows)["privacy"]


def test_report_has_the_epsilon_of_whole_updates() -> None:
    report = privacy_in(recipe("fedavg", {"update_clip": 1.0, "update_sigma": 8.0, "delta": 1e-4}))
    assert (report["unit"], report["sampling_rate"], report["delta"]) == ("client", 1.0, 1e-4)
    # two rounds, each with noise of 8 C on what may differ by 2 C
    assert report["mechanisms"] == [{"of": "updates", "noise_multiplier": 4.0, "releases": 2}]
    expected = exact([Mechanism("updates", 4.0, 2)], 1e-4)
    assert expected <= report["epsilon"] <= 1.15 * expected


def test_report_counts_every_sample_s_features_for_the_client() -> None:
    noise = {"update_clip": 1.0, "update_sigma": 8.0, "feature_clip": 1.0, "feature_sigma": 40.0}
    report = privacy_in(recipe("splitlpf", noise, epochs=3))
    assert report["labels"] == "derivable"
    assert report["mechanisms"] == [
        {"of": "updates", "noise_multiplier": 4.0, "releases": 2},
        {"of": "features", "noise_multiplier": 20.0, "releases": 2 * 3 * 20},
    ]
    found = [Mechanism("updates", 4.0, 2), Mechanism("features", 20.0, 120)]
    assert exact(found, 1e-5) <= report["epsilon"] <= 1.15 * exact(found, 1e-5)


@pytest.mark.parametrize(
    ("privacy", "why"),
    [
        ({"feature_clip": 1.0, "feature_sigma": 40.0}, "updates carry"),
        ({"update_clip": 1.0, "update_sigma": 40.0}, "features carry"),
        ({"update_clip": 1.0, "feature_clip": 1.0}, "updates carry"),
    ],
)
def test_report_gives_no_epsilon_where_something_leaves_without_noise(
    privacy: dict[str, Any], why: str
) -> None:
    report = privacy_in(recipe("splitlpf", privacy))
    assert report["epsilon"] is None
    assert why in report["why"]


def test_report_of_a_run_without_noise_says_nothing_of_privacy() -> None:
    assert privacy_in(recipe("fedavg", {})) is None


@pytest.mark.parametrize(
    ("method", "privacy", "match"),
    [
        ("fedavg", {"feature_clip": 1.0, "feature_sigma": 1.0}, "sends no features"),
        ("fedavg", {"update_sigma": 1.0}, "update_clip"),
        ("fedavg", {"update_clip": -1.0}, "update_clip"),
        ("fedavg", {"update_clip": 1.0, "delta": 1.0}, "delta"),
        ("supersfl", {"feature_clip": 1.0}, "losses"),
        ("besplit", {"feature_sigma": -1.0}, "feature_sigma"),
    ],
)
def test_noise_that_cannot_be_is_refused(method: str, privacy: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        read_recipe(recipe(method, privacy))


@pytest.mark.parametrize("normalise", [False, True])
def test_weights_by_loss_are_refused_under_noise_whoever_has_them(normalise: bool) -> None:
    parts = {"weigh": {"method": "supersfl", "numbers": {"normalise_weights": normalise}}}
    data = recipe("fedavg", {"update_clip": 1.0, "update_sigma": 1.0}) | {"parts": parts}
    with pytest.raises(ConfigurationError, match="losses"):
        read_recipe(data)


@pytest.mark.parametrize("method", METHODS)
def test_refusal_names_the_methods_that_can_be_noised(method: str) -> None:
    data = recipe(method, {"update_clip": 1.0, "update_sigma": 1.0}, iterations=2)
    if method in NOISED.replace(" and", ",").split(", "):
        assert read_recipe(data).built_method.client.noise is not None
        return
    with pytest.raises(ConfigurationError, match=f"{method} .*Take one of fedavg, ") as refused:
        read_recipe(data)
    assert "Noise(" not in str(refused.value)


def test_exit_heads_of_clients_are_no_part_of_a_noised_update() -> None:
    method = Method("mine", client=ClientPart(exit_head=True))
    with pytest.raises(ConfigurationError, match="shared exits"):
        with_noise(method, Noise(update_clip=1.0))


def test_batch_norm_is_refused_under_noise() -> None:
    data = recipe("fedavg", {"update_clip": 1.0, "update_sigma": 1.0}, backbone="resnet18")
    with pytest.raises(ConfigurationError, match="group"):
        build_simulation(read_recipe(data))


def test_second_view_is_refused_under_noise() -> None:
    with pytest.raises(ConfigurationError, match="second view"):
        ClientPart(views=True, noise=BOTH)
    with pytest.raises(ConfigurationError, match="the client adapts"):
        ClientPart(exit_head=True, fusion="fixed", meta=MetaAdaptation(), noise=BOTH)


def test_settings_of_nothing_are_no_noise() -> None:
    assert PrivacySettings().noise() is None
    assert with_noise(fedavg(), None) == fedavg()
