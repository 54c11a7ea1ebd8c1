"""Codecs of weight updates: what they lose, what they save, what they refuse."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_sdk.errors import ConfigurationError, FrameError, InputError
from edge_sdk.nets import build
from edge_sdk.nets.supernet import Supernet
from edge_sdk.training.protocol.synthetic import GradientProbe, reproduce, synthesise
from edge_sdk.training.protocol.update_codec import (
    UPDATE_CODECS,
    UpdateCoding,
    decode_update,
    encode_update,
    fidelity,
)
from edge_sdk.training.protocol.weights import read_weights

DEPTH = 2


def search() -> np.random.Generator:
    return np.random.default_rng((0, 1, 2))


@pytest.fixture(scope="module")
def net() -> Supernet:
    return build("tiny", classes=10, input_shape=(1, 8, 8), mean=(4.0,), std=(3.0,), seed=0)


@pytest.fixture
def sent(net: Supernet) -> dict[str, Tensor]:
    return read_weights(net.prefix(DEPTH))


@pytest.fixture
def after(sent: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in sent.items()
    }


def there_and_back(
    after: dict[str, Tensor], sent: dict[str, Tensor], coding: UpdateCoding, net: Supernet
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    def probe() -> GradientProbe:
        return GradientProbe(net, DEPTH, sent)

    coded = encode_update(after, sent, coding, probe, search())
    return coded, decode_update(coded, sent, coding, probe)


def test_fp32_is_the_weights_themselves(
    after: dict[str, Tensor], sent: dict[str, Tensor], net: Supernet
) -> None:
    coded, decoded = there_and_back(after, sent, UpdateCoding(), net)
    assert all(torch.equal(decoded[name], tensor) for name, tensor in after.items())
    assert fidelity(after, coded, decoded, sent).error == 0


def test_fp16_is_the_change_rounded_to_11_bits(
    after: dict[str, Tensor], sent: dict[str, Tensor], net: Supernet
) -> None:
    coded, decoded = there_and_back(after, sent, UpdateCoding("fp16"), net)
    for name, tensor in sent.items():
        change = (after[name] - tensor).numpy()
        # any power of two will do as long as nothing leaves half precision's range
        rounded = (change * 2**10).astype(np.float16).astype(np.float32) / 2**10
        np.testing.assert_array_equal(decoded[name].numpy(), tensor.numpy() + rounded)
    measured = fidelity(after, coded, decoded, sent)
    assert measured.bytes == measured.raw_bytes / 2 + 4 * len(sent)
    assert 0 < measured.error < 2**-11  # half a unit in the last of 11 bits, for every entry


@pytest.mark.parametrize("size", [1e-30, 1e-7, 1e6, 1e30])
def test_fp16_takes_a_change_of_any_size(size: float, net: Supernet) -> None:
    sent = {"a": torch.zeros(100)}
    after = {"a": size * torch.randn(100, generator=torch.Generator().manual_seed(0))}
    coded, decoded = there_and_back(after, sent, UpdateCoding("fp16"), net)
    assert 0 < fidelity(after, coded, decoded, sent).error < 2**-11


def test_int8_is_off_by_half_a_step_of_each_tensor(
    after: dict[str, Tensor], sent: dict[str, Tensor], net: Supernet
) -> None:
    coded, decoded = there_and_back(after, sent, UpdateCoding("int8"), net)
    for name, tensor in sent.items():
        change = after[name] - tensor
        step = float(change.max().clamp(min=0) - change.min().clamp(max=0)) / 255
        assert float((decoded[name] - after[name]).abs().max()) <= step / 2 * 1.001 + 1e-7
    measured = fidelity(after, coded, decoded, sent)
    assert measured.bytes == measured.raw_bytes / 4 + 8 * len(sent)
    assert measured.cosine > 0.999


def test_top_k_keeps_the_largest_of_all_tensors_together(net: Supernet) -> None:
    sent = {"a": torch.zeros(4), "b": torch.zeros(2, 3)}
    after = {
        "a": torch.tensor([0.0, -5.0, 1.0, 0.5]),
        "b": torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.25, 9.0]]),
    }
    coding = UpdateCoding("top-k", share=0.3)  # 3 of 10
    coded, decoded = there_and_back(after, sent, coding, net)
    assert decoded["a"].tolist() == [0, -5, 0, 0]
    assert decoded["b"].tolist() == [[2, 0, 0], [0, 0, 9]]
    measured = fidelity(after, coded, decoded, sent)
    assert measured.bytes == 3 * (4 + 4)
    # what is lost: 1, .5 and .25 of 5, 1, .5, 2, .25 and 9
    assert measured.error == pytest.approx(
        math.sqrt((1 + 0.25 + 0.0625) / (25 + 1 + 0.25 + 4 + 0.0625 + 81))
    )


def test_top_k_of_everything_loses_nothing(
    after: dict[str, Tensor], sent: dict[str, Tensor], net: Supernet
) -> None:
    _, decoded = there_and_back(after, sent, UpdateCoding("top-k", share=1.0), net)
    for name, tensor in after.items():
        torch.testing.assert_close(decoded[name], tensor, rtol=0, atol=1e-7)


def test_replay_is_the_gradient_autograd_finds_on_the_whole_network(net: Supernet) -> None:
    sent = read_weights(net.segment(0, None))
    probe = GradientProbe(net, None, sent)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 1, 8, 8, generator=generator)
    targets = torch.randn(3, 10, generator=generator)
    raw = x * 3.0 + 4.0  # the network normalises by mean 4 and std 3
    net.zero_grad()
    (net.eval()(raw) * targets).sum(1).mean().backward()
    expected = {name: parameter.grad for name, parameter in net.segment(0, None).named_parameters()}
    for name, got in zip(probe.names, probe.gradients(x, targets), strict=True):
        torch.testing.assert_close(got, expected[name], rtol=1e-4, atol=1e-5)


def test_synthetic_samples_come_nearer_with_the_search_and_never_farther_than_nothing(
    net: Supernet, sent: dict[str, Tensor]
) -> None:
    prefix = net.prefix(DEPTH)
    x = 16 * torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(2))
    y = torch.arange(64) % 10
    loss = nn.functional.cross_entropy(net.eval()(x), y)
    gradients = torch.autograd.grad(loss, list(prefix.parameters()))
    after = {
        name: tensor - 0.1 * gradient
        for (name, tensor), gradient in zip(prefix.named_parameters(), gradients, strict=True)
    }
    after = {name: tensor.detach() for name, tensor in after.items()}
    errors = []
    for steps in (1, 60):
        coding = UpdateCoding("synthetic", samples=2, steps=steps)
        coded, decoded = there_and_back(after, sent, coding, net)
        measured = fidelity(after, coded, decoded, sent)
        errors.append(measured.error)
        # two inputs of 64 and two targets of 10 in half precision, four lengths
        assert measured.bytes == 2 * 2 * (64 + 10) + 4 * 4
    assert errors[1] < 0.95 * errors[0] < 0.95


def test_lengths_are_the_best_there_are(
    net: Supernet, sent: dict[str, Tensor], after: dict[str, Tensor]
) -> None:
    change = {name: after[name] - sent[name] for name in sent}
    probe = GradientProbe(net, DEPTH, sent)
    made = synthesise(change, probe, 2, 20, search())

    def distance(lengths: Tensor) -> float:
        got = reproduce(replace(made, lengths=lengths), probe)
        return sum(float((got[name] - change[name]).pow(2).sum()) for name in change)

    best = distance(made.lengths)
    for place in range(len(made.lengths)):
        for factor in (0.9, 1.1):
            other = made.lengths.clone()
            other[place] *= factor
            assert distance(other) > best


@pytest.mark.parametrize("codec", UPDATE_CODECS)
def test_change_of_nothing_stays_nothing(
    codec: str, sent: dict[str, Tensor], net: Supernet
) -> None:
    coded, decoded = there_and_back(sent, sent, UpdateCoding(codec), net)  # type: ignore[arg-type]  # each name in turn
    assert all(torch.equal(decoded[name], tensor) for name, tensor in sent.items())
    measured = fidelity(sent, coded, decoded, sent)
    assert (measured.error, measured.cosine) == (0, 1)


@pytest.mark.parametrize("codec", UPDATE_CODECS)
def test_what_was_not_sent_and_statistics_travel_as_they_are(codec: str, net: Supernet) -> None:
    sent = read_weights(net.prefix(DEPTH)) | {"stage2.1.running_mean": torch.zeros(3)}
    own = {"exit2.1.weight": torch.randn(10, 4), "stage2.1.running_mean": torch.ones(3)}
    after = {name: tensor + 0.5 for name, tensor in sent.items()} | own

    def probe() -> GradientProbe:
        return GradientProbe(net, DEPTH, {k: v for k, v in sent.items() if "running" not in k})

    coding = UpdateCoding(codec, steps=2)  # type: ignore[arg-type]  # each name in turn
    decoded = decode_update(
        encode_update(after, sent, coding, probe, search()), sent, coding, probe
    )
    assert decoded.keys() == after.keys()
    assert all(torch.equal(decoded[name], tensor) for name, tensor in own.items())


@pytest.mark.parametrize("codec", [c for c in UPDATE_CODECS if c != "fp32"])
def test_diverged_update_cannot_be_coded(
    codec: str, sent: dict[str, Tensor], after: dict[str, Tensor], net: Supernet
) -> None:
    after["stage1.0.weight"][0] = math.nan
    with pytest.raises(InputError, match="learning_rate"):
        there_and_back(after, sent, UpdateCoding(codec), net)  # type: ignore[arg-type]  # each name in turn


@pytest.mark.parametrize("codec", [c for c in UPDATE_CODECS if c != "fp32"])
def test_foreign_bytes_are_refused(
    codec: str, sent: dict[str, Tensor], after: dict[str, Tensor], net: Supernet
) -> None:
    coding = UpdateCoding(codec, steps=1)  # type: ignore[arg-type]  # each name in turn

    def probe() -> GradientProbe:
        return GradientProbe(net, DEPTH, sent)

    coded = encode_update(after, sent, coding, probe, search())
    for name, tensor in coded.items():
        for wrong in (tensor[:1].repeat(9, *[1] * (tensor.ndim - 1)), tensor.double()):
            with pytest.raises(FrameError, match="expected"):
                decode_update(coded | {name: wrong}, sent, coding, probe)
        with pytest.raises(FrameError, match="got none"):
            decode_update({k: v for k, v in coded.items() if k != name}, sent, coding, probe)


@pytest.mark.parametrize("places", [[0, 0], [1, 0], [-1, 3], [0, 10**6]])
def test_places_out_of_order_or_range_are_refused(places: list[int], net: Supernet) -> None:
    sent = {"a": torch.zeros(10)}
    coded = {
        ":places": torch.tensor(places, dtype=torch.int32),
        ":values": torch.ones(2),
    }
    with pytest.raises(FrameError, match="ascending"):
        decode_update(
            coded, sent, UpdateCoding("top-k", share=0.2), lambda: GradientProbe(net, 1, sent)
        )


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"codec": "zip"}, "update_codec"),
        ({"share": 0.0}, "update_share"),
        ({"samples": 0}, "update_samples"),
        ({"steps": True}, "update_steps"),
    ],
)
def test_wrong_numbers_are_named(wrong: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        UpdateCoding(**wrong)  # type: ignore[arg-type]  # wrong on purpose
