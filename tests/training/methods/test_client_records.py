"""Client State Records and the weights they give, against sums by hand and the paper's reading."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from edge_sdk.training.formulas.evidence import (
    aleatoric,
    concentration,
    dirichlet_entropy,
    epistemic,
)
from server.training.methods.formulas.client_records import (
    evidential_weights,
    label_shares,
    record_of,
    updated,
)


def record(evidence: list[list[float]], counts: list[float], ale: float, epi: float) -> Tensor:
    """A record with the same mean uncertainties for every class with samples."""
    m = torch.tensor(counts, dtype=torch.float64)
    e = torch.tensor(evidence, dtype=torch.float64)
    return torch.cat([e, m[:, None], ale * m[:, None], epi * m[:, None]], dim=1)


def test_a_batch_is_summed_by_true_class() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.5, 3.0, 0.0], [1.0, 0.0, 0.0]])
    labels = torch.tensor([0, 2, 0])
    alpha = concentration(logits)
    got = record_of(logits, labels)
    assert got.shape == (3, 6)
    np.testing.assert_allclose(got[0, :3].numpy(), (alpha[0] + alpha[2] - 2).numpy())
    np.testing.assert_allclose(got[2, :3].numpy(), (alpha[1] - 1).numpy())
    assert got[1].tolist() == [0] * 6
    assert got[:, 3].tolist() == [2, 0, 1]
    ale, epi = aleatoric(alpha), epistemic(alpha)
    np.testing.assert_allclose(got[:, 4].numpy(), [float(ale[0] + ale[2]), 0, float(ale[1])])
    np.testing.assert_allclose(got[:, 5].numpy(), [float(epi[0] + epi[2]), 0, float(epi[1])])


def test_old_records_fade_by_the_rounds_since() -> None:
    old, new = torch.full((2, 5), 100.0), torch.full((2, 5), 10.0)
    assert torch.equal(updated(None, new, 7, 0.9), new)
    for rounds, decay in ((0, 0.9), (1, 0.9), (2, 0.81), (3, 0.729)):
        expected = decay * 100 + (1 - decay) * 10
        torch.testing.assert_close(
            updated(old, new, rounds, 0.9), torch.full((2, 5), float(expected))
        )
    assert torch.equal(updated(old, new, 1, 0.0), new)


def test_weights_by_hand() -> None:
    # one class in three for ada: q = 6/8 there; two for bob: 1/2 and 1/4
    ada = record([[6, 1, 1], [0, 0, 0], [0, 0, 0]], [4, 0, 0], ale=0.5, epi=0.25)
    bob = record([[2, 1, 1], [0, 0, 0], [2, 1, 1]], [2, 0, 1], ale=0.5, epi=0.5)
    q_ada, q_bob = 0.75 / 3, (0.5 + 0.25) / 3
    mean = evidential_weights({"ada": ada, "bob": bob}, missing="mean")
    s_ada, s_bob = q_ada / (0.5 * 0.25), q_bob / (0.5 * 0.5)
    assert mean["ada"] == pytest.approx(s_ada / (s_ada + s_bob), rel=1e-6)
    assert sum(mean.values()) == pytest.approx(1)
    # without evidence in three classes U_ale = digamma(4) - digamma(2) = 1/2 + 1/3, and U_epi = 1
    full = evidential_weights({"ada": ada, "bob": bob})
    f_ada = q_ada / ((0.5 + 5 / 3) / 3 * (0.25 + 2) / 3)
    f_bob = q_bob / ((2 * 0.5 + 5 / 6) / 3 * (2 * 0.5 + 1) / 3)
    assert full["ada"] == pytest.approx(f_ada / (f_ada + f_bob), rel=1e-6)
    literal = evidential_weights({"ada": ada, "bob": bob}, missing="sum")
    s_bob = q_bob / (1.0 * 1.0)  # two classes: twice each sum
    assert literal["ada"] == pytest.approx(s_ada / (s_ada + s_bob), rel=1e-6)


def test_the_literal_sum_pays_a_client_for_the_classes_it_lacks() -> None:
    classes = 10
    eye = [[float(i == j) for j in range(classes)] for i in range(classes)]
    full = record(eye, [1.0] * classes, 0.5, 0.5)
    one = record([eye[0], *[[0.0] * classes] * 9], [1.0] + [0.0] * 9, 0.5, 0.5)
    literal = evidential_weights({"one": one, "full": full}, missing="sum")
    mean = evidential_weights({"one": one, "full": full}, missing="mean")
    held = evidential_weights({"one": one, "full": full})
    # Q is ten times smaller; each of the two sums ten times smaller too
    assert literal["one"] / literal["full"] == pytest.approx(10, rel=1e-6)
    assert mean["one"] / mean["full"] == pytest.approx(0.1, rel=1e-6)
    assert held["one"] < mean["one"]


def test_a_surer_client_earns_more_at_equal_evidence_and_aleatoric_uncertainty() -> None:
    """The sign of Eq. 9, which the paper's own negative entropies would turn over."""
    sure = torch.tensor([[41.0, 5.0, 5.0]], dtype=torch.float64)
    unsure = torch.tensor([[8.2, 1.0, 1.0]], dtype=torch.float64)
    assert float(dirichlet_entropy(sure)) < float(dirichlet_entropy(unsure)) < 0
    evidence = [[4.0, 1.0, 1.0], [1.0, 4.0, 1.0], [1.0, 1.0, 4.0]]
    records = {
        name: record(evidence, [1.0] * 3, ale=0.5, epi=float(epistemic(alpha)))
        for name, alpha in (("sure", sure), ("unsure", unsure))
    }
    weights = evidential_weights(records)
    assert weights["sure"] > weights["unsure"]
    # with H in the place of U_epi it is the other way round
    literal = {
        n: record(evidence, [1.0] * 3, 0.5, float(dirichlet_entropy(a)))
        for n, a in (("sure", sure), ("unsure", unsure))
    }
    upside_down = {n: 1 / float(r[0, 5]) for n, r in literal.items()}
    total = sum(upside_down.values())
    assert upside_down["sure"] / total < upside_down["unsure"] / total


