"""Evidence and its uncertainties against scipy's Dirichlet, torch's KL and hand-worked numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch.distributions import Dirichlet, kl_divergence

from edge_sdk.errors import ConfigurationError
from edge_sdk.gate.gate import POLICIES
from edge_sdk.gate_form import VACUITY, Activation
from edge_sdk.training.formulas.evidence import (
    aleatoric,
    concentration,
    dirichlet_entropy,
    epistemic,
    evidence,
    evidential_losses,
    kl_to_uniform,
)
from edge_sdk.training.formulas.evidential_loss import EvidentialLoss

ACTIVATIONS: list[Activation] = ["exp", "softplus"]

ALPHAS = torch.tensor(
    [[1.0, 1.0, 1.0, 1.0], [1.5, 2.0, 7.25, 1.0], [120.0, 1.01, 3.0, 40.0], [9.0, 9.0, 9.0, 9.0]],
    dtype=torch.float64,
)


def rows() -> list[np.ndarray]:
    return list(ALPHAS.numpy())


def test_entropy_is_that_of_scipy_s_dirichlet() -> None:
    expected = [scipy.stats.dirichlet(alpha).entropy() for alpha in rows()]
    np.testing.assert_allclose(dirichlet_entropy(ALPHAS).numpy(), expected, rtol=1e-12)


def test_without_evidence_entropy_is_minus_log_factorial() -> None:
    # N = 4: -ln 3!
    assert float(dirichlet_entropy(ALPHAS)[0]) == pytest.approx(-math.log(6), rel=1e-14)


def test_aleatoric_is_the_mean_entropy_of_draws_from_the_dirichlet() -> None:
    generator = np.random.default_rng(0)
    for alpha, got in zip(rows(), aleatoric(ALPHAS), strict=True):
        draws = scipy.stats.dirichlet(alpha).rvs(100_000, random_state=generator)
        entropies = scipy.stats.entropy(draws, axis=1)
        # of the mean of 100,000 draws: five standard errors
        assert abs(entropies.mean() - float(got)) < 5 * entropies.std() / math.sqrt(100_000)


def test_aleatoric_by_hand() -> None:
    # alpha (1, 1): 2 * 1/2 * (digamma(3) - digamma(2)) = 1/2; (1, 2): S = 3, digamma(4) is
    # 1/3 above digamma(3) and 1/2 + 1/3 above digamma(2): 1/3 * 5/6 + 2/3 * 1/3 = 1/2
    got = aleatoric(torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=torch.float64))
    np.testing.assert_allclose(got.numpy(), [0.5, 0.5], rtol=1e-14)


def test_epistemic_lies_in_0_to_1_and_falls_as_evidence_grows() -> None:
    alphas = 1 + torch.tensor([0.0, 0.5, 5, 50, 500], dtype=torch.float64)[:, None].expand(5, 10)
    values = epistemic(alphas)
    assert float(values[0]) == pytest.approx(1, rel=1e-12)
    assert bool((values[1:] < values[:-1]).all())
    assert bool((values > 0).all())
    # H_max - H is KL to the uniform Dirichlet
    uniform = Dirichlet(torch.ones(10, dtype=torch.float64))
    expected = 1 / (1 + kl_divergence(Dirichlet(alphas), uniform))
    np.testing.assert_allclose(values.numpy(), expected.numpy(), rtol=1e-11)


def test_kl_is_that_of_torch() -> None:
    expected = kl_divergence(Dirichlet(ALPHAS), Dirichlet(torch.ones_like(ALPHAS)))
    np.testing.assert_allclose(kl_to_uniform(ALPHAS).numpy(), expected.numpy(), atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kl_weight", [0.0, 0.3, 1.0])
def test_loss_is_the_expected_cross_entropy_and_a_pull_to_no_evidence(
    kl_weight: float, activation: Activation
) -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 3.0, 3.0]])
    labels = torch.tensor([0, 1])
    raised = logits.double().exp()
    alpha = (raised if activation == "exp" else torch.log1p(raised)) + 1
    # E[-ln p_y] under the Dirichlet is digamma(S) - digamma(alpha_y)
    fit = [
        scipy.special.digamma(float(a.sum())) - scipy.special.digamma(float(a[y]))
        for a, y in zip(alpha, labels, strict=True)
    ]
    wrong = alpha.clone()
    wrong[0, 0] = wrong[1, 1] = 1.0
    pull = kl_divergence(Dirichlet(wrong), Dirichlet(torch.ones_like(wrong)))
    expected = np.array(fit) + kl_weight * pull.numpy()
    got = evidential_losses(logits, labels, kl_weight, activation)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def test_loss_has_the_gradient_of_finite_differences() -> None:
    # 12 lies on the tangent
    logits = torch.tensor([[2.0, -1.0, 0.5], [0.0, 12.0, -4.0]], dtype=torch.float64)
    labels = torch.tensor([2, 0])
    assert torch.autograd.gradcheck(
        lambda given: evidential_losses(given, labels, 0.7), [logits.requires_grad_()]
    )


def test_loss_falls_with_evidence_for_the_true_class_and_grows_with_any_other() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(evidential_losses(logits, torch.tensor([1]), 1).sum(), logits)
    assert gradient[0, 1] < 0 < min(gradient[0, 0], gradient[0, 2])
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e20, 3e38])
def test_unbounded_evidence_keeps_every_figure_finite(size: float) -> None:
    logits = torch.tensor([[size, -size, 0.0], [-size] * 3, [size] * 3], requires_grad=True)
    alpha = concentration(logits.detach())
    for figure in (aleatoric(alpha), epistemic(alpha)):
        assert bool(torch.isfinite(figure).all())
        assert bool((figure >= -1e-12).all())
    assert bool((epistemic(alpha) > 0).all())
    assert float(epistemic(alpha)[1]) == pytest.approx(1)  # no evidence
    losses = evidential_losses(logits, torch.tensor([1, 0, 2]), 1.0)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert bool(torch.isfinite(losses).all())
    assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("peak", [-3.0, 10.0, 10.5, 30.0])
def test_the_devices_gate_computes_the_same_vacuity(peak: float, activation: Activation) -> None:
    logits = torch.tensor([[-3.5, -5.0, -4.0, peak]])
    label, probabilities, uncertainty = POLICIES[VACUITY[activation]](logits[0].numpy())
    alpha = concentration(logits, activation)[0]
    assert label == 3
    assert uncertainty == pytest.approx(4 / float(alpha.sum()), rel=1e-12)
    np.testing.assert_allclose(probabilities, (alpha / alpha.sum()).numpy(), rtol=1e-6)


def test_evidence_is_exp_and_its_tangent_beyond_10() -> None:
    z = torch.tensor([[-50.0, 0.0, math.log(3), 10.0, 11.0, 13.5]], dtype=torch.float64)
    z.requires_grad_()
    got = evidence(z)
    # e^10 at 10, and as much more for each unit beyond it
    ten = math.exp(10)
    expected = [math.exp(-50), 1.0, 3.0, ten, 2 * ten, 4.5 * ten]
    np.testing.assert_allclose(got.detach().numpy(), [expected], rtol=1e-12)
    (slope,) = torch.autograd.grad(got.sum(), z)
    np.testing.assert_allclose(slope, [[math.exp(-50), 1.0, 3.0, ten, ten, ten]], rtol=1e-12)


def test_the_releases_before_took_softplus() -> None:
    assert evidence(torch.zeros(1, 2), "softplus").tolist() == [[math.log(2)] * 2]


def test_kl_weight_is_annealed_over_rounds() -> None:
    loss = EvidentialLoss()
    assert [loss.kl_weight(t) for t in (1, 5, 10, 11, 500)] == [0.001, 0.005, 0.01, 0.01, 0.01]
    whole = EvidentialLoss("softplus", 1.0, 1)
    assert whole.kl_weight(1) == 1
    with pytest.raises(ConfigurationError, match=r"anneal_rounds: .*at least 1, got 0"):
        EvidentialLoss(anneal_rounds=0)
    with pytest.raises(ConfigurationError, match="activation: expected one of exp, softplus"):
        EvidentialLoss("relu")  # type: ignore[arg-type]  # the point of the test


def test_near_the_first_weights_the_divergence_does_not_outweigh_the_fit() -> None:
    """The reason for exp and for a hundredth: the net pull of each term at logits of 0."""

    def pulls(activation: Activation, kl_weight: float) -> list[float]:
        logits = torch.zeros(1, 10, requires_grad=True)
        found = []
        for weight in (0.0, kl_weight):
            loss = evidential_losses(logits, torch.tensor([0]), weight, activation).sum()
            found.append(float(torch.autograd.grad(loss, logits)[0].sum()))
        return found

    for activation, kl_weight, up in (("softplus", 1.0, False), ("exp", 0.01, True)):
        fit, both = pulls(activation, kl_weight)  # type: ignore[arg-type]  # the two activations
        assert fit < 0  # the fit alone lifts evidence
        assert (both < 0) == up
