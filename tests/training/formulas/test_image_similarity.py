"""MSE, PSNR and SSIM of images, against hand-worked numbers and SciPy's Gaussian filter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from edge_sdk.training.formulas.image_similarity import mse, psnr, ssim


def pair(shape: tuple[int, ...], noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    image = torch.rand(*shape, generator=generator, dtype=torch.float64)
    other = image + noise * torch.randn(*shape, generator=generator, dtype=torch.float64)
    return image, other.clamp(0, 1)


def ssim_by_filter(a: NDArray[Any], b: NDArray[Any], reach: int) -> float:
    """One channel: the textbook's maps by SciPy, cropped to where the window is whole."""

    def blur(x: NDArray[Any]) -> NDArray[Any]:
        blurred: NDArray[Any] = gaussian_filter(x, 1.5, radius=reach, mode="constant")
        return blurred[reach : x.shape[0] - reach, reach : x.shape[1] - reach]

    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    cov = blur(a * b) - mean_a * mean_b
    top = (2 * mean_a * mean_b + 1e-4) * (2 * cov + 9e-4)
    return float((top / ((mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4))).mean())


@pytest.mark.parametrize(
    ("shape", "reach"), [((2, 3, 32, 32), 5), ((2, 1, 8, 8), 3), ((1, 1, 13, 7), None)]
)
@pytest.mark.parametrize("noise", [0.05, 0.5])
def test_ssim_is_scipys(shape: tuple[int, ...], reach: int | None, noise: float) -> None:
    image, other = pair(shape, noise)
    got = ssim(image, other)
    if reach is None:  # 11 along one side, 7 along the other: no one SciPy call, but it is defined
        assert got.shape == (1,)
        assert 0 < float(got) < 1
        return
    expected = [
        np.mean([ssim_by_filter(a, b, reach) for a, b in zip(one, two, strict=True)])
        for one, two in zip(image.numpy(), other.numpy(), strict=True)
    ]
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-10)


def test_a_copy_has_the_best_value_of_every_measure() -> None:
    image, _ = pair((3, 1, 28, 28), 0.1)
    torch.testing.assert_close(ssim(image, image), torch.ones(3, dtype=torch.float64))
    assert mse(image, image).tolist() == [0, 0, 0]
    assert psnr(image, image).tolist() == [100, 100, 100]


def test_flat_images_differ_only_in_brightness() -> None:
    # no variance: only the first factor is left, (2*0.2*0.6 + C1) / (0.04 + 0.36 + C1)
    image, other = (torch.full((1, 1, 16, 16), v, dtype=torch.float64) for v in (0.2, 0.6))
    assert float(ssim(image, other)) == pytest.approx((0.24 + 1e-4) / (0.4 + 1e-4))
    assert float(mse(image, other)) == pytest.approx(0.16)
    assert float(psnr(image, other)) == pytest.approx(10 * math.log10(1 / 0.16), rel=1e-6)


def test_every_image_is_measured_by_itself() -> None:
    image = torch.zeros(2, 1, 4, 4)
    other = torch.stack([torch.zeros(1, 4, 4), torch.full((1, 4, 4), 0.1)])
    assert mse(image, other).tolist() == pytest.approx([0, 0.01])
    assert psnr(image, other).tolist() == pytest.approx([100, 20], rel=1e-5)


def test_more_noise_means_less_similarity() -> None:
    image, _ = pair((4, 1, 28, 28), 0)
    scores = [float(ssim(image, pair((4, 1, 28, 28), noise)[1]).mean()) for noise in (0, 0.1, 0.3)]
    assert scores == sorted(scores, reverse=True)


def test_ssim_pulls_an_image_towards_another() -> None:
    image, other = pair((2, 1, 12, 12), 0.3)
    assert torch.autograd.gradcheck(
        lambda moved: ssim(image, moved), (other.requires_grad_(),), fast_mode=True
    )
