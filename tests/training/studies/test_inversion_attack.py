"""Decoders by their counts and sizes; the attack on prefixes that give away all or nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.attacks.inversion import Attacker, attack
from edge_sdk.errors import ConfigurationError
from edge_sdk.nets import build
from edge_sdk.training.data.load import Dataset, load_dataset
from edge_sdk.training.formulas.decoder import Decoder, Pixels
from edge_sdk.training.protocol.weights import read_weights

SMALL = Attacker(width=16, blocks=1, epochs=20)


class Scaled(nn.Module):
    """A prefix that hands the image on, times a number."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(by))

    def forward(self, x: Tensor) -> Tensor:
        return self.by * x / 16


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load_dataset("digits")


@pytest.mark.parametrize(
    ("features", "image"),
    [
        ((8, 8, 8), (1, 8, 8)),
        ((32, 4, 4), (1, 8, 8)),
        ((64, 7, 7), (1, 28, 28)),
        ((8, 3, 5), (3, 20, 11)),
        ((256, 3, 3), (3, 32, 32)),
    ],
)
def test_a_decoder_draws_images_of_the_asked_size(
    features: tuple[int, ...], image: tuple[int, ...]
) -> None:
    drawn = Decoder(features, image, 16, blocks=1)(10 * torch.randn(2, *features)).detach()
    assert drawn.shape == (2, *image)
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) <= 1


def test_a_decoder_has_the_parameters_of_its_convolutions() -> None:
    # 8 -> 16, two residual blocks of two, 4x4 -> 8x8 -> 16x16 -> 20x20, then 16 -> 3
    inside = 9 * 16 * 16 + 16 + 2 * 16
    expected = (9 * 8 * 16 + 16 + 2 * 16) + (4 + 3) * inside + (9 * 16 * 3 + 3)
    decoder = Decoder((8, 4, 4), (3, 20, 20), 16, blocks=2)
    assert sum(parameter.numel() for parameter in decoder.parameters()) == expected


def test_what_is_no_image_is_refused() -> None:
    net = build("har_cnn", seed=0)
    x = np.zeros((4, 9, 128), np.float32)
    with pytest.raises(ConfigurationError, match="three axes"):
        attack(net.prefix(1), x, x, SMALL)


def test_pixels_are_bytes_or_from_least_to_most() -> None:
    bytewise = Pixels(np.array([[3, 9]], np.uint8))
    assert bytewise(torch.tensor([0, 51, 255], dtype=torch.uint8)).tolist() == [
        0,
        pytest.approx(0.2),
        1,
    ]
    measured = Pixels(np.array([[-1.0, 3.0]], np.float32))
    assert measured(torch.tensor([-1.0, 0.0, 3.0])).tolist() == [0, 0.25, 1]
    assert Pixels(np.ones((2, 2), np.float32))(torch.ones(2)).tolist() == [0, 0]


def test_features_that_are_the_image_give_it_away_and_a_constant_gives_nothing(
    digits: Dataset,
) -> None:
    known, private = digits.x_test, digits.x_train[:100]
    told = attack(Scaled(1.0), known, private, SMALL)
    untold = attack(Scaled(0.0), known, private, SMALL)
    assert told.mse < 0.004
    assert told.ssim > 0.98
    # without features the best guess is the mean image; it need not be reached exactly
    assert untold.mse == pytest.approx(untold.mse_blind, rel=0.25)
    assert untold.mse_blind == told.mse_blind
    # by hand: the mean of what the attacker had, on the scale of 0 to 1
    mean = digits.x_test.mean(0) / 16
    assert told.mse_blind == pytest.approx(float(((private / 16 - mean) ** 2).mean()), rel=1e-4)


def test_the_attack_repeats_and_leaves_the_prefix_as_it_was(digits: Dataset) -> None:
    """FAULTS row 33."""
    net = build("resnet18", input_shape=(1, 8, 8), seed=0)
    prefix = net.prefix(2)
    before = read_weights(prefix)
    attacker = Attacker(width=8, blocks=0, epochs=1)
    leaks = [attack(prefix, digits.x_test[:64], digits.x_train[:64], attacker) for _ in range(2)]
    assert leaks[0] == leaks[1]
    assert prefix.training
    for name, tensor in read_weights(prefix).items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in prefix.parameters())
