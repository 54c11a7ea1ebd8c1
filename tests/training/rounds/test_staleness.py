"""Staleness: what a late result counts, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from edge_sdk.training.protocol.messages import Update
from server.training.core.weighted_mean import Contribution
from server.training.rounds.staleness import rebase_update


def test_a_late_change_is_discounted_and_added_to_the_weights_of_now_by_hand() -> None:
    # from 1 to 5 is a change of 4; three merges late half of it counts, on top of 10
    update = Update(1, {"a": torch.tensor([5.0])}, 1, 1.0, 1, 1)
    late = Contribution(1, update, {"b": torch.tensor([3.0])})
    then = {"a": torch.tensor([1.0]), "b": torch.tensor([1.0])}
    now = {"a": torch.tensor([10.0]), "b": torch.tensor([0.0])}
    moved = rebase_update(late, then, now, (1 + 3) ** -0.5)
    assert moved.tensor("a").item() == 12.0
    assert moved.tensor("b").item() == 1.0  # in its copy on the server too


def test_a_late_variance_stays_above_zero() -> None:
    # it fell from 1 to 0.2 while the server's fell to 0.1: the change alone would lead to -0.46
    name = "stage1.bn.running_var"
    update = Update(1, {name: torch.tensor([0.2])}, 1, 1.0, 1, 1)
    copy = {"stage2.bn.running_var": torch.tensor([0.2])}
    then = {name: torch.tensor([1.0]), "stage2.bn.running_var": torch.tensor([1.0])}
    now = {name: torch.tensor([0.1]), "stage2.bn.running_var": torch.tensor([0.1])}
    moved = rebase_update(Contribution(1, update, copy), then, now, 0.7)
    # 0.7 of the way from 0.1 to 0.2
    assert moved.tensor(name).item() == pytest.approx(0.17)
    assert moved.tensor("stage2.bn.running_var").item() == pytest.approx(0.17)
