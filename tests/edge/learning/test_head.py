"""The linear layer and its step of SGD, against torch's autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edge_sdk.learning.head import Floats, Head, Scale, cross_entropy, sgd_step, softmax


def made(classes: int = 4, features: int = 7, samples: int = 9) -> tuple[Head, Floats, Floats]:
    random = np.random.default_rng(3)
    head = Head(
        random.normal(size=(classes, features)).astype(np.float32),
        random.normal(size=classes).astype(np.float32),
    )
    x = (random.normal(size=(samples, features)) * 5 + 2).astype(np.float32)
    targets = random.dirichlet(np.ones(classes), samples).astype(np.float32)
    return head, x, targets


@pytest.mark.parametrize("pull", [0.0, 0.3])
def test_a_step_is_torchs(pull: float) -> None:
    start, x, targets = made()
    head = Head(start.weight + 0.5, start.bias - 0.25)
    weight, bias = (torch.tensor(part, requires_grad=True) for part in (head.weight, head.bias))
    features, q = torch.tensor(x), torch.tensor(targets)
    loss = torch.nn.functional.cross_entropy(features @ weight.T + bias, q)
    loss = loss + pull / 2 * (weight - torch.tensor(start.weight)).square().sum()
    slope, offset = torch.autograd.grad(loss, [weight, bias])
    # the largest safe rate: 1 / mean |(g, 1)|^2
    rate = 0.5 / float(torch.cat([features, torch.ones(len(x), 1)], 1).square().sum(1).mean())
    stepped = sgd_step(head, x, targets, rate=0.5, pull=pull, start=start)
    expected = (weight - rate * slope).detach().numpy()
    np.testing.assert_allclose(stepped.weight, expected, rtol=1e-5, atol=1e-6)
    expected = (bias - rate * offset).detach().numpy()
    np.testing.assert_allclose(stepped.bias, expected, rtol=1e-5, atol=1e-6)
    assert stepped.weight.dtype == stepped.bias.dtype == np.float32


def test_loss_and_probabilities_are_torchs() -> None:
    head, x, targets = made()
    logits = torch.tensor(head.logits(x)) * 30  # far from each other
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(targets))
    assert cross_entropy(logits.numpy(), targets) == pytest.approx(float(expected), rel=1e-5)
    np.testing.assert_allclose(softmax(logits.numpy()), torch.softmax(logits, 1), atol=1e-6)


def test_a_head_for_standardised_features_gives_the_same_logits() -> None:
    head, x, _ = made()
    x[:, 2] = 4.0  # a feature that never changes
    scale = Scale.of(x)
    inner = scale.inner(head)
    own = scale.standardised(x)
    np.testing.assert_allclose(own[:, :2].std(axis=0), 1, rtol=1e-4)
    np.testing.assert_allclose(inner.logits(own), head.logits(x), rtol=1e-4, atol=1e-4)
    back = scale.outer(inner)
    np.testing.assert_allclose(back.weight, head.weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(back.bias, head.bias, rtol=1e-4, atol=1e-4)