def test_each_factor_can_be_left_out() -> None:
    ada = record([[6, 1], [1, 6]], [4, 4], ale=0.5, epi=0.25)
    bob = record([[6, 2], [2, 6]], [2, 2], ale=0.25, epi=0.5)
    both = {"ada": ada, "bob": bob}

    def ratio(*factors: str) -> float:
        weights = evidential_weights(both, factors=factors)  # type: ignore[arg-type]  # parametrised words
        return weights["ada"] / weights["bob"]

    assert ratio("evidence") == pytest.approx((6 / 7) / (6 / 8), rel=1e-6)
    assert ratio("aleatoric") == pytest.approx(0.5, rel=1e-6)
    assert ratio("epistemic") == pytest.approx(2, rel=1e-6)
    assert ratio("evidence", "aleatoric", "epistemic") == pytest.approx(8 / 7, rel=1e-6)
    assert ratio() == 1


def test_clients_without_samples_or_evidence_break_nothing() -> None:
    nothing = torch.zeros(3, 6, dtype=torch.float64)
    wrong = record([[0, 1, 1], [0, 0, 0], [0, 0, 0]], [5, 0, 0], 0.5, 0.5)
    right = record([[1, 0, 0], [0, 0, 0], [0, 0, 0]], [5, 0, 0], 0.5, 0.5)
    assert evidential_weights({"n": nothing, "r": right}) == {"n": 0, "r": 1}
    assert evidential_weights({"n": nothing, "w": wrong}) == {"n": 0.5, "w": 0.5}
    assert evidential_weights({"only": right}) == {"only": 1}
    assert evidential_weights({}) == {}


def test_records_of_overflowing_evidence_give_weights() -> None:
    labels = torch.tensor([0, 1, 2])
    huge = record_of(torch.eye(3) * 3e38 - 1e38, labels)
    small = record_of(torch.eye(3), labels)
    weights = evidential_weights({"huge": huge, "small": small})
    assert bool(torch.isfinite(huge).all())
    assert 0.99 < weights["huge"] <= 1
    assert sum(weights.values()) == pytest.approx(1)


def test_label_shares_are_of_counts() -> None:
    ada = record([[0.0] * 2] * 2, [3, 1], 0, 0)
    bob = record([[0.0] * 2] * 2, [0, 4], 0, 0)
    shares, overall = label_shares({"ada": ada, "bob": bob, "none": torch.zeros(2, 5).double()})
    assert {name: p.tolist() for name, p in shares.items()} == {"ada": [0.75, 0.25], "bob": [0, 1]}
    assert overall.tolist() == [3 / 8, 5 / 8]
    with pytest.raises(ValueError, match="got none"):
        label_shares({})
