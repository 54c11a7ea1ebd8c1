"""Labels that gradients of logits and of embeddings give away, and the effect of noise."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.attacks.labels import (
    by_direction,
    by_likelihood,
    by_sign,
    candidate_gradients,
    guessing_rate,
)
from edge_sdk.errors import ConfigurationError
from edge_sdk.training.formulas.gradient_noise import isotropic

N, B, WIDTH = 10, 1000, 32


@pytest.fixture(scope="module")
def embeddings() -> Tensor:
    return torch.randn(B, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def head() -> nn.Linear:
    torch.manual_seed(2)
    return nn.Linear(WIDTH, N)


@pytest.fixture(scope="module")
def labels() -> Tensor:
    return torch.randint(0, N, (B,), generator=torch.Generator().manual_seed(3))


def returned(embeddings: Tensor, head: nn.Linear, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, and torch's own gradients of the mean cross-entropy by logits and by embeddings."""
    embeddings = embeddings.clone().requires_grad_()
    logits = head(embeddings)
    loss = nn.functional.cross_entropy(logits, labels)
    by_logits, by_embeddings = torch.autograd.grad(loss, [logits, embeddings])
    return logits.detach(), by_logits, by_embeddings


def accuracy(guesses: Tensor, labels: Tensor) -> float:
    return float((guesses == labels).double().mean())


def test_logit_gradients_give_every_label_away(
    embeddings: Tensor, head: nn.Linear, labels: Tensor
) -> None:
    """FAULTS row 33."""
    logits, gradients, _ = returned(embeddings, head, labels)
    assert accuracy(by_sign(gradients), labels) == 1
    assert accuracy(by_likelihood(gradients, candidate_gradients(logits, B)), labels) == 1


def test_embedding_gradients_give_every_label_away_to_who_holds_the_head(
    embeddings: Tensor, head: nn.Linear, labels: Tensor
) -> None:
    logits, _, gradients = returned(embeddings, head, labels)
    candidates = candidate_gradients(logits, B, head.weight.detach())
    # the true label's candidate is the gradient itself
    true = candidates[torch.arange(B), labels]
    torch.testing.assert_close(true, gradients, rtol=1e-4, atol=1e-8)
    assert accuracy(by_likelihood(gradients, candidates), labels) == 1


def test_directions_give_labels_away_without_the_head(
    embeddings: Tensor, head: nn.Linear, labels: Tensor
) -> None:
    _, _, gradients = returned(embeddings, head, labels)
    known = [gradients[:100][labels[:100] == label] for label in range(N)]
    # not every sample, but most, from ten labelled ones a class
    assert accuracy(by_direction(gradients[100:], known), labels[100:]) > 0.9
    # two classes pull in opposite directions: one labelled sample of each is enough
    two = labels < 2
    _, _, gradients = returned(embeddings[two], two_class(head), labels[two])
    known = [gradients[labels[two] == label][:1] for label in range(2)]
    assert accuracy(by_direction(gradients, known), labels[two]) == 1


def two_class(head: nn.Linear) -> nn.Linear:
    small = nn.Linear(WIDTH, 2)
    with torch.no_grad():
        small.weight.copy_(head.weight[:2])
        small.bias.copy_(head.bias[:2])
    return small


def test_a_class_nobody_has_is_never_guessed() -> None:
    known = [torch.tensor([[1.0, 0.0]]), torch.empty(0, 2), torch.tensor([[0.0, 1.0]])]
    gradients = torch.tensor([[2.0, 0.1], [-1.0, -1.0], [0.1, 3.0], [0.0, 0.0]])
    assert by_direction(gradients, known).tolist() == [0, 0, 2, 0]
    with pytest.raises(ConfigurationError, match="expected labelled gradients of a class"):
        by_direction(gradients, [torch.empty(0, 2)])


def test_guessing_rate_is_the_commonest_labels_share() -> None:
    assert guessing_rate(torch.tensor([3, 3, 1, 3])) == 0.75


def test_noise_takes_attacks_to_guessing(
    embeddings: Tensor, head: nn.Linear, labels: Tensor
) -> None:
    """FAULTS row 33."""
    logits, gradients, _ = returned(embeddings, head, labels)
    candidates = candidate_gradients(logits, B)
    found = []
    for strength in (0.0, 0.1, 1.0, 10.0, 1000.0):
        noisy = isotropic(gradients, strength, np.random.default_rng(4))
        found.append(accuracy(by_likelihood(noisy, candidates), labels))
    assert found == sorted(found, reverse=True)
    assert found[0] == 1
    # a sample's noise of 31 times the largest gradient; binomial, 3 standard deviations of 1,000
    assert found[-1] < 0.1 + 3 * (0.1 * 0.9 / B) ** 0.5


def test_noise_has_the_stated_variance_and_no_drift() -> None:
    gradient = torch.zeros(20_000, 5)
    gradient[0] = torch.tensor([0.0, 3.0, 0.0, 4.0, 0.0])  # the largest: norm 5
    noise = isotropic(gradient, 2.0, np.random.default_rng(0)) - gradient
    # s / D * 5^2 = 10 for each entry; of 100,000 the standard error of a variance is 0.45 %
    assert float(noise.var()) == pytest.approx(10, rel=0.02)
    assert float(noise.mean()) == pytest.approx(0, abs=0.04)
    # a sample's noise has s times the squared norm of the largest gradient
    assert float(noise.square().sum(1).mean()) == pytest.approx(2 * 25, rel=0.02)


def test_no_noise_leaves_the_bits_and_zero_gradients_stay_zero() -> None:
    gradient = torch.rand(3, 4)
    assert isotropic(gradient, 0.0, np.random.default_rng(0)) is gradient
    zero = torch.zeros(3, 4)
    assert torch.equal(isotropic(zero, 9.0, np.random.default_rng(0)), zero)
    again = [isotropic(gradient, 1.0, np.random.default_rng(5)) for _ in range(2)]
    assert torch.equal(again[0], again[1])


def test_max_norm_would_hide_nothing_among_many_classes(
    embeddings: Tensor, head: nn.Linear, labels: Tensor
) -> None:
    """Why it is not offered: noise along the gradient scales it, and the odd sign stays."""
    _, gradients, _ = returned(embeddings, head, labels)
    norms = gradients.norm(dim=1, keepdim=True)
    scale = (norms.max() ** 2 / norms**2 - 1).sqrt() * torch.randn(
        B, 1, generator=torch.Generator().manual_seed(6)
    )
    perturbed = gradients * (1 + scale)
    # the entry with a sign that no other has
    odd = torch.where((perturbed < 0).sum(1, keepdim=True) == 1, -perturbed, perturbed).argmax(1)
    assert accuracy(odd, labels) == 1
